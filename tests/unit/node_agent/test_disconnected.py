"""Jobs with stop_after_disconnected stop by themselves even if the agent is dead; others run on."""

from __future__ import annotations

import json
import signal
import time
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
from cotenant.node_agent.supervisor.lease import DisconnectLimit, Lease, boot_seconds, read_lease
from cotenant.v1 import job_pb2

ALLOWED_SECONDS = 1.2


def leashed(job_id: str, tmp_path: Path, allowed_seconds: float = ALLOWED_SECONDS) -> agent_pb2.Assignment:
    """A job that writes its pid, and on its warning a file."""
    script = (
        f"trap 'echo saved > {tmp_path}/{job_id}.saved; exit 0' TERM; echo $$ > {tmp_path}/{job_id}.pid; "
        "while :; do sleep 0.02; done"
    )
    return shell(job_id, script, spec=job_pb2.JobSpec(stop_after_disconnected=duration(allowed_seconds)))


async def test_a_job_stops_with_its_grace_if_its_agent_stays_dead(
    placement: Placement, agent_process: AgentProcess, tmp_path: Path
) -> None:
    placement.assign(leashed("leashed", tmp_path), shell("free", f"echo $$ > {tmp_path}/free.pid; exec sleep 60"))
    await placement.running("leashed")
    await placement.running("free")
    leashed_pid = await until(lambda: written_number(tmp_path / "leashed.pid"))
    free_pid = await until(lambda: written_number(tmp_path / "free.pid"))
    await agent_process.end(signal.SIGKILL)
    heard = read_lease(str(tmp_path / "state" / "lease"))
    await until(lambda: not alive(leashed_pid))
    assert heard + ALLOWED_SECONDS <= boot_seconds() < heard + ALLOWED_SECONDS + 5
    assert (tmp_path / "leashed.saved").exists()
    assert alive(free_pid)
    state = tmp_path / "state" / "attempts" / "leashed-1" / "state.json"
    await until(lambda: json.loads(state.read_text())["state"] == "STOPPED")
    await agent_process.start()
    hello = await placement.connected(2)
    ends = {report.job_id: report for report in hello.attempts}
    assert ends["leashed"].state == job_pb2.ATTEMPT_STATE_STOPPED
    assert ends["leashed"].stop_reason == job_pb2.STOP_REASON_DISCONNECTED
    assert ends["leashed"].message == f"its node was disconnected from the control plane for {ALLOWED_SECONDS:g} s"
    assert ends["free"].state == job_pb2.ATTEMPT_STATE_RUNNING


@pytest.mark.deep
async def test_a_job_runs_while_placement_answers_and_stops_when_it_does_not(
    placement: Placement, agent: RunningAgent, tmp_path: Path
) -> None:
    allowed_seconds = 3 * ALLOWED_SECONDS  # a busy machine may delay an answer
    placement.assign(leashed("leashed", tmp_path, allowed_seconds))
    await placement.running("leashed")
    begin, pid = boot_seconds(), await until(lambda: written_number(tmp_path / "leashed.pid"))
    await until(lambda: boot_seconds() > begin + 2 * allowed_seconds)
    assert alive(pid)
    placement.deaf = True  # the stream stands, but nothing proves that we are heard
    assert (await placement.ended("leashed")).stop_reason == job_pb2.STOP_REASON_DISCONNECTED


async def test_a_stop_order_is_not_a_disconnection(placement: Placement, agent: RunningAgent, tmp_path: Path) -> None:
    placement.assign(leashed("leashed", tmp_path, 60))
    await placement.running("leashed")
    placement.send(stops=[agent_pb2.StopOrder(job_id="leashed", number=1, epoch=10, grace=duration(1))])
    end = await placement.ended("leashed")
    assert (end.state, end.stop_reason) == (job_pb2.ATTEMPT_STATE_STOPPED, job_pb2.STOP_REASON_UNSPECIFIED)


def test_a_jump_of_the_wall_clock_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "lease")
    kept = Lease(path)
    kept.renew(boot_seconds())
    leash = DisconnectLimit(path, 60, boot_seconds())
    now = time.time()
    for jump in (-1e9, 1e9):
        monkeypatch.setattr(time, "time", lambda jump=jump: now + jump)
        assert not leash.expired()
    kept.close()


def test_a_lease_that_is_renewed_too_late_stays_expired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after the machine was suspended, when the agent is quicker than the supervisor."""
    path, now = str(tmp_path / "lease"), 1000.0
    monkeypatch.setattr(lease, "boot_seconds", lambda: now)
    kept = Lease(path)
    kept.renew(990.0)
    leash = DisconnectLimit(path, 20, 990.0)
    assert not leash.expired()
    assert leash.next_check_seconds() == lease.LOOK_SECONDS_MAX
    now = 1009.0
    kept.renew(1009.0)
    assert not leash.expired()
    now = 1100.0
    kept.renew(1100.0)
    assert leash.expired()
    kept.close()


def test_a_lease_that_is_renewed_in_time_never_expires_if_checks_come_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, now, allowed, beat, late = str(tmp_path / "lease"), 1000.0, 4.0, 1.05, 0.3
    monkeypatch.setattr(lease, "boot_seconds", lambda: now)
    kept = Lease(path)
    kept.renew(now)
    limit, renewed = DisconnectLimit(path, allowed, now), now
    while now < 1100.0:
        assert not limit.expired()
        now += limit.next_check_seconds() + late
        while renewed + beat <= now:
            renewed += beat
        kept.renew(renewed)
    waits = 0
    while not limit.expired():  # then it is not renewed any more
        now, waits = now + limit.next_check_seconds(), waits + 1
    assert renewed + allowed <= now < renewed + allowed + 0.01
    assert waits < 12
    kept.close()


def test_a_lease_survives_a_restart_but_not_a_reboot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "lease")
    monkeypatch.setattr(lease, "boot_seconds", lambda: 500.0)
    first = Lease(path)
    first.renew(400.0)
    first.renew(300.0)
    first.close()
    assert read_lease(path) == 400.0
    Lease(path).close()
    assert read_lease(path) == 400.0
    monkeypatch.setattr(lease, "boot_seconds", lambda: 30.0)
    Lease(path).close()
    assert read_lease(path) == 0.0


def test_a_partially_written_lease_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "lease").write_text("200.000 199.999")
    assert read_lease(str(tmp_path / "lease")) == 0.0
    assert read_lease(str(tmp_path / "absent")) == 0.0
