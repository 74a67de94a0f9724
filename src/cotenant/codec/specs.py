"""Encodes and decodes specs, allocations and inventories. Every spec from outside is decoded here.

The `…_from_wire` functions trust their message: they are for messages that this mesh has written. `accept_spec` trusts
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from operator import attrgetter
from typing import Any, Generic, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from cotenant.codec import dependencies as dependencies_module
from cotenant.codec import errors
from cotenant.codec.request_limits import spec_violations
from cotenant.codec.roles import role_from_wire, role_to_wire
from cotenant.codec.spec_cache import SpecCache
from cotenant.codec.times import DURATION_SECONDS_MAX as DURATION_SECONDS_MAX
from cotenant.codec.times import NANOS, TIMESTAMP_SECONDS_MAX
from cotenant.codec.times import duration as duration
from cotenant.codec.times import optional_seconds as optional_seconds
from cotenant.codec.times import seconds as seconds
from cotenant.codec.times import timestamp as timestamp
from cotenant.core.model import job_fields, validation
from cotenant.core.model.allocation import GpuShare, NodeAllocation, TaskAllocation
from cotenant.core.model.job import (
    BatchScaling,
    EnvironmentSource,
    JobKind,
    JobSpec,
    Locality,
    ObjectiveCheck,
    PythonEnvironment,
    ResizeMode,
    SpreadBy,
    SubmitDirectory,
)
from cotenant.core.model.job_fields import JobField
from cotenant.core.model.lifecycle import AttemptState, LaunchCause, Phase, StopReason
from cotenant.core.model.mounts import Mount
from cotenant.core.model.node import Core, Gpu, HealthAction, HealthProblem, Inventory, NodeShape
from cotenant.core.model.node_capabilities import Capability
from cotenant.core.model.notification import Trigger
from cotenant.core.model.resources import amounts_of
from cotenant.core.model.secrets import SecretUse
from cotenant.internal.v1 import placement_service_pb2
from cotenant.v1 import job_pb2, node_capabilities_pb2, resources_pb2

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

    def get(self, number: int) -> Word | None:
        """Return the value of a protobuf number; None if it has none."""
        return self._from.get(number)

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
TRIGGERS = EnumMap(Trigger, job_pb2.NotificationTrigger, "NOTIFICATION_TRIGGER")
ENVIRONMENT_SOURCES = EnumMap(EnvironmentSource, job_pb2.EnvironmentSource, "ENVIRONMENT_SOURCE")
LOCALITIES = EnumMap(Locality, job_pb2.Locality, "LOCALITY")
HEALTH_ACTIONS = EnumMap(HealthAction, resources_pb2.HealthAction, "HEALTH_ACTION")
CAPABILITIES = EnumMap(Capability, node_capabilities_pb2.Capability, "CAPABILITY")


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
    found += [
        validation.Violation(
            f"spec.notify_on[{place}]", f"{number} is unknown; the values are {_known(TRIGGERS.names)}"
        )
        for place, number in enumerate(message.notify_on)
        if number not in TRIGGERS
    ]
    for field, enum in _ENUM_FIELDS.items():
        number = attrgetter(field)(message)
        if number and number not in enum:
            wrong = f"{number} is unknown; the values are {_known(enum.names)}"
            found.append(validation.Violation(f"spec.{field}", wrong))
    for field, seconds_max in _TIME_FIELDS.items():
        time = attrgetter(field)(message)
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
    fields = {"kind": validation.default_kind(roles), **fields_from_wire(message)}
    if message.container.mounts:
        fields["container.mounts"] = mounts_from_wire(message)
    return JobSpec(
        roles=roles,
        command=tuple(message.command),
        environment=tuple(sorted(message.environment.items())),
        labels=tuple(sorted(message.labels.items())),
        submit_directory=_submit_directory(message),
        python_environment=_python_environment(message),
        notify=tuple(message.notify),
        notify_on=triggers_from_wire(message.notify_on),
        secrets=secrets_from_wire(message),
        dependencies=dependencies_module.dependencies_from_wire(message),
        array=dependencies_module.array_from_wire(message),
        array_task=dependencies_module.task_from_wire(message),
        **job_fields.attributes(fields),
    )


def triggers_from_wire(numbers: Iterable[int]) -> tuple[Trigger, ...]:
    """Decode triggers of notifications, each once; unknown ones are left out."""
    return tuple(dict.fromkeys(word for number in numbers if (word := TRIGGERS.get(number))))


def secrets_from_wire(message: job_pb2.JobSpec) -> tuple[SecretUse, ...]:
    """Decode the secrets that a job names."""
    return tuple(SecretUse(use.name, use.variable, use.path) for use in message.secrets)


def mounts_from_wire(message: job_pb2.JobSpec) -> tuple[Mount, ...]:
    """Decode the mounts of a job's container."""
    return tuple(Mount(one.source, one.target, one.read_only) for one in message.container.mounts)


