"""Checks whether an assignment can run on this node: pure, each with one clear reason.

Placement is not trusted more than necessary: users' texts pass through it unchanged.
"""

from __future__ import annotations

import itertools
import re
import signal
from collections import Counter
from collections.abc import Collection, Iterable, Iterator

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.core.model.resources import AMOUNT_KINDS, amounts_of
from cotenant.v1 import resources_pb2

JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
VARIABLE_NAME = re.compile(r"[^=\0]+")
WHOLE_GPU_MILLI = 1000
MEBIBYTE = 1 << 20
ARGUMENT_BYTES_MAX = 128 * 1024  # the kernel's limit for one string
WARNING_SIGNALS = frozenset(signal.Signals.__members__) - {"SIGKILL", "SIGSTOP", "SIGCHLD"}


def job_id_is_safe(job_id: str) -> bool:
    """Return whether a job id can name files and control groups.

    >>> job_id_is_safe("job-1"), job_id_is_safe("../etc"), job_id_is_safe("")
    (True, False, False)
    """
    return JOB_ID.fullmatch(job_id) is not None


def command_of(assignment: agent_pb2.Assignment, task: resources_pb2.TaskAllocation) -> list[str]:
    """Return a replica's program and arguments: its role's, or the job's."""
    for role in assignment.spec.roles:
        if role.name == task.role and role.command:
            return list(role.command)
    return list(assignment.spec.command)


def warning_signal_of(assignment: agent_pb2.Assignment) -> signal.Signals:
    """Return the signal that warns the job before it is killed."""
    return signal.Signals[assignment.spec.warning_signal or "SIGTERM"]


def first_fault(assignment: agent_pb2.Assignment, inventory: resources_pb2.Inventory, node_id: str) -> str | None:
    """Return the first reason, in a fixed order, why the assignment is invalid on this node; None if it is valid."""
    return next(_faults(assignment, inventory, node_id), None)


def _faults(assignment: agent_pb2.Assignment, inventory: resources_pb2.Inventory, node_id: str) -> Iterator[str]:
    return itertools.chain(_spec_faults(assignment), _allocation_faults(assignment, inventory, node_id))


def spec_fault(assignment: agent_pb2.Assignment) -> str | None:
    """Return the first reason why no node can run the job; None if there is none."""
    return next(_spec_faults(assignment), None)


def _spec_faults(assignment: agent_pb2.Assignment) -> Iterator[str]:
    spec = assignment.spec
    if not job_id_is_safe(assignment.job_id):
        yield f"invalid job id {assignment.job_id[:64]!r}: only letters, digits, '.', '_' and '-' are allowed"
    if assignment.number < 1:
        yield f"invalid attempt number {assignment.number}: numbers begin at 1"
    if spec.warning_signal and spec.warning_signal not in WARNING_SIGNALS:
        yield f"invalid warning signal: {spec.warning_signal!r}"
    if spec.working_directory and not spec.working_directory.startswith("/"):
        yield f"the working directory {spec.working_directory!r} is not absolute"
    if "\0" in spec.working_directory:
        yield "the working directory contains a NUL character"
    yield from _variable_faults(spec.environment.items())
    if spec.HasField("stop_after_disconnected") and spec.stop_after_disconnected.ToMicroseconds() <= 0:
        yield "stop_after_disconnected must be above 0"
    if spec.HasField("time_limit") and spec.time_limit.ToMicroseconds() <= 0:
        yield "time_limit must be above 0"
    for task in assignment.allocation.tasks:
        yield from _command_faults(assignment, task)


def _allocation_faults(
    assignment: agent_pb2.Assignment, inventory: resources_pb2.Inventory, node_id: str
) -> Iterator[str]:
    allocation = assignment.allocation
    if allocation.node_id != node_id:
        yield f"the allocation is for node {allocation.node_id!r}; this is node {node_id!r}"
    if not allocation.tasks:
        yield "the allocation has no task on this node"
    ranks = Counter(task.rank for task in allocation.tasks)
    yield from (f"rank {rank} occurs {count} times" for rank, count in sorted(ranks.items()) if count > 1)
    yield from _gang_faults(assignment)
    for task in allocation.tasks:
        yield from _task_faults(assignment, task)
    yield from _unknown_resources(allocation, inventory)
    if within := resource_conflict(allocation, (), inventory):
        yield within


