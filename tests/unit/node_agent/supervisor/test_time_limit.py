"""Attempts with a time limit stop by themselves, with their grace, even if the agent is dead."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from tests.unit.node_agent.agent_process import AgentProcess
from tests.unit.node_agent.conditions import alive, until, written_number
from tests.unit.node_agent.conftest import RunningAgent
from tests.unit.node_agent.jobs import shell
from tests.unit.node_agent.placement import Placement

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.codec.specs import duration
from cotenant.node_agent.supervisor import lease
from cotenant.node_agent.supervisor.time_limit import TimeLimit
from cotenant.v1 import job_pb2

LIMIT_SECONDS, GRACE_SECONDS = 1.5, 0.5
STOPPED, TIME_LIMIT = job_pb2.ATTEMPT_STATE_STOPPED, job_pb2.STOP_REASON_TIME_LIMIT


def uptime() -> float:
    """Return the time on the clock that jobs read."""
    return float(Path("/proc/uptime").read_text().split()[0])


def limited(job_id: str, tmp_path: Path, on_warning: str, limit_seconds: float = LIMIT_SECONDS) -> agent_pb2.Assignment:
    """A job that writes its pid, and on its warning the time."""
    script = (
        f"trap 'cut -d\" \" -f1 /proc/uptime > {tmp_path}/{job_id}.warned; {on_warning}' TERM; "
        f"echo $$ > {tmp_path}/{job_id}.pid; while :; do sleep 0.02; done"
    )
    spec = job_pb2.JobSpec(time_limit=duration(limit_seconds))
    return shell(job_id, script, spec=spec, grace_seconds=GRACE_SECONDS)


async def test_a_job_stops_at_its_limit_if_its_agent_is_dead(
    placement: Placement, agent_process: AgentProcess, tmp_path: Path
) -> None:
    begin = uptime()
    placement.assign(limited("saves", tmp_path, "exit 0"), limited("stays", tmp_path, ":"))
    saves = await until(lambda: written_number(tmp_path / "saves.pid"))
    stays = await until(lambda: written_number(tmp_path / "stays.pid"))
    await agent_process.end(signal.SIGKILL)
    await until(lambda: not alive(saves) and not alive(stays))
    end = uptime()
    assert begin + LIMIT_SECONDS - 0.02 <= end < begin + LIMIT_SECONDS + 10
    warned = float((tmp_path / "stays.warned").read_text())
    assert begin + LIMIT_SECONDS - GRACE_SECONDS - 0.02 <= warned < end
    assert (tmp_path / "saves.warned").exists()
    states = [tmp_path / "state" / "attempts" / f"{name}-1" / "state.json" for name in ("saves", "stays")]
    await until(lambda: {json.loads(state.read_text())["state"] for state in states} == {"STOPPED"})
    await agent_process.start()
    hello = await placement.connected(2)
    for report in hello.attempts:
        assert (report.state, report.stop_reason) == (STOPPED, TIME_LIMIT)
        assert report.message == "reached its time limit of 1.5 s"


async def test_a_job_that_ends_before_its_limit_has_succeeded(
    placement: Placement, agent: RunningAgent, tmp_path: Path
) -> None:
    placement.assign(shell("short", "exit 0", spec=job_pb2.JobSpec(time_limit=duration(60))))
    end = await placement.ended("short")
    assert (end.state, end.stop_reason) == (job_pb2.ATTEMPT_STATE_SUCCEEDED, job_pb2.STOP_REASON_UNSPECIFIED)


async def test_a_stop_order_before_the_limit_is_the_reason(
    placement: Placement, agent: RunningAgent, tmp_path: Path
) -> None:
    placement.assign(limited("ordered", tmp_path, "exit 0", 60))
    await until(lambda: written_number(tmp_path / "ordered.pid"))
    await placement.running("ordered")
    preempted = job_pb2.STOP_REASON_PREEMPTED
    placement.send(stops=[agent_pb2.StopOrder(job_id="ordered", number=1, epoch=10, reason=preempted)])
    end = await placement.ended("ordered")
    assert (end.state, end.stop_reason) == (STOPPED, preempted)


def test_suspension_counts_and_is_noticed_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(lease, "boot_seconds", lambda: now)
    limit = TimeLimit(7200, 30)
    assert limit.message == "reached its time limit of 2 h"
    assert limit.next_check_seconds() == lease.LOOK_SECONDS_MAX
    now = 8169.0
    assert (limit.expired(), limit.next_check_seconds()) == (False, 1.0)
    now = 9000.0  # the machine was suspended
    assert (limit.expired(), limit.next_check_seconds()) == (True, 0.0)
