"""The dashboard of a live mesh: by plain requests, and in a real Chromium if there is one."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.end_to_end.dashboard_client import SECONDS_MAX, Http, link_of
from tests.end_to_end.meshes import Mesh
from tests.end_to_end.waiting import until
from tests.support.paths import ROOT

from cotenant.cli.mesh.tenants import tenant_view
from cotenant.core.model.lifecycle import Phase
from cotenant.v1.contention_service_pb2 import Incident
from cotenant.v1.job_pb2 import Job, JobPhase, JobSpec
from cotenant.v1.tenant_service_pb2 import Tenant
from cotenant.web import incident_board, prediction_board, queue_board, tenant_board
from cotenant.web.boards import MAY_NOT
from cotenant.web.changes import Changes
from cotenant.web.rows import Row, to_json
from cotenant.web.streams import batch_events

AXE = ROOT / "tests" / "support" / "axe" / "axe.min.js.gz"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SCREENSHOTS = "COTENANT_SCREENSHOTS"  # a directory, where the pictures of the pages are kept
MARKUP = "<img src=x onerror=alert(1)>"
TRAIN = """
import sys, time
from cotenant import progress
for step in range(1, 100000):
    progress.step(step, loss=1 / step)
    print(f"step {step}")
    if step % 10 == 1:
        print("\\x1b[31m<script>alert(1)</script>\\x1b]0;title\\x07\\u202e", flush=True)
    time.sleep(0.05)
"""

pytestmark = pytest.mark.group("dashboard")


@pytest.fixture(scope="module")
def base(mesh: Mesh) -> str:
    return link_of(mesh).partition("/login")[0]


@pytest.fixture(scope="module")
def token(mesh: Mesh) -> str:
    return (mesh.state_dir / "token").read_text().strip()


@pytest.fixture(scope="module")
def http(base: str, token: str) -> Http:
    return Http(base).log_in(token)


@pytest.fixture(scope="module")
def jobs(mesh: Mesh) -> dict[str, str]:
    """The ids of a job that trains, of one that waits, and of one that has failed, by what they do."""

    def submit(name: str, gpus: int, *command: str) -> str:
        wanted = ("--gpus", str(gpus), "--cpus", "1", "--expected", "20m", "--name", name)
        return mesh.cli("submit", *wanted, "--", *command).out.strip()

    trains = submit("resnet50", 1, sys.executable, "-c", TRAIN)
    waits = submit("llama-finetune", 4, "sleep", "1000")
    fails = mesh.cli("submit", "--cpus", "1", "--name", "export-onnx", "--", "sh", "-c", "echo oh; exit 3").out.strip()
    mesh.client.wait_for(fails, Phase.FAILED)
    return {"trains": trains, "waits": waits, "fails": fails}


# Requests -----------------------------------------------------------------------------------------------------------


def test_the_printed_link_logs_in_once_and_its_token_leaves_the_url(mesh: Mesh, base: str) -> None:
    link = link_of(mesh)
    browser = Http(base)
    status, url, _ = browser(link.removeprefix(base))
    assert (status, url) == (200, f"{base}/")
    [cookie] = browser.jar
    assert cookie.has_nonstandard_attr("HttpOnly")
    assert Http(base)(link.removeprefix(base))[0] == 403


def test_a_wrong_token_does_not_log_in(base: str) -> None:
    browser = Http(base)
    status, _, text = browser("/login", {"csrf": browser.csrf("/login"), "token": "x" * 43})
    assert (status, "does not know this token" in text) == (403, True)
    assert browser("/")[0] == 401


def test_a_stream_has_all_jobs_and_then_each_change(mesh: Mesh, http: Http, jobs: dict[str, str]) -> None:
    known: dict[str, Any] = {}
    more = ""
    for name, data in http.events("/events/jobs"):
        if name == "jobs":
            known |= {row["id"]: row for row in data["rows"]}
        if not more and set(jobs.values()) <= known.keys():
            more = mesh.cli("submit", "--cpus", "1", "--", "true").out.strip()
        if known.get(more, {}).get("phase") == "succeeded":
            break
    assert known[jobs["waits"]]["why"]


def test_many_pages_of_a_principal_share_one_watch(mesh: Mesh, http: Http, base: str, token: str) -> None:
    streams = [one.events("/events/jobs") for one in (http, *(Http(base).log_in(token) for _ in range(4)))]
    for stream in streams:
        next(stream)

    def connections() -> int:
        """Return the connections to the services of the dashboard's process."""
        return len(_connections_to(int(mesh.address.rpartition(":")[2]), "cotenant.web"))

    assert 1 <= connections() <= 2
    for stream in streams:
        stream.close()


def _connections_to(port: int, module: str) -> list[str]:
    """Return the established connections of processes of a module to a local port."""
    import psutil

    return [
        str(one)
        for process in psutil.process_iter(["cmdline"])
        if module in (process.info["cmdline"] or ())
        for one in process.net_connections("tcp")
        if one.raddr and one.raddr.port == port
    ]


