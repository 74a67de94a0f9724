"""Sums up what jobs used in a period, from the attempts in their records.

What counts is what attempts held while they ran, as fair share counts it: neither requests nor waiting times. A job
keeps only its last attempts; the use of earlier ones is known as a sum, and is spread evenly over the time before them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from typing import NamedTuple

from cotenant.codec import specs
from cotenant.core.model.resources import WHOLE_GPU_MILLI
from cotenant.services.queue.jobs.usage_accounting import intervals
from cotenant.v1 import job_pb2
from cotenant.v1 import job_service_pb2 as pb

COUNTS_MAX = 1000  # of an answer
DAY_SECONDS = 86_400.0
PERIODS = {pb.USAGE_GROUP_DAY: 1, pb.USAGE_GROUP_WEEK: 7}  # in days
MONDAY = date(1970, 1, 5)


class Use(NamedTuple):
    """What a job held, from one time to another."""

    gpu_seconds: float
    core_seconds: float
    since: float
    until: float


@dataclass(slots=True)
class _Count:
    gpu_seconds: float = 0.0
    core_seconds: float = 0.0
    jobs: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


class UsageSummary:
    """Sums up the use of jobs by the group that the request names."""

    def __init__(self, request: pb.SummarizeUsageRequest, now: float) -> None:
        self._request, self._now = request, now
        self.until = min(now, specs.seconds(request.until)) if request.HasField("until") else now
        self.since = specs.seconds(request.since) if request.HasField("since") else 0.0
        if days := PERIODS.get(request.by):
            self.since = max(self.since, self.until - COUNTS_MAX * days * DAY_SECONDS + days * DAY_SECONDS)
        self._counts: dict[str, _Count] = {}
        self._total = _Count()

    def add(self, jobs: Iterable[job_pb2.Job]) -> None:
        """Count some jobs."""
        for job in jobs:
            if self._request.tenant and job.spec.tenant != self._request.tenant:
                continue
            failed = job.phase == job_pb2.JOB_PHASE_FAILED
            ended = specs.seconds(job.end_time) if failed else math.inf
            for use in uses_of(job, self._now):
                for group, since, until in self._parts(job, use):
                    share = (until - since) / (use.until - use.since) if use.until > use.since else 1.0
                    for count in (self._counts.setdefault(group, _Count()), self._total):
                        count.gpu_seconds += use.gpu_seconds * share
                        count.core_seconds += use.core_seconds * share
                        count.jobs.add(job.id)
                        if failed and until >= use.until and ended < self.until:
                            count.failed.add(job.id)

    def _parts(self, job: job_pb2.Job, use: Use) -> Iterator[tuple[str, float, float]]:
        """Yield the groups into which the part of a use within the period falls, each with its part of the time."""
        since, until = max(use.since, self.since), min(use.until, self.until)
        if until < since or (until == since and use.until > use.since) or since >= self.until:
            return
        days = PERIODS.get(self._request.by)
        if not days:
            yield self._group(job), since, until
            return
        while True:
            first = _first_day(since, days)
            end = min(until, _begin(first + timedelta(days=days)))
            yield first.isoformat(), since, end
            if end >= until:
                return
            since = end

    def _group(self, job: job_pb2.Job) -> str:
        match self._request.by:
            case pb.USAGE_GROUP_TENANT:
                return job.spec.tenant
            case pb.USAGE_GROUP_SUBMITTER:
                return job.submitter
            case pb.USAGE_GROUP_MODEL:
                return job.spec.model or job.spec.name
        return ""

    def response(self, missing_archives: int) -> pb.SummarizeUsageResponse:
        """Return the counts, up to `COUNTS_MAX`, and their sum."""
        if self._request.by in PERIODS:
            order = sorted(self._counts.items())
        else:
            order = sorted(self._counts.items(), key=lambda one: (-one[1].gpu_seconds, -one[1].core_seconds, one[0]))
        return pb.SummarizeUsageResponse(
            counts=[_to_wire(group, count) for group, count in order[:COUNTS_MAX]],
            total=_to_wire("", self._total),
            total_size=len(order),
            missing_archives=missing_archives,
        )


def uses_of(job: job_pb2.Job, now: float) -> Iterator[Use]:
    """Yield what the attempts of a job held while they ran, until now."""
    known = [one for one in (*job.past_attempts, job.attempt) if one.HasField("start_time")]
    gpu_seconds = core_seconds = 0.0
    uses: list[Use] = []
    for attempt in known:
        over = attempt.HasField("end_time")
        for held, since, until in intervals(attempt, specs.seconds(attempt.end_time) if over else now):
            ran = until - since
            uses.append(Use(ran * held.gpu_milli / WHOLE_GPU_MILLI, ran * held.cores, since, until))
            gpu_seconds += uses[-1].gpu_seconds if over else 0.0
            core_seconds += uses[-1].core_seconds if over else 0.0
    if (
        job.past_attempts and job.past_attempts[0].number > 1 and job.HasField("start_time")
    ):  # earlier ones are not kept
        since = specs.seconds(job.start_time)
        until = max(since, min((use.since for use in uses), default=now))
        missing = max(0.0, job.attained_gpu_seconds - gpu_seconds), max(0.0, job.attained_core_seconds - core_seconds)
        yield Use(*missing, since, until)
    yield from uses


def _first_day(at: float, days: int) -> date:
    """Return the day of a time, or the Monday of its week."""
    day = datetime.fromtimestamp(at, UTC).date()
    return day if days == 1 else day - timedelta(days=(day - MONDAY).days % 7)


def _begin(day: date) -> float:
    return datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp()


def _to_wire(group: str, count: _Count) -> pb.UsageCount:
    return pb.UsageCount(
        group=group,
        jobs=len(count.jobs),
        failed_jobs=len(count.failed),
        gpu_seconds=count.gpu_seconds,
        core_seconds=count.core_seconds,
    )
