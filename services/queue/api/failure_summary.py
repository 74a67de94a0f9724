"""Summarizes failures over all stored jobs, as Philly's table does (Jeon et al., ATC 2019, table 7 [P])."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from cotenant.codec import specs
from cotenant.core.failures.classifier import UNCLASSIFIED
from cotenant.services.queue.jobs.failure_classifier import is_failure
from cotenant.v1 import job_pb2
from cotenant.v1 import job_service_pb2 as pb

ENDED = frozenset(
    {
        job_pb2.ATTEMPT_STATE_SUCCEEDED,
        job_pb2.ATTEMPT_STATE_FAILED,
        job_pb2.ATTEMPT_STATE_STOPPED,
        job_pb2.ATTEMPT_STATE_LOST,
    }
)


COUNTS_MAX = 1000  # of an answer


@dataclass(slots=True)
class _Count:
    runtimes: list[float] = field(default_factory=list)
    jobs: set[str] = field(default_factory=set)
    gpu_seconds: float = 0.0
    newest: job_pb2.Attempt = field(default_factory=job_pb2.Attempt)


class FailureSummary:
    """Counts failed attempts by class and responsibility, and by the group that the request names.

    Only stored jobs are counted, and only the last few attempts of each.
    """

    def __init__(self, request: pb.SummarizeFailuresRequest) -> None:
        self._request = request
        self._since = specs.seconds(request.since) if request.HasField("since") else 0.0
        self._counts: dict[tuple[str, str, int], _Count] = {}
        self._ended = 0

    def add(self, jobs: Iterable[job_pb2.Job]) -> FailureSummary:
        """Count some jobs."""
        request = self._request
        for job in jobs:
            if request.tenant and job.spec.tenant != request.tenant:
                continue
            for attempt in _ended(job, self._since):
                self._ended += 1
                if not is_failure(attempt):
                    continue
                failure = attempt.failure
                key = _group(job, attempt, request.by), failure.failure_class or UNCLASSIFIED, failure.blame
                _add(self._counts.setdefault(key, _Count()), attempt)
        return self

    @property
    def response(self) -> pb.SummarizeFailuresResponse:
        """The counts, most frequent first, up to `COUNTS_MAX`."""
        order = sorted(self._counts.items(), key=lambda one: (-len(one[1].runtimes), one[0]))
        counts = [_to_wire(key[0], key[1], count) for key, count in order[:COUNTS_MAX]]
        return pb.SummarizeFailuresResponse(counts=counts, attempts=self._ended, total_size=len(order))


def _ended(job: job_pb2.Job, since: float) -> Iterator[job_pb2.Attempt]:
    for attempt in (*job.past_attempts, job.attempt):
        if attempt.state in ENDED and specs.seconds(attempt.end_time) >= since:
            yield attempt


def _group(job: job_pb2.Job, attempt: job_pb2.Attempt, by: pb.FailureGroup.ValueType) -> str:
    match by:
        case pb.FAILURE_GROUP_TENANT:
            return job.spec.tenant
        case pb.FAILURE_GROUP_NODE:
            return attempt.exit.node_id or next((part.node_id for part in attempt.allocations), "")
        case pb.FAILURE_GROUP_SUBMITTER:
            return job.submitter
        case pb.FAILURE_GROUP_MODEL:
            return job.spec.model or job.spec.name
    return ""


def _add(count: _Count, attempt: job_pb2.Attempt) -> None:
    ran = 0.0
    if attempt.HasField("start_time"):
        ran = max(0.0, specs.seconds(attempt.end_time) - specs.seconds(attempt.start_time))
    milli = sum(share.milli for part in attempt.allocations for task in part.tasks for share in task.gpus)
    count.runtimes.append(ran)
    count.jobs.add(attempt.job_id)
    count.gpu_seconds += ran * milli / 1000
    newest = count.newest.end_time
    if (attempt.end_time.seconds, attempt.end_time.nanos) >= (newest.seconds, newest.nanos):
        count.newest = attempt


def _to_wire(group: str, failure_class: str, count: _Count) -> pb.FailureCount:
    response = pb.FailureCount(
        group=group,
        failure=count.newest.failure,
        attempts=len(count.runtimes),
        jobs=len(count.jobs),
        gpu_seconds=count.gpu_seconds,
        runtime_p50=specs.duration(percentile(count.runtimes, 0.5)),
        runtime_p90=specs.duration(percentile(count.runtimes, 0.9)),
        newest_job_id=count.newest.job_id,
        newest_time=count.newest.end_time,
    )
    response.failure.failure_class = failure_class
    return response


def percentile(values: Iterable[float], share: float) -> float:
    """Return a percentile by linear interpolation.

    >>> percentile([4.0, 1.0, 2.0], 0.5), percentile([0.0, 10.0], 0.9)
    (2.0, 9.0)
    """
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    below = int(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (at - below)
