"""A supervisor killed at each step of recording the end: exactly what was recorded is reported."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.unit.node_agent.conditions import until
from tests.unit.node_agent.conftest import RunningAgent
from tests.unit.node_agent.jobs import shell
from tests.unit.node_agent.placement import TERMINAL_STATES, Placement

from cotenant.node_agent.runtime import supervisor_start
from cotenant.v1 import job_pb2

STEPS = ("open", "write", "ftruncate", "fsync", "close", "rename", "open", "fsync", "close")
RECORDED_BY = STEPS.index("rename")
DYING = """
import os, signal, sys
sys.path.append({folder!r})
import state_file, supervisor

class Dying:
    left = None
    def __getattr__(self, name):
        real = getattr(os, name)
        if name not in {steps!r} or Dying.left is None:
            return real
        def step(*words, **named):
            done = real(*words, **named)
            if Dying.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            Dying.left -= 1
            return done
        return step

class StateFile(state_file.StateFile):
    def write(self, state, *, last=False):
        Dying.left = {after} if last else None
        super().write(state, last=last)

state_file.os = Dying()
supervisor.main.__globals__["Supervisor"].__init__.__globals__["StateFile"] = StateFile
supervisor.main(sys.argv[1], int(sys.argv[2]))
"""


@pytest.mark.parametrize("step", range(len(STEPS)), ids=[f"{place} {name}" for place, name in enumerate(STEPS)])
async def test_an_end_is_reported_as_recorded_or_as_unknown(
    placement: Placement, agent: RunningAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    folder = str(supervisor_start.SUPERVISOR.parent)
    script = tmp_path / "dying.py"
    script.write_text(DYING.format(folder=folder, steps=sorted(set(STEPS)), after=step))
    monkeypatch.setattr(supervisor_start, "SUPERVISOR", script)
    monkeypatch.setattr(supervisor_start, "STAMP_SECONDS", 0.0)
    placement.assign(shell("cut", f"while [ ! -e {tmp_path}/go ]; do sleep 0.01; done; exit 7"))
    await placement.running("cut")
    await agent.stop()
    directory = agent.config.state_dir / "attempts" / "cut-1"
    supervisor = int((directory / "state.json").read_text().partition('"pid": ')[2].partition(",")[0])
    (tmp_path / "go").touch()
    await until(lambda: ended(supervisor))
    await agent.start()
    (told,) = (await placement.connected(2)).attempts
    end = told if told.state in TERMINAL_STATES else await placement.ended("cut")
    assert end.state == job_pb2.ATTEMPT_STATE_FAILED
    if step >= RECORDED_BY:
        assert (end.exit.code, end.message) == (7, "rank 0 ended with status 7")
    else:
        assert end.message == "its supervisor died; the job's remaining processes were killed"


def ended(pid: int) -> bool:
    """Return whether a supervisor that was started here has ended; reaps it, for no agent is there to."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True