def test_what_another_tenant_has_does_not_exist(mesh: Mesh, base: str, jobs: dict[str, str]) -> None:
    made = mesh.cli("tokens", "create", "--role", "viewer", "--name", "eve", "--tenant", "other").out.split()
    eve = _logged_in(base, made[-1])
    status, _, text = eve(f"/jobs/{jobs['trains']}")
    assert (status, "no such job" in text) == (404, True)
    assert eve(f"/events/jobs/{jobs['trains']}")[0] == 404
    assert eve(f"/events/jobs/{jobs['trains']}/logs")[0] == 404
    assert eve(f"/jobs/{jobs['trains']}/cancel", {"csrf": eve.csrf("/")})[0] == 404
    seen = [row for name, data in _until_synced(eve) if name == "jobs" for row in data["rows"]]
    assert seen == []


def _logged_in(base: str, token: str) -> Http:
    """Log in with a token that was just created, as soon as the services know it."""
    browser = Http(base)

    def accepted() -> bool:
        return browser("/login", {"csrf": browser.csrf("/login"), "token": token})[0] == 200

    until(accepted, "the token is known")
    return browser


def _until_synced(browser: Http) -> Iterator[tuple[str, Any]]:
    for name, data in browser.events("/events/jobs"):
        yield name, data
        if name == "meta" and any(row["id"] == "watch" and row["synced"] for row in data["rows"]):
            return


def test_another_tenants_page_and_usage_do_not_exist(mesh: Mesh, base: str, http: Http, jobs: dict[str, str]) -> None:
    mesh.cli("tenants", "create", "vision", "--quota-gpus", "2", "--limit-gpus", "3")
    made = mesh.cli("tokens", "create", "--role", "viewer", "--name", "amy", "--tenant", "vision").out.split()
    amy = _logged_in(base, made[-1])
    assert [one("/tenants/vision")[0] for one in (amy, http)] == [200, 200]
    for path in ("/tenants/default", "/tenants/nobody", "/api/usage?tenant=default"):
        status, _, text = amy(path)
        assert (status, "no such tenant" in text) == (404, True)
    [tenants] = [row for row in _first_rows(amy, "/events/tenants", "board") if row["id"] == "tenants"]
    assert [one["id"] for one in tenants["rows"]] == ["vision"]
    used = json.loads(amy("/api/usage")[2])
    assert [used[name] for name in ("weeks", "users", "tenants")] == 3 * [{"rows": [], "trouble": ""}]
    assert [one["tenant"] for one in json.loads(http("/api/usage")[2])["tenants"]["rows"]] == ["default"]


def _first_rows(browser: Http, path: str, table: str) -> list[Any]:
    """Return the first rows of a table in a stream."""
    stream = browser.events(path)
    found: list[Any] = next(data["rows"] for name, data in stream if name == table and data["rows"])
    stream.close()
    return found


def test_a_viewer_of_the_tenant_reads_and_may_do_nothing(mesh: Mesh, base: str, jobs: dict[str, str]) -> None:
    made = mesh.cli("tokens", "create", "--role", "viewer", "--name", "vic", "--tenant", "default").out.split()
    vic = _logged_in(base, made[-1])
    status, _, text = vic(f"/jobs/{jobs['trains']}")
    assert (status, 'data-may-change="no"' in text, "data-action" in text) == (200, True, False)
    assert vic(f"/jobs/{jobs['trains']}/cancel", {"csrf": vic.csrf("/")})[0] == 404
    assert mesh.client.job(jobs["trains"]).phase == JobPhase.JOB_PHASE_RUNNING


def test_the_scheduler_answers_a_what_if(http: Http, jobs: dict[str, str]) -> None:
    def ask(wanted: Any) -> tuple[int, Any]:
        headers = {"x-csrf-token": http.csrf("/"), "content-type": "application/json", "Origin": http.base}
        url = f"{http.base}/api/jobs/{jobs['trains']}/whatif"
        request = urllib.request.Request(url, json.dumps(wanted).encode(), headers)
        try:
            with http._opener.open(request, timeout=SECONDS_MAX) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    status, answer = ask({"gpus": 4, "cores": 1})
    assert (status, answer["starts_now"]) == (200, False)
    assert answer["reason"]["detail"]
    status, answer = ask({"gpus": "many"})
    assert (status, "gpus" in answer["error"]) == (400, True)
    assert ask([])[0] == 400


# Pages --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if not path:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