def fields_from_wire(message: Message, prefix: str = "") -> dict[str, Any]:
    """Decode the fields of the table of job fields that are set, by attribute; unknown enum numbers count as unset."""
    found: dict[str, Any] = {}
    for descriptor, value in message.ListFields():
        path = prefix + descriptor.name
        if path in _DECODERS:
            attribute, decode = _DECODERS[path]
            if (decoded := decode(value) if decode else value) is not None:
                found[attribute] = decoded
        elif path in _NESTED:
            found |= fields_from_wire(value, f"{path}.")
    return found


def fields_to_wire(values: Iterable[tuple[JobField, Any]]) -> dict[str, Any]:
    """Encode fields of the table of job fields, as arguments of the message; what the wire cannot tell is left out."""
    found: dict[str, Any] = {}
    for field, value in values:
        outer, inner, encode, has_presence = _ENCODERS[field.wire]
        if value or (has_presence and value is not None):
            target = found.setdefault(outer, {}) if inner else found
            target[inner or outer] = encode(value) if encode else value
    return found


def _submit_directory(message: job_pb2.JobSpec) -> SubmitDirectory | None:
    if not message.HasField("submit_directory"):
        return None
    folder = message.submit_directory
    variables = tuple(sorted(folder.environment.items()))
    return SubmitDirectory(folder.path, folder.inode, folder.owner_uid, variables)


def _python_environment(message: job_pb2.JobSpec) -> PythonEnvironment | None:
    if not message.HasField("python_environment"):
        return None
    found = message.python_environment
    source = ENVIRONMENT_SOURCES.get(found.source)
    return PythonEnvironment(source, found.path, found.interpreter, found.requested)


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
        roles=[role_to_wire(role) for role in spec.roles],
        command=spec.command,
        environment=dict(spec.environment),
        labels=dict(spec.labels),
        notify=spec.notify,
        notify_on=map(TRIGGERS.to_wire, spec.notify_on),
        secrets=[job_pb2.SecretUse(name=use.name, variable=use.variable, path=use.path) for use in spec.secrets],
        **fields_to_wire([(field, field.value_of(spec)) for field in job_fields.JOB]),
    )
    if folder := spec.submit_directory:
        message.submit_directory.path, message.submit_directory.inode = folder.path, folder.inode
        message.submit_directory.owner_uid = folder.owner_uid
        message.submit_directory.environment.update(dict(folder.environment))
    for mount in spec.container.mounts:
        message.container.mounts.add(source=mount.source, target=mount.target, read_only=mount.read_only)
    if found := spec.python_environment:
        message.python_environment.path, message.python_environment.interpreter = found.path, found.interpreter
        message.python_environment.requested = found.requested
        if found.source:
            message.python_environment.source = ENVIRONMENT_SOURCES.to_wire(found.source)
    dependencies_module.write_dependencies(spec, message)
    return message


def _descriptor(path: str) -> FieldDescriptor:
    """Return the descriptor of a field of a spec, or of a message in it."""
    message: Any = job_pb2.JobSpec.DESCRIPTOR
    *outer, name = path.split(".")
    for part in outer:
        message = message.fields_by_name[part].message_type
    field: FieldDescriptor = message.fields_by_name[name]
    return field


