"""Changes of running jobs' cores: real processes, real cpusets, and agents that die in the middle."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.node_agent.agent_process import AgentProcess
from tests.unit.node_agent.conditions import need_groups, until
from tests.unit.node_agent.conftest import RunningAgent
from tests.unit.node_agent.jobs import CPUS, NODE, PYTHON, assignment, resize_order, shell, stop_order, task
from tests.unit.node_agent.placement import Placement

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.history import recording
from cotenant.history.events import Resized
from cotenant.node_agent.enforcement import cgroup_mounts, hooks
from cotenant.node_agent.enforcement.affinity import masks
from cotenant.node_agent.runtime import attempt_cores
from cotenant.node_agent.runtime.attempt_directory import AttemptDirectory
from cotenant.node_agent.runtime.attempt_status import AttemptKey
from cotenant.node_agent.supervisor.cgroups import Group, GroupError

pytestmark = pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
ONE, OTHER, BOTH = CPUS[:1], CPUS[1:2], CPUS[:2]

# Three threads that run all the time, with short pauses that leave the CPUs to the tests, and a child that sleeps; one
# thread pins itself to the last of its CPUs, one to all of them.
BUSY = """
import os, sys, threading, time, subprocess
def burn(pin):
    cpus = sorted(os.sched_getaffinity(0))
    if pin: os.sched_setaffinity(0, cpus[-1:] if pin == 'last' else cpus)
    while True: sum(range(1000)); time.sleep(0.01)
