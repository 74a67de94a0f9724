"""Encodes and decodes a job's dependencies, array and array task."""

from __future__ import annotations

from cotenant.core.model.dependencies import Condition, Dependency
from cotenant.core.model.job import JobSpec
from cotenant.core.model.job_array import ArraySpec, ArrayTask, IndexRange
from cotenant.core.model.validation import Violation
from cotenant.v1 import job_pb2

_CONDITIONS = {
    Condition.AFTER: job_pb2.DEPENDENCY_CONDITION_AFTER,
    Condition.AFTER_OK: job_pb2.DEPENDENCY_CONDITION_AFTER_OK,
    Condition.AFTER_FAIL: job_pb2.DEPENDENCY_CONDITION_AFTER_FAIL,
    Condition.AFTER_STARTED: job_pb2.DEPENDENCY_CONDITION_AFTER_STARTED,
}
_WORDS = {number: word for word, number in _CONDITIONS.items()}


def dependencies_from_wire(message: job_pb2.JobSpec) -> tuple[Dependency, ...]:
    """Decode a job's dependencies; an unset condition means success."""
    return tuple(Dependency(one.id, condition_of(one)) for one in message.dependencies)


def condition_of(dependency: job_pb2.Dependency) -> Condition:
    """Return the condition of a dependency; unset means success."""
    return _WORDS.get(dependency.condition, Condition.AFTER_OK)


def violations(message: job_pb2.JobSpec) -> list[Violation]:
    """Return violations for unknown conditions."""
    return [
        Violation(f"spec.dependencies[{place}].condition", f"{one.condition} is unknown")
        for place, one in enumerate(message.dependencies)
        if one.condition and one.condition not in _WORDS
    ]


def array_from_wire(message: job_pb2.JobSpec) -> ArraySpec | None:
    """Decode the array of a spec."""
    if not message.HasField("array"):
        return None
    ranges = tuple(IndexRange(part.first, part.last, part.step or 1) for part in message.array.ranges)
    return ArraySpec(ranges, message.array.running_max)


def task_from_wire(message: job_pb2.JobSpec) -> ArrayTask | None:
    """Decode the array task of a spec."""
    if not message.HasField("array_task"):
        return None
    task = message.array_task
    return ArrayTask(task.array_id, task.index, task.count, task.running_max)


def write_dependencies(spec: JobSpec, message: job_pb2.JobSpec) -> None:
    """Encode dependencies, array and array task into a spec's message."""
    for dependency in spec.dependencies:
        message.dependencies.add(id=dependency.job_id, condition=_CONDITIONS[dependency.condition])
    if spec.array:
        message.array.CopyFrom(array_to_wire(spec.array))
    if task := spec.array_task:
        message.array_task.CopyFrom(task_to_wire(task))


def array_to_wire(array: ArraySpec) -> job_pb2.ArraySpec:
    """Encode the indices of an array, and its limit."""
    ranges = [job_pb2.IndexRange(first=part.first, last=part.last, step=part.step) for part in array.ranges]
    return job_pb2.ArraySpec(ranges=ranges, running_max=array.running_max)


def task_to_wire(task: ArrayTask) -> job_pb2.ArrayTask:
    """Encode an array task."""
    return job_pb2.ArrayTask(array_id=task.array_id, index=task.index, count=task.count, running_max=task.running_max)