class Window:
    """A window of the browser; it notes what scripts complain of, and dialogs, which markup in a name would open."""

    def __init__(self, chromium: Any, base: str, token: str, **settings: Any) -> None:
        self.base = base
        self.context = chromium.new_context(viewport={"width": 1280, "height": 800}, **settings)
        self.context.set_default_timeout(1000 * SECONDS_MAX)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.page.on("console", lambda said: self.complaints.append(said.text) if said.type == "error" else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: self.complaints.append(dialog.message))
        self.page.goto(f"{base}/login")
        self.page.fill("#token", token)
        self.page.click("main button")
        self.page.wait_for_url(f"{base}/")

    def open(self, path: str) -> Any:
        """Open a page, and wait until it is live."""
        self.page.goto(self.base + path)
        self.page.wait_for_selector("#live[data-state=live]")
        return self.page

    def check(self, name: str) -> None:
        """Check the page in light and dark and on a phone: no barriers, nothing wider than it; take pictures."""
        for look, (width, height), scheme in (
            ("light", (1280, 800), "light"),
            ("dark", (1280, 800), "dark"),
            ("phone", (390, 844), "light"),
        ):
            self.page.set_viewport_size({"width": width, "height": height})
            self.page.emulate_media(color_scheme=scheme)
            self.page.wait_for_function("() => new Promise((done) => requestAnimationFrame(() => done(true)))")
            assert self.page.evaluate("document.documentElement.scrollWidth") <= width
            if look != "phone":
                self.page.evaluate(gzip.decompress(AXE.read_bytes()).decode())
                found = self.page.evaluate("axe.run()")["violations"]
                assert [(one["id"], [node["html"] for node in one["nodes"]][:3]) for one in found] == []
            if folder := os.environ.get(SCREENSHOTS):
                self.page.screenshot(path=str(Path(folder) / f"{name}-{look}.png"))
        self.page.set_viewport_size({"width": 1280, "height": 800})
        assert self.complaints == []


@pytest.fixture
def window(chromium: Any, base: str, token: str) -> Iterator[Window]:
    opened = Window(chromium, base, token)
    yield opened
    opened.context.close()


@pytest.mark.deep
def test_the_list_shows_filters_and_opens_jobs(window: Window, mesh: Mesh, jobs: dict[str, str]) -> None:
    page = window.open("/")
    page.wait_for_selector(f"a[href='/jobs/{jobs['waits']}']")
    page.keyboard.press("/")
    page.keyboard.type("onnx")
    page.wait_for_function("() => document.querySelectorAll('.scroller .row').length === 1")
    page.keyboard.press("Escape")
    page.wait_for_function("() => document.querySelectorAll('.scroller .row').length > 2")
    page.locator("h1").click()
    page.keyboard.press("?")
    page.wait_for_selector("#help[open]")
    page.keyboard.press("Escape")
    more = mesh.cli("submit", "--cpus", "1", "--name", "evaluate", "--", "true").out.strip()
    page.wait_for_selector(f"a[href='/jobs/{more}']")
    window.check("jobs")
    page.keyboard.press("j")
    page.wait_for_function("() => document.activeElement.matches('.row a')")
    first = page.evaluate("document.activeElement.pathname")
    page.keyboard.press("j")
    page.keyboard.press("k")
    assert page.evaluate("document.activeElement.pathname") == first
    newer = mesh.cli("submit", "--cpus", "1", "--", "true").out.strip()
    page.set_viewport_size({"width": 1000, "height": 700})
    page.wait_for_selector(f"a[href='/jobs/{newer}']")
    page.wait_for_function("() => innerWidth === 1000")
    assert page.evaluate("document.activeElement.pathname") == first, "the focus stays with the job"
    page.keyboard.press("Enter")
    page.wait_for_url(f"{window.base}{first}")


@pytest.mark.deep
def test_a_waiting_job_says_why_and_what_nodes_have(window: Window, jobs: dict[str, str]) -> None:
    page = window.open(f"/jobs/{jobs['waits']}")
    page.wait_for_selector("#nodes td")
    assert page.inner_text("h1") == "llama-finetune"
    assert page.inner_text("#summary").startswith("Waiting: ")
    assert page.inner_text("#remedy")
    assert page.inner_text("#nodes .tag") == "full"
    assert page.inner_text("#nodes-words").startswith("The scheduler ")
    page.locator("#if-gpus").focus()
    page.keyboard.press("Home")
    page.wait_for_selector("#if-answer .yes, #if-answer .no")
    window.check("waiting")


def test_a_running_job_shows_its_output_and_rate_and_is_cancelled(
    window: Window, mesh: Mesh, jobs: dict[str, str]
) -> None:
    script = mesh.cli("submit", "--gpus", "1", "--cpus", "1", "--name", "bert-base", "--", sys.executable, "-c", TRAIN)
    job_id = script.out.strip()
    mesh.client.wait_for(job_id, Phase.RUNNING)
    page = window.open(f"/jobs/{job_id}")
    page.wait_for_selector("#rates canvas")
    page.wait_for_selector("text=<script>alert(1)</script>^[]0;title^G")
    window.check("running")
    page.click("[data-action=cancel] button")
    page.click("#confirm-yes")
    page.wait_for_selector("#phase[data-phase=cancelled]")
    assert "The job is cancelled" in page.inner_text(".notice")
    mesh.client.wait_for(job_id, Phase.CANCELLED)