for pin in ('', 'all', 'last'): threading.Thread(target=burn, args=(pin,), daemon=True).start()
child = subprocess.Popen(['sleep', '600'])
print(os.getpid(), child.pid, file=open(sys.argv[1] + '.new', 'w'), flush=True)
os.rename(sys.argv[1] + '.new', sys.argv[1])
child.wait()
"""


def busy(job_id: str, told: Path, cpus: list[int], **more: Any) -> agent_pb2.Assignment:
    return assignment(job_id, [*PYTHON, BUSY, str(told)], tasks=[task(cpus=cpus)], grace_seconds=0, **more)


async def pids_of(told: Path) -> list[int]:
    return await until(lambda: [int(word) for word in told.read_text().split()] if told.exists() else [])


def allowed(pids: Iterable[int]) -> list[set[int]]:
    """Return the CPUs of each thread from /proc."""
    return sorted((set(cpus) for cpus in masks(pids).values()), key=sorted)


def directory(agent: RunningAgent, job_id: str) -> AttemptDirectory:
    return AttemptDirectory(agent.config.state_dir / "attempts", AttemptKey(job_id, 1))


def task_group(job_id: str) -> Group:
    node = cgroup_mounts.open_node_group(NODE)
    assert node is not None
    return node.child(f"{job_id}-1").child("task-0")


@pytest.mark.root
async def test_all_threads_follow_when_cores_come_and_go(
    placement: Placement, agent: RunningAgent, tmp_path: Path
) -> None:
    need_groups("cpuset")
    placement.assign(busy("job", tmp_path / "pids", BOTH))
    pids = await pids_of(tmp_path / "pids")
    await until(lambda: allowed(pids).count(set(OTHER)) == 1)  # the thread that pinned itself
    assert allowed(pids).count(set(BOTH)) == 4
    for epoch, cpus in ((11, ONE), (12, BOTH), (13, OTHER)):
        placement.send(resizes=[resize_order("job", task(cpus=cpus), epoch=epoch)])
        assert await placement.answered(epoch) == ""
        assert set.union(*allowed(pids)) == set(cpus)
        assert allowed(pids).count(set(cpus)) >= 4  # but for the one that pinned itself
        assert (task_group("job").cpus(), recorded_cpus(agent, "job")) == (cpus, cpus)
    assert allowed(pids) == [set(OTHER)] * 5
    placement.send(stops=[stop_order("job", epoch=13, grace_seconds=0)])
    assert (await placement.ended("job")).epoch == 13


async def test_without_cpusets_the_threads_are_moved(
    placement: Placement, agent: RunningAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroup_mounts, "open_node_group", lambda _: None)
    monkeypatch.setenv(recording.VARIABLE, str(tmp_path / "history"))
    await agent.stop()
    await agent.start()
    await placement.connected(2)
    placement.assign(busy("job", tmp_path / "pids", ONE))
    pids = await pids_of(tmp_path / "pids")
    await placement.running("job")
    for epoch, cpus in ((11, BOTH), (12, OTHER)):
        placement.send(resizes=[resize_order("job", task(cpus=cpus), epoch=epoch)])
        assert await placement.answered(epoch) == ""
        assert allowed(pids) == [set(cpus)] * 5
    edges = [event for _, event in recording.read((tmp_path / "history").read_text().splitlines())]
    held = [(event.epoch, sorted(event.holds)) for event in edges if isinstance(event, Resized)]
    assert [(epoch, len(holds)) for epoch, holds in held] == [(11, 2), (12, 1)]


async def test_cores_of_another_attempt_are_refused_and_nothing_changes(
    placement: Placement, agent: RunningAgent
) -> None:
    placement.assign(shell("job", "sleep 600", tasks=[task(cpus=ONE)]))
    placement.assign(shell("neighbour", "sleep 600", tasks=[task(cpus=OTHER)]))
    await placement.running("job")
    await placement.running("neighbour")
    placement.send(resizes=[resize_order("job", task(cpus=BOTH), epoch=11)])
    assert await placement.answered(11) == f"CPU {OTHER[0]} is held by attempt neighbour/1"
    recorded = directory(agent, "job").assignment()
    assert recorded
    assert (recorded.epoch, list(recorded.allocation.tasks[0].cpu_ids)) == (10, ONE)
    placement.send(stops=[stop_order("neighbour", grace_seconds=0)])
    await placement.ended("neighbour")
    placement.send(resizes=[resize_order("job", task(cpus=BOTH), epoch=12)])
    assert await placement.answered(12) == ""


async def test_old_and_new_cores_are_held_during_a_change(
    placement: Placement, agent: RunningAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, entered, go = hooks.change, asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow(*arguments: Any) -> None:
        loop.call_soon_threadsafe(entered.set)
        asyncio.run_coroutine_threadsafe(go.wait(), loop).result()
        change(*arguments)

    monkeypatch.setattr(attempt_cores, "change", slow)
    placement.assign(shell("job", "sleep 600", tasks=[task(cpus=ONE)]))
    await placement.running("job")
    placement.send(resizes=[resize_order("job", task(cpus=OTHER), epoch=11)])
    await entered.wait()
    placement.assign(shell("old", "true", tasks=[task(cpus=ONE)]), shell("new", "true", tasks=[task(cpus=OTHER)]))
    for job_id, cpus in (("old", ONE), ("new", OTHER)):
        assert (await placement.ended(job_id)).message == f"CPU {cpus[0]} is held by attempt job/1"
    go.set()
    assert await placement.answered(11) == ""
    placement.assign(shell("heir", "true", tasks=[task(cpus=ONE)]))
    assert (await placement.ended("heir")).message == ""


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (task(cpus=[4095]), "CPUs that this node does not have"),
        (task(cpus=ONE, memory_bytes=1 << 30), "only the cores"),
        (task(3, cpus=ONE), "rank 3 is not within"),
        (task(), "would lose all of its CPUs"),
    ],
)
async def test_unknown_cores_are_refused(placement: Placement, agent: RunningAgent, changed: Any, words: str) -> None:
    placement.assign(shell("job", "sleep 600", tasks=[task(cpus=ONE)]))
    await placement.running("job")
    placement.send(resizes=[resize_order("job", changed, epoch=11)])
    assert words in await placement.answered(11)
    placement.send(stops=[stop_order("job", epoch=10, grace_seconds=0)])  # the epoch of before still counts
    await placement.ended("job")


async def test_an_old_order_is_refused_and_a_repeated_one_answered_again(
    placement: Placement, agent: RunningAgent
) -> None:
    placement.assign(shell("job", "sleep 600", tasks=[task(cpus=ONE)]))
    await placement.running("job")
    order = resize_order("job", task(cpus=OTHER), epoch=12)
    placement.send(resizes=[order, order])
    assert await placement.answered(12, 2) == ""
    placement.send(resizes=[resize_order("job", task(cpus=ONE), epoch=11)])
    assert await placement.answered(11) == "refused: epoch 11 is older than 12"
    await agent.stop()
    await agent.start()
    hello = await placement.connected(2)
    assert [report.epoch for report in hello.attempts] == [12]
    placement.send(resizes=[order])
    assert await placement.answered(12, 3) == ""
    assert recorded_cpus(agent, "job") == OTHER


def recorded_cpus(agent: RunningAgent, job_id: str) -> list[int]:
    recorded = directory(agent, job_id).assignment()
    assert recorded
    return list(recorded.allocation.tasks[0].cpu_ids)


async def test_resizing_an_attempt_that_is_not_running_is_an_error(placement: Placement, agent: RunningAgent) -> None:
    placement.send(resizes=[resize_order("stranger", task(cpus=ONE), epoch=11)])
    assert await placement.answered(11) == "unknown on this node"
    placement.assign(shell("over", "true", tasks=[task(cpus=ONE)]))
    await placement.ended("over")
    placement.send(resizes=[resize_order("over", task(cpus=OTHER), epoch=12)])
    assert await placement.answered(12) == "already ended"


async def test_an_order_right_after_the_assignment_waits_for_the_start(
    placement: Placement, agent: RunningAgent
) -> None:
    placement.assign(shell("job", "sleep 600", tasks=[task(cpus=ONE)]))
    placement.send(resizes=[resize_order("job", task(cpus=OTHER), epoch=11)])
    assert await placement.answered(11) == ""
    assert placement.states("job") == ["RUNNING"]


@pytest.mark.root
async def test_processes_forked_during_a_change_follow_the_group(placement: Placement, agent: RunningAgent) -> None:
    need_groups("cpuset")
    placement.assign(shell("job", "sleep 600", tasks=[task(cpus=ONE)]))
    await placement.running("job")
    node = cgroup_mounts.open_node_group(NODE)
    assert node is not None
    for group in (node.child("job-1"), task_group("job")):
        group.set_cpus(BOTH)
    assert set.intersection(*allowed(task_group("job").pids())) == set(BOTH)


@pytest.mark.root
async def test_a_change_that_the_kernel_refuses_is_rolled_back(
    placement: Placement, agent: RunningAgent, tmp_path: Path
) -> None:
    need_groups("cpuset")
    placement.assign(busy("job", tmp_path / "pids", BOTH))
    pids = await pids_of(tmp_path / "pids")
    await until(lambda: allowed(pids).count(set(OTHER)) == 1)
    before = masks(pids)
    group = task_group("job")
    if group.version != 1:
        pytest.skip("version 2 narrows children by itself")
    group.child("made-by-the-job").create()  # in version 1 it keeps its parent from becoming smaller
    placement.send(resizes=[resize_order("job", task(cpus=ONE), epoch=11)])
    error = await placement.answered(11)
    assert "Device or resource busy" in error
    assert (group.cpus(), masks(pids), recorded_cpus(agent, "job")) == (BOTH, before, BOTH)


@pytest.mark.root
async def test_a_change_that_cannot_be_recorded_is_rolled_back(
    placement: Placement, agent: RunningAgent, tmp_path: Path
) -> None:
    need_groups("cpuset")
    placement.assign(shell("job", "sleep 600", tasks=[task(cpus=ONE)]))
    await placement.running("job")
    (directory(agent, "job").path / "assignment.new").mkdir()  # stands for a disk that takes nothing more
    placement.send(resizes=[resize_order("job", task(cpus=BOTH), epoch=11)])
    assert "cannot record" in await placement.answered(11)
    assert (task_group("job").cpus(), recorded_cpus(agent, "job")) == (ONE, ONE)


@pytest.mark.root
async def test_a_failed_rollback_reports_both_reasons(
    placement: Placement, agent: RunningAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_groups("cpuset")
    placement.assign(shell("job", "sleep 600", tasks=[task(cpus=ONE)]))
    await placement.running("job")

    def refuse(*_: Any) -> None:
        raise GroupError("read-only file system")

    monkeypatch.setattr(Group, "set_cpus", refuse)
    placement.send(resizes=[resize_order("job", task(cpus=BOTH), epoch=11)])
    assert await placement.answered(11) == "read-only file system; rollback failed: read-only file system"


@pytest.mark.root
@pytest.mark.parametrize("moment", ["change", "replace_assignment", "answer"])
async def test_an_agent_killed_during_a_change_restores_its_record(
    placement: Placement, new_process: AgentProcess, tmp_path: Path, moment: str
) -> None:
    need_groups("cpuset")
    await new_process.start(dies_at=moment)
    await placement.connected()
    placement.assign(busy("job", tmp_path / "pids", ONE))
    pids = await pids_of(tmp_path / "pids")
    await placement.running("job")
    order = resize_order("job", task(cpus=BOTH), epoch=11)
    placement.send(resizes=[order])
    assert await new_process.ended() == -signal.SIGKILL
    assert set.union(*allowed(pids)) == set(ONE if moment == "change" else BOTH)
    await new_process.start()
    hello = await placement.connected(2)
    applied = moment == "answer"
    assert [report.epoch for report in hello.attempts] == [11 if applied else 10]
    assert allowed(pids) == [set(BOTH if applied else ONE)] * 5
    placement.send(resizes=[order])
    assert await placement.answered(11) == ""
    assert allowed(pids) == [set(BOTH)] * 5
