"""Agents, supervisors and control planes that die, and what happens to jobs."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import asdict
from pathlib import Path

import pytest
from tests.unit.node_agent.agent_process import AgentProcess
from tests.unit.node_agent.conditions import alive, need_groups, until, written_number
from tests.unit.node_agent.conftest import RunningAgent
from tests.unit.node_agent.jobs import CPUS, NODE, shell, stop_order, task
from tests.unit.node_agent.placement import Placement

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.node_agent.enforcement import cgroup_mounts
from cotenant.node_agent.supervisor.cgroups import Group
from cotenant.v1 import job_pb2


def supervisor_pid(state_dir: Path, job_id: str) -> int:
    return int(json.loads((state_dir / "attempts" / f"{job_id}-1" / "state.json").read_text())["pid"])


async def test_a_restarted_agent_finds_its_jobs_and_kills_none(
    placement: Placement, agent: RunningAgent, tmp_path: Path
) -> None:
    placement.assign(
        shell("long", f"echo $$ > {tmp_path}/pid; while [ ! -e {tmp_path}/go ]; do sleep 0.02; done; exit 5")
    )
    pid = await until(lambda: written_number(tmp_path / "pid"))
    await placement.running("long")
    await agent.stop()
    assert alive(pid)
    await agent.start()
    hello = await placement.connected(2)
    assert [(report.job_id, report.state) for report in hello.attempts] == [("long", job_pb2.ATTEMPT_STATE_RUNNING)]
    assert alive(pid)
    (tmp_path / "go").touch()
    assert (await placement.ended("long")).exit.code == 5


async def test_an_exit_while_the_agent_was_dead_is_reported_by_the_next(
    placement: Placement, agent_process: AgentProcess, tmp_path: Path
) -> None:
    placement.assign(
        shell("long", f"echo $$ > {tmp_path}/pid; while [ ! -e {tmp_path}/go ]; do sleep 0.02; done; exit 6")
    )
    await placement.running("long")
    supervisor = supervisor_pid(tmp_path / "state", "long")
    await agent_process.end(signal.SIGKILL)
    (tmp_path / "go").touch()
    await until(lambda: not alive(supervisor))
    await agent_process.start()
    hello = await placement.connected(2)
    (report,) = hello.attempts
    assert (report.state, report.exit.code) == (job_pb2.ATTEMPT_STATE_FAILED, 6)


@pytest.mark.root
async def test_a_group_that_was_not_removed_in_time_is_removed_with_its_attempt(
    placement: Placement, agent: RunningAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where an agent dies between the end and that, or the kernel calls the group busy for longer than usual."""
    need_groups("cpuset")
    tried: list[Group] = []
    monkeypatch.setattr(Group, "remove", lambda group, *_, **__: tried.append(group))
    placement.assign(shell("long", f"echo $$ > {tmp_path}/pid; exec sleep 60"))
    await until(lambda: written_number(tmp_path / "pid"))
    await placement.running("long")
    state_dir, attempt = agent.config.state_dir, agent_pb2.AttemptAck(job_id="long", number=1)
    os.kill(supervisor_pid(state_dir, "long"), signal.SIGKILL)
    await placement.ended("long")
    tried.clear()
    placement.send(acks=[attempt])
    (group,) = await until(lambda: tried)
    await agent.stop()
    assert (group.exists(), (state_dir / "attempts" / "long-1").exists()) == (True, True)
    monkeypatch.undo()
    await agent.start()
    await placement.connected(2)
    placement.send(acks=[attempt])
    await until(lambda: not group.exists() and (state_dir / "kept" / "long-1").exists())


async def test_sigterm_stops_the_agent_but_no_job(
    placement: Placement, agent_process: AgentProcess, tmp_path: Path
) -> None:
    placement.assign(shell("long", f"echo $$ > {tmp_path}/pid; exec sleep 60"))
    pid = await until(lambda: written_number(tmp_path / "pid"))
    await placement.running("long")
    assert await agent_process.end(signal.SIGTERM) == 0
    assert alive(pid)
    await agent_process.start()
    await placement.connected(2)
    placement.send(stops=[stop_order("long", grace_seconds=1)])
    await placement.ended("long")
    assert not alive(pid)