def test_one_rank_of_a_gang_is_read_and_searched(window: Window, mesh: Mesh, jobs: dict[str, str]) -> None:
    mesh.cli("suspend", jobs["waits"], jobs["trains"])  # two cores are all that some machines have
    mesh.client.wait_for(jobs["trains"], Phase.SUSPENDED)
    speaks = ("sh", "-c", "while :; do printf 'rank %s \\033[1m<b>says\\000\\377\\n' $RANK; sleep 0.2; done")
    job_id = mesh.cli("submit", "--replicas", "2", "--cpus", "1", "--name", "gang", "--", *speaks).out.split()[0]
    mesh.client.wait_for(job_id, Phase.RUNNING)
    page = window.open(f"/jobs/{job_id}")
    page.wait_for_selector("#rank option[value='1']", state="attached")
    [node] = {one.node_id for one in mesh.client.job(job_id).attempt.allocations}
    assert page.locator("#rank option").all_inner_texts() == ["all", f"0 · {node}", f"1 · {node}"]
    for rank in (0, 1):
        page.wait_for_selector(f"#log >> text=[{rank}]rank {rank} <b>says^@\ufffd")
    page.select_option("#rank", "1")
    seen = "document.getElementById('log').innerText"
    page.wait_for_function(f"() => {seen}.includes('rank 1') && !{seen}.includes('rank 0')")
    page.keyboard.press("/")
    page.locator("#find").fill("rank 7")
    page.wait_for_function("() => document.getElementById('found').innerText.startsWith('0 of ')")
    page.locator("#find").fill("SAYS")
    page.wait_for_function(f"() => {seen}.includes('rank 1')")
    assert window.complaints == []
    mesh.cli("cancel", job_id)
    mesh.client.wait_for(job_id, Phase.CANCELLED)
    mesh.cli("resume", jobs["trains"])
    mesh.client.wait_for(jobs["trains"], Phase.RUNNING)
    mesh.cli("resume", jobs["waits"])


def test_the_cluster_shows_who_holds_what(window: Window, jobs: dict[str, str]) -> None:
    page = window.open("/cluster")
    page.wait_for_selector(f".legend a[href='/jobs/{jobs['trains']}']")
    page.wait_for_function("() => document.querySelector('.node canvas').height > 20")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_selector(f"#node[open] a[href='/jobs/{jobs['trains']}']")
    page.click("#node-close")
    page.click("[data-mode=use]")
    page.wait_for_selector(".node >> text=/CPU \\d+ %/")
    window.check("cluster")


def test_time_is_dragged_back_to_what_was_held_and_on_to_what_will_have_ended(
    window: Window, mesh: Mesh, http: Http, jobs: dict[str, str]
) -> None:
    mesh.client.wait_for(jobs["trains"], Phase.RUNNING)
    attempt = mesh.client.job(jobs["trains"]).attempt
    answer = json.loads(http(f"/api/cluster?at={int(time.time())}")[2])["nodes"]
    [node] = attempt.allocations
    [cores] = [one["cores"] for one in answer[node.node_id] if one["id"] == jobs["trains"]]
    assert cores == [core for task in node.tasks for core in task.core_ids]
    for wrong in ("", "-1", "1e9", "0", str(int(time.time()) - 90_000)):
        assert http(f"/api/cluster?at={wrong}")[0] == 400
    page = window.open("/cluster")
    page.wait_for_selector(f".legend a[href='/jobs/{jobs['trains']}']")

    def drag(minutes: int) -> None:
        page.evaluate(
            """(minutes) => { const when = document.getElementById("when");
            when.value = minutes; when.dispatchEvent(new Event("input")); }""",
            minutes,
        )

    drag(-1439)
    page.wait_for_selector("#when-words >> text=/^0 jobs held resources then/")
    page.wait_for_selector(".node >> text=no job then")
    drag(30)
    page.wait_for_selector("#when-words >> text=will probably have ended")
    page.click("#when-now")
    page.wait_for_selector(".node >> text=/of \\d+ cores? · \\d jobs?/")
    assert window.complaints == []


def test_the_mesh_page_names_services_and_problems(window: Window) -> None:
    page = window.open("/mesh")
    page.wait_for_selector("#services td")
    page.wait_for_selector("#summary >> text=all run release")
    assert "queue" in page.inner_text("#services")
    window.check("mesh")


