"""Encodes and decodes specs, allocations and inventories. Every spec from outside is decoded here.

The `…_from_wire` functions trust their message: they are for messages that this mesh has written. `accept_spec` trusts
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Generic, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from cotenant.codec import dependencies as dependencies_module
from cotenant.codec import errors, objectives
from cotenant.codec.request_limits import spec_violations
from cotenant.codec.roles import role_from_wire, role_to_wire
from cotenant.codec.spec_cache import SpecCache
from cotenant.core.model import validation
from cotenant.core.model.allocation import GpuShare, NodeAllocation, TaskAllocation
from cotenant.core.model.job import (
    GRACE_SECONDS_DEFAULT,
    QUEUE_DEFAULT,
    TENANT_DEFAULT,
    JobKind,
    JobSpec,
    Locality,
    Qos,
    SubmitDirectory,
)
from cotenant.core.model.lifecycle import AttemptState, LaunchCause, Phase, StopReason
from cotenant.core.model.loss_goal import NO_GOAL
from cotenant.core.model.node import Core, Gpu, HealthAction, HealthProblem, Inventory, NodeShape
from cotenant.internal.v1 import placement_service_pb2
from cotenant.v1 import job_pb2, resources_pb2

NANOS = 1_000_000_000
TIMESTAMP_SECONDS_MAX = 253_402_300_799  # the end of the year 9999, the maximum of google.protobuf.Timestamp
DURATION_SECONDS_MAX = 315_576_000_000  # 10,000 years, the maximum of google.protobuf.Duration

Word = TypeVar("Word", bound=StrEnum)


class EnumMap(Generic[Word]):
    """Maps between a protobuf enum and an enum of the model; the names are equal except for protobuf's prefix."""

    def __init__(self, words: type[Word], wire: Any, prefix: str) -> None:
        self._to = {word: wire.Value(f"{prefix}_{word.name}") for word in words}
        self._from = {number: word for word, number in self._to.items()}
        self.names: Mapping[int, str] = {number: word.value for number, word in self._from.items()}

    def to_wire(self, word: Word) -> Any:
        """Return the protobuf number of a value."""
        return self._to[word]

    def __contains__(self, number: object) -> bool:
        """Return whether a protobuf number has a value."""
        return number in self._from

    def from_wire(self, number: int) -> Word:
        """Return the value of a protobuf number.

        Raises:
            KeyError: the number is unspecified, or from a newer version.
        """
        return self._from[number]


PHASES = EnumMap(Phase, job_pb2.JobPhase, "JOB_PHASE")
ATTEMPT_STATES = EnumMap(AttemptState, job_pb2.AttemptState, "ATTEMPT_STATE")
LAUNCH_CAUSES = EnumMap(LaunchCause, job_pb2.LaunchCause, "LAUNCH_CAUSE")
STOP_REASONS = EnumMap(StopReason, job_pb2.StopReason, "STOP_REASON")
KINDS = EnumMap(JobKind, job_pb2.JobKind, "JOB_KIND")
LOCALITIES = EnumMap(Locality, job_pb2.Locality, "LOCALITY")
HEALTH_ACTIONS = EnumMap(HealthAction, resources_pb2.HealthAction, "HEALTH_ACTION")


def timestamp(seconds: float) -> Timestamp:
    """Encode Unix seconds, to the nanosecond."""
    return Timestamp(**_split(seconds))


def duration(seconds: float) -> Duration:
    """Encode non-negative seconds, to the nanosecond."""
    return Duration(**_split(seconds))


