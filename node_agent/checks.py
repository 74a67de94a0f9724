"""Why an assignment cannot be run here: pure checks, each with one clear reason.

Placement is trusted no further than needed: what a user wrote comes through it unchanged.
"""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Iterable, Iterator

from cotenant.v1 import node_service_pb2, resources_pb2

JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
VARIABLE_NAME = re.compile(r"[^=\0]+")
WHOLE_GPU_MILLI = 1000
ARGUMENT_BYTES_MAX = 128 * 1024  # the kernel's own limit for one string
WARNING_SIGNALS = frozenset(signal.Signals.__members__) - {"SIGKILL", "SIGSTOP", "SIGCHLD"}


def job_id_is_safe(job_id: str) -> bool:
    """Whether an id can name files and control groups.

    >>> job_id_is_safe("job-1"), job_id_is_safe("../etc"), job_id_is_safe("")
    (True, False, False)
    """
    return JOB_ID.fullmatch(job_id) is not None


def command_of(assignment: node_service_pb2.Assignment, task: resources_pb2.TaskAllocation) -> list[str]:
    """Program and arguments of a replica: its role's, else the job's."""
    for role in assignment.spec.roles:
        if role.name == task.role and role.command:
            return list(role.command)
    return list(assignment.spec.command)


def warning_signal_of(assignment: node_service_pb2.Assignment) -> signal.Signals:
    """The signal that warns the job before it is killed."""
    return signal.Signals[assignment.spec.warning_signal or "SIGTERM"]


def first_fault(
    assignment: node_service_pb2.Assignment, inventory: resources_pb2.Inventory, node_id: str
) -> str | None:
    """The first reason, in a fixed order, why the assignment makes no sense here; None where it does."""
    return next(_faults(assignment, inventory, node_id), None)


def _faults(assignment: node_service_pb2.Assignment, inventory: resources_pb2.Inventory, node_id: str) -> Iterator[str]:
    spec, allocation = assignment.spec, assignment.allocation
    if not job_id_is_safe(assignment.job_id):
        yield f"the job id {assignment.job_id[:64]!r} is not made of letters, digits, '.', '_' and '-'"
    if assignment.number < 1:
        yield f"attempt numbers begin at 1, this is {assignment.number}"
    if allocation.node_id != node_id:
        yield f"the allocation is for node {allocation.node_id!r}, this is {node_id!r}"
    if not allocation.tasks:
        yield "the allocation has no task on this node"
    if spec.warning_signal and spec.warning_signal not in WARNING_SIGNALS:
        yield f"{spec.warning_signal!r} cannot be a warning signal"
    if spec.working_directory and not spec.working_directory.startswith("/"):
        yield f"the working directory {spec.working_directory!r} is not absolute"
    if "\0" in spec.working_directory:
        yield "the working directory has a NUL character"
    yield from _variable_faults(spec.environment.items())
    ranks = Counter(task.rank for task in allocation.tasks)
    yield from (f"rank {rank} is given {count} times" for rank, count in sorted(ranks.items()) if count > 1)
    for task in allocation.tasks:
        yield from _task_faults(assignment, task)
    yield from _unknown_resources(allocation, inventory)
    if within := overlap(allocation, ()):
        yield within


def _variable_faults(variables: Iterable[tuple[str, str]]) -> Iterator[str]:
    for name, value in sorted(variables):
        if not VARIABLE_NAME.fullmatch(name):
            yield f"{name[:64]!r} cannot be the name of an environment variable"
        if "\0" in value:
            yield f"the environment variable {name} has a NUL character"
        if len(value.encode()) >= ARGUMENT_BYTES_MAX:
            yield f"the environment variable {name} is longer than {ARGUMENT_BYTES_MAX} bytes"


def _task_faults(assignment: node_service_pb2.Assignment, task: resources_pb2.TaskAllocation) -> Iterator[str]:
    command = command_of(assignment, task)
    if not 0 <= task.rank < assignment.world_size:
        yield f"rank {task.rank} is not within a gang of {assignment.world_size}"
    if not command or not command[0]:
        yield f"role {task.role!r} has no command"
    if any("\0" in word for word in command):
        yield f"the command of role {task.role!r} has a NUL character"
    if any(len(word.encode()) >= ARGUMENT_BYTES_MAX for word in command):
        yield f"the command of role {task.role!r} has an argument longer than {ARGUMENT_BYTES_MAX} bytes"
    if task.core_ids and not task.cpu_ids:
        yield f"rank {task.rank} was given cores without their CPUs"
    if task.memory_bytes < 0:
        yield f"rank {task.rank} has a negative memory limit"


def _unknown_resources(allocation: resources_pb2.NodeAllocation, inventory: resources_pb2.Inventory) -> Iterator[str]:
    cpus = {cpu for core in inventory.cores for cpu in core.cpus}
    gpus = {gpu.uuid: gpu for gpu in inventory.gpus}
    for task in allocation.tasks:
        if strange := sorted(set(task.cpu_ids) - cpus):
            yield f"rank {task.rank} was given CPUs that this node does not have: {strange}"
        if strange := sorted(set(task.core_ids) - {core.id for core in inventory.cores}):
            yield f"rank {task.rank} was given cores that this node does not have: {strange}"
        for share in task.gpus:
            if share.uuid not in gpus:
                yield f"rank {task.rank} was given GPU {share.uuid}, which this node does not have"
            elif gpus[share.uuid].unhealthy_reason:
                yield f"GPU {share.uuid} is not healthy: {gpus[share.uuid].unhealthy_reason}"


def overlap(
    allocation: resources_pb2.NodeAllocation, live: Iterable[tuple[str, resources_pb2.NodeAllocation]]
) -> str | None:
    """The first core or GPU of an allocation that is held already: by a live attempt, or twice by itself.

    A GPU may be shared as long as no more than the whole of it is given away.
    """
    cpu_holder: dict[int, str] = {}
    gpu_holder: dict[str, str] = {}
    gpu_milli: Counter[str] = Counter()
    parts = [(f"attempt {name}", task) for name, other in live for task in other.tasks]
    own = [("another task of the same attempt", task) for task in allocation.tasks]
    for holder, task in [*parts, *own]:
        checked = holder.startswith("another")
        for cpu in task.cpu_ids:
            if checked and cpu in cpu_holder:
                return f"CPU {cpu} is held by {cpu_holder[cpu]}"
            cpu_holder[cpu] = holder
        for share in task.gpus:
            gpu_milli[share.uuid] += share.milli or WHOLE_GPU_MILLI
            if checked and gpu_milli[share.uuid] > WHOLE_GPU_MILLI:
                return f"GPU {share.uuid} is held by {gpu_holder.get(share.uuid, 'nobody, but asked for twice')}"
            gpu_holder[share.uuid] = holder
    return None


def cannot_become(old: node_service_pb2.Assignment, new: node_service_pb2.Assignment) -> str | None:
    """Why a running attempt cannot go on under a newer assignment: only its cores may change while it runs."""

    def fixed(assignment: node_service_pb2.Assignment) -> list[tuple[int, list[str], int]]:
        return [
            (task.rank, [share.uuid for share in task.gpus], task.memory_bytes)
            for task in sorted(assignment.allocation.tasks, key=lambda task: task.rank)
        ]

    if fixed(old) != fixed(new):
        return "only the cores of a running attempt can be changed"
    held = {task.rank for task in old.allocation.tasks if task.cpu_ids}
    bare = [task.rank for task in new.allocation.tasks if bool(task.cpu_ids) != (task.rank in held)]
    return f"rank {bare[0]} would have no CPUs of its own, or would get its first" if bare else None
