"""An array as a message: from its jobs in memory, from the archive, or as a preview of one that is not created."""

from __future__ import annotations

from collections.abc import Mapping

from cotenant.codec import dependencies, specs
from cotenant.core.model.job_array import ArraySpec, from_indices
from cotenant.core.model.lifecycle import Phase
from cotenant.services.queue.jobs.archived_jobs import ArchivedArray
from cotenant.services.queue.jobs.array_recovery import SEPARATOR
from cotenant.services.queue.jobs.dependency_gate import Array
from cotenant.services.queue.jobs.messages import stored_message
from cotenant.services.queue.jobs.transitions import Record
from cotenant.v1 import array_service_pb2 as pb


def array_message(array: Array, records: Mapping[str, Record]) -> pb.Array:
    """Return an array as callers see it; `records` has all of its jobs."""
    message = _message(array.id, records[array.first], array.indices, array.phases)
    message.job_count, message.etag = array.count, str(array.revision)
    if not array.left:
        message.end_time.CopyFrom(records[array.last_ended].job.end_time)
    return message


def archived_array_message(archived: ArchivedArray) -> pb.Array:
    """Return an array as the archive knows it."""
    entry, first = archived.entry, archived.first
    task = first.spec.array_task
    assert task
    found = (task_id.rpartition(SEPARATOR)[2] for task_id in archived.task_ids)
    indices = from_indices((int(index) for index in found if index.isdecimal()), task.running_max)
    message = _message(entry.id, first, indices, entry.phases)
    message.job_count, message.archived = task.count, True
    message.end_time.CopyFrom(specs.timestamp(entry.ended_seconds))
    return message


def array_preview(first: Record) -> pb.Array:
    """Return the array that a validated submission would create; `first` has its spec, and no id."""
    assert first.spec.array
    count = len(first.spec.array.indices)
    message = _message("", first, first.spec.array, {first.phase: count})
    message.job_count = count
    return message


def _message(array_id: str, first: Record, indices: ArraySpec, phases: Mapping[Phase, int]) -> pb.Array:
    job = stored_message(first)
    message = pb.Array(id=array_id, spec=job.spec, create_time=job.create_time, submitter=job.submitter)
    message.spec.ClearField("array_task")
    message.spec.array.CopyFrom(dependencies.array_to_wire(indices))
    for phase in Phase:
        if phases.get(phase):
            message.phase_counts.add(phase=specs.PHASES.to_wire(phase), count=phases[phase])
    return message
