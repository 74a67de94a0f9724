from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.node_agent.jobs import NODE, assignment, task

from cotenant.node_agent.checks import cannot_become, first_fault, job_id_is_safe, overlap
from cotenant.v1 import node_service_pb2, resources_pb2

INVENTORY = resources_pb2.Inventory(
    cores=[resources_pb2.Core(id=core, cpus=[core, core + 4]) for core in range(4)],
    gpus=[resources_pb2.Gpu(uuid="GPU-a"), resources_pb2.Gpu(uuid="GPU-ill", unhealthy_reason="XID 79")],
)


def good() -> node_service_pb2.Assignment:
    held = task(gpus=["GPU-a"])
    held.core_ids.extend([0, 1])
    held.cpu_ids.extend([0, 4, 1, 5])
    return assignment("job-1", ["true"], tasks=[held])


def test_a_sound_assignment_has_no_fault() -> None:
    assert first_fault(good(), INVENTORY, NODE) is None


Change = Callable[[node_service_pb2.Assignment], object]


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
        (lambda job: job.allocation.tasks.append(task(0)), "rank 0 is given 2 times"),
        (lambda job: setattr(job.allocation.tasks[0], "memory_bytes", -1), "negative"),
        (lambda job: job.allocation.tasks[0].cpu_ids.append(99), r"CPUs that this node does not have: \[99\]"),
        (lambda job: job.allocation.tasks[0].core_ids.append(99), r"cores that this node does not have: \[99\]"),
        (lambda job: job.allocation.tasks[0].ClearField("cpu_ids"), "without their CPUs"),
        (lambda job: job.allocation.tasks[0].gpus.add(uuid="GPU-x"), "GPU-x, which this node does not have"),
        (lambda job: job.allocation.tasks[0].gpus.add(uuid="GPU-ill"), "XID 79"),
        (lambda job: job.allocation.tasks[0].gpus.add(uuid="GPU-a", milli=1), "GPU-a is held by another task"),
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


def test_shares_of_a_gpu_add_up_over_all_its_holders() -> None:
    live = [("a/1", share("GPU-a", 400)), ("b/1", share("GPU-a", 400))]
    assert overlap(share("GPU-a", 200), live) is None
    assert overlap(share("GPU-a", 201), live) == "GPU GPU-a is held by attempt b/1"


def test_a_share_without_a_size_is_the_whole() -> None:
    assert overlap(share("GPU-a", 1), [("a/1", share("GPU-a", 0))]) is not None


def test_only_cores_of_a_running_attempt_may_change() -> None:
    moved, grown = good(), good()
    moved.allocation.tasks[0].cpu_ids[:] = [2, 6]
    grown.allocation.tasks[0].memory_bytes = 1
    assert cannot_become(good(), moved) is None
    assert cannot_become(good(), grown) is not None
