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
from cotenant.node_agent.supervisor.time_limit import TimeLimit, read_changed
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


async def test_a_running_job_gets_another_limit_counted_from_its_start(
    placement: Placement, agent: RunningAgent, tmp_path: Path
) -> None:
    placement.assign(limited("shorter", tmp_path, "exit 0", 3600), limited("longer", tmp_path, "exit 0", 5))
    for name in ("shorter", "longer"):
        await placement.running(name)
    orders = {"shorter": duration(GRACE_SECONDS + 0.01), "longer": duration(7200), "unknown": duration(60)}
    placement.send(
        time_limits=[
            agent_pb2.TimeLimitOrder(job_id=job_id, number=1, epoch=10, time_limit=limit)
            for job_id, limit in orders.items()
        ]
    )
    end = await placement.ended("shorter")
    assert (end.state, end.stop_reason) == (STOPPED, TIME_LIMIT)
    assert end.message == "reached its time limit of 0.51 s"
    changed = tmp_path / "state" / "attempts" / "longer-1" / "time_limit.json"
    assert json.loads(await until(lambda: changed.read_text() if changed.exists() else "")) == {"limit_seconds": 7200.0}
    placement.send(time_limits=[agent_pb2.TimeLimitOrder(job_id="longer", number=1, epoch=10)])  # none
    await until(lambda: json.loads(changed.read_text()) == {"limit_seconds": None})
    recorded = agent_pb2.Assignment.FromString((changed.parent / "assignment").read_bytes())
    assert not recorded.spec.HasField("time_limit") or recorded.spec.time_limit.seconds == 7200
    placement.send(time_limits=[agent_pb2.TimeLimitOrder(job_id="longer", number=1, epoch=9, time_limit=duration(1))])
    placement.send(stops=[agent_pb2.StopOrder(job_id="longer", number=1, epoch=10)])
    assert (await placement.ended("longer")).stop_reason != TIME_LIMIT
    assert json.loads(changed.read_text()) == {"limit_seconds": None}, "an order of an older epoch changes nothing"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"limit_seconds": "a"}', '{"limit_seconds": 0}', '{"limit_seconds": 1e999}']
)
def test_a_damaged_order_changes_no_limit(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_changed() is None
    (tmp_path / "time_limit.json").write_text(text)
    assert read_changed() is None
    (tmp_path / "time_limit.json").write_text('{"limit_seconds": 90}')
    assert read_changed() == (90.0,)


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