def _variable_faults(variables: Iterable[tuple[str, str]]) -> Iterator[str]:
    for name, value in sorted(variables):
        if not VARIABLE_NAME.fullmatch(name):
            yield f"invalid name of an environment variable: {name[:64]!r}"
        if "\0" in value:
            yield f"the environment variable {name} contains a NUL character"
        if len(value.encode()) >= ARGUMENT_BYTES_MAX:
            yield f"the environment variable {name} is longer than {ARGUMENT_BYTES_MAX} bytes"


def _gang_faults(assignment: agent_pb2.Assignment) -> Iterator[str]:
    roles, addresses = len(assignment.replica_roles), len(assignment.replica_addresses)
    if not (roles == addresses == 0 or roles == addresses == assignment.world_size):
        yield f"{roles} replica roles and {addresses} addresses are given for a gang of {assignment.world_size}"


def _task_faults(assignment: agent_pb2.Assignment, task: resources_pb2.TaskAllocation) -> Iterator[str]:
    if not 0 <= task.rank < assignment.world_size:
        yield f"rank {task.rank} is not within a gang of {assignment.world_size}"
    if task.core_ids and not task.cpu_ids:
        yield f"rank {task.rank} was given cores without their CPUs"
    for kind in AMOUNT_KINDS:
        if getattr(task, kind.name) < 0:
            yield f"rank {task.rank} has a negative {kind.noun} limit"


def _command_faults(assignment: agent_pb2.Assignment, task: resources_pb2.TaskAllocation) -> Iterator[str]:
    command = command_of(assignment, task)
    if not command and assignment.spec.container.image:
        return  # the image's is used
    if not command or not command[0]:
        yield f"role {task.role!r} has no command"
    if any("\0" in word for word in command):
        yield f"the command of role {task.role!r} contains a NUL character"
    if any(len(word.encode()) >= ARGUMENT_BYTES_MAX for word in command):
        yield f"the command of role {task.role!r} has an argument longer than {ARGUMENT_BYTES_MAX} bytes"


def _unknown_resources(allocation: resources_pb2.NodeAllocation, inventory: resources_pb2.Inventory) -> Iterator[str]:
    cpus = {cpu for core in inventory.cores for cpu in core.cpus}
    gpus = {gpu.uuid: gpu for gpu in inventory.gpus}
    for task in allocation.tasks:
        if unknown := sorted(set(task.cpu_ids) - cpus):
            yield f"rank {task.rank} was given CPUs that this node does not have: {unknown}"
        if unknown := sorted(set(task.core_ids) - {core.id for core in inventory.cores}):
            yield f"rank {task.rank} was given cores that this node does not have: {unknown}"
        own = {cpu for core in inventory.cores if core.id in task.core_ids for cpu in core.cpus}
        if foreign := sorted(set(task.cpu_ids) - own):
            yield f"rank {task.rank} was given CPUs that do not belong to its cores: {foreign}"
        for share in task.gpus:
            if not 0 <= share.milli <= WHOLE_GPU_MILLI:
                yield f"rank {task.rank} was given {share.milli} thousandths of GPU {share.uuid}"
            elif share.uuid not in gpus:
                yield f"rank {task.rank} was given GPU {share.uuid}, which this node does not have"
            elif gpus[share.uuid].unhealthy_reason:
                yield f"GPU {share.uuid} is not healthy: {gpus[share.uuid].unhealthy_reason}"


def cause_of(fault: str) -> str:
    """Return the launch cause for a fault, as the value of a `LaunchCause`.

    >>> cause_of("CPUs [4] are off line"), cause_of("GPU GPU-1 is not healthy: lost"), cause_of("of node 'b'")
    ('cpus', 'device', 'order')
    """
    if fault.startswith("CPUs"):
        return "cpus"
    return "device" if fault.startswith("GPU") else "order"


def resource_conflict(
    allocation: resources_pb2.NodeAllocation,
    live: Iterable[tuple[str, resources_pb2.NodeAllocation]],
    inventory: resources_pb2.Inventory,
) -> str | None:
    """Return the first resource of an allocation that is already held, by a live attempt or twice by itself.

    A core belongs to one task, with all its CPUs. A shareable GPU may be held by several attempts up to its capacity,
    any other GPU by one; amounts by all together up to the node's total. An attempt that occurs twice in `live`, while
    its cores change, holds the cores of both and everything else once.
    """
    held = [(f"attempt {name}", other) for name, other in live]
    return next(
        itertools.chain(
            _core_overlaps(allocation, held),
            _gpu_overlaps(allocation, held, {gpu.uuid for gpu in inventory.gpus if gpu.shareable}),
            _amount_overlaps(allocation, held, inventory),
        ),
        None,
    )


OWN = "another task of the same attempt"
HeldAllocations = list[tuple[str, resources_pb2.NodeAllocation]]


