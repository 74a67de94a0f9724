"""Logging in, and what every request is held to; without a mesh."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest
from tests.support.asgi import Answer, Browser
from tests.support.etcd_server import free_ports

from cotenant.cli.mesh import login_links
from cotenant.rpc.access import Access
from cotenant.rpc.endpoints import Endpoints
from cotenant.web import application as module
from cotenant.web.application import Site, Static, application
from cotenant.web.guards import HEADERS
from cotenant.web.sessions import IDLE_SECONDS

TOKEN = "the-mesh-token"
PAGES = ("/", "/queue", "/cluster", "/tenants", "/predictions", "/incidents", "/lab", "/mesh")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def browser(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Browser:
    """A browser at a dashboard whose mesh does not answer."""
    monkeypatch.setattr(module, "LOGIN_PAUSE_SECONDS", 0.0)
    address = f"127.0.0.1:{free_ports(1)[0]}"

    def redeem(token: str) -> str:
        return TOKEN if login_links.redeem(tmp_path, token) else ""

    site = Site(lambda token: Access(Endpoints.one(address), token), redeem, port=7000, names=["Head"], clock=clock)
    return Browser(application(site))


async def log_in(browser: Browser, tmp_path: Path) -> Answer:
    return await browser.get(f"/login?token={login_links.mint(tmp_path)}")


def csrf_of(page: Answer) -> str:
    found = re.search(r'name="csrf" (?:value|content)="([^"]+)"', page.body)
    assert found
    return found[1]


async def test_a_link_logs_in_once_and_its_token_leaves_the_url(browser: Browser, tmp_path: Path) -> None:
    token = login_links.mint(tmp_path)
    answer = await browser.get(f"/login?token={token}")
    assert (answer.status, answer.headers["location"]) == (303, "/")
    cookie = answer.cookies["cotenant-7000"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert token not in cookie
    assert TOKEN not in cookie
    page = await browser.get("/")
    assert page.status == 200
    assert TOKEN not in page.body
    again = await Browser(browser.app).get(f"/login?token={token}")
    assert again.status == 403
    assert "has been used" in again.body


STREAMS = [
    f"/events/{name}" for name in ("jobs", "queue", "cluster", "tenants", "predictions", "incidents", "lab", "mesh")
]
ANSWERS = ["/api/forecasts?ids=x", "/api/places?ids=x", "/api/usage"]


@pytest.mark.parametrize("path", [*PAGES, "/jobs/j1", "/tenants/t", *STREAMS, *ANSWERS])
async def test_nothing_is_shown_without_a_session(browser: Browser, path: str) -> None:
    assert (await browser.get(path)).status == 401


async def test_all_answers_have_the_security_headers(browser: Browser, tmp_path: Path) -> None:
    answers = [await browser.get(path) for path in ("/login", "/", "/nowhere", "/static/style.css")]
    await log_in(browser, tmp_path)
    answers += [await browser.get(path) for path in ("/", "/jobs/j1")]
    answers += [await browser.post("/logout", {}, origin="http://evil.example"), await browser.get("/", host="evil")]
    for answer in answers:
        assert {name: answer.headers.get(name) for name in HEADERS} == dict(HEADERS)
        assert "cache-control" in answer.headers
    assert "unsafe" not in HEADERS["content-security-policy"]


async def test_pages_have_no_inline_scripts_or_styles(browser: Browser, tmp_path: Path) -> None:
    await log_in(browser, tmp_path)
    for path in (*PAGES, "/login", "/nowhere"):
        body = (await browser.get(path)).body
        assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son[a-z]+=|javascript:|https?://", body), path


@pytest.mark.parametrize(
    ("host", "status"),
    [("127.0.0.1:7000", 401), ("localhost:7000", 401), ("[::1]:7000", 401), ("head", 401), ("evil.example", 421)],
)
async def test_only_names_of_this_server_are_answered(browser: Browser, host: str, status: int) -> None:
    assert (await browser.get("/", host=host)).status == status


async def test_large_scripts_are_kept_and_sent_compressed(browser: Browser) -> None:
    answer = await browser.head("/static/vendor/xterm.js")
    assert (answer.status, answer.headers["content-encoding"]) == (200, "gzip")
    assert answer.headers["content-type"].startswith("text/javascript")
    plain = await browser.get("/static/vendor/xterm-fit.js")
    assert (plain.status, plain.headers.get("content-encoding")) == (200, None)
    assert (await browser.get("/static/vendor/nothing.js")).status == 404


async def test_a_shell_is_opened_by_a_post_of_a_page_of_this_server(browser: Browser, tmp_path: Path) -> None:
    for path in ("/api/jobs/j1/shell", "/api/shells/s1"):
        assert (await Browser(browser.app).post(path, {})).status == 401
    await log_in(browser, tmp_path)
    csrf = csrf_of(await browser.get("/"))
    for path in ("/api/jobs/j1/shell", "/api/shells/s1"):
        assert (await browser.get(path)).status == 405
        assert (await browser.post(path, {})).status == 403
        assert (await browser.post(path, {}, x_csrf_token=csrf, origin="http://evil.example")).status == 403
    refused = await browser.post("/api/jobs/j1/shell", {}, x_csrf_token=csrf)
    assert (refused.status, "must be a JSON object" in refused.body) == (400, True)
    ended = await browser.post("/api/shells/s1", {}, x_csrf_token=csrf)
    assert (ended.status, "This shell has ended" in ended.body) == (404, True)


async def test_an_action_needs_the_cookie_the_form_token_and_this_origin(browser: Browser, tmp_path: Path) -> None:
    await log_in(browser, tmp_path)
    csrf = csrf_of(await browser.get("/"))
    action = "/jobs/j1/cancel"
    assert (await Browser(browser.app).post(action, {"csrf": csrf})).status == 401
    assert (await browser.post(action, {})).status == 403
    assert (await browser.post(action, {"csrf": "x"})).status == 403
    assert (await browser.post(action, {"csrf": csrf}, origin="http://evil.example")).status == 403
    assert (await browser.post(action, {"csrf": csrf}, origin="http://127.0.0.1:7001")).status == 403
    assert (await browser.post(action, {"csrf": csrf}, origin="null")).status == 403
    assert (await browser.post(action, {"csrf": csrf}, origin="")).status == 403
    assert (await browser.post(action, {"csrf": csrf}, content_length="9999999")).status == 413
    assert (await browser.get(action)).status == 405
    passed = await browser.post(action, {"csrf": csrf}, origin="null", sec_fetch_site="same-origin")
    assert (passed.status, "does not answer" in passed.body) == (503, True)


async def test_a_simulation_needs_the_form_token_and_policies(browser: Browser, tmp_path: Path) -> None:
    assert (await browser.post("/api/lab", {})).status == 401
    await log_in(browser, tmp_path)
    csrf = csrf_of(await browser.get("/lab"))
    assert (await browser.post("/api/lab", {})).status == 403
    assert (await browser.get("/api/lab")).status == 405
    refused = await browser.post("/api/lab", {}, x_csrf_token=csrf)
    assert (refused.status, "policies: must be a list of 1 to 4" in refused.body) == (400, True)


async def test_a_session_that_ran_out_says_so(browser: Browser, tmp_path: Path, clock: Clock) -> None:
    await log_in(browser, tmp_path)
    assert (await browser.get("/")).status == 200
    clock.now += IDLE_SECONDS
    page = await browser.get("/")
    assert (page.status, "Your session has ended" in page.body) == (401, True)
    assert "session has ended" in (await browser.get("/api/forecasts?ids=")).body


async def test_logging_out_ends_the_session(browser: Browser, tmp_path: Path) -> None:
    await log_in(browser, tmp_path)
    kept = dict(browser.jar)
    answer = await browser.post("/logout", {"csrf": csrf_of(await browser.get("/"))})
    assert (answer.status, answer.headers["location"]) == (303, "/login")
    browser.jar = kept
    assert (await browser.get("/")).status == 401


async def test_a_token_that_cannot_be_one_is_refused_without_asking(browser: Browser) -> None:
    for token in ("", "two words", "é", "a\x00b"):
        csrf = csrf_of(await browser.get("/login"))
        answer = await browser.post("/login", {"csrf": csrf, "token": token})
        assert (answer.status, "not an API token" in answer.body) == (403, True)
    assert (await browser.post("/login", {"csrf": "x", "token": "t"})).status == 403


async def test_a_mesh_that_does_not_answer_is_said_so(browser: Browser, tmp_path: Path) -> None:
    await log_in(browser, tmp_path)
    page = await browser.get("/jobs/j1")
    assert (page.status, "The mesh does not answer" in page.body) == (503, True)


async def test_scripts_and_styles_are_served_as_the_wheel_packs_them(tmp_path: Path) -> None:
    for name in ("cluster.js", "style.css"):
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(b"/* " + name.encode() + b" */"))
    files = Browser(Static(directory=tmp_path))
    for name, kind in (("cluster.js", "text/javascript"), ("style.css", "text/css")):
        answer = await files.head(f"/{name}")
        assert (answer.status, answer.headers["content-encoding"]) == (200, "gzip")
        assert answer.headers["content-type"].startswith(kind)
