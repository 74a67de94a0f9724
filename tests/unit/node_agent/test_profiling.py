"""Profiles of running jobs: rates depend on the cores, and all cores are restored however a profile ends."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.node_agent.agent_process import AgentProcess
from tests.unit.node_agent.conditions import need_groups, until
from tests.unit.node_agent.conftest import RunningAgent
from tests.unit.node_agent.jobs import CPUS, PYTHON, assignment, profile_order, resize_order, shell, stop_order, task
from tests.unit.node_agent.placement import Placement

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.node_agent.control import live_profiling
from cotenant.node_agent.control.rate_meter import MeterTimeouts
from cotenant.node_agent.enforcement import cgroup_mounts
from cotenant.node_agent.enforcement.affinity import masks
from cotenant.node_agent.enforcement.core_changes import CoresRefused, narrowed
from cotenant.node_agent.runtime.attempt_directory import AttemptDirectory
from cotenant.node_agent.runtime.attempt_status import AttemptKey
from cotenant.node_agent.runtime.process_runtime import ProcessRuntime
from cotenant.v1 import job_pb2, resources_pb2

pytestmark = pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
ONE, OTHER, BOTH = set(CPUS[:1]), set(CPUS[1:2]), set(CPUS[:2])

TELL = "from cotenant import progress; import os, time, sys; print(os.getpid(), flush=True)\n"
# As quick as it has cores: 20 steps a second on one, 40 on two, whatever else the machine does.
PACED = TELL + "while True: time.sleep(0.05 / len(os.sched_getaffinity(0))); progress.step()"
# Two processes that burn without a pause, before all others; a step is 20 ms of their time.
BURNING = (
    TELL
    + """
import multiprocessing
os.nice(-20)
if os.path.exists('/proc/self/autogroup'): open('/proc/self/autogroup', 'w').write('-20')
used = multiprocessing.Array('d', 2, lock=False)
def burn(which):
    while True: sum(range(1000)); used[which] = time.process_time()
