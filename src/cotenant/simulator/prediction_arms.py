"""What the simulator lets the policies know in advance: the arms of an experiment about prediction.

`oracle` tells the true rest of each job, `noisy-oracle` that of some jobs with an error, `none` tells nothing, and any
installed predictors learn from the jobs that finished and are asked at each submission, together as in the service.
What is told is a job's whole run time; what the job has attained comes off it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from cotenant.core.model.estimate import UNKNOWN, Candidate, CandidateEstimate, Estimate, Observation, Query, Submission
from cotenant.core.model.job_table import Floats, Jobs
from cotenant.core.model.node import NodeShape
from cotenant.core.model.validation import Violation
from cotenant.core.placement.candidate_allocations import standard
from cotenant.core.policy.protocols import Predictor, Trains
from cotenant.core.prediction.chain import Chain
from cotenant.simulator import service_scaling
from cotenant.simulator.physics.rounding import steady
from cotenant.simulator.policy_set import PolicyFailed
from cotenant.simulator.snapshots import Present
from cotenant.simulator.traces import TraceJob

Judge = Callable[[TraceJob], tuple[CandidateEstimate, ...]]


def unjudged(_: TraceJob) -> tuple[CandidateEstimate, ...]:
    """Tell nothing about other allocations."""
    return ()


class Arm(Protocol):
    """Tells what may be known of jobs. `sequence` numbers jobs in the order of their submission.

    `by_chance`: what it tells is drawn at random.
    """

    by_chance: bool

    def submitted(self, sequence: int, job: TraceJob) -> Estimate:
        """Say what is known of a job at its submission."""

    def takes(self, sequence: int, total_seconds: float) -> None:
        """Note that a job will take so long in all: it has work to repeat, or goes at another rate."""

    def finished(self, job: TraceJob, run_seconds: float, now: float, *, passed: bool = True) -> None:
        """Learn from a job's end."""

    def window(self, job: TraceJob, held: Candidate, rate_per_second: float, seconds: float, now: float) -> None:
        """Learn from a running job's rate."""

    def later(self, sequence: int, job: TraceJob, given: Estimate, attained_seconds: float) -> Estimate:
        """Say what is known of a job now of which an estimate was given at its submission."""

    def know(self, jobs: Jobs) -> Jobs:
        """Fill in the remaining time of the jobs, as far as it is known."""


class Nothing:
    """The arm in which nobody knows anything."""

    name = "none"
    by_chance = False

    def submitted(self, sequence: int, job: TraceJob) -> Estimate:
        """Nothing is known."""
        return UNKNOWN

    def takes(self, sequence: int, total_seconds: float) -> None:
        """Nothing is kept."""

    def finished(self, job: TraceJob, run_seconds: float, now: float, *, passed: bool = True) -> None:
        """Nothing is learnt."""

    def window(self, job: TraceJob, held: Candidate, rate_per_second: float, seconds: float, now: float) -> None:
        """Nothing is learnt."""

    def later(self, sequence: int, job: TraceJob, given: Estimate, attained_seconds: float) -> Estimate:
        """Nothing is known."""
        return given

    def know(self, jobs: Jobs) -> Jobs:
        """Nothing is known."""
        return jobs


class Told:
    """Knows the total run time of some jobs; the others' is NaN."""

    by_chance = False

    def __init__(self, count: int) -> None:
        self._total_seconds: Floats = np.full(count, np.nan)
        self._confidence: Floats = np.zeros(count)

    def tell(self, sequence: int, total_seconds: float | None, confidence: float) -> None:
        """Note what one job is expected to run in all."""
        self._total_seconds[sequence] = np.nan if total_seconds is None else total_seconds
        self._confidence[sequence] = confidence

    def window(self, job: TraceJob, held: Candidate, rate_per_second: float, seconds: float, now: float) -> None:
        """What is told does not depend on rates."""

    def later(self, sequence: int, job: TraceJob, given: Estimate, attained_seconds: float) -> Estimate:
        """Take off the expected total what the job has attained."""
        if np.isnan(total := float(self._total_seconds[sequence])):
            return given
        return replace(given, remaining_seconds=max(0.0, total - attained_seconds))

    def know(self, jobs: Jobs) -> Jobs:
        """Take off the expected total what each job has attained."""
        total = self._total_seconds[jobs.sequence]
        return replace(
            jobs,
            predicted_seconds=total,
            remaining_seconds=np.maximum(0.0, total - jobs.attained_seconds),
            confidence=self._confidence[jobs.sequence],
        )