@pytest.mark.parametrize("groups", [pytest.param(True, marks=pytest.mark.root), False], ids=["groups", "no groups"])
async def test_an_attempt_fails_with_its_killed_supervisor(
    placement: Placement, agent: RunningAgent, tmp_path: Path, groups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if groups:
        need_groups("memory")
    else:
        monkeypatch.setattr(cgroup_mounts, "open_node_group", lambda _: None)
        await agent.stop()
        await agent.start()
        await placement.connected(2)
    script = f"setsid sh -c 'echo $$ > {tmp_path}/daemon; exec sleep 60' & echo $$ > {tmp_path}/pid; wait"
    placement.assign(shell("victim", script, tasks=[task(cpus=CPUS[:1])]))
    daemon = await until(lambda: written_number(tmp_path / "daemon"))
    pid = await until(lambda: written_number(tmp_path / "pid"))
    await placement.running("victim")
    os.kill(supervisor_pid(agent.config.state_dir, "victim"), signal.SIGKILL)
    end = await placement.ended("victim")
    assert end.state == job_pb2.ATTEMPT_STATE_FAILED
    assert "its supervisor died" in end.message
    assert not alive(pid)
    assert not alive(daemon)


async def test_the_next_agent_notices_a_supervisor_killed_in_the_meantime(
    placement: Placement, agent: RunningAgent, tmp_path: Path
) -> None:
    placement.assign(shell("victim", f"setsid sleep 60 & echo $! > {tmp_path}/daemon; wait"))
    daemon = await until(lambda: written_number(tmp_path / "daemon"))
    await placement.running("victim")
    supervisor = supervisor_pid(agent.config.state_dir, "victim")
    await agent.stop()
    os.kill(supervisor, signal.SIGKILL)
    await agent.start()
    assert (await placement.ended("victim")).state == job_pb2.ATTEMPT_STATE_FAILED
    assert not alive(daemon)


async def test_jobs_run_without_placement_and_are_reported_when_it_returns(
    placement: Placement, agent: RunningAgent, tmp_path: Path
) -> None:
    placement.assign(shell("long", f"while [ ! -e {tmp_path}/go ]; do sleep 0.02; done"))
    await placement.running("long")
    await placement.stop()
    (tmp_path / "go").touch()
    state = agent.config.state_dir / "attempts" / "long-1" / "state.json"
    await until(lambda: json.loads(state.read_text())["state"] == "SUCCEEDED")
    await placement.start()
    hello = await placement.connected(2)
    [told] = hello.attempts
    if told.state != job_pb2.ATTEMPT_STATE_SUCCEEDED:  # the supervisor's file was quicker than its word to the agent
        told = await placement.ended("long")
    assert (told.job_id, told.state) == ("long", job_pb2.ATTEMPT_STATE_SUCCEEDED)


async def test_an_attempt_unknown_to_placement_runs_until_it_is_stopped(
    placement: Placement, agent: RunningAgent
) -> None:
    placement.assign(shell("unknown", "sleep 60", epoch=7))
    await placement.running("unknown")
    await placement.stop()
    await placement.start()
    hello = await placement.connected(2)
    assert [report.state for report in hello.attempts] == [job_pb2.ATTEMPT_STATE_RUNNING]
    order = agent_pb2.StopOrder(job_id="unknown", number=1, epoch=7, reason=job_pb2.STOP_REASON_SUPERSEDED)
    placement.send(stops=[order])
    assert (await placement.ended("unknown")).state == job_pb2.ATTEMPT_STATE_STOPPED


async def test_an_idle_agent_sends_heartbeats(placement: Placement, agent: RunningAgent) -> None:
    await placement.stop()
    placement.heartbeat_seconds = 0.05
    await placement.start()
    await placement.until(lambda: placement.beats >= 3)


async def test_an_older_epoch_is_refused_after_a_restart(placement: Placement, agent: RunningAgent) -> None:
    placement.assign(shell("job", "true", number=2, epoch=20))
    await placement.ended("job", 2)
    for _ in range(2):
        placement.reports.clear()
        placement.assign(shell("job", "true", number=1, epoch=19))
        end = await placement.ended("job", 1)
        assert (end.message, end.epoch) == ("refused: epoch 19 is older than 20", 20)
        await agent.stop()
        await agent.start()
        await placement.connected(len(placement.hellos) + 1)


async def test_a_stop_order_with_an_older_epoch_is_refused(placement: Placement, agent: RunningAgent) -> None:
    placement.assign(shell("job", "sleep 60", epoch=20))
    await placement.running("job")
    placement.send(stops=[stop_order("job", epoch=19, grace_seconds=0)])
    await placement.until(lambda: placement.states("job") == ["RUNNING", "RUNNING"])
    placement.send(stops=[stop_order("job", epoch=20, grace_seconds=0)])
    await placement.ended("job")


async def test_an_older_term_is_refused_after_a_restart(placement: Placement, agent: RunningAgent) -> None:
    for _ in range(2):
        await placement.stop()
        placement.term = 5
        await placement.start()
        count = len(placement.hellos)
        await placement.connected(count + 1)
        await until(lambda: '"term": 5' in (agent.config.state_dir / "fence.jsonl").read_text())
        await placement.stop()
        placement.term = 4
        await placement.start()
        count = len(placement.hellos)
        await placement.connected(count + 1)
        placement.assign(shell("stale", "true"))
        await placement.connected(count + 2)  # it hangs up on the old leader and tries again
        assert not placement.states("stale")
        await agent.stop()
        await agent.start()


async def test_a_second_agent_on_the_same_state_is_refused(placement: Placement, agent: RunningAgent) -> None:
    second = RunningAgent(agent.config)
    await second.start()
    with pytest.raises(Exception, match="another agent is running"):
        await second.stop()


def test_a_config_has_plain_fields() -> None:
    from cotenant.node_agent.control.agent import AgentConfig

    assert "token" in asdict(AgentConfig(NODE, Path("/x"), "h:1"))
