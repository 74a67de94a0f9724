"""What `up` prints once the mesh is up, and which events it logs."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pytest
import structlog

from cotenant.cli.mesh.embedded import MeshConfig
from cotenant.cli.mesh.welcome import LogFormat, log_lines, set_up_logs, terminal_lines
from cotenant.telemetry import logs
from cotenant.v1.node_service_pb2 import Node

CONFIG = MeshConfig(Path("/s"), queue="las")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COTENANT_LOG", logs.FORMAT_VARIABLE):
        monkeypatch.setenv(name, "")


def node(node_id: str, gpus: int) -> Node:
    made = Node(id=node_id)
    for number in range(gpus):
        made.inventory.gpus.add(uuid=str(number), declared=True)
    made.inventory.cores.add()
    made.inventory.not_enforced.append("memory")
    return made


def test_a_terminal_gets_what_runs_how_to_submit_and_how_to_stop() -> None:
    told = "\n".join(terminal_lines(CONFIG, "127.0.0.1:7070", [node("a", 2), node("b", 0)], " --state-dir /s", ""))
    assert "The mesh is up at 127.0.0.1:7070." in told
    assert "a: 2 declared GPUs, 1 cores" in told
    assert "queue      las" in told
    assert told.count("not enforced: memory") == 1
    assert "cotenant submit --state-dir /s --gpus 1 --wait" in told
    assert "Ctrl-C stops the mesh" in told


def test_the_first_job_can_run_on_the_nodes() -> None:
    *_, last = log_lines(CONFIG, "127.0.0.1:7070", [node("a", 0)], "", "")
    assert last == "try: cotenant submit --cpus 1 --wait -- python3 -c 'print(42)'"


@pytest.mark.parametrize(
    ("terminal", "given", "level", "quiet"),
    [
        (True, None, "", True),
        (True, None, "debug", False),
        (True, LogFormat.TEXT, "", False),
        (False, None, "", False),
    ],
)
def test_only_a_terminal_without_settings_of_its_own_is_quiet(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, given: LogFormat | None, level: str, quiet: bool
) -> None:
    monkeypatch.setenv("COTENANT_LOG", level)
    monkeypatch.setattr(sys, "stderr", Terminal() if terminal else io.StringIO())
    assert set_up_logs(given) is quiet
    assert os.environ["COTENANT_LOG"] == ("warning" if quiet else level)


@pytest.mark.parametrize(("log_format", "is_json"), [("json", True), ("text", False), ("", True)])
def test_the_format_is_the_environments(monkeypatch: pytest.MonkeyPatch, log_format: str, is_json: bool) -> None:
    monkeypatch.setenv(logs.FORMAT_VARIABLE, log_format)
    out = io.StringIO()
    logs.configure("queue", "info", out)
    structlog.get_logger().info("job_placed", job="a")
    structlog.reset_defaults()
    assert out.getvalue().startswith("{") is is_json
    assert "\x1b" not in out.getvalue()
    if is_json:
        assert json.loads(out.getvalue())["job"] == "a"
