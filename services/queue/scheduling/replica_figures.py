"""What the allocator is shown of an elastic job, and what users are told about its number of replicas."""

from __future__ import annotations

from cotenant.codec import specs
from cotenant.core.model.job import BatchScaling, ReplicaRange, ResizeMode, Role
from cotenant.core.model.lifecycle import Phase
from cotenant.core.sizing.elastic import ElasticJob
from cotenant.core.sizing.replica_speed import completed_rates
from cotenant.core.sizing.restart_cost import ResizeCost
from cotenant.services.queue.jobs.job_record import Record

NO_CHECKPOINT = (
    "it keeps its replicas: it has not said that it continues from a checkpoint; with `resize: restart` it is resized"
)
IN_PLACE = "it keeps its replicas until it starts again: running jobs are not resized in place yet"


def kept_because(record: Record) -> str:
    """Return why a running job is not resized; "" if it may be.

    A restart costs what was not saved, so only the job's owner can allow it.
    """
    if record.spec.resize is ResizeMode.RESTART:
        return ""
    return IN_PLACE if record.spec.resize is ResizeMode.IN_PLACE else NO_CHECKPOINT


def elastic_job(record: Record, most: int, cost: ResizeCost, now: float) -> ElasticJob:
    """Return an elastic job that runs or waits, with at most this many replicas; `cost` is that of a resize."""
    role = _role(record)
    assert role.elastic
    runs = record.phase is Phase.RUNNING
    count = record.elastic_replicas if runs else 0
    span = ReplicaRange(role.elastic.least, max(role.elastic.least, most, count))
    if runs:
        _measure(record, count, now)
    rates = completed_rates(record.replica_rates, span, max(1, role.replicas))
    ran = max(0.0, now - specs.seconds(record.job.attempt.start_time)) if runs else 0.0
    estimated = min(max(record.estimated_replicas, span.least), span.most)
    return ElasticJob(
        record.id,
        span,
        count,
        role.request.resources(auto=1),
        rates,
        remaining=_left(record, now, rates[estimated - span.least]),
        attained=record.ran_seconds(now) * rates[max(count - span.least, 0)],
        restart_seconds=cost.seconds if runs else 0.0,
        settled_seconds=ran,
    )


def _role(record: Record) -> Role:
    return record.spec.roles[record.spec.elastic_role or 0]


def _measure(record: Record, count: int, now: float) -> None:
    """Remember the measured rate with the present number of replicas, in batches of constant size per second."""
    own = record.rate_track.measured(now) if record.rate_track else None
    if own and own.windows and own.rate_per_second > 0:
        weak = record.spec.scale is BatchScaling.WEAK
        record.replica_rates[count] = own.rate_per_second * (count if weak else 1)


def _left(record: Record, now: float, rate: float) -> float | None:
    """Return the remaining work by the estimate, which is for this rate; None if the job is unpredictable."""
    if record.prediction is None:
        return None
    return max(0.0, record.prediction.seconds - record.ran_seconds(now)) * rate


def replicas_in_words(job: ElasticJob, role: ReplicaRange, *, fits: bool, interval_seconds: float = 0.0) -> str:
    """Return a job's replicas, why it has that number, and what one more would bring.

    `interval_seconds` is the least time between two of its changes.

    >>> from cotenant.core.model.resources import NOTHING
    >>> job = ElasticJob("a", ReplicaRange(1, 3), 2, NOTHING, (1.0, 1.9, 2.7))
    >>> replicas_in_words(job, ReplicaRange(1, 8), fits=False)
    'replicas: 2 of 1..8; there is no room for one more, with which it would be 1.42 times as fast'
    """
    text = f"replicas: {job.replicas} of {role}"
    if job.replicas >= role.most:
        return f"{text}, the most that it takes"
    if job.replicas >= job.range.most:
        return f"{text}, the most that the nodes and its tenant's limits allow"
    gain = job.rate(job.replicas + 1) / job.rate(job.replicas)
    why = "one more gains too little for its restart" if fits else "there is no room for one more"
    if fits and 0 < job.settled_seconds < interval_seconds:
        why = (
            f"it changed {job.settled_seconds:.0f} s ago, and grows at most once in {interval_seconds:g} s, to one more"
        )
    return f"{text}; {why}, with which it would be {gain:.2f} times as fast"