for which in range(2): multiprocessing.Process(target=burn, args=(which,), daemon=True).start()
while True: time.sleep(0.005); progress.step(int(sum(used) / 0.02))
"""
)


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        live_profiling, "TIMEOUTS", MeterTimeouts(settle_seconds=0.1, window_seconds=0.3, silence_seconds=2.0)
    )


async def impatient(
    placement: Placement, agent: RunningAgent, monkeypatch: pytest.MonkeyPatch, patience: MeterTimeouts
) -> None:
    monkeypatch.setattr(live_profiling, "TIMEOUTS", patience)
    await agent.stop()
    await agent.start()
    await placement.connected(2)


def told(script: str, job_id: str = "job", **more: Any) -> agent_pb2.Assignment:
    return assignment(job_id, [sys.executable, "-c", script], tasks=[task(cpus=sorted(BOTH))], grace_seconds=0, **more)


def directory(state_dir: Path, job_id: str = "job") -> AttemptDirectory:
    return AttemptDirectory(state_dir / "attempts", AttemptKey(job_id, 1))


async def pid_of(state_dir: Path) -> int:
    output = directory(state_dir).path / "output-0.log"
    return await until(lambda: output.exists() and output.read_text().endswith("\n") and int(output.read_text()))


def cpus_of(pid: int) -> set[frozenset[int]]:
    return set(masks([pid]).values())


async def begun(placement: Placement, agent: RunningAgent, job: agent_pb2.Assignment) -> int:
    placement.assign(job)
    await placement.running("job")
    pid = await pid_of(agent.config.state_dir)
    await placement.until(lambda: placement.progress)
    return pid


def rates(reports: Iterable[agent_pb2.ProfileReport]) -> dict[int, float]:
    return {report.cores: report.rate_per_second for report in reports if not report.done}


@pytest.mark.speed
@pytest.mark.calm
@pytest.mark.parametrize("groups", [pytest.param(True, marks=pytest.mark.root), False], ids=["groups", "no groups"])
async def test_rates_depend_on_the_cores(
    placement: Placement, agent: RunningAgent, groups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if groups:
        need_groups("cpuset")
    else:
        monkeypatch.setattr(cgroup_mounts, "open_node_group", lambda _: None)
        await agent.stop()
        await agent.start()
        await placement.connected(2)
    pid = await begun(placement, agent, told(PACED))
    placement.send(profiles=[profile_order("job", 1, 2, 3)])
    one, two, three, end = await placement.profile_over()
    assert 10 < one.rate_per_second < 20.5
    assert two.rate_per_second / one.rate_per_second == pytest.approx(2, abs=0.4)
    assert (one.cores, two.cores, one.message, two.message) == (1, 2, "", "")
    assert one.steps >= 10
    assert one.window.ToMilliseconds() == pytest.approx(1000 * one.steps / one.rate_per_second, rel=0.01)
    assert one.time.seconds > 0
    assert (three.cores, three.rate_per_second, three.message) == (3, 0, "rank 0 holds 2 cores, not 3")
    assert (end.done, end.message, cpus_of(pid)) == (True, "", {frozenset(BOTH)})


@pytest.mark.speed
@pytest.mark.calm
@pytest.mark.root
async def test_two_real_cores_are_faster_than_one(placement: Placement, agent: RunningAgent) -> None:
    need_groups("cpuset")
    placement.assign(told(BURNING))
    await placement.running("job")
    gains: list[float] = []
    while not gains or (gains[-1] < 1.2 and len(gains) < 4):  # the machine does other things, too
        placement.send(profiles=[profile_order("job", 1, 2)])
        found = rates((await placement.profile_over(len(gains) + 1))[-3:])
        gains.append(found[2] / found[1])
    assert gains[-1] >= 1.2, gains


@pytest.mark.speed
@pytest.mark.calm
async def test_the_rate_of_a_profile_is_not_reported_as_the_jobs(placement: Placement, agent: RunningAgent) -> None:
    await agent.stop()
    await agent.start(contention_endpoint=placement.endpoint, sample_interval_seconds=0.1)
    await placement.connected(2)
    await begun(placement, agent, told(PACED))
    await placement.until(lambda: placement.progress[-1].progress.rate_per_second > 30)
    await placement.until(lambda: placement.samples[-1].attempts[0].rate_per_second > 30)
    placement.progress.clear()
    placement.samples.clear()
    placement.send(profiles=[profile_order("job", 1, steps=25)])
    await placement.profile_over()
    await placement.until(lambda: placement.progress[-1].progress.rate_per_second > 30)
    await placement.until(lambda: placement.samples[-1].attempts[0].rate_per_second > 30)
    told_rates = [report.progress.rate_per_second for report in placement.progress]
    sampled = [one.rate_per_second for sample in placement.samples for one in sample.attempts]
    assert any(not report.progress.HasField("step_time") for report in placement.progress)
    for some in (told_rates, sampled):
        assert 0 in some
        assert not [rate for rate in some if 0 < rate < 28]


async def test_a_job_that_reports_nothing_keeps_its_cores(
    placement: Placement, agent: RunningAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    await impatient(placement, agent, monkeypatch, MeterTimeouts(silence_seconds=0.2))
    asked: list[int | None] = []
    narrow = ProcessRuntime.narrow

    async def spy(runtime: ProcessRuntime, key: AttemptKey, cores: int | None) -> str | None:
        asked.append(cores)
        return await narrow(runtime, key, cores)

    monkeypatch.setattr(ProcessRuntime, "narrow", spy)
    placement.assign(shell("job", "sleep 600", tasks=[task(cpus=sorted(BOTH))]))
    await placement.running("job")
    placement.send(profiles=[profile_order("job", 1, 2)])
    *counts, end = await placement.profile_over()
    words = "the job reported no step for 0.2 s"
    assert [(report.cores, report.message) for report in counts] == [(1, words), (2, words)]
    assert (end.done, end.message, asked) == (True, words, [None])


async def test_a_job_that_falls_silent_ends_its_profile(
    placement: Placement, agent: RunningAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    await impatient(placement, agent, monkeypatch, MeterTimeouts(silence_seconds=0.5))
    await begun(
        placement, agent, told(TELL + "[(time.sleep(0.1), progress.step()) for _ in range(9)]; time.sleep(600)")
    )
    placement.send(profiles=[profile_order("job", 1, 2, 1, 2, steps=1000)])
    *counts, end = await placement.profile_over()
    assert [report.message for report in counts] == ["the job reported no step for 0.5 s"] * 4
    assert end.done


@pytest.mark.root
@pytest.mark.parametrize("what", ["resize", "stop", "end", "order", "other", "budget", "shutdown"])
async def test_cores_are_restored_however_a_profile_ends(
    placement: Placement, agent: RunningAgent, what: str, tmp_path: Path
) -> None:
    need_groups("cpuset")
    wait = f"signal.signal(signal.SIGTERM, signal.SIG_IGN); import pathlib; go = pathlib.Path('{tmp_path}/go')\n"
    script = "import signal\n" + TELL + wait + "while not go.exists(): time.sleep(0.02); progress.step()"
    pid = await begun(placement, agent, told(script))
    budget_seconds = 1.0 if what == "budget" else 600
    placement.send(profiles=[profile_order("job", 1, 2, steps=100_000, budget_seconds=budget_seconds)])
    await until(lambda: cpus_of(pid) == {frozenset(ONE)})
    if what == "resize":
        placement.send(resizes=[resize_order("job", task(cpus=sorted(OTHER)), epoch=11)])
        assert await placement.answered(11) == ""
        assert cpus_of(pid) == {frozenset(OTHER)}
    elif what == "stop":
        placement.send(stops=[stop_order("job", grace_seconds=600)])
    elif what == "end":
        (tmp_path / "go").touch()
    elif what == "order":
        placement.send(profiles=[profile_order("job")])
    elif what == "other":
        placement.send(profiles=[profile_order("job", 2, steps=5)])
    elif what == "shutdown":
        await agent.stop()
    words = {
        "resize": "its cores are being resized",
        "stop": "the attempt is being stopped",
        "end": "the attempt has ended",
        "order": "cancelled by an order",
        "other": "replaced by another profile",
        "budget": "its budget of 1 s is exhausted",
        "shutdown": "the agent is shutting down",
    }
    await placement.profile_over()
    end = next(report for report in placement.profiled if report.done)
    assert end.message == words[what]
    assert [report.cores for report in placement.profiled][:3] == [1, 2, 0]
    if what not in ("resize", "end"):
        assert cpus_of(pid) == {frozenset(BOTH)}
        assert not (directory(agent.config.state_dir).path / "narrowed").exists()
    if what == "other":
        assert rates((await placement.profile_over(2))[3:])[2] > 0


@pytest.mark.root
@pytest.mark.parametrize("groups", [True, False], ids=["groups", "no groups"])
async def test_the_next_agent_restores_the_cores_of_an_interrupted_profile(
    placement: Placement, agent_process: AgentProcess, tmp_path: Path, groups: bool
) -> None:
    if groups:
        need_groups("cpuset")
    else:
        await agent_process.restart(without_groups=True)
        await placement.connected(2)
    placement.assign(told(PACED))
    await placement.running("job")
    pid = await pid_of(tmp_path / "state")
    placement.send(profiles=[profile_order("job", 1, steps=100_000)])
    await until(lambda: cpus_of(pid) == {frozenset(ONE)})
    await agent_process.end(signal.SIGKILL)
    assert cpus_of(pid) == {frozenset(ONE)}
    await agent_process.start(without_groups=not groups)
    await placement.connected(len(placement.hellos) + 1)
    assert cpus_of(pid) == {frozenset(BOTH)}
    assert not (directory(tmp_path / "state").path / "narrowed").exists()


async def test_invalid_orders_end_at_once(placement: Placement, agent: RunningAgent) -> None:
    placement.send(profiles=[profile_order("stranger", 1), profile_order("stranger")])
    placement.assign(told(PACED, epoch=11))
    await placement.running("job")
    placement.send(profiles=[profile_order("job", 1, epoch=10), profile_order("job", 1, epoch=11, steps=0)])
    placement.send(profiles=[profile_order("job", *[1] * 65, epoch=11)])
    reports = await placement.profile_over(5)
    assert [report.message for report in reports if report.done] == [
        "unknown on this node",
        "no profile is running",
        "refused: epoch 10 is older than 11",
        "a profile has at least 1 step and at most 64 core counts",
        "a profile has at least 1 step and at most 64 core counts",
    ]
    assert not any(report.rate_per_second for report in reports)


async def test_a_repeated_order_changes_nothing(placement: Placement, agent: RunningAgent) -> None:
    await begun(placement, agent, told(PACED))
    order = profile_order("job", 1, steps=15)
    placement.send(profiles=[order, order])
    await placement.profile_over()
    placement.send(profiles=[profile_order("job")])  # answered behind anything else that were to come
    assert [report.cores for report in await placement.profile_over(2)] == [1, 0, 0]


@pytest.mark.calm
async def test_progress_from_output_patterns_is_measured_too(placement: Placement, agent: RunningAgent) -> None:
    script = "import time, itertools\nfor n in itertools.count(): time.sleep(0.05); print('step', n, flush=True)"
    spec = job_pb2.JobSpec(progress=job_pb2.ProgressRule(regex=r"step (\d+)"))
    placement.assign(assignment("job", [*PYTHON, script], tasks=[task(cpus=sorted(BOTH))], spec=spec))
    await placement.running("job")
    placement.send(profiles=[profile_order("job", 1, steps=20)])
    assert rates(await placement.profile_over())[1] == pytest.approx(20, rel=0.25)


def test_the_remaining_cores_are_whole_and_near_the_gpu() -> None:
    cores = [resources_pb2.Core(id=n, cpus=[n, n + 8], numa_node=n // 4) for n in range(8)]
    gpus = [resources_pb2.Gpu(uuid="G", numa_node=1)]
    inventory = resources_pb2.Inventory(cores=cores, gpus=gpus)
    held = task(cpus=[1, 9, 2, 10, 5, 13, 6, 14], gpus=["G"])
    held.core_ids[:] = [1, 2, 5, 6]
    allocation = resources_pb2.NodeAllocation(tasks=[held])
    assert narrowed(allocation, inventory, 2).tasks[0].cpus == {5, 13, 6, 14}
    assert narrowed(allocation, inventory, 3).tasks[0].cpus == {5, 13, 6, 14, 1, 9}
    with pytest.raises(CoresRefused, match="holds 4 cores, not 5"):
        narrowed(allocation, inventory, 5)