@pytest.mark.deep
def test_the_queue_shows_the_order_what_decides_it_and_who_holds_up_whom(
    window: Window, mesh: Mesh, jobs: dict[str, str]
) -> None:
    second = mesh.cli("submit", "--gpus", "4", "--cpus", "1", "--name", "vit", "--", "true").out.strip()
    page = window.open("/")
    page.keyboard.press("g")
    page.keyboard.press("q")
    page.wait_for_url(f"{window.base}/queue")
    page.wait_for_function("() => document.querySelectorAll('.scroller .row').length === 2")
    page.wait_for_function(
        "() => ['1', '2'].every((n) => [...document.querySelectorAll('.q-place')].some((one) => one.innerText === n))"
    )
    page.wait_for_selector("#shares a[href='/tenants/default']")
    page.wait_for_selector("#free li")
    rows = page.locator(".scroller .row").evaluate_all(
        "(all) => all.map((one) => [one.ariaRowIndex, one.querySelector('a').pathname]).sort().map((one) => one[1])"
    )
    assert rows == [f"/jobs/{jobs['waits']}", f"/jobs/{second}"]
    assert page.inner_text("#verdict").startswith("2 jobs wait")
    assert "fifo" in page.inner_text("#order")
    assert "resnet50" in page.inner_text("#holders")
    assert "3 of 4 GPUs free; most on one node: 3." in page.inner_text("#free")
    scores = page.locator(".scroller .q-score").all_inner_texts()
    assert [re.sub(r"\d\d", "00", score) for score in scores] == 2 * ["submitted 00:00:00"]
    page.keyboard.press("j")
    page.wait_for_function("() => document.activeElement.matches('.row a')")
    window.check("queue")
    page.click(f".scroller .row:has(a[href='/jobs/{second}']) .place")
    page.wait_for_selector("#why[open] >> text=Why vit has place 2 of 2")
    why = page.inner_text("#why-facts")
    assert all(one in why for one in ("Priority", "Level by fifo", "Score; lower runs first", "Ahead of it", "% fair"))
    assert page.locator(f"#why-facts a[href='/jobs/{jobs['waits']}']").count()
    page.click("#why-close")
    mesh.cli("cancel", second)
    page.wait_for_function("() => document.querySelectorAll('.scroller .row').length === 1")


@pytest.mark.deep
def test_the_tenants_show_quotas_shares_and_what_was_used(window: Window, mesh: Mesh, jobs: dict[str, str]) -> None:
    mesh.cli("tenants", "create", "vision", "--quota-gpus", "2", "--limit-gpus", "3")
    mesh.cli("tenants", "create", "segmentation", "--parent", "vision", "--quota-gpus", "1")
    page = window.open("/tenants")
    page.wait_for_selector(".scroller a[href='/tenants/segmentation']")
    page.wait_for_selector("#users-table td")
    assert page.inner_text("#verdict").startswith("3 tenants hold 1 GPU")
    window.check("tenants")
    page.click(".scroller a[href='/tenants/vision']")
    page.wait_for_selector("#quota td")
    assert page.inner_text("#verdict") == "Holds 0 of its quota of 2 GPUs; 2 idle."
    page.wait_for_selector("#weeks-table td")
    window.check("tenant")
    mesh.cli("tenants", "delete", "segmentation")
    mesh.cli("tenants", "delete", "vision")


