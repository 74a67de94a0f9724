"""Throttles attempts as contention directs, on real control groups, and releases them whatever happens."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.unit.node_agent.agent_process import AgentProcess
from tests.unit.node_agent.conditions import PATIENCE, need_groups, until
from tests.unit.node_agent.conftest import RunningAgent
from tests.unit.node_agent.jobs import CPUS, NODE, assignment, profile_order, resize_order, stop_order, task
from tests.unit.node_agent.placement import Placement
from tests.unit.node_agent.test_profiling import BOTH, OTHER, PACED, cpus_of, directory, pid_of

from cotenant import telemetry
from cotenant.agent.v1 import sample_service_pb2
from cotenant.core.policy.protocols import Throttle
from cotenant.node_agent.control import throttle_directives
from cotenant.node_agent.control.throttle_directives import throttle_for_share
from cotenant.node_agent.control.throttles import describe_throttle
from cotenant.node_agent.enforcement import cgroup_mounts
from cotenant.v1 import contention_service_pb2 as contention
from cotenant.v1 import job_pb2

pytestmark = pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")

POLITE = """
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: exit(7))
print(os.getpid(), flush=True)
while True: time.sleep(0.02)
"""


@pytest.fixture
async def watched(placement: Placement, agent: RunningAgent) -> RunningAgent:
    """An agent with a stream to contention, here the same server as placement."""
    await agent.stop()
    await agent.start(contention_endpoint=placement.endpoint, sample_interval_seconds=0.1)
    await placement.connected(2)
    return agent


def directive(share: float = 0.5, job_id: str = "job", **throttle: Any) -> sample_service_pb2.Directive:
    said = sample_service_pb2.Directive(id="d1", job_id=job_id, number=1, share=share, reason="job gpu is 20 % slower")
    if throttle:
        said.throttle.CopyFrom(contention.Throttle(**throttle))
    return said


def cpu_job(script: str = PACED, *, best_effort: bool = False, **more: Any) -> Any:
    spec = job_pb2.JobSpec(best_effort=best_effort, kind=job_pb2.JOB_KIND_CPU)
    return assignment("job", [sys.executable, "-c", script], tasks=[task(cpus=sorted(BOTH))], spec=spec, **more)


async def begun(placement: Placement, agent: RunningAgent, job: Any) -> int:
    placement.assign(job)
    await placement.running("job")
    return await pid_of(agent.config.state_dir)


def last_throttle(placement: Placement) -> contention.Throttle | None:
    attempts = placement.samples[-1].attempts if placement.samples else ()
    return attempts[0].throttle if attempts and attempts[0].HasField("throttle") else None


async def held(placement: Placement, **fields: Any) -> None:
    """Wait until a sample reports exactly this throttle of the job."""
    wanted = contention.Throttle(**{"bandwidth_percent": 100, **fields})
    await placement.until(lambda: last_throttle(placement) == wanted)


async def freed(placement: Placement) -> None:
    count = len(placement.samples) + 1
    await placement.until(lambda: len(placement.samples) > count and last_throttle(placement) is None)


def group_of(state_dir: Path) -> Any:
    found = cgroup_mounts.open_node_group(NODE)
    assert found is not None
    return found.child(directory(state_dir).path.name)


@pytest.mark.root
async def test_each_throttle_is_applied_reported_and_released(placement: Placement, watched: RunningAgent) -> None:
    need_groups("cpuset", "cpu", "freezer")
    pid = await begun(placement, watched, cpu_job(best_effort=True))
    group = group_of(watched.config.state_dir)
    placement.directives.append(directive(cores=1))
    await held(placement, cores=1)
    assert len(next(iter(cpus_of(pid)))) == 1
    told = await placement.until(lambda: placement.progress and placement.progress[-1].progress.throttle)
    assert told == "limited to 1 of its cores: job gpu is 20 % slower"
    placement.directives.append(directive(cores=1, idle=True))
    await held(placement, cores=1, idle=True)
    assert group.is_idle()
    placement.directives.append(directive(suspended=True))  # the newest holds, and nothing else
    await held(placement, suspended=True)
    assert (cpus_of(pid), group.is_idle(), group.is_frozen()) == ({frozenset(BOTH)}, False, True)
    placement.directives.append(directive(share=1))
    await freed(placement)
    assert not group.is_frozen()
    assert not (directory(watched.config.state_dir).path / "throttle").exists()
    await placement.until(lambda: placement.progress[-1].progress.throttle == "")


@pytest.mark.root
async def test_a_share_is_reached_with_fewer_cores(placement: Placement, watched: RunningAgent) -> None:
    need_groups("cpuset")
    pid = await begun(placement, watched, cpu_job())
    placement.directives.append(directive(share=0.5))
    await held(placement, cores=1)
    assert len(next(iter(cpus_of(pid)))) == 1


@pytest.mark.root
async def test_only_allowed_and_supported_throttles_apply(placement: Placement, watched: RunningAgent) -> None:
    need_groups("cpuset", "cpu")
    await begun(placement, watched, cpu_job())
    group = group_of(watched.config.state_dir)
    placement.directives.append(directive(idle=True, bandwidth_percent=20, cores=1))
    await held(placement, cores=1)  # it is no best-effort job, and the machine has no such hardware
    assert not group.is_idle()
    placement.directives.append(directive(cores=7))  # more than it has
    await freed(placement)


@pytest.mark.parametrize("groups", [pytest.param(True, marks=pytest.mark.root), False], ids=["groups", "no groups"])
async def test_a_suspended_job_gets_its_warning_and_ends(
    placement: Placement, watched: RunningAgent, groups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if groups:
        need_groups("freezer")
    else:
        monkeypatch.setattr(cgroup_mounts, "open_node_group", lambda _: None)
        await watched.stop()
        await watched.start()
        await placement.connected(3)
    pid = await begun(placement, watched, cpu_job(POLITE))
    placement.directives.append(directive(suspended=True))
    await held(placement, suspended=True)
    if groups:
        assert group_of(watched.config.state_dir).is_frozen()
    else:
        assert psutil.Process(pid).status() == psutil.STATUS_STOPPED
    placement.send(stops=[stop_order("job", grace_seconds=600)])
    end = await placement.ended("job")
    assert end.exit.code == 7


@pytest.mark.root
async def test_a_resized_attempt_stays_throttled_on_its_new_cores(placement: Placement, watched: RunningAgent) -> None:
    need_groups("cpuset")
    pid = await begun(placement, watched, cpu_job())
    placement.directives.append(directive(cores=1))
    await held(placement, cores=1)
    placement.send(resizes=[resize_order("job", task(cpus=sorted(OTHER)), epoch=11)])
    assert await placement.answered(11) == ""
    assert cpus_of(pid) == {frozenset(OTHER)}
    placement.send(resizes=[resize_order("job", task(cpus=sorted(BOTH)), epoch=12)])
    assert await placement.answered(12) == ""
    placement.directives.append(directive(cores=1, suspended=True))
    await held(placement, cores=1, suspended=True)
    assert len(next(iter(cpus_of(pid)))) == 1
    placement.directives.append(directive(share=1))
    await freed(placement)
    assert cpus_of(pid) == {frozenset(BOTH)}


@pytest.mark.root
async def test_a_throttled_attempt_is_not_profiled(placement: Placement, watched: RunningAgent) -> None:
    need_groups("cpuset")
    pid = await begun(placement, watched, cpu_job())
    placement.send(profiles=[profile_order("job", 2, steps=100_000)])
    await placement.until(lambda: placement.samples and not placement.samples[-1].attempts[0].steady)
    placement.directives.append(directive(cores=1))
    *_, end = await placement.profile_over()
    assert end.message == "the attempt is being throttled"
    await held(placement, cores=1)
    placement.send(profiles=[profile_order("job", 2)])
    *_, end = await placement.profile_over(2)
    assert end.message == "it is throttled"
    assert len(next(iter(cpus_of(pid)))) == 1


@pytest.mark.root
async def test_silence_releases_the_attempt(
    placement: Placement, watched: RunningAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_groups("cpuset")
    lasts_seconds = min(PATIENCE, 5.0)
    monkeypatch.setattr(throttle_directives, "SILENT_SECONDS_MAX", lasts_seconds)
    await watched.stop()
    await watched.start()
    await placement.connected(3)
    pid = await begun(placement, watched, cpu_job())
    placement.directives.append(directive(cores=1))
    await held(placement, cores=1)
    renewed_until = time.monotonic() + 1.2 * lasts_seconds
    while time.monotonic() < renewed_until:
        placement.directives.append(directive(cores=1))
        count = len(placement.samples)
        await placement.until(lambda count=count: len(placement.samples) > count)  # type: ignore[misc]  # binds the loop's own
    assert last_throttle(placement) is not None
    await freed(placement)
    assert cpus_of(pid) == {frozenset(BOTH)}


@pytest.mark.root
async def test_the_loss_of_contention_releases_the_attempt(
    placement: Placement, watched: RunningAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_groups("cpuset")
    monkeypatch.setattr(throttle_directives, "DISCONNECTED_SECONDS_MAX", 0.2)
    pid = await begun(placement, watched, cpu_job())
    placement.directives.append(directive(cores=1))
    await held(placement, cores=1)
    await placement.stop()
    await until(lambda: cpus_of(pid) == {frozenset(BOTH)})


@pytest.mark.root
async def test_a_stopping_agent_releases_all_attempts(placement: Placement, watched: RunningAgent) -> None:
    need_groups("cpuset", "freezer")
    pid = await begun(placement, watched, cpu_job())
    placement.directives.append(directive(cores=1, suspended=True))
    await held(placement, cores=1, suspended=True)
    await watched.stop()
    assert cpus_of(pid) == {frozenset(BOTH)}
    assert not group_of(watched.config.state_dir).is_frozen()


@pytest.mark.root
async def test_the_next_agent_knows_the_throttles_of_a_killed_one(placement: Placement, tmp_path: Path) -> None:
    need_groups("cpuset", "freezer")
    agent = AgentProcess(
        placement, tmp_path / "state", contention_endpoint=placement.endpoint, sample_interval_seconds=0.1
    )
    await agent.start()
    await placement.connected()
    placement.assign(cpu_job())
    await placement.running("job")
    pid = await pid_of(tmp_path / "state")
    placement.directives.append(directive(cores=1, suspended=True))
    await held(placement, cores=1, suspended=True)
    await agent.end(signal.SIGKILL)
    placement.samples.clear()
    await agent.start()
    await placement.connected(2)
    await held(placement, cores=1, suspended=True)
    assert len(next(iter(cpus_of(pid)))) == 1
    placement.directives.append(directive(share=1))
    await freed(placement)
    assert cpus_of(pid) == {frozenset(BOTH)}
    placement.send(stops=[stop_order("job", grace_seconds=0)])
    await placement.ended("job")
    await agent.end(signal.SIGTERM)


async def test_invalid_directives_are_harmless(placement: Placement, watched: RunningAgent) -> None:
    pid = await begun(placement, watched, cpu_job())
    placement.directives += [directive(job_id="stranger"), directive(share=7), directive(bandwidth_percent=101)]
    await freed(placement)
    assert cpus_of(pid) == {frozenset(BOTH)}
    placement.send(stops=[stop_order("job", grace_seconds=0)])
    await placement.ended("job")
    placement.directives.append(directive(suspended=True))
    await placement.until(lambda: not placement.directives)


def test_a_throttle_is_found_for_each_share() -> None:
    assert throttle_for_share(0.3, 1, False, True) == Throttle(bandwidth_percent=30)
    assert throttle_for_share(0.3, 1, False, False).free  # nothing can be done
    assert throttle_for_share(0.1, 8, False, False) == Throttle(cores=1)
    assert (
        describe_throttle(Throttle(bandwidth_percent=20, suspended=True))
        == "limited to 20 % of the memory bandwidth, suspended"
    )


async def test_the_jobs_trace_contains_its_throttles(
    placement: Placement, watched: RunningAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans: list[tuple[str, str, float, float, dict[str, Any]]] = []

    def record(name: str, parent: str, start: float, end: float, **attributes: Any) -> str:
        spans.append((name, parent, start, end, attributes))
        return ""

    monkeypatch.setattr(telemetry, "record", record)
    job = cpu_job()
    job.trace_parent = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"
    await begun(placement, watched, job)
    placement.directives.append(directive(cores=1))
    await held(placement, cores=1)
    placement.directives.append(directive(share=1.0, bandwidth_percent=100))
    await until(lambda: any(name == "throttle" for name, *_ in spans))
    ((_, parent, start, end, told),) = [span for span in spans if span[0] == "throttle"]
    assert (parent, told["throttle"]) == (job.trace_parent, "limited to 1 of its cores")
    assert told["why"] == "job gpu is 20 % slower"
    assert 0 < start < end
    await freed(placement)
    placement.directives.append(directive(cores=1))
    await held(placement, cores=1)
    placement.send(stops=[stop_order("job", grace_seconds=0)])
    await placement.ended("job")
    await until(lambda: len([name for name, *_ in spans if name == "throttle"]) == 2)
