"""CPUs that go offline under running jobs and come back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.node_agent.conditions import alive, until, written_number
from tests.unit.node_agent.conftest import RunningAgent
from tests.unit.node_agent.jobs import resize_order, shell, task
from tests.unit.node_agent.placement import Placement
from tests.verification.machines.kernel import CPUS, group_of, read

from cotenant.node_agent.supervisor.cgroups import parse_cpu_list
from cotenant.v1 import job_pb2, resources_pb2

pytestmark = pytest.mark.root


def last_two() -> list[int]:
    return sorted(os.sched_getaffinity(0))[-2:]


def switch(cpu: int, *, on: bool) -> None:
    (CPUS / f"cpu{cpu}" / "online").write_text("1" if on else "0")


@pytest.fixture(autouse=True)
def all_on_line_again() -> Iterator[None]:
    if len(os.sched_getaffinity(0)) < 4:
        pytest.skip("needs four CPUs")
    yield
    for path in CPUS.glob("cpu[0-9]*/online"):
        path.write_text("1")


async def sleeper(placement: Placement, told: Path, cpus: list[int]) -> int:
    placement.assign(shell("job", f"echo $$ > {told}; exec sleep 6000", tasks=[task(cpus=cpus)], grace_seconds=0))
    pid = await until(lambda: written_number(told))
    await placement.running("job")
    return pid


async def test_a_job_that_loses_a_cpu_continues_on_the_other_and_gets_it_back(
    placement: Placement, agent: RunningAgent, tmp_path: Path
) -> None:
    one, other = last_two()
    pid = await sleeper(placement, tmp_path / "pid", [one, other])
    switch(other, on=False)
    await until(lambda: os.sched_getaffinity(pid) == {one})
    assert read(group_of(pid) / "cpuset.cpus.effective") == str(one)
    switch(other, on=True)
    await until(lambda: os.sched_getaffinity(pid) == {one, other})


async def test_an_agent_started_with_an_offline_cpu_offers_the_others_and_keeps_the_job(
    placement: Placement, agent: RunningAgent, tmp_path: Path
) -> None:
    one, other = last_two()
    pid = await sleeper(placement, tmp_path / "pid", [one, other])
    switch(other, on=False)
    await agent.stop()
    await agent.start()
    hello = await placement.connected(2)
    assert other not in [cpu for core in hello.inventory.cores for cpu in core.cpus]
    assert [report.state for report in hello.attempts] == [job_pb2.ATTEMPT_STATE_RUNNING]
    assert alive(pid)


async def test_an_offline_cpu_of_a_job_can_be_replaced(
    placement: Placement, agent: RunningAgent, tmp_path: Path
) -> None:
    one, other = last_two()
    pid = await sleeper(placement, tmp_path / "pid", [one, other])
    switch(other, on=False)
    await until(lambda: os.sched_getaffinity(pid) == {one})
    placement.send(resizes=[resize_order("job", task(cpus=[1, one]), epoch=11)])
    assert await placement.answered(11) == ""
    assert os.sched_getaffinity(pid) == {1, one}
    switch(other, on=True)
    await until(lambda: other in parse_cpu_list(read(CPUS / "online")))
    assert os.sched_getaffinity(pid) == {1, one}


async def test_an_offline_cpu_is_refused_and_the_job_keeps_its_cpus(
    placement: Placement, agent: RunningAgent, tmp_path: Path
) -> None:
    one, other = last_two()
    pid = await sleeper(placement, tmp_path / "pid", [one])
    switch(other, on=False)
    placement.send(resizes=[resize_order("job", task(cpus=[one, other]), epoch=11)])
    assert await placement.answered(11) != ""
    assert os.sched_getaffinity(pid) == {one}
    assert read(group_of(pid) / "cpuset.cpus") == str(one)


async def test_a_job_that_loses_all_its_cpus_runs_on_and_survives_the_agent(
    placement: Placement, agent: RunningAgent, tmp_path: Path
) -> None:
    one, other = last_two()
    pid = await sleeper(placement, tmp_path / "pid", [one, other])
    switch(one, on=False)
    switch(other, on=False)
    await agent.stop()
    await agent.start()
    hello = await placement.connected(2)
    assert [report.state for report in hello.attempts] == [job_pb2.ATTEMPT_STATE_RUNNING]
    assert alive(pid)
    for group in (group_of(pid), group_of(pid).parent):  # no core of anybody else's is its own for good
        assert parse_cpu_list(read(group / "cpuset.cpus")) == [one, other]
    switch(one, on=True)
    switch(other, on=True)
    await until(lambda: os.sched_getaffinity(pid) == {one, other})


async def test_a_running_agent_reports_a_cpu_that_goes_offline_and_restores_it(
    placement: Placement, agent: RunningAgent, tmp_path: Path
) -> None:
    await agent.stop()
    await agent.start(health_interval_seconds=0.5)
    await placement.connected(2)
    one, other = last_two()
    pid = await sleeper(placement, tmp_path / "pid", [one, other])
    switch(other, on=False)
    await placement.until(lambda: placement.inventories and other not in cpus_of(placement.inventories[-1]))
    placement.send(resizes=[resize_order("job", task(cpus=[one]), epoch=11)])
    assert await placement.answered(11) == ""
    assert read(group_of(pid) / "cpuset.cpus") == str(one)
    switch(other, on=True)
    await placement.until(lambda: other in cpus_of(placement.inventories[-1]))
    placement.send(resizes=[resize_order("job", task(cpus=[one, other]), epoch=12)])
    assert await placement.answered(12) == ""
    assert os.sched_getaffinity(pid) == {one, other}


def cpus_of(inventory: resources_pb2.Inventory) -> list[int]:
    return [cpu for core in inventory.cores for cpu in core.cpus]
