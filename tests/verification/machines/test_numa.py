"""Memory of jobs on their NUMA node, and on another after a resize."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.node_agent.conditions import until, written_number
from tests.unit.node_agent.conftest import RunningAgent
from tests.unit.node_agent.jobs import NODE, PYTHON, assignment, resize_order, task
from tests.unit.node_agent.placement import Placement
from tests.verification.machines.kernel import (
    MEBIBYTE,
    PAGE_BYTES,
    anonymous_pages,
    cpus_of_nodes,
    group_of,
    need_nodes,
    read,
)

from cotenant.node_agent.supervisor.cgroups import parse_cpu_list
from cotenant.v1 import resources_pb2

pytestmark = pytest.mark.root
HELD_BYTES = 48 * MEBIBYTE
# Holds memory of its own, each page touched, and tells its pid then.
HOLDING = f"""
import mmap, os, sys
held = mmap.mmap(-1, {HELD_BYTES}, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for place in range(0, len(held), {MEBIBYTE}): held[place:place + {MEBIBYTE}] = b'1' * {MEBIBYTE}
print(os.getpid(), file=open(sys.argv[1], 'w'), flush=True)
os.read(os.pipe()[0], 1)
"""


@pytest.fixture(autouse=True)
def two_nodes() -> None:
    need_nodes(2)


def on_node(node: int, *, memory_nodes: tuple[int, ...] = ()) -> resources_pb2.TaskAllocation:
    allocation = task(cpus=cpus_of_nodes()[node][:2])
    allocation.memory_nodes.extend(memory_nodes or (node,))
    return allocation


async def holder(placement: Placement, told: Path, node: int) -> int:
    placement.assign(assignment("job", [*PYTHON, HOLDING, str(told)], tasks=[on_node(node)], grace_seconds=0))
    return await until(lambda: written_number(told))


@pytest.mark.parametrize("node", [0, 1])
async def test_pages_are_on_the_jobs_node(placement: Placement, agent: RunningAgent, tmp_path: Path, node: int) -> None:
    pid = await holder(placement, tmp_path / "pid", node)
    pages = anonymous_pages(pid, HELD_BYTES // PAGE_BYTES)
    assert set(pages) == {node}
    assert pages[node] >= HELD_BYTES // PAGE_BYTES
    assert read(group_of(pid) / "cpuset.mems.effective") == str(node)


async def test_pages_move_with_the_job_to_another_node_and_back(
    placement: Placement, agent: RunningAgent, tmp_path: Path
) -> None:
    pid = await holder(placement, tmp_path / "pid", 1)
    for epoch, node in ((11, 0), (12, 1)):
        placement.send(resizes=[resize_order("job", on_node(node), epoch=epoch)])
        assert await placement.answered(epoch) == ""
        group = group_of(pid)
        assert parse_cpu_list(read(group / "cpuset.cpus.effective")) == cpus_of_nodes()[node][:2]
        assert read(group / "cpuset.mems.effective") == str(node)
        pages = anonymous_pages(pid, HELD_BYTES // PAGE_BYTES)
        assert set(pages) == {node}, pages


async def test_memory_may_be_on_both_nodes(placement: Placement, agent: RunningAgent, tmp_path: Path) -> None:
    pid = await holder(placement, tmp_path / "pid", 1)
    placement.send(resizes=[resize_order("job", on_node(1, memory_nodes=(0, 1)), epoch=11)])
    assert await placement.answered(11) == ""
    assert parse_cpu_list(read(group_of(pid) / "cpuset.mems.effective")) == [0, 1]
    assert set(anonymous_pages(pid, HELD_BYTES // PAGE_BYTES)) == {1}  # what may stay, stays


async def test_a_missing_memory_node_is_refused_and_nothing_moves(
    placement: Placement, agent: RunningAgent, tmp_path: Path
) -> None:
    pid = await holder(placement, tmp_path / "pid", 1)
    placement.send(resizes=[resize_order("job", on_node(0, memory_nodes=(9,)), epoch=11)])
    assert await placement.answered(11) != ""
    group = group_of(pid)
    assert parse_cpu_list(read(group / "cpuset.cpus.effective")) == cpus_of_nodes()[1][:2]
    assert read(group / "cpuset.mems.effective") == "1"
    assert set(anonymous_pages(pid, HELD_BYTES // PAGE_BYTES)) == {1}


async def test_the_agent_reports_each_cores_node_and_socket(placement: Placement, agent: RunningAgent) -> None:
    await placement.until(lambda: placement.hellos)
    inventory = placement.hellos[-1].inventory
    told: dict[int, list[int]] = {}
    for core in inventory.cores:
        told.setdefault(core.numa_node, []).extend(core.cpus)
    assert {node: sorted(cpus) for node, cpus in told.items()} == cpus_of_nodes()
    assert {core.socket for core in inventory.cores} == {0, 1}
    assert inventory.not_enforced == []
    assert placement.hellos[-1].node_id == NODE
