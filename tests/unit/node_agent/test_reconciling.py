"""Inconsistent state that an agent finds at startup, and how it reconciles it."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from tests.unit.node_agent.conditions import alive, need_groups, until, written_number
from tests.unit.node_agent.conftest import RunningAgent
from tests.unit.node_agent.jobs import CPUS, NODE, shell, stop_order, task
from tests.unit.node_agent.placement import Placement
from tests.unit.node_agent.test_restarts import supervisor_pid

from cotenant.node_agent.control.state_directory import NodeMismatch
from cotenant.v1 import job_pb2

FAILED, RUNNING = job_pb2.ATTEMPT_STATE_FAILED, job_pb2.ATTEMPT_STATE_RUNNING


def attempt_path(agent: RunningAgent, job_id: str) -> Path:
    return agent.config.state_dir / "attempts" / f"{job_id}-1"


async def test_after_a_reboot_attempts_have_failed_for_that_reason_and_are_not_run_again(
    placement: Placement, agent: RunningAgent, tmp_path: Path
) -> None:
    job = shell("before", f"echo $$ >> {tmp_path}/lives; exec sleep 60")
    placement.assign(job)
    await placement.running("before")
    await agent.stop()
    os.kill(supervisor_pid(agent.config.state_dir, "before"), signal.SIGKILL)
    (attempt_path(agent, "before") / "boot").write_text("00000000-0000-0000-0000-000000000000")
    await agent.start()
    await placement.connected(2)
    end = await placement.ended("before")
    assert (end.state, end.message) == (FAILED, "the node was rebooted")
    placement.reports.clear()
    placement.assign(job)
    assert (await placement.ended("before")).message == "the node was rebooted"
    assert len((tmp_path / "lives").read_text().split()) == 1


async def test_a_job_without_a_recorded_state_is_not_started_again(placement: Placement, agent: RunningAgent) -> None:
    """It is not started once more as if nothing had been."""
    job = shell("silent", "exec sleep 60")
    placement.assign(job)
    await placement.running("silent")
    await agent.stop()
    os.kill(supervisor_pid(agent.config.state_dir, "silent"), signal.SIGKILL)
    for name in ("state.json", "state.json.spare"):
        (attempt_path(agent, "silent") / name).unlink(missing_ok=True)
    await agent.start()
    await placement.connected(2)
    end = await placement.ended("silent")
    assert (end.state, end.message) == (FAILED, "its supervisor died; the job's remaining processes were killed")


async def test_an_interrupted_launch_is_removed_and_can_be_repeated(placement: Placement, agent: RunningAgent) -> None:
    await agent.stop()
    half = attempt_path(agent, "half")
    half.mkdir()
    (half / "assignment").write_bytes(b"\x0a\x04ha")
    (half / "spec").write_bytes(b"")
    await agent.start()
    assert not (await placement.connected(2)).attempts
    placement.assign(shell("half", "exit 3"))
    assert (await placement.ended("half")).exit.code == 3


@pytest.mark.parametrize("text", [b"", b"\0" * 4096, b"{", b'{"state": "RUNNING"}', b"\xff\xfe"])
async def test_an_unreadable_state_file_fails_only_its_attempt(
    placement: Placement, agent: RunningAgent, text: bytes
) -> None:
    for job_id in ("torn", "well"):
        placement.assign(shell(job_id, "exec sleep 60"))
        await placement.running(job_id)
    await agent.stop()
    os.kill(supervisor_pid(agent.config.state_dir, "torn"), signal.SIGKILL)
    (attempt_path(agent, "torn") / "state.json").write_bytes(text)
    await agent.start()
    await placement.connected(2)
    assert (await placement.ended("torn")).state == FAILED
    assert placement.end("well") is None
    placement.send(stops=[stop_order("well", grace_seconds=0)])
    await placement.ended("well")


async def test_a_recycled_pid_is_not_taken_for_a_supervisor(
    placement: Placement, agent: RunningAgent, tmp_path: Path
) -> None:
    """The state names a process that lives, but was started at another time: it is left alone."""
    placement.assign(shell("first", "exec sleep 60"), shell("other", f"echo $$ > {tmp_path}/pid; exec sleep 60"))
    await placement.running("first")
    other = await until(lambda: written_number(tmp_path / "pid"))
    await placement.running("other")
    await agent.stop()
    supervisor = supervisor_pid(agent.config.state_dir, "first")
    os.kill(supervisor, signal.SIGKILL)
    state = attempt_path(agent, "first") / "state.json"
    state.write_text(state.read_text().replace(f'"pid": {supervisor},', f'"pid": {other},'))
    await agent.start()
    await placement.connected(2)
    assert (await placement.ended("first")).state == FAILED
    assert alive(other)


@pytest.mark.root
async def test_an_orphan_attempt_is_reported_and_runs_until_it_is_stopped(
    placement: Placement, agent: RunningAgent, tmp_path: Path
) -> None:
    need_groups("cpuset")
    placement.assign(
        shell("stray", f"echo $$ > {tmp_path}/pid; exec sleep 60", tasks=[task(cpus=CPUS[:1])]),
        shell("stray-brief", f"while [ ! -e {tmp_path}/go ]; do sleep 0.02; done; exit 6"),
        shell("stray-dark", "exec sleep 60"),
    )
    pid = await until(lambda: written_number(tmp_path / "pid"))
    for job_id in ("stray", "stray-brief", "stray-dark"):
        await placement.running(job_id)
    await agent.stop()
    supervisor = supervisor_pid(agent.config.state_dir, "stray-dark")
    for job_id in ("stray", "stray-brief", "stray-dark"):
        shutil.rmtree(attempt_path(agent, job_id))
    await agent.start()
    told = {report.job_id: report for report in (await placement.connected(2)).attempts}
    assert {job_id: report.state for job_id, report in told.items()} == dict.fromkeys(told, RUNNING)
    assert set(told) == {"stray", "stray-brief", "stray-dark"}
    assert "only its control group is left" in told["stray"].message
    placement.assign(shell("thief", "true", tasks=[task(cpus=CPUS[:1])]))
    assert "is held by attempt stray/1" in (await placement.ended("thief")).message
    assert alive(pid)
    placement.send(stops=[stop_order("stray", epoch=0, grace_seconds=0)])
    assert (await placement.ended("stray")).state == job_pb2.ATTEMPT_STATE_STOPPED
    assert not alive(pid)
    (tmp_path / "go").touch()
    assert (await placement.ended("stray-brief")).exit.code == 6, "its supervisor lives, and tells"
    os.kill(supervisor, signal.SIGKILL)
    end = await placement.ended("stray-dark")
    assert (end.state, "its outcome is unknown" in end.message) == (FAILED, True)


async def test_the_state_of_another_node_is_refused(placement: Placement, agent: RunningAgent) -> None:
    placement.assign(shell("long", "exec sleep 60"))
    await placement.running("long")
    await agent.stop()
    await agent.start(node_id="renamed")
    with pytest.raises(NodeMismatch, match=rf"belongs to node '{NODE}' and holds 1 of its attempts, such as long-1"):
        await agent.stop()
    await agent.start(node_id=NODE)
    assert [report.state for report in (await placement.connected(2)).attempts] == [RUNNING]


async def test_a_node_without_attempts_may_be_renamed(placement: Placement, agent: RunningAgent) -> None:
    await agent.stop()
    await agent.start(node_id="renamed")
    assert (await placement.connected(2)).node_id == "renamed"


async def test_a_deep_state_directory_leaves_no_sockets_in_the_temporary_one(
    placement: Placement, agent: RunningAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    await agent.stop()
    await agent.start(state_dir=tmp_path / ("deep" * 30))
    await placement.connected(2)
    placement.assign(shell("long", "exec sleep 60"))
    await placement.running("long")
    assert os.listdir(temporary)
    await agent.stop()
    assert os.listdir(temporary), "where jobs run, nobody else may take its name"
    await agent.start()
    await placement.connected(3)
    placement.send(stops=[stop_order("long", grace_seconds=0)])
    await placement.ended("long")
    await agent.stop()
    assert not os.listdir(temporary)
    os.rmdir(temporary)
