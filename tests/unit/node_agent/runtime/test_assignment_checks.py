from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.node_agent.jobs import NODE, assignment, task

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.node_agent.runtime.assignment_checks import (
    change_refusal,
    first_fault,
    job_id_is_safe,
    offline,
    resource_conflict,
)
from cotenant.v1 import resources_pb2

INVENTORY = resources_pb2.Inventory(
    cores=[resources_pb2.Core(id=core, cpus=[core, core + 4]) for core in range(4)],
    gpus=[resources_pb2.Gpu(uuid="GPU-a"), resources_pb2.Gpu(uuid="GPU-ill", unhealthy_reason="XID 79")],
)


def good() -> agent_pb2.Assignment:
    held = task(gpus=["GPU-a"])
    held.core_ids.extend([0, 1])
    held.cpu_ids.extend([0, 4, 1, 5])
    return assignment("job-1", ["true"], tasks=[held])


def test_a_valid_assignment_has_no_fault() -> None:
    assert first_fault(good(), INVENTORY, NODE) is None


Change = Callable[[agent_pb2.Assignment], object]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda job: setattr(job, "job_id", "../x"), "job id"),
        (lambda job: setattr(job, "job_id", "a/b"), "job id"),
        (lambda job: setattr(job, "job_id", ".hidden"), "job id"),
        (lambda job: setattr(job, "job_id", "x" * 300), "job id"),
        (lambda job: setattr(job, "number", 0), "begin at 1"),
        (lambda job: setattr(job.allocation, "node_id", "elsewhere"), "elsewhere"),
        (lambda job: job.allocation.tasks.pop(), "no task"),
        (lambda job: setattr(job.spec, "warning_signal", "SIGKILL"), "SIGKILL"),
        (lambda job: setattr(job.spec, "warning_signal", "SIGNOTHING"), "SIGNOTHING"),
        (lambda job: setattr(job.spec, "working_directory", "here"), "absolute"),
        (lambda job: setattr(job.spec, "working_directory", "/a\0b"), "NUL"),
        (lambda job: job.spec.environment.update({"A=B": "x"}), "A=B"),
        (lambda job: job.spec.environment.update({"": "x"}), "name"),
        (lambda job: job.spec.environment.update({"A": "x\0y"}), "NUL"),
        (lambda job: job.spec.environment.update({"A": "x" * 200_000}), "longer"),
        (lambda job: job.spec.command.append("x\0"), "NUL"),
        (lambda job: job.spec.command.append("x" * 200_000), "longer"),
        (lambda job: job.spec.ClearField("command"), "no command"),
        (lambda job: setattr(job.allocation.tasks[0], "rank", 5), "not within a gang of 1"),
        (lambda job: job.allocation.tasks.append(task(0)), "rank 0 occurs 2 times"),
        (lambda job: setattr(job.allocation.tasks[0], "memory_bytes", -1), "negative"),
        (lambda job: job.allocation.tasks[0].cpu_ids.append(99), r"CPUs that this node does not have: \[99\]"),
        (lambda job: job.allocation.tasks[0].core_ids.append(99), r"cores that this node does not have: \[99\]"),
        (lambda job: job.allocation.tasks[0].ClearField("cpu_ids"), "without their CPUs"),
        (lambda job: job.allocation.tasks[0].cpu_ids.append(2), r"do not belong to its cores: \[2\]"),
        (lambda job: setattr(job.allocation.tasks[0].gpus[0], "milli", 1001), "1001 thousandths"),
        (lambda job: job.allocation.tasks[0].gpus.add(uuid="GPU-x"), "GPU-x, which this node does not have"),
        (lambda job: job.allocation.tasks[0].gpus.add(uuid="GPU-ill"), "XID 79"),
        (
            lambda job: job.allocation.tasks[0].gpus.add(uuid="GPU-a", milli=1),
            "GPU-a is requested more than once: 1000 thousandths",
        ),
    ],
)
def test_each_fault_is_named(change: Change, words: str) -> None:
    job = good()
    change(job)
    fault = first_fault(job, INVENTORY, NODE)
    assert fault is not None
    assert re.search(words, fault), fault


@given(st.text(max_size=200))
def test_a_safe_id_names_one_directory_below_another(job_id: str) -> None:
    if job_id_is_safe(job_id):
        assert "/" not in job_id
        assert "\0" not in job_id
        assert not job_id.startswith(".")
        assert job_id.isascii()


def share(uuid: str, milli: int) -> resources_pb2.NodeAllocation:
    part = resources_pb2.GpuShare(uuid=uuid, milli=milli)
    return resources_pb2.NodeAllocation(tasks=[resources_pb2.TaskAllocation(gpus=[part])])


NODE_MEMORY_BYTES = 1 << 30
SHARED = resources_pb2.Inventory(
    gpus=[resources_pb2.Gpu(uuid="GPU-a", shareable=True), resources_pb2.Gpu(uuid="GPU-b")],
    memory_bytes=NODE_MEMORY_BYTES,
)