def _split(seconds: float) -> dict[str, int]:
    """Split seconds into whole seconds and nanoseconds, so that decoding returns exactly the same number."""
    whole = math.floor(seconds)
    nanos = round((seconds - whole) * NANOS)
    return {"seconds": whole + nanos // NANOS, "nanos": nanos % NANOS}


def seconds(message: Timestamp | Duration) -> float:
    """Decode a timestamp to Unix seconds, or a duration to seconds."""
    return (message.seconds * NANOS + message.nanos) / NANOS  # integers first, to round only once


def optional_seconds(message: Message, field: str) -> float | None:
    """Decode the duration in a field, None if it is not set."""
    return seconds(getattr(message, field)) if message.HasField(field) else None


def accept_spec(message: job_pb2.JobSpec, *, now: float) -> JobSpec:
    """Validate and decode a spec from outside, with all defaults.

    Raises:
        Problem: INVALID_ARGUMENT, naming every invalid field.
    """
    if beyond := spec_violations(message):
        raise errors.invalid(beyond)
    spec = spec_from_wire(message)
    strange = _wire_violations(message)
    named = {violation.field for violation in strange}
    wrong = [violation for violation in validation.check_spec(spec, now=now) if violation.field not in named]
    if strange or wrong:
        raise errors.invalid([*strange, *wrong])
    return spec


def _wire_violations(message: job_pb2.JobSpec) -> list[validation.Violation]:
    """Return violations that decoding would hide: unknown enum numbers, and times out of range."""
    found = dependencies_module.violations(message)
    for field, number, known in (
        ("kind", message.kind, KINDS.names),
        ("locality", message.locality, LOCALITIES.names),
    ):
        if number and number not in known:
            found.append(validation.Violation(f"spec.{field}", f"{number} is unknown; the values are {_known(known)}"))
    for field, time, seconds_max in (
        ("deadline", message.deadline, TIMESTAMP_SECONDS_MAX),
        ("grace", message.grace, DURATION_SECONDS_MAX),
        ("expected_duration", message.expected_duration, DURATION_SECONDS_MAX),
        ("stop_after_disconnected", message.stop_after_disconnected, DURATION_SECONDS_MAX),
        ("pre_run", message.pre_run, DURATION_SECONDS_MAX),
    ):
        if not (0 <= time.seconds <= seconds_max and 0 <= time.nanos < NANOS):
            wrong = f"{time.seconds} s and {time.nanos} ns are out of range"
            found.append(validation.Violation(f"spec.{field}", wrong))
    return found


def _known(names: Mapping[int, str]) -> str:
    return ", ".join(f"{number} ({name})" for number, name in names.items())


def spec_from_wire(message: job_pb2.JobSpec) -> JobSpec:
    """Decode a spec, with defaults for unset fields.

    Small specs are cached: a spec is decoded whenever its job's record has changed, and the specs of waiting jobs in
    each scheduling cycle.
    """
    return _specs(message)


def _spec_from_wire(message: job_pb2.JobSpec) -> JobSpec:
    roles = tuple(role_from_wire(role) for role in message.roles)
    qos = message.qos
    return JobSpec(
        name=message.name,
        kind=KINDS.from_wire(message.kind) if message.kind in KINDS.names else validation.default_kind(roles),
        tenant=message.tenant or TENANT_DEFAULT,
        queue=message.queue or QUEUE_DEFAULT,
        roles=roles,
        command=tuple(message.command),
        environment=tuple(sorted(message.environment.items())),
        working_directory=message.working_directory,
        model=message.model,
        steps_total=message.steps_total,
        deadline_seconds=optional_seconds(message, "deadline"),
        qos=Qos(qos.rate_min_per_second, qos.latency_seconds, qos.latency_percentile, qos.arrivals_per_second),
        priority=message.priority,
        preemptible=is_preemptible(message),
        grace_seconds=seconds(message.grace) if message.HasField("grace") else GRACE_SECONDS_DEFAULT,
        warning_signal=message.warning_signal or "SIGTERM",
        retries_max=message.retries_max,
        locality=LOCALITIES.from_wire(message.locality) if message.locality in LOCALITIES.names else None,
        progress_regex=message.progress.regex,
        labels=tuple(sorted(message.labels.items())),
        expected_seconds=optional_seconds(message, "expected_duration"),
        loss_goal=objectives.goal_from_wire(message.loss_goal) if message.HasField("loss_goal") else NO_GOAL,
        profiled=may_be_profiled(message),
        best_effort=message.best_effort,
        stop_after_disconnected_seconds=optional_seconds(message, "stop_after_disconnected"),
        pre_run_seconds=optional_seconds(message, "pre_run"),
        pids_max=message.pids_max,
        submit_directory=_submit_directory(message),
        dependencies=dependencies_module.dependencies_from_wire(message),
        array=dependencies_module.array_from_wire(message),
        array_task=dependencies_module.task_from_wire(message),
    )


def _submit_directory(message: job_pb2.JobSpec) -> SubmitDirectory | None:
    if not message.HasField("submit_directory"):
        return None
    folder = message.submit_directory
    variables = tuple(sorted(folder.environment.items()))
    return SubmitDirectory(folder.path, folder.inode, folder.owner_uid, variables)


_specs = SpecCache(_spec_from_wire)


def is_preemptible(message: job_pb2.JobSpec) -> bool:
    """Return whether the job may be preempted; it may if the spec does not say."""
    return message.preemptible or not message.HasField("preemptible")


def may_be_profiled(message: job_pb2.JobSpec) -> bool:
    """Return whether the job's cores may be reduced for a profile; they may if the spec does not say."""
    return message.profiled or not message.HasField("profiled")


def spec_to_wire(spec: JobSpec) -> job_pb2.JobSpec:
    """Encode a spec, defaults included."""
    message = job_pb2.JobSpec(
        name=spec.name,
        kind=KINDS.to_wire(spec.kind),
        tenant=spec.tenant,
        queue=spec.queue,
        roles=[role_to_wire(role) for role in spec.roles],
        command=spec.command,
        environment=dict(spec.environment),
        working_directory=spec.working_directory,
        model=spec.model,
        steps_total=spec.steps_total,
        priority=spec.priority,
        preemptible=spec.preemptible,
        grace=duration(spec.grace_seconds),
        warning_signal=spec.warning_signal,
        retries_max=spec.retries_max,
        labels=dict(spec.labels),
        profiled=spec.profiled,
        best_effort=spec.best_effort,
        pids_max=spec.pids_max,
    )
    if folder := spec.submit_directory:
        message.submit_directory.path, message.submit_directory.inode = folder.path, folder.inode
        message.submit_directory.owner_uid = folder.owner_uid
        message.submit_directory.environment.update(dict(folder.environment))
    if spec.stop_after_disconnected_seconds is not None:
        message.stop_after_disconnected.CopyFrom(duration(spec.stop_after_disconnected_seconds))
    if spec.pre_run_seconds is not None:
        message.pre_run.CopyFrom(duration(spec.pre_run_seconds))
    dependencies_module.write_dependencies(spec, message)
    if spec.deadline_seconds is not None:
        message.deadline.CopyFrom(timestamp(spec.deadline_seconds))
    if spec.expected_seconds is not None:
        message.expected_duration.CopyFrom(duration(spec.expected_seconds))
    if spec.locality:
        message.locality = LOCALITIES.to_wire(spec.locality)
    if spec.progress_regex:
        message.progress.regex = spec.progress_regex
    if spec.loss_goal != NO_GOAL:
        message.loss_goal.CopyFrom(objectives.goal_to_wire(spec.loss_goal))
    if spec.qos != Qos():
        qos = spec.qos
        message.qos.rate_min_per_second, message.qos.latency_seconds = qos.rate_min_per_second, qos.latency_seconds
        message.qos.latency_percentile = qos.latency_percentile
        message.qos.arrivals_per_second = qos.arrivals_per_second
    return message


def inventory_from_wire(message: resources_pb2.Inventory) -> Inventory:
    """Decode a node's inventory."""
    return Inventory(
        cores=tuple(Core(core.id, tuple(core.cpus), core.numa_node, core.socket) for core in message.cores),
        gpus=tuple(
            Gpu(
                uuid=gpu.uuid,
                model=gpu.model,
                memory_bytes=gpu.memory_bytes,
                numa_node=gpu.numa_node,
                shareable=gpu.shareable,
                declared=gpu.declared,
                pci_bus_id=gpu.pci_bus_id,
                unhealthy_reason=gpu.unhealthy_reason,
                island=gpu.island,
            )
            for gpu in message.gpus
        ),
        memory_bytes=message.memory_bytes,
        rack=message.rack,
        address=message.address,
        not_enforced=tuple(message.not_enforced),
        agent_version=message.agent_version,
        problems=tuple(map(_problem_from_wire, message.problems)),
        shared_user=message.shared_user,
        machine=message.machine,
    )


def _problem_from_wire(message: resources_pb2.HealthProblem) -> HealthProblem:
    return HealthProblem(
        check=message.check,
        action=HEALTH_ACTIONS.from_wire(message.action)
        if message.action in HEALTH_ACTIONS.names
        else HealthAction.IGNORE,  # from a newer agent; its meaning is unknown here
        reason=message.reason,
        gpu_uuid=message.gpu_uuid,
        since=optional_seconds(message, "since"),
        remedy=message.remedy,
    )


def problem_to_wire(problem: HealthProblem) -> resources_pb2.HealthProblem:
    """Encode a problem of a node's health."""
    return resources_pb2.HealthProblem(
        check=problem.check,
        action=HEALTH_ACTIONS.to_wire(problem.action),
        reason=problem.reason,
        gpu_uuid=problem.gpu_uuid,
        since=None if problem.since is None else timestamp(problem.since),
        remedy=problem.remedy,
    )


def inventory_to_wire(inventory: Inventory) -> resources_pb2.Inventory:
    """Encode a node's inventory."""
    return resources_pb2.Inventory(
        cores=[
            resources_pb2.Core(id=core.id, cpus=core.cpus, numa_node=core.numa_node, socket=core.socket)
            for core in inventory.cores
        ],
        gpus=[
            resources_pb2.Gpu(
                uuid=gpu.uuid,
                model=gpu.model,
                memory_bytes=gpu.memory_bytes,
                numa_node=gpu.numa_node,
                shareable=gpu.shareable,
                declared=gpu.declared,
                pci_bus_id=gpu.pci_bus_id,
                unhealthy_reason=gpu.unhealthy_reason,
                island=gpu.island,
            )
            for gpu in inventory.gpus
        ],
        memory_bytes=inventory.memory_bytes,
        rack=inventory.rack,
        address=inventory.address,
        not_enforced=inventory.not_enforced,
        agent_version=inventory.agent_version,
        problems=map(problem_to_wire, inventory.problems),
        shared_user=inventory.shared_user,
        machine=inventory.machine,
    )


def allocation_from_wire(message: resources_pb2.NodeAllocation) -> NodeAllocation:
    """Decode an attempt's allocation on a node."""
    return NodeAllocation(
        message.node_id,
        tuple(
            TaskAllocation(
                role=task.role,
                rank=task.rank,
                core_ids=tuple(task.core_ids),
                cpu_ids=tuple(task.cpu_ids),
                gpus=tuple(GpuShare(share.uuid, share.milli) for share in task.gpus),
                memory_bytes=task.memory_bytes,
                memory_nodes=tuple(task.memory_nodes),
                reclaimable=task.reclaimable,
                own_cores=task.own_cores,
                target_cores=task.target_cores,
            )
            for task in message.tasks
        ),
        message.gpu_type,
    )


def allocation_to_wire(allocation: NodeAllocation) -> resources_pb2.NodeAllocation:
    """Encode an attempt's allocation on a node."""
    return resources_pb2.NodeAllocation(
        node_id=allocation.node_id,
        tasks=[
            resources_pb2.TaskAllocation(
                role=task.role,
                rank=task.rank,
                core_ids=task.core_ids,
                cpu_ids=task.cpu_ids,
                gpus=[resources_pb2.GpuShare(uuid=share.uuid, milli=share.milli) for share in task.gpus],
                memory_bytes=task.memory_bytes,
                memory_nodes=task.memory_nodes,
                reclaimable=task.reclaimable,
                own_cores=task.own_cores,
                target_cores=task.target_cores,
            )
            for task in allocation.tasks
        ],
        gpu_type=allocation.gpu_type,
    )


def shape_to_wire(shape: NodeShape) -> placement_service_pb2.NodeShape:
    """Encode a node's shape."""
    return placement_service_pb2.NodeShape(
        gpus=shape.gpus,
        cores=shape.cores,
        memory_bytes=shape.memory_bytes,
        gpu_type=shape.gpu_type,
        shareable=shape.shareable,
        count=shape.count,
    )


def shape_from_wire(message: placement_service_pb2.NodeShape) -> NodeShape:
    """Decode a node's shape."""
    return NodeShape(
        gpus=message.gpus,
        cores=message.cores,
        memory_bytes=message.memory_bytes,
        gpu_type=message.gpu_type,
        shareable=message.shareable,
        count=message.count,
    )