def _core_overlaps(allocation: resources_pb2.NodeAllocation, held: HeldAllocations) -> Iterator[str]:
    cores: dict[int, str] = {}
    cpus: dict[int, str] = {}
    for holder, other in held:
        for task in other.tasks:
            cores.update(dict.fromkeys(task.core_ids, holder))
            cpus.update(dict.fromkeys(task.cpu_ids, holder))
    for task in allocation.tasks:
        yield from (f"CPU {cpu} is held by {cpus[cpu]}" for cpu in task.cpu_ids if cpu in cpus)
        yield from (f"core {core} is held by {cores[core]}" for core in task.core_ids if core in cores)
        cores.update(dict.fromkeys(task.core_ids, OWN))
        cpus.update(dict.fromkeys(task.cpu_ids, OWN))


def _gpu_overlaps(
    allocation: resources_pb2.NodeAllocation, held: HeldAllocations, shareable: Collection[str]
) -> Iterator[str]:
    milli: dict[str, dict[str, int]] = {}  # per GPU, by holder
    for holder, other in held:
        for uuid, wanted in _gpu_milli(other.tasks).items():
            holders = milli.setdefault(uuid, {})
            holders[holder] = max(holders.get(holder, 0), wanted)
    for task in allocation.tasks:
        for uuid, wanted in _gpu_milli([task]).items():
            holders = milli.setdefault(uuid, {})
            left = WHOLE_GPU_MILLI - sum(holders.values())
            if holders and uuid not in shareable:
                yield f"GPU {uuid} is held by {list(holders)[-1]}"
            elif wanted > left:
                words = f"is held by {list(holders)[-1]}" if holders else "is requested more than once"
                yield f"GPU {uuid} {words}: {max(0, left)} thousandths are free, {wanted} are needed"
            holders[OWN] = holders.get(OWN, 0) + wanted


def _gpu_milli(tasks: Iterable[resources_pb2.TaskAllocation]) -> Counter[str]:
    milli: Counter[str] = Counter()
    for task in tasks:
        for share in task.gpus:
            milli[share.uuid] += share.milli or WHOLE_GPU_MILLI
    return milli


def _amount_overlaps(
    allocation: resources_pb2.NodeAllocation, held: HeldAllocations, inventory: resources_pb2.Inventory
) -> Iterator[str]:
    for kind in AMOUNT_KINDS:
        by_holder: dict[str, int] = {}
        for holder, other in held:
            by_holder[holder] = max(by_holder.get(holder, 0), _amount(other, kind.name))
        node_bytes: int = getattr(inventory, kind.name)
        wanted, left = _amount(allocation, kind.name), node_bytes - sum(by_holder.values())
        if wanted > 0 and (node_bytes > 0 or kind.optional) and wanted > left:
            free, whole = (f"{round(count / MEBIBYTE)} MiB" for count in (max(0, left), node_bytes))
            requested = f"{round(wanted / MEBIBYTE)} MiB of {kind.noun} are requested"
            others = f"{len(by_holder)} live attempts hold the rest" if by_holder else "that is all it has"
            yield f"{requested}, {free} of the node's {whole} are free: {others}"


def _amount(allocation: resources_pb2.NodeAllocation, name: str) -> int:
    return sum(getattr(task, name) for task in allocation.tasks)


def offline(allocation: resources_pb2.NodeAllocation, online: Collection[int]) -> str | None:
    """Return which of an allocation's CPUs are offline; None if all are online.

    `online` is empty if the kernel does not tell.
    """
    gone = {cpu for task in allocation.tasks for cpu in task.cpu_ids} - set(online)
    return f"CPUs {sorted(gone)} are off line" if online and gone else None  # `core.failures` matches this text


def change_refusal(old: agent_pb2.Assignment, new: agent_pb2.Assignment) -> str | None:
    """Return why a running attempt cannot adopt a newer assignment; None if only its cores differ."""

    def fixed(assignment: agent_pb2.Assignment) -> list[tuple[int, list[str], dict[str, int]]]:
        return [
            (task.rank, [share.uuid for share in task.gpus], amounts_of(task))
            for task in sorted(assignment.allocation.tasks, key=lambda task: task.rank)
        ]

    if fixed(old) != fixed(new):
        return "only the cores of a running attempt can be changed"
    held = {task.rank for task in old.allocation.tasks if task.cpu_ids}
    bare = [task.rank for task in new.allocation.tasks if bool(task.cpu_ids) != (task.rank in held)]
    return f"rank {bare[0]} would lose all of its CPUs or gain its first ones" if bare else None
