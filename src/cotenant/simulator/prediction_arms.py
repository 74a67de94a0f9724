"""What policies know in advance in a simulation: the arms of a prediction experiment.

`oracle` gives the true remaining time of each job, `noisy-oracle` that of some jobs with an error, `none` nothing, and
installed predictors learn from finished jobs and are queried at each submission, chained as in the service. Predictions
are of a job's total run time; the attained run time is subtracted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from cotenant.core.model.estimate import UNKNOWN, Candidate, CandidateEstimate, Estimate, Observation, Query, Submission
from cotenant.core.model.job_table import Floats, JobTable
from cotenant.core.model.node import NodeShape
from cotenant.core.model.validation import Violation
from cotenant.core.placement.candidate_allocations import standard_candidates
from cotenant.core.policy.protocols import Predictor, Trains
from cotenant.core.prediction.chain import Chain
from cotenant.simulator import service_scaling
from cotenant.simulator.job import SimulatedJob
from cotenant.simulator.physics.rounding import steady
from cotenant.simulator.policy_set import PolicyFailed
from cotenant.simulator.snapshots import SnapshotState
from cotenant.simulator.traces import TraceJob

CandidateSource = Callable[[TraceJob], tuple[CandidateEstimate, ...]]


def no_candidates(_: TraceJob) -> tuple[CandidateEstimate, ...]:
    """Return no estimates of other allocations."""
    return ()


class Arm(Protocol):
    """Predicts jobs. `sequence` numbers jobs in order of submission.

    `by_chance`: predictions are drawn at random.
    """

    by_chance: bool

    def submitted(self, sequence: int, job: TraceJob) -> Estimate:
        """Return the estimate of a job at its submission."""

    def total_changed(self, sequence: int, total_seconds: float) -> None:
        """Update the true total run time of a job: it has to repeat work, or its rate changed."""

    def finished(self, job: TraceJob, run_seconds: float, now: float, *, passed: bool = True) -> None:
        """Learn from a job's end."""

    def window(self, job: TraceJob, held: Candidate, rate_per_second: float, seconds: float, now: float) -> None:
        """Learn from a running job's rate."""

    def updated_estimate(self, sequence: int, job: TraceJob, given: Estimate, attained_seconds: float) -> Estimate:
        """Return the present estimate of a job, from the one at its submission."""

    def expected(self, sequence: int) -> tuple[float, float]:
        """Return the expected total run time of a job, NaN if unknown, and the confidence in it."""


def predict(arm: Arm, sim_job: SimulatedJob, table: JobTable) -> None:
    """Set what an arm expects of a job in the table of jobs."""
    total_seconds, confidence = arm.expected(sim_job.sequence)
    table.update(sim_job.job.id, predicted_seconds=total_seconds, confidence=confidence)


def update_total(arm: Arm, sim_job: SimulatedJob, table: JobTable, now: float) -> None:
    """Update what an arm expects of a job that has to repeat work, or whose rate changed."""
    arm.total_changed(sim_job.sequence, sim_job.total_seconds(now))
    predict(arm, sim_job, table)


class NoPrediction:
    """The arm without any predictions."""

    name = "none"
    by_chance = False

    def submitted(self, sequence: int, job: TraceJob) -> Estimate:
        """Return no prediction."""
        return UNKNOWN

    def total_changed(self, sequence: int, total_seconds: float) -> None:
        """Ignore it."""

    def finished(self, job: TraceJob, run_seconds: float, now: float, *, passed: bool = True) -> None:
        """Learn nothing."""

    def window(self, job: TraceJob, held: Candidate, rate_per_second: float, seconds: float, now: float) -> None:
        """Learn nothing."""

    def updated_estimate(self, sequence: int, job: TraceJob, given: Estimate, attained_seconds: float) -> Estimate:
        """Return the estimate unchanged."""
        return given

    def expected(self, sequence: int) -> tuple[float, float]:
        """Return that nothing is known."""
        return math.nan, 0.0


