"""Samples to contention, and directives from it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from tests.unit.node_agent.conditions import need_groups
from tests.unit.node_agent.conftest import RunningAgent
from tests.unit.node_agent.jobs import CPUS, NODE, PYTHON, assignment, resize_order, shell, stop_order, task
from tests.unit.node_agent.placement import Placement

from cotenant.agent.v1 import sample_service_pb2
from cotenant.node_agent.enforcement import cgroup_mounts
from cotenant.node_agent.probes.pressure import parse_pressure, pressure_within, read_pressure
from cotenant.node_agent.supervisor.cgroups import Group
from cotenant.v1 import contention_service_pb2, job_pb2

STEPS = "import time; from cotenant import progress\nwhile True: time.sleep(0.05); progress.step(phase='validation')"


def test_pressure_is_parsed_and_odd_content_is_ignored(tmp_path: Path) -> None:
    told = parse_pressure("some avg10=2.50 avg60=1 total=5\nfull avg10=0.75 avg60=x\nfull avg10=x\nnonsense")
    assert (told.some_avg10, told.full_avg10) == (2.5, 0.75)
    assert read_pressure("cpu", tmp_path) == contention_service_pb2.Pressure()


def test_only_version_2_reports_pressure_within_a_group(tmp_path: Path) -> None:
    (tmp_path / "cpu.pressure").write_text("some avg10=12.50 avg60=0 avg300=0 total=9\n")
    told = pressure_within(Group(2, {"unified": str(tmp_path)}, ()), "cpu")
    assert told is not None
    assert told.some_avg10 == 12.5
    assert pressure_within(Group(2, {"unified": str(tmp_path)}, ()), "memory") is None
    assert pressure_within(Group(1, {"cpu": str(tmp_path)}, ()), "cpu") is None


@pytest.mark.calm
@pytest.mark.parametrize("groups", [pytest.param(True, marks=pytest.mark.root), False], ids=["groups", "no groups"])
async def test_each_attempt_is_sampled(
    placement: Placement, agent: RunningAgent, groups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if groups:
        need_groups("memory")
    else:
        monkeypatch.setattr(cgroup_mounts, "open_node_group", lambda _: None)
    await agent.stop()
    await agent.start(contention_endpoint=placement.endpoint, sample_interval_seconds=0.3)
    await placement.connected(2)
    spin = "x = bytearray(30 << 20)\nwhile True: pass"
    cpu_job = job_pb2.JobSpec(kind=job_pb2.JOB_KIND_CPU)
    placement.assign(
        assignment("spinner", [*PYTHON, spin], tasks=[task(cpus=CPUS[-1:])], spec=cpu_job),
        shell("sleeper", "exec sleep 60", spec=job_pb2.JobSpec(kind=job_pb2.JOB_KIND_TRAINING)),
    )

    def latest() -> dict[str, contention_service_pb2.AttemptSample]:
        return {one.job_id: one for one in placement.samples[-1].attempts} if placement.samples else {}

    await placement.until(
        lambda: (
            latest().keys() == {"spinner", "sleeper"}
            and latest()["sleeper"].cores_used < 0.1  # its shell took some time to begin
            and latest()["spinner"].cores_used > 0.3
            and latest()["spinner"].memory_bytes > 30 << 20
        )  # the kernel may tell this some seconds late
    )
    sample, node = latest(), placement.samples[-1]
    assert sample["spinner"].cores_used < 1.5
    assert (sample["spinner"].cpu_job, sample["sleeper"].cpu_job) == (True, False)
    assert (node.node_id, node.memory_bandwidth_bytes_per_second) == (NODE, -1)
    assert node.window.ToMilliseconds() >= 250
    assert node.memory_used_bytes > 0
    placement.send(stops=[stop_order(job_id, grace_seconds=0) for job_id in sample])
    for job_id in sample:
        await placement.ended(job_id)


async def test_a_directive_for_an_unknown_attempt_is_logged(placement: Placement, agent: RunningAgent) -> None:
    placement.directives.append(sample_service_pb2.Directive(id="d1", job_id="x", number=1, share=0.5))
    await agent.stop()
    with capture_logs() as logs:
        await agent.start(contention_endpoint=placement.endpoint, sample_interval_seconds=0.05)
        await placement.until(lambda: len(placement.samples) >= 3)
    assert [entry["why"] for entry in logs if entry["event"] == "directive_obsolete"] == ["unknown on this node"]


@pytest.mark.calm
async def test_samples_include_cores_and_the_expected_rate(placement: Placement, agent: RunningAgent) -> None:
    await agent.stop()
    await agent.start(contention_endpoint=placement.endpoint, sample_interval_seconds=0.1, memory_bandwidth_peak=25e9)
    await placement.connected(2)
    spec = job_pb2.JobSpec(kind=job_pb2.JOB_KIND_TRAINING, best_effort=True)
    told = assignment("job", [sys.executable, "-c", STEPS], tasks=[task(cpus=CPUS[:1])], spec=spec)
    told.expected_rate_per_second = 20.0
    placement.assign(told)
    await placement.running("job")
    await placement.until(
        lambda: placement.samples and any(5 < one.rate_per_second < 21 for one in placement.samples[-1].attempts)
    )  # on a busy machine the first steps may arrive late, and together
    node, sample = placement.samples[-1], placement.samples[-1].attempts[0]
    assert (sample.cores, sample.tasks, sample.phase, sample.expected_rate_per_second) == (1, 1, "validation", 20.0)
    assert (sample.cpu_job, sample.best_effort) == (False, True)
    assert not next(one for node in placement.samples for one in node.attempts).steady  # it had just begun
    assert (node.memory_bandwidth_peak_bytes_per_second, node.bandwidth_enforced) == (25e9, False)
    await placement.until(lambda: placement.samples[-1].attempts[0].steady)
    placement.send(resizes=[resize_order("job", task(cpus=CPUS[-1:]), epoch=11)])
    await placement.answered(11)
    await placement.until(lambda: not placement.samples[-1].attempts[0].steady)
    await placement.until(lambda: placement.samples[-1].attempts[0].steady)
    assert placement.samples[-1].attempts[0].expected_rate_per_second == 0  # the order tells none


async def test_samples_resume_after_contention_reconnects(placement: Placement, agent: RunningAgent) -> None:
    await agent.stop()
    await agent.start(contention_endpoint=placement.endpoint, sample_interval_seconds=0.05)
    await placement.until(lambda: placement.samples)
    await placement.stop()
    placement.samples.clear()
    await placement.start()
    await placement.until(lambda: placement.samples)
