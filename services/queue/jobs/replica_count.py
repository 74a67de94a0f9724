"""The number of replicas of a service that leaves it open."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cotenant.codec.estimates import estimate_from_wire
from cotenant.core.model.job import JobSpec
from cotenant.core.sizing import replica_sizing

if TYPE_CHECKING:
    from cotenant.services.queue.jobs.transitions import Record


def with_required_replicas(record: Record) -> JobSpec:
    """Return the spec with the replicas of its attempt; while it waits, with those expected to meet its objective."""
    if record.phase.holds_resources and (tasks := sum(len(part.tasks) for part in record.job.attempt.allocations)):
        return record.spec.with_replicas(tasks)
    return (
        replica_sizing.with_required_replicas(record.spec, estimate_from_wire(record.estimate))
        if record.estimate
        else record.spec
    )