def test_shares_of_a_gpu_add_up_over_all_its_holders() -> None:
    live = [("a/1", share("GPU-a", 400)), ("b/1", share("GPU-a", 400))]
    assert resource_conflict(share("GPU-a", 200), live, SHARED) is None
    fault = resource_conflict(share("GPU-a", 201), live, SHARED)
    assert fault == "GPU GPU-a is held by attempt b/1: 200 thousandths are free, 201 are needed"


def test_a_gpu_that_is_not_shared_has_one_holder() -> None:
    fault = resource_conflict(share("GPU-b", 200), [("a/1", share("GPU-b", 100))], SHARED)
    assert fault == "GPU GPU-b is held by attempt a/1"
    assert resource_conflict(share("GPU-b", 200), [("a/1", share("GPU-a", 100))], SHARED) is None


def test_a_share_without_a_size_is_the_whole() -> None:
    assert resource_conflict(share("GPU-a", 1), [("a/1", share("GPU-a", 0))], SHARED) is not None


def test_an_attempt_whose_cores_change_holds_its_gpus_and_memory_once() -> None:
    changing = share("GPU-a", 500)
    changing.tasks[0].memory_bytes = NODE_MEMORY_BYTES // 2
    live = [("a/1", changing), ("a/1", changing)]
    other = share("GPU-a", 500)
    other.tasks[0].memory_bytes = NODE_MEMORY_BYTES // 2
    assert resource_conflict(other, live, SHARED) is None


def holding(*cores: int, cpus: tuple[int, ...] = (), memory_bytes: int = 0) -> resources_pb2.NodeAllocation:
    held = resources_pb2.TaskAllocation(core_ids=cores, cpu_ids=cpus, memory_bytes=memory_bytes)
    return resources_pb2.NodeAllocation(tasks=[held])


def test_a_core_is_held_with_all_its_siblings() -> None:
    live = [("a/1", holding(0, cpus=(0,)))]
    assert resource_conflict(holding(0, cpus=(4,)), live, SHARED) == "core 0 is held by attempt a/1"
    assert resource_conflict(holding(1, cpus=(0,)), live, SHARED) == "CPU 0 is held by attempt a/1"


def test_memory_is_not_overcommitted() -> None:
    most = NODE_MEMORY_BYTES
    live = [("a/1", holding(memory_bytes=most // 4)), ("b/1", holding(memory_bytes=most // 4))]
    assert resource_conflict(holding(memory_bytes=most // 2), live, SHARED) is None
    fault = resource_conflict(holding(memory_bytes=most // 2 + 1), live, SHARED)
    expected = "512 MiB of memory are requested, 512 MiB of the node's 1024 MiB are free: 2 live attempts hold the rest"
    assert fault == expected
    assert resource_conflict(holding(memory_bytes=most + 1), (), SHARED) is not None
    assert resource_conflict(holding(), [("a/1", holding(memory_bytes=most))], SHARED) is None


ALLOCATIONS = st.builds(
    lambda cores, gpus, memory: resources_pb2.NodeAllocation(
        tasks=[
            resources_pb2.TaskAllocation(
                core_ids=cores,
                cpu_ids=[cpu for core in cores for cpu in (core, core + 4)],
                gpus=[resources_pb2.GpuShare(uuid=uuid, milli=milli) for uuid, milli in gpus.items()],
                memory_bytes=memory << 28,
            )
        ]
    ),
    st.sets(st.integers(0, 3), max_size=2),
    st.dictionaries(st.sampled_from(["GPU-a", "GPU-b"]), st.sampled_from([0, 250, 500, 1000]), max_size=2),
    st.integers(0, 2),
)


@given(st.lists(ALLOCATIONS, max_size=8))
def test_accepted_allocations_never_overlap(asked: list[resources_pb2.NodeAllocation]) -> None:
    live: list[tuple[str, resources_pb2.NodeAllocation]] = []
    for number, allocation in enumerate(asked):
        if resource_conflict(allocation, live, SHARED) is None:
            live.append((f"job/{number}", allocation))
    tasks = [task for _, allocation in live for task in allocation.tasks]
    cpus = [cpu for task in tasks for cpu in task.cpu_ids]
    assert len(cpus) == len(set(cpus))
    for gpu in SHARED.gpus:
        parts = [part.milli or 1000 for task in tasks for part in task.gpus if part.uuid == gpu.uuid]
        assert sum(parts) <= 1000
        assert gpu.shareable or len(parts) <= 1
    assert sum(task.memory_bytes for task in tasks) <= NODE_MEMORY_BYTES


def test_offline_cpus_are_named() -> None:
    assert offline(holding(0, cpus=(0, 4)), [0, 1, 2, 3]) == "CPUs [4] are off line"
    assert offline(holding(0, cpus=(0, 4)), [0, 4]) is None
    assert offline(holding(0, cpus=(0, 4)), []) is None


def test_only_cores_of_a_running_attempt_may_change() -> None:
    moved, grown = good(), good()
    moved.allocation.tasks[0].cpu_ids[:] = [2, 6]
    grown.allocation.tasks[0].memory_bytes = 1
    assert change_refusal(good(), moved) is None
    assert change_refusal(good(), grown) is not None