class KnownTotals:
    """Known total run times of some jobs; NaN for the others."""

    by_chance = False

    def __init__(self, count: int) -> None:
        self._total_seconds: Floats = np.full(count, np.nan)
        self._confidence: Floats = np.zeros(count)

    def set_total(self, sequence: int, total_seconds: float | None, confidence: float) -> None:
        """Set the expected total run time of a job."""
        self._total_seconds[sequence] = np.nan if total_seconds is None else total_seconds
        self._confidence[sequence] = confidence

    def window(self, job: TraceJob, held: Candidate, rate_per_second: float, seconds: float, now: float) -> None:
        """Ignore it: predictions do not depend on rates."""

    def updated_estimate(self, sequence: int, job: TraceJob, given: Estimate, attained_seconds: float) -> Estimate:
        """Return the expected total minus the attained run time."""
        if np.isnan(total := float(self._total_seconds[sequence])):
            return given
        return replace(given, remaining_seconds=max(0.0, total - attained_seconds))

    def expected(self, sequence: int) -> tuple[float, float]:
        """Return the expected total run time of a job, NaN if unknown, and the confidence in it."""
        return float(self._total_seconds[sequence]), float(self._confidence[sequence])


class Oracle(KnownTotals):
    """The truth, as if every prediction were right; `candidates_of` gives it for other allocations."""

    name = "oracle"

    def __init__(self, count: int, candidates_of: CandidateSource = no_candidates) -> None:
        super().__init__(count)
        self._judge = candidates_of

    def submitted(self, sequence: int, job: TraceJob) -> Estimate:
        """Return the true run time."""
        self.set_total(sequence, job.work_seconds, 1.0)
        return service_scaling.with_batch_latency(job, _certain(job.work_seconds, self._judge(job), self.name))

    def total_changed(self, sequence: int, total_seconds: float) -> None:
        """Follow the truth."""
        self.set_total(sequence, total_seconds, 1.0)

    def finished(self, job: TraceJob, run_seconds: float, now: float, *, passed: bool = True) -> None:
        """Learn nothing: everything is known."""


class NoisyOracle(KnownTotals):
    """Knows some jobs, with an error: prediction error is an input of a fair comparison, not a surprise."""

    name = "noisy-oracle"
    by_chance = True

    @dataclass(frozen=True, slots=True)
    class Options:
        """How much is known.

        predictable: share of the jobs that are predictable, from 0 to 1.
        spread: standard deviation of the logarithm of predicted / true run time.
        bias: median of predicted / true run time; above 1 jobs are overestimated.
        """

        predictable: float = 0.5
        spread: float = 0.3
        bias: float = 1.0

        def check(self) -> list[Violation]:
            """Return a violation for each invalid option."""
            wrong = []
            if not 0 <= self.predictable <= 1:
                wrong.append(Violation("predictable", f"must be from 0 to 1, not {self.predictable:g}"))
            if not 0 <= self.spread <= 10:
                wrong.append(Violation("spread", f"must be from 0 to 10, not {self.spread:g}"))
            if not 0.01 <= self.bias <= 100:
                wrong.append(Violation("bias", f"must be from 0.01 to 100, not {self.bias:g}"))
            return wrong

    def __init__(self, options: Options, count: int, seed: int, candidates_of: CandidateSource = no_candidates) -> None:
        super().__init__(count)
        self._judge = candidates_of
        rng = np.random.default_rng([seed, 1])  # a stream of its own: jobs have the same errors in each arm
        self._predictable = rng.random(count) < options.predictable
        error = options.bias * np.exp(options.spread * rng.standard_normal(count))
        self._error = [steady(one) for one in error.tolist()]

    def submitted(self, sequence: int, job: TraceJob) -> Estimate:
        """Return the run time with its error, or nothing."""
        if not self._predictable[sequence]:
            self.set_total(sequence, None, 0.0)
            return UNKNOWN
        error = self._error[sequence]
        self.set_total(sequence, job.work_seconds * error, 1.0)
        candidates = tuple([_with_error(one, error) for one in self._judge(job)])
        return service_scaling.with_batch_latency(job, _certain(job.work_seconds * error, candidates, self.name))

    def total_changed(self, sequence: int, total_seconds: float) -> None:
        """Keep the prediction."""

    def finished(self, job: TraceJob, run_seconds: float, now: float, *, passed: bool = True) -> None:
        """Learn nothing."""