_ENUMS: Mapping[str, EnumMap[Any]] = {  # by protobuf's name
    "JobKind": KINDS,
    "Locality": LOCALITIES,
    "SpreadBy": EnumMap(SpreadBy, job_pb2.SpreadBy, "SPREAD_BY"),
    "ObjectiveCheck": EnumMap(ObjectiveCheck, job_pb2.ObjectiveCheck, "OBJECTIVE_CHECK"),
    "ResizeMode": EnumMap(ResizeMode, job_pb2.ResizeMode, "RESIZE_MODE"),
    "BatchScaling": EnumMap(BatchScaling, job_pb2.BatchScaling, "BATCH_SCALING"),
}
_DECODERS: dict[str, tuple[str, Callable[[Any], Any] | None]] = {}
_ENCODERS: dict[str, tuple[str, str, Callable[[Any], Any] | None, bool]] = {}
_ENUM_FIELDS: dict[str, EnumMap[Any]] = {"python_environment.source": ENVIRONMENT_SOURCES}
_TIME_FIELDS: dict[str, int] = {}
_NESTED = frozenset(field.wire.partition(".")[0] for field in job_fields.JOB if "." in field.wire)


def _read_table() -> None:
    """Derive from the table of job fields, and from the types on the wire, how each field is encoded and decoded."""
    for field in job_fields.JOB:
        descriptor = _descriptor(field.wire)
        decode: Callable[[Any], Any] | None = None
        encode: Callable[[Any], Any] | None = None
        if descriptor.enum_type:
            enum = _ENUM_FIELDS[field.wire] = _ENUMS[descriptor.enum_type.name]
            decode, encode = enum.get, enum.to_wire
        elif descriptor.message_type is Duration.DESCRIPTOR:
            decode, encode, _TIME_FIELDS[field.wire] = seconds, duration, DURATION_SECONDS_MAX
        elif descriptor.message_type is Timestamp.DESCRIPTOR:
            decode, encode, _TIME_FIELDS[field.wire] = seconds, timestamp, TIMESTAMP_SECONDS_MAX
        outer, _, inner = field.wire.partition(".")
        _DECODERS[field.wire] = field.attribute, decode
        _ENCODERS[field.wire] = outer, inner, encode, descriptor.has_presence


_read_table()


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
        **amounts_of(message),
        rack=message.rack,
        address=message.address,
        not_enforced=tuple(message.not_enforced),
        agent_version=message.agent_version,
        problems=tuple(map(_problem_from_wire, message.problems)),
        shared_user=message.shared_user,
        container_runtime=message.container_runtime,
        container_gpus_missing=message.container_gpus_missing,
        machine=message.machine,
        outer_job=message.outer_job,
        available_until=optional_seconds(message, "available_until"),
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
        **amounts_of(inventory),
        rack=inventory.rack,
        address=inventory.address,
        not_enforced=inventory.not_enforced,
        agent_version=inventory.agent_version,
        problems=map(problem_to_wire, inventory.problems),
        shared_user=inventory.shared_user,
        container_runtime=inventory.container_runtime,
        container_gpus_missing=inventory.container_gpus_missing,
        machine=inventory.machine,
        outer_job=inventory.outer_job,
        available_until=None if inventory.available_until is None else timestamp(inventory.available_until),
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
                **amounts_of(task),
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
                **amounts_of(task),
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
        **amounts_of(shape),
        gpu_type=shape.gpu_type,
        shareable=shape.shareable,
        count=shape.count,
        without_containers=not shape.containers,
        without_container_gpus=not shape.container_gpus,
        lacks=sorted(CAPABILITIES.to_wire(one) for one in shape.lacks),
    )


def shape_from_wire(message: placement_service_pb2.NodeShape) -> NodeShape:
    """Decode a node's shape."""
    return NodeShape(
        gpus=message.gpus,
        cores=message.cores,
        **amounts_of(message),
        gpu_type=message.gpu_type,
        shareable=message.shareable,
        count=message.count,
        containers=not message.without_containers,
        container_gpus=not message.without_container_gpus,
        lacks=frozenset(CAPABILITIES.from_wire(one) for one in message.lacks if one in CAPABILITIES.names),
    )
