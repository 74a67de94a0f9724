"""The dashboard under large and strange output, a hundred open pages, and in front of a mesh that lacks services."""

from __future__ import annotations

import json
import re
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.end_to_end.dashboard_client import Http, link_of
from tests.end_to_end.meshes import Mesh, Separate
from tests.end_to_end.waiting import until
from tests.support.etcd_server import free_ports

from cotenant.core.model.lifecycle import Phase

pytestmark = [pytest.mark.group("dashboard"), pytest.mark.deep]

PAGES = 100
GIBIBYTE = 2**30
SENT_BYTES_MAX = 2 * 2**20  # of a log, however long it is: its end
MEMORY_BYTES_MAX = 100 * 2**20  # more than before, of the dashboard's process
MUCH = f"""
import sys
block = (b"x" * 999 + b"\\n") * 1024
for _ in range({GIBIBYTE} // len(block) + 1):
    sys.stdout.buffer.write(block)
print("the end")
"""
STRANGE = """
import sys
out = sys.stdout.buffer
out.write(b"y" * 10_000_000 + b"\\n")
out.write(bytes(range(256)) * 4 + b"\\n")
out.write(b"\\x1b[31mred\\x1b[0m \\x1b]0;title\\x07 \\x1b[2J \\xe2\\x80\\xae <script>alert(1)</script>\\n")
out.write(b"the end\\n")
"""


@pytest.fixture(scope="module")
def http(mesh: Mesh) -> Http:
    base = link_of(mesh).partition("/login")[0]
    return Http(base).log_in((mesh.state_dir / "token").read_text().strip())


def dashboard_process() -> Any:
    [found] = [one for one in psutil.process_iter(["cmdline"]) if "cotenant.web" in (one.info["cmdline"] or ())]
    return found


def printed(mesh: Mesh, program: str, name: str) -> str:
    """Return the id of a job that has printed something and succeeded."""
    job_id = mesh.cli("submit", "--cpus", "1", "--name", name, "--", sys.executable, "-c", program).out.strip()
    mesh.client.wait_for(job_id, Phase.SUCCEEDED)
    return job_id


def lines_of(http: Http, job_id: str) -> tuple[list[str], int]:
    """Return the lines that a page gets of a log, and their size in bytes."""
    lines: list[str] = []
    size = 0
    for name, data in http.events(f"/events/jobs/{job_id}/logs"):
        size += len(json.dumps(data))
        if name == "lines":
            lines += [text for _, text in data["lines"]]
        elif name == "end":
            break
    return lines, size


def test_of_a_log_of_a_gibibyte_the_end_is_shown_and_little_is_kept(mesh: Mesh, http: Http) -> None:
    before = dashboard_process().memory_info().rss
    lines, size = lines_of(http, printed(mesh, MUCH, "much"))
    assert lines[-1] == "the end"
    assert size < SENT_BYTES_MAX
    assert dashboard_process().memory_info().rss - before < MEMORY_BYTES_MAX


def test_lines_of_ten_megabytes_binary_output_and_escapes_are_inert_text(mesh: Mesh, http: Http) -> None:
    lines, size = lines_of(http, printed(mesh, STRANGE, "strange"))
    assert size < SENT_BYTES_MAX
    assert lines[-1] == "the end"
    assert lines[-2].startswith("red ^[]0;title^G ^[[2J <U+202E> <script>"), "as text: pages set no markup"
    assert all(text.isprintable() for text in lines), "no control character is left"
    assert max(map(len, lines)) < 2_100


def test_a_hundred_open_pages_share_one_watch_and_each_gets_each_change(mesh: Mesh, http: Http) -> None:
    cookie = "; ".join(f"{one.name}={one.value}" for one in http.jar)
    synced, got, stop = threading.Semaphore(0), threading.Semaphore(0), threading.Event()
    wanted: list[str] = []

    def read() -> None:
        request = urllib.request.Request(f"{http.base}/events/jobs", headers={"Cookie": cookie})
        with closing(urllib.request.urlopen(request, timeout=120)) as stream:
            for line in stream:
                if b'"synced":true' in line:
                    synced.release()
                if wanted and wanted[0].encode() in line:
                    got.release()
                    stop.wait()
                    return

    pages = [threading.Thread(target=read, daemon=True) for _ in range(PAGES)]
    for page in pages:
        page.start()
    for _ in pages:
        assert synced.acquire(timeout=120)
    connected = [one for one in dashboard_process().net_connections("tcp") if one.raddr and one.status == "ESTABLISHED"]
    services = {one.raddr.port for one in connected if one.laddr.port != int(http.base.rpartition(":")[2])}
    assert len(services) <= 2, "one connection to the mesh, however many pages are open"
    wanted.append(mesh.cli("submit", "--cpus", "1", "--name", "seen-by-all", "--", "sleep", "300").out.strip())
    for _ in pages:
        assert got.acquire(timeout=120)
    stop.set()
    for page in pages:
        page.join()
    mesh.cli("cancel", wanted[0])


@pytest.fixture(scope="module")
def partial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Separate, Http]]:
    """A mesh of a queue alone, with a dashboard: no placement, no predictor, no contention."""
    directory = tmp_path_factory.mktemp("partial")
    made = Separate(directory, parts=("queue", "placement", "predictor", "contention"))
    made.start("queue")
    port = free_ports(1)[0]
    ends = ",".join(f"{name}={made.address(name)}" for name in made.parts)
    web = made.cli.start(
        "serve", "web", "--endpoints", ends, "--listen", f"127.0.0.1:{port}", log=Path(directory / "web.log")
    )
    try:
        web.wait_for_output("web serves at")
        yield made, Http(f"http://127.0.0.1:{port}").log_in((made.state_dir / "token").read_text().strip())
    finally:
        web.terminate()
        made.close()


@pytest.mark.parametrize("page", ["queue", "tenants", "predictions", "incidents", "lab", "cluster"])
def test_a_mesh_that_lacks_services_leaves_gaps_that_say_so(partial: tuple[Separate, Http], page: str) -> None:
    _, http = partial
    status, _, text = http(f"/{page}")
    assert (status, f"/static/{page}.js" in text) == (200, True)
    board: dict[str, Any] = {}
    for name, data in http.events(f"/events/{page}"):
        if name == "board":
            board |= {row["id"]: row for row in data["rows"]}
        if board:  # the table is empty until the mesh has been asked
            break
    troubles = {name: row.get("trouble") for name, row in board.items() if row.get("trouble")}
    expected = {"queue": "free", "tenants": "free", "incidents": "state", "lab": "nodes", "cluster": "state"}
    if page in expected:
        assert expected[page] in troubles, board
        assert all(re.search(r"\w{3}", words) for words in troubles.values())
    if page in ("queue", "lab"):
        assert board["queues"]["rows"], "the queue is there, and shown"
    if page == "predictions":
        assert board["state"]["away"], board


def test_a_job_is_shown_without_predictor_and_placement(partial: tuple[Separate, Http]) -> None:
    mesh, http = partial
    job_id = mesh.cli("submit", "--cpus", "1", "--", "true").out.strip()
    status, _, text = http(f"/jobs/{job_id}")
    assert (status, job_id in text) == (200, True)
    until(lambda: "trouble" in str(_meta(http, "mesh")), "the state of the mesh")
    assert any("placement" in one["where"] for one in _meta(http, "mesh")["problems"])


def _meta(http: Http, row_id: str) -> Any:
    for name, data in http.events("/events/mesh"):
        found = [row for row in data["rows"] if row["id"] == row_id] if name == "meta" else []
        if found:
            return found[0]
    return None
