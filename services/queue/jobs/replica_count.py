"""How many replicas a service has, or waits for, that leaves their number open."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cotenant.codec.estimates import estimate_from_wire
from cotenant.core.model.job import JobSpec
from cotenant.core.sizing import replica_sizing

if TYPE_CHECKING:
    from cotenant.services.queue.jobs.transitions import Record


def decided(record: Record) -> JobSpec:
    """Give it as many replicas as its attempt has; while it waits, as many as are expected to keep its promise."""
    if record.phase.holds_resources and (tasks := sum(len(part.tasks) for part in record.job.attempt.allocations)):
        return record.spec.with_replicas(tasks)
    return replica_sizing.decided(record.spec, estimate_from_wire(record.estimate)) if record.estimate else record.spec