def _certain(seconds: float, candidates: tuple[CandidateEstimate, ...], source: str) -> Estimate:
    return Estimate(predictable=True, confidence=1.0, remaining_seconds=seconds, candidates=candidates, source=source)


def _with_error(one: CandidateEstimate, error: float) -> CandidateEstimate:
    """Return a candidate with the remaining time multiplied and the rate divided by an error."""
    rate, left = one.rate_per_second, one.remaining_seconds
    return replace(
        one,
        rate_per_second=None if rate is None else rate / error,
        remaining_seconds=None if left is None else left * error,
    )


class Recorded(KnownTotals):
    """What was known when a snapshot was taken, so that policies decide as they did."""

    name = "recorded"

    def __init__(self, snapshot_state: SnapshotState, count: int) -> None:
        super().__init__(count)
        self._snapshot_state = snapshot_state

    def submitted(self, sequence: int, job: TraceJob) -> Estimate:
        """Return what the predictor had predicted, or nothing."""
        known = self._snapshot_state.known.get(job.id)
        if known is None:
            self.set_total(sequence, None, 0.0)
            return UNKNOWN
        self.set_total(sequence, known.total_seconds, known.confidence)
        ran = self._snapshot_state.attained.get(job.id, 0.0)
        rest = max(0.0, known.total_seconds - ran)
        return Estimate(predictable=True, confidence=known.confidence, remaining_seconds=rest, source=self.name)

    def total_changed(self, sequence: int, total_seconds: float) -> None:
        """Keep the prediction."""

    def finished(self, job: TraceJob, run_seconds: float, now: float, *, passed: bool = True) -> None:
        """Learn nothing."""


class Learner(KnownTotals):
    """Queries predictors as the service does, and shows them every finished job. `shapes` are those of the nodes."""

    def __init__(self, predictors: Sequence[Predictor], count: int, shapes: Sequence[NodeShape] = ()) -> None:
        super().__init__(count)
        self._shapes = shapes
        self._chain = Chain(predictors, _failed)
        self._asked: dict[str, tuple[int | None, Query]] = {}  # the last query about each job, and its θ

    def submitted(self, sequence: int, job: TraceJob) -> Estimate:
        """Query the predictors once.

        Raises:
            PolicyFailed: a predictor raised an error, or returned an invalid answer.
        """
        estimate = self._ask(job, None)
        known = estimate.predictable and estimate.remaining_seconds is not None
        self.set_total(sequence, estimate.remaining_seconds if known else None, estimate.confidence if known else 0.0)
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
            candidates=standard_candidates(spec, self._shapes, cores_useful),
            qos=spec.qos,
            submission=_submission(job),
        )

    def total_changed(self, sequence: int, total_seconds: float) -> None:
        """Keep the prediction."""

    def window(self, job: TraceJob, held: Candidate, rate_per_second: float, seconds: float, now: float) -> None:
        """Show the predictors the rate of a job on its cores."""
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

    def updated_estimate(self, sequence: int, job: TraceJob, given: Estimate, attained_seconds: float) -> Estimate:
        """Query the predictors again for the cores; the total run time keeps its prediction."""
        new = self._ask(job, given.cores_useful)
        cores, sure = new.cores_useful, new.cores_useful_confidence
        said = super().updated_estimate(sequence, job, given, attained_seconds)
        return replace(said, cores_useful=cores, cores_useful_confidence=sure, source=new.source)

    def finished(self, job: TraceJob, run_seconds: float, now: float, *, passed: bool = True) -> None:
        """Show the predictors a finished job; train them at once if training is due."""
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
        for seen in (*service_scaling.batches(job, standard_candidates(spec, self._shapes)[0], ended), ended):
            self._chain.observe(seen)
        for predictor in self._chain.predictors.values():
            if isinstance(predictor, Trains) and (training_task := predictor.training_task()):
                predictor.adopt(training_task.train())


def _failed(predictor: Predictor, error: str) -> None:
    raise PolicyFailed("predictor", predictor, "a job", error)


def _submission(job: TraceJob) -> Submission:
    return Submission(job.user, job.submitted_seconds, job.kind.value, job.roles)
