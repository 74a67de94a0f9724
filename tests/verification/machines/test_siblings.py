"""Cores with two threads: a job has both, and never one whose sibling belongs to another job."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from tests.unit.node_agent.conditions import until, written_number
from tests.unit.node_agent.conftest import RunningAgent
from tests.unit.node_agent.jobs import assignment, profile_order, task
from tests.unit.node_agent.placement import Placement
from tests.verification.machines.kernel import need_siblings, siblings_of

from cotenant.node_agent.probes.inventory import ProbeOptions, probe
from cotenant.v1 import resources_pb2

pytestmark = pytest.mark.root
STEPPING = """
import os, sys, time
from cotenant import progress
print(os.getpid(), file=open(sys.argv[1], 'w'), flush=True)
while True: time.sleep(0.05); progress.step()
"""


@pytest.fixture(autouse=True)
def siblings() -> None:
    need_siblings()


def inventory(*, split_siblings: bool = False) -> resources_pb2.Inventory:
    return probe(ProbeOptions("node", gpus="fake:2", split_siblings=split_siblings))


def test_a_cores_threads_are_the_kernels_siblings() -> None:
    cores = inventory().cores
    assert len(cores) * 2 == os.cpu_count()
    assert all(set(core.cpus) == siblings_of(core.cpus[0]) for core in cores)


def test_threads_are_cores_if_the_operator_wants_it() -> None:
    assert [list(core.cpus) for core in inventory(split_siblings=True).cores] == [
        [cpu] for cpu in range(os.cpu_count() or 0)
    ]


async def test_a_job_that_is_narrowed_keeps_the_threads_of_a_core_together(
    placement: Placement, agent: RunningAgent, tmp_path: Path
) -> None:
    two = inventory().cores[:2]
    allocation = task(cpus=[cpu for core in two for cpu in core.cpus], cores=[core.id for core in two])
    command = [sys.executable, "-c", STEPPING, str(tmp_path / "pid")]
    placement.assign(assignment("job", command, tasks=[allocation], grace_seconds=0))
    pid = await until(lambda: written_number(tmp_path / "pid"))
    assert os.sched_getaffinity(pid) == set(allocation.cpu_ids)
    await placement.until(lambda: placement.progress)
    placement.send(profiles=[profile_order("job", 1, budget_seconds=600)])
    narrowed = await until(lambda: len(found := os.sched_getaffinity(pid)) == 2 and found)
    assert narrowed
    assert narrowed == siblings_of(min(narrowed))
    await placement.profile_over()
    assert os.sched_getaffinity(pid) == set(allocation.cpu_ids)