class Oracle(Told):
    """Knows the truth: how an order would do if every prediction were right. `judge` knows it of other allocations."""

    name = "oracle"

    def __init__(self, count: int, judge: Judge = unjudged) -> None:
        super().__init__(count)
        self._judge = judge

    def submitted(self, sequence: int, job: TraceJob) -> Estimate:
        """Tell the whole truth."""
        self.tell(sequence, job.work_seconds, 1.0)
        return service_scaling.judged(job, _sure(job.work_seconds, self._judge(job), self.name))

    def takes(self, sequence: int, total_seconds: float) -> None:
        """Keep to the truth."""
        self.tell(sequence, total_seconds, 1.0)

    def finished(self, job: TraceJob, run_seconds: float, now: float, *, passed: bool = True) -> None:
        """There is nothing left to learn."""


class NoisyOracle(Told):
    """Knows some jobs, with an error: prediction error is an input of a fair comparison, not a surprise."""

    name = "noisy-oracle"
    by_chance = True

    @dataclass(frozen=True, slots=True)
    class Options:
        """How much is known.

        predictable: share of the jobs that are predictable, from 0 to 1.
        spread: standard deviation of the logarithm of predicted / true run time.
        bias: median of predicted / true run time; above 1 jobs are taken for longer than they are.
        """

        predictable: float = 0.5
        spread: float = 0.3
        bias: float = 1.0

        def check(self) -> list[Violation]:
            """Name what the types cannot say."""
            wrong = []
            if not 0 <= self.predictable <= 1:
                wrong.append(Violation("predictable", f"must be from 0 to 1, not {self.predictable:g}"))
            if not 0 <= self.spread <= 10:
                wrong.append(Violation("spread", f"must be from 0 to 10, not {self.spread:g}"))
            if not 0.01 <= self.bias <= 100:
                wrong.append(Violation("bias", f"must be from 0.01 to 100, not {self.bias:g}"))
            return wrong

    def __init__(self, options: Options, count: int, seed: int, judge: Judge = unjudged) -> None:
        super().__init__(count)
        self._judge = judge
        rng = np.random.default_rng([seed, 1])  # a stream of its own: each arm's jobs err alike
        self._predictable = rng.random(count) < options.predictable
        error = options.bias * np.exp(options.spread * rng.standard_normal(count))
        self._error = [steady(one) for one in error.tolist()]

    def submitted(self, sequence: int, job: TraceJob) -> Estimate:
        """Tell about what is true, or nothing."""
        if not self._predictable[sequence]:
            self.tell(sequence, None, 0.0)
            return UNKNOWN
        error = self._error[sequence]
        self.tell(sequence, job.work_seconds * error, 1.0)
        judged = tuple([_wrong(one, error) for one in self._judge(job)])
        return service_scaling.judged(job, _sure(job.work_seconds * error, judged, self.name))

    def takes(self, sequence: int, total_seconds: float) -> None:
        """Stay with what was told."""

    def finished(self, job: TraceJob, run_seconds: float, now: float, *, passed: bool = True) -> None:
        """Nothing is learnt."""


def _sure(seconds: float, judged: tuple[CandidateEstimate, ...], source: str) -> Estimate:
    return Estimate(predictable=True, confidence=1.0, remaining_seconds=seconds, candidates=judged, source=source)


def _wrong(one: CandidateEstimate, error: float) -> CandidateEstimate:
    """Take a job for longer than it is, and for slower in proportion."""
    rate, left = one.rate_per_second, one.remaining_seconds
    return replace(
        one,
        rate_per_second=None if rate is None else rate / error,
        remaining_seconds=None if left is None else left * error,
    )


