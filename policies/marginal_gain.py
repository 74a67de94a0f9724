"""Replicas of elastic jobs by marginal gain, as in Optimus."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from cotenant.core.model.estimate import Estimate
from cotenant.core.model.job import JobSpec
from cotenant.core.model.node import NodeShape
from cotenant.core.model.resources import NOTHING, Resources, added
from cotenant.core.model.validation import Violation
from cotenant.core.policy.protocols import Sizing
from cotenant.core.sizing.elastic import ElasticJob
from cotenant.policies.requested import Requested

Goal = Literal["completions", "time"]


class MarginalGain:
    """Gives replicas to elastic jobs one by one: always to the job that gains most for its share of the cluster.

    Optimus (Peng et al., EuroSys 2018) starts each job with one worker and adds workers where the remaining time falls
    most per unit of the dominant resource [P]: `goal=time`. That favors long jobs. `goal=completions` divides the gain
    in speed by the remaining work instead, so that jobs complete at the greatest rate: with rates that grow linearly it
    is shortest remaining time first, and the worse a job scales, the more jobs share the cluster [R]. A job of unknown
    length is expected to run for as long again as it has run [R].

    A resize is charged its restart: a job grows only if that ends it earlier. A replica that a job already has counts
    more than the same replica elsewhere (`hysteresis`), and a job keeps its number for `interval_seconds`, unless a
    waiting job gains by what it gives up. Cores are as requested.

    >>> from cotenant.core.model.job import ReplicaRange
    >>> rates = (1.0, 1.9, 2.7, 3.4)
    >>> of = ReplicaRange(1, 4), 0, Resources(1000), rates
    >>> jobs = [ElasticJob("a", *of, remaining=9.0), ElasticJob("b", *of, remaining=90.0)]
    >>> MarginalGain().targets(jobs, Resources(5000), now=0.0)
    {'a': 4, 'b': 1}
    """

    name = "marginal-gain"
    api_version = 1

    @dataclass(frozen=True, slots=True)
    class Options:
        """What is gained, and how often it may change.

        goal: `completions` per second, or remaining `time` saved, as Optimus.
        interval_seconds: minimum time between two changes of one job.
        hysteresis: how much more a replica counts for the job that has it.
        quantum_seconds: least remaining time of a job of unknown length.
        """

        goal: Goal = "completions"
        interval_seconds: float = 240.0
        hysteresis: float = 0.2
        quantum_seconds: float = 60.0

        def check(self) -> Iterator[Violation]:
            """Yield a violation for each invalid option."""
            if not 0 <= self.interval_seconds <= 1e9:
                yield Violation("interval_seconds", f"must be from 0 to 1e9, not {self.interval_seconds:g}")
            if not 0 <= self.hysteresis <= 100:
                yield Violation("hysteresis", f"must be from 0 to 100, not {self.hysteresis:g}")
            if not 1 <= self.quantum_seconds <= 1e9:
                yield Violation("quantum_seconds", f"must be from 1 to 1e9, not {self.quantum_seconds:g}")

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()
        self.resize_interval_seconds = self.options.interval_seconds
        self._cores = Requested()

    def size(self, spec: JobSpec, estimate: Estimate, shapes: Sequence[NodeShape]) -> Sizing:
        """Return the requested cores."""
        return self._cores.size(spec, estimate, shapes)

    def targets(self, jobs: Sequence[ElasticJob], room: Resources, now: float) -> Mapping[str, int]:
        """Return the number of replicas of each job."""
        kept: set[str] = set()  # jobs whose growth would not pay for its restart
        while True:
            counts = {job.job_id: job.range.least if job.replicas else 0 for job in jobs}
            left = room - added([NOTHING, *(job.needs * counts[job.job_id] for job in jobs)])
            left = self._add(jobs, room, left, counts, kept)
            lost = {job.job_id for job in jobs if counts[job.job_id] > job.replicas > 0 and not self._pays(job, counts)}
            if not lost:
                return _without_idle_shrinks(jobs, left, counts)
            kept |= lost

    def _add(
        self, jobs: Sequence[ElasticJob], room: Resources, left: Resources, counts: dict[str, int], kept: set[str]
    ) -> Resources:
        """Add replicas in the order of their gains, none beyond what `kept` jobs have; returns what is left."""
        crowded = not all(job.replicas for job in jobs)
        queue = [(-self._gain(job, counts[job.job_id], room, crowded), number) for number, job in enumerate(jobs)]
        heapq.heapify(queue)
        while queue:
            gain, number = heapq.heappop(queue)
            job = jobs[number]
            have = counts[job.job_id]
            more = _next(job, have)
            if not gain or (more > job.replicas and job.job_id in kept):
                continue
            if not (step := job.needs * (more - have)).fits(left):
                continue
            left -= step
            counts[job.job_id] = more
            heapq.heappush(queue, (-self._gain(job, more, room, crowded), number))
        return left

    def _gain(self, job: ElasticJob, have: int, room: Resources, crowded: bool) -> float:
        """Return the gain of a job's next replicas per share of the room; 0 if it may not have more."""
        more = _next(job, have)
        if more > job.range.most or (more > job.replicas and self._pinned(job)):
            return 0.0
        if more <= job.replicas and self._pinned(job) and not crowded:
            return math.inf
        before, after, rest = job.rate(have), job.rate(more), self._remaining(job)
        if self.options.goal == "completions":
            gain = (after - before) * job.rate(job.range.least) / max(rest, 1e-9)
        else:
            gain = rest / before - rest / after if before else math.inf
        held = 1 + self.options.hysteresis if more <= job.replicas else 1.0
        return max(0.0, gain) * held / _share(job.needs * (more - have), room)

    def _pinned(self, job: ElasticJob) -> bool:
        """Return whether a running job changed too recently to change again, unless jobs wait."""
        return 0 < job.settled_seconds < self.resize_interval_seconds and job.replicas > 0

    def _remaining(self, job: ElasticJob) -> float:
        """Return a job's remaining work, or what is expected of it."""
        if job.remaining is not None:
            return job.remaining
        return max(job.attained, self.options.quantum_seconds * job.rate(job.range.least))

    def _pays(self, job: ElasticJob, counts: Mapping[str, int]) -> bool:
        """Return whether a running job ends earlier with its new number, its restart included."""
        rest = self._remaining(job)
        return job.restart_seconds + rest / job.rate(counts[job.job_id]) < rest / job.rate(job.replicas)


def _without_idle_shrinks(jobs: Sequence[ElasticJob], left: Resources, counts: dict[str, int]) -> Mapping[str, int]:
    """Return the numbers without the shrinks that nothing needs."""
    for job in jobs:
        back = job.needs * (job.replicas - counts[job.job_id])
        if job.replicas > counts[job.job_id] and back.fits(left):
            counts[job.job_id] = job.replicas
            left -= back
    return counts


def _next(job: ElasticJob, have: int) -> int:
    return have + 1 if have else job.range.least


def _share(needs: Resources, room: Resources) -> float:
    """Return the dominant share of the room."""
    shares = (need / most for need, most in zip(needs, room, strict=True) if need and most > 0)
    return max(shares, default=1.0)