def _served(window: Window, path: str, rows: dict[str, Row]) -> Any:
    """Open a page whose stream is answered with the rows of a board."""
    board, meta = Changes(), Changes()
    for row_id, row in rows.items():
        board.put(row_id, to_json({"id": row_id, **row}))
    meta.put("watch", to_json({"id": "watch", "trouble": "", "synced": True}))
    events = [*batch_events("board", board.after(""), "b"), *batch_events("meta", meta.after(""), "m")]
    body = "retry: 1000000\n\n" + "".join(events)
    window.page.route(f"**/events{path}", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    window.page.goto(window.base + path)
    return window.page


@pytest.mark.deep
def test_theta_is_marked_on_the_curve_of_rates(window: Window, http: Http, jobs: dict[str, str]) -> None:
    path = f"/jobs/{jobs['trains']}"
    view = next(batch["rows"][0] for name, batch in http.events(f"/events{path}") if name == "job" and batch["rows"])
    view["curve"] = [{"cores": cores, "rate": min(cores, 6) * 1.5, "confidence": 0.9} for cores in (1, 2, 4, 6, 8)]
    view["estimate"] = {**(view["estimate"] or {}), "cores_useful": 6, "predictable": False}
    table = Changes()
    table.put("job", to_json(view))
    body = "retry: 1000000\n\n" + "".join(batch_events("job", table.after(""), "j"))
    window.page.route("**/events/jobs/*", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    page = window.page
    page.goto(window.base + path)
    page.wait_for_selector("#curve canvas")
    assert page.inner_text("#curve-words") == "θ = 6 cores per replica (the dashed line): more do not help."
    amber = """() => {
      const canvas = document.querySelector("#curve canvas"), all = canvas.getContext("2d");
      const { data, width } = all.getImageData(0, 0, canvas.width, canvas.height), columns = new Set();
      for (let at = 0; at < data.length; at += 4)
        if (Math.abs(data[at] - 143) < 9 && Math.abs(data[at + 1] - 82) < 9 && data[at + 2] < 9 && data[at + 3] > 200)
          columns.add((at / 4) % width / width);
      return [...columns];
    }"""
    columns = page.evaluate(amber)
    assert columns, "the line of θ is drawn"
    assert 0.6 < min(columns) < 0.8, "at 6 of 8 cores"
    page.unroute("**/events/jobs/*")
    window.check("curve")


@pytest.mark.deep
def test_incidents_are_on_one_time_axis_with_what_was_done(window: Window, http: Http) -> None:
    [state] = _first_rows(http, "/events/incidents", "board")
    assert (state["trouble"], state["policy"]) == ("", "coda-eliminator")
    page = window.open("/incidents")
    page.wait_for_selector("#empty h2")
    assert "coda-eliminator watches the nodes" in page.inner_text("#empty")
    rows = dict(_incident(number) for number in range(1, 41))
    page = _served(window, "/incidents", {**rows, "state": {"trouble": "", "policy": "coda-eliminator"}})
    page.wait_for_selector(".incidents .lane .tick")
    assert page.inner_text("#verdict").startswith("resnet50 is slowed by 41")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_selector("#detail .timeline li")
    assert "held to 1 of its cores" in page.inner_text("#detail")
    window.check("incidents")


def _incident(number: int) -> tuple[str, Row]:
    """Return an incident as the board has it; the first ones are the newest, and the first is still open."""
    start = time.time() - 300.0 - 1500.0 * number**1.2
    made = Incident(id=f"{number:012d}", node_id=f"gpu-{number % 3}", suspect_job_id="preprocess")
    made.slowdown = 0.4 + number / 100
    made.victim_job_id = "resnet50" if number % 2 else "bert-base"
    made.start_time.FromSeconds(int(start))
    for after, text in ((20, "held to 1 of its cores: memory bandwidth of 96 %"), (300, "freed: the victim is well")):
        clock = time.strftime("%H:%M:%SZ", time.gmtime(start + after))
        made.actions.append(f"{clock} {text} ({made.victim_job_id} at {50 + after // 10}% of its baseline)")
    if number > 1:
        made.recovered = 0.97
        made.end_time.FromSeconds(int(start + 400 + 60 * number))
        made.outcome = f"it is free again after {400 + 60 * number} s; {made.victim_job_id} is at 97% of its baseline"
    return f"incident {made.node_id} {number}", incident_board.incident_row(made)


def test_a_token_for_one_tenant_learns_why_it_sees_no_incidents(mesh: Mesh, base: str) -> None:
    made = mesh.cli("tokens", "create", "--role", "viewer", "--name", "ida", "--tenant", "other").out.split()
    [state] = _first_rows(_logged_in(base, made[-1]), "/events/incidents", "board")
    assert state["trouble"] == MAY_NOT


@pytest.mark.deep
def test_predictions_are_judged_by_what_jobs_did(window: Window, http: Http) -> None:
    [state] = [row for row in _first_rows(http, "/events/predictions", "board") if row["id"] == "state"]
    assert (state["trouble"], state["away"]) == ("", "")
    jobs = [_judged(number) for number in range(200)]
    rows = {f"job {job.id}": prediction_board.job_row(job) for job in jobs}
    told = {"trouble": "", "away": "", "predictors": ["history"], "jobs_max": 1000, **prediction_board.summary(jobs)}
    page = _served(window, "/predictions", {**rows, "state": told})
    page.wait_for_selector(".predictions .scroller .row")
    assert page.inner_text("#verdict").startswith("Half of the 200 predictions were off by at most ")
    assert page.locator("#calibration tr").count() == 5
    said = page.inner_text("#coverage")
    assert re.match(r"The promised band .* held for \d+ of 150 jobs that had one \(\d+\u00a0%\)", said), said
    window.check("predictions")


@pytest.mark.deep
def test_the_lab_tells_what_other_policies_would_do(
    window: Window, mesh: Mesh, base: str, jobs: dict[str, str]
) -> None:
    page = window.open("/")
    page.keyboard.press("g")
    page.keyboard.press("l")
    page.wait_for_url(f"{window.base}/lab")
    page.wait_for_selector("#choices input")
    page.wait_for_function("() => document.getElementById('today').innerText.includes('fifo')")
    assert page.is_hidden("#partial")
    for kind, name in (("queue", "sjf"), ("placement", "first-fit")):
        page.locator("#choices input").evaluate_all(
            "(all, value) => all.find((one) => one.value === value).focus()",
            json.dumps([kind, name], separators=(",", ":")),
        )
        page.keyboard.press("Space")
    page.click("#run")
    page.wait_for_selector("#result:not([hidden])")
    page.wait_for_selector("#waiting canvas")
    assert page.locator("#figures th").all_inner_texts()[0].startswith("in use now")
    assert page.locator("#figures tr").count() == 3
    assert "the run time of" not in page.inner_text("#notes")
    assert page.is_visible("#tenants a[href='/tenants/default']")
    window.check("lab")
    page.click("#run")
    until(lambda: _simulations(), "the process of a simulation")[0].kill()
    page.wait_for_function("() => document.getElementById('state').innerText.includes('was killed by SIGKILL')")
    page.click("#run")
    until(lambda: _simulations(), "the process of another")
    page.click("#stop")
    page.wait_for_function("() => document.getElementById('state').innerText === 'Stopped.'")
    page.click("#run")
    until(lambda: _simulations(), "the process of the last")
    page.goto(f"{window.base}/queue")
    until(lambda: not _simulations(), "the end of what a closed page wanted")


def test_the_lab_simulates_only_what_a_token_may_see(mesh: Mesh, base: str, jobs: dict[str, str]) -> None:
    made = mesh.cli("tokens", "create", "--role", "viewer", "--name", "lea", "--tenant", "other").out.split()
    lea = _logged_in(base, made[-1])
    [found] = [row["rows"][0] for row in _first_rows(lea, "/events/lab", "board") if row["id"] == "jobs"]
    assert (found["seen"], found["hidden"] >= 2) == (0, True)


def _simulations() -> list[Any]:
    """Return the processes of the policy lab."""
    import psutil

    module = "cotenant.web.lab_process"
    return [one for one in psutil.process_iter(["cmdline"]) if module in (one.info["cmdline"] or ())]


def _judged(number: int) -> Job:
    """Return a job that ran longer or shorter than predicted: the surer the prediction, the less."""
    spec = JobSpec(name=("resnet50", "bert-base", "export")[number % 3], tenant=("vision", "speech")[number % 2])
    job = Job(id=f"j{number:03d}", spec=spec, prediction_source=("history", "progress")[number % 5 > 2])
    job.prediction_confidence = number % 100 / 100
    promised = 30.0 * 1.05**number
    job.predicted_run_time.FromNanoseconds(int(1e9 * promised))
    job.run_time.FromNanoseconds(
        int(1e9 * promised * 8 ** ((1 - job.prediction_confidence) * (number * 7 % 11 - 5) / 5))
    )
    if number % 4:
        job.predicted_run_time_p10.FromNanoseconds(int(0.5e9 * promised))
        job.predicted_run_time_p90.FromNanoseconds(int(2e9 * promised))
    job.end_time.FromSeconds(int(time.time()) - 60 * number)
    return job


def test_pages_say_what_is_missing_and_show_the_rest(window: Window) -> None:
    missing: Row = {"rows": [], "trouble": "no leader answers"}
    free: Row = {"rows": [queue_board.pieces([])], "trouble": ""}
    page = _served(window, "/queue", {"queues": missing, "shares": missing, "free": free})
    page.wait_for_selector("#free li")
    assert page.inner_text("#rules-gap") == "The rules are missing: no leader answers"
    assert page.inner_text("#shares-gap") == "The shares are missing: no leader answers"
    vision = tenant_board.lent([tenant_view(Tenant(id="vision", quota_gpu_milli=2000))], free["rows"][0])
    page = _served(window, "/tenants", {"tenants": {"rows": vision, "trouble": ""}, "shares": missing, "free": free})
    page.wait_for_selector(".scroller a[href='/tenants/vision']")
    assert page.inner_text("#shares-gap") == "The shares are missing: no leader answers"
    jobs = [_judged(number) for number in range(20)]
    told = {"trouble": "", "away": "it is down", "predictors": [], "jobs_max": 1000, **prediction_board.summary(jobs)}
    page = _served(window, "/predictions", {"job a": prediction_board.job_row(jobs[0]), "state": told})
    page.wait_for_selector("#records td")
    assert page.inner_text("#away") == "The predictor does not answer: new jobs are not predicted now. it is down"
    page = _served(window, "/incidents", {"state": {"trouble": "it is down", "policy": ""}})
    page.wait_for_selector("#gap:not([hidden])")
    assert (page.inner_text("#gap"), page.is_hidden("#empty")) == ("Incidents are missing: it is down", True)
    assert window.complaints == []


def test_a_stream_that_was_cut_resumes_markup_is_inert_and_a_session_that_ended_says_so(
    window: Window, mesh: Mesh, jobs: dict[str, str]
) -> None:
    page = window.open("/")
    page.wait_for_selector(f"a[href='/jobs/{jobs['trains']}']")
    window.context.set_offline(True)
    page.evaluate("dispatchEvent(new Event('pagehide'))")
    more = mesh.cli("submit", "--cpus", "1", "--name", MARKUP, "--", "true").out.strip()
    window.context.set_offline(False)
    page.evaluate("dispatchEvent(new PageTransitionEvent('pageshow', { persisted: true }))")
    page.wait_for_selector(f"a[href='/jobs/{more}']")
    assert page.inner_text(f"a[href='/jobs/{more}']") == MARKUP
    assert (page.locator("main img").count(), window.complaints.count("1")) == (0, 0)
    window.context.clear_cookies()
    page.evaluate("dispatchEvent(new Event('pagehide'))")
    page.evaluate("dispatchEvent(new PageTransitionEvent('pageshow', { persisted: true }))")
    page.wait_for_selector("text=Your session has ended")


def test_a_shell_in_a_running_job_types_resizes_and_ends(window: Window, mesh: Mesh, jobs: dict[str, str]) -> None:
    mesh.client.wait_for(jobs["trains"], Phase.RUNNING)
    page = window.open(f"/jobs/{jobs['trains']}")
    page.click("#shell")
    page.wait_for_url(f"{window.base}/jobs/{jobs['trains']}/shell")
    page.wait_for_selector("text=Open.")
    screen = "document.querySelector('.xterm-rows').innerText"

    def run(command: str, shows: str) -> None:
        page.keyboard.type(command)
        page.keyboard.press("Enter")
        page.wait_for_function(f"(shows) => {screen}.includes(shows)", arg=shows)

    run("PS1='ready''> '", "ready> ")
    run("echo job-$COTENANT_JOB_ID", f"job-{jobs['trains']}")
    run(r"printf '\303\251 \033[38;2;200;30;90mred\033[0m <b>bold</b> \033]0;title\007\n'", "é red <b>bold</b>")
    rows = page.locator(".xterm-rows > div").count()
    run("echo rows-$(stty size | cut -d' ' -f1)-", f"rows-{rows}-")
    page.set_viewport_size({"width": 1280, "height": 600})
    page.wait_for_function("(before) => document.querySelectorAll('.xterm-rows > div').length < before", arg=rows)
    fewer = page.locator(".xterm-rows > div").count()
    run(f"until stty size | grep -q '^{fewer} '; do sleep 0.1; done; echo re''sized", "resized")
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.matches('.xterm-helper-textarea')"), "Escape is the program's"
    window.check("shell")
    page.keyboard.press("Control+Shift+Enter")
    page.wait_for_function("() => document.activeElement.matches('.crumb a')")
    page.locator(".xterm-helper-textarea").focus()
    page.keyboard.press("Control+c")
    run("exit 3", "exit")
    page.wait_for_selector("text=The program ended with exit code 3.")
    page.click("#again")
    page.wait_for_selector("text=Open.")
    assert window.complaints == []
    page.route("**/api/shells/*", lambda route: route.abort())
    page.keyboard.type("x")
    page.wait_for_selector("text=The connection was lost, and with it the shell.")
    audit = json.loads(mesh.cli("audit", "--json").out)
    assert [one["answer"] for one in audit if one["what"] == "OpenSession" and one["on"].get("id") == jobs["trains"]]


def test_who_may_not_change_a_job_gets_no_shell(mesh: Mesh, base: str, jobs: dict[str, str]) -> None:
    for name, tenant in (("sue", "default"), ("sam", "other")):
        made = mesh.cli("tokens", "create", "--role", "viewer", "--name", name, "--tenant", tenant).out.split()
        reader = _logged_in(base, made[-1])
        assert reader(f"/jobs/{jobs['trains']}/shell")[0] == 404
        headers = {"x-csrf-token": reader.csrf("/"), "content-type": "application/json", "Origin": base}
        request = urllib.request.Request(
            f"{base}/api/jobs/{jobs['trains']}/shell", b'{"rows": 24, "columns": 80}', headers
        )
        with pytest.raises(urllib.error.HTTPError) as refused:
            reader._opener.open(request, timeout=SECONDS_MAX)
        assert refused.value.code == 404


def test_a_job_is_held_reprioritized_and_run_again(window: Window, mesh: Mesh, jobs: dict[str, str]) -> None:
    page = window.open(f"/jobs/{jobs['waits']}")
    page.wait_for_selector("[data-action=suspend] >> text=Hold")
    page.fill("#priority", "7")
    page.click("#priority-form button")
    page.wait_for_selector("text=The priority is changed.")
    assert mesh.client.job(jobs["waits"]).spec.priority == 7
    page.locator("#if-deadline").focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("#out-deadline >> text=1 hour")
    page.wait_for_selector("#if-answer .yes, #if-answer .no")
    page = window.open(f"/jobs/{jobs['fails']}")
    page.click("[data-action=rerun] button")
    page.wait_for_selector("text=This is a new job like the one before.")
    again = page.url.rpartition("/")[2].partition("?")[0]
    assert again != jobs["fails"]
    assert mesh.client.job(again).spec.name == "export-onnx"
    assert window.complaints == []


def test_a_browser_whose_clock_is_off_shows_ages_by_the_clock_of_the_mesh(window: Window, jobs: dict[str, str]) -> None:
    window.page.add_init_script("const real = Date.now; Date.now = () => real() - 7200e3")
    page = window.open(f"/jobs/{jobs['fails']}")
    page.wait_for_selector("#events time")
    ages = page.locator("#events time").all_inner_texts()
    assert ages
    assert all(re.fullmatch(r"\d+ (s|min) ago", age) for age in ages), ages
    assert page.evaluate("import('/static/page.js').then((page) => page.now() - Date.now() / 1000)") > 7000