class Recorded(Told):
    """Knows what was known when a snapshot was taken: for policies to decide by as they did."""

    name = "recorded"

    def __init__(self, present: Present, count: int) -> None:
        super().__init__(count)
        self._present = present

    def submitted(self, sequence: int, job: TraceJob) -> Estimate:
        """Tell what the predictor had said, or nothing."""
        known = self._present.known.get(job.id)
        if known is None:
            self.tell(sequence, None, 0.0)
            return UNKNOWN
        self.tell(sequence, known.total_seconds, known.confidence)
        ran = self._present.attained.get(job.id, 0.0)
        rest = max(0.0, known.total_seconds - ran)
        return Estimate(predictable=True, confidence=known.confidence, remaining_seconds=rest, source=self.name)

    def takes(self, sequence: int, total_seconds: float) -> None:
        """Stay with what was told."""

    def finished(self, job: TraceJob, run_seconds: float, now: float, *, passed: bool = True) -> None:
        """Nothing is learnt."""


class Learner(Told):
    """Asks predictors as the service does, and shows them every job that finishes. `shapes` are those of the nodes."""

    def __init__(self, predictors: Sequence[Predictor], count: int, shapes: Sequence[NodeShape] = ()) -> None:
        super().__init__(count)
        self._shapes = shapes
        self._chain = Chain(predictors, _failed)
        self._asked: dict[str, tuple[int | None, Query]] = {}  # the last question about each job, and its θ

    def submitted(self, sequence: int, job: TraceJob) -> Estimate:
        """Ask the predictors once.

        Raises:
            PolicyFailed: one of them raised an error, or answered nonsense.
        """
        estimate = self._ask(job, None)
        known = estimate.predictable and estimate.remaining_seconds is not None
        self.tell(sequence, estimate.remaining_seconds if known else None, estimate.confidence if known else 0.0)
        return estimate

    def _ask(self, job: TraceJob, cores_useful: int | None) -> Estimate:
        before = self._asked.get(job.id)
        if before is None or before[0] != cores_useful:
            before = self._asked[job.id] = cores_useful, self._question(job, cores_useful)
        return self._chain.estimate(before[1])

    def _question(self, job: TraceJob, cores_useful: int | None) -> Query:
        spec = job.spec()
        return Query(
            job.tenant,
            job.model,
            spec.name,
            spec.gpu_milli,
            spec.replicas,
            candidates=standard(spec, self._shapes, cores_useful),
            qos=spec.qos,
            submission=_submission(job),
        )

    def takes(self, sequence: int, total_seconds: float) -> None:
        """A prediction stays what it was."""

    def window(self, job: TraceJob, held: Candidate, rate_per_second: float, seconds: float, now: float) -> None:
        """Show the predictors how fast a job runs on how many cores."""
        spec = job.spec()
        self._chain.observe(
            Observation(
                job.tenant,
                job.model,
                spec.name,
                gpu_milli=spec.gpu_milli,
                replicas=spec.replicas,
                allocation=held,
                rate_per_second=rate_per_second,
                window_seconds=seconds,
                submission=_submission(job),
                seen_seconds=now,
            )
        )

    def later(self, sequence: int, job: TraceJob, given: Estimate, attained_seconds: float) -> Estimate:
        """Ask again for the cores; how long the job runs stays what was told."""
        new = self._ask(job, given.cores_useful)
        cores, sure = new.cores_useful, new.cores_useful_confidence
        said = super().later(sequence, job, given, attained_seconds)
        return replace(said, cores_useful=cores, cores_useful_confidence=sure, source=new.source)

    def finished(self, job: TraceJob, run_seconds: float, now: float, *, passed: bool = True) -> None:
        """Show the predictors how long the job ran; where that makes it time to learn, learn at once."""
        spec = job.spec()
        self._asked.pop(job.id, None)
        ended = Observation(
            job.tenant,
            job.model,
            spec.name,
            gpu_milli=spec.gpu_milli,
            replicas=spec.replicas,
            allocation=Candidate(cores=sum(role.request.cores or 0 for role in spec.roles)),
            run_seconds=run_seconds,
            succeeded=passed,
            submission=_submission(job),
            seen_seconds=now,
        )
        for seen in (*service_scaling.batches(job, standard(spec, self._shapes)[0], ended), ended):
            self._chain.observe(seen)
        for predictor in self._chain.predictors.values():
            if isinstance(predictor, Trains) and (lesson := predictor.lesson()):
                predictor.adopt(lesson.train())


def _failed(predictor: Predictor, error: str) -> None:
    raise PolicyFailed("predictor", predictor, "a job", error)


def _submission(job: TraceJob) -> Submission:
    return Submission(job.user, job.submitted_seconds, job.kind.value, job.roles)
