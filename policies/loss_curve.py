"""Remaining time of a job from the steps and losses that it reports."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cotenant.core.model.estimate import (
    TRAINING,
    Candidate,
    CandidateEstimate,
    Estimate,
    Observation,
    Query,
    validated_rate,
)
from cotenant.core.model.loss_goal import LossGoal
from cotenant.core.model.refusal import plural
from cotenant.core.model.validation import Violation
from cotenant.core.prediction import record_validation as kept
from cotenant.core.prediction.job_class_memory import JobClassMemory, Key, job_class_of
from cotenant.core.prediction.loss_fit import Forecast, forecast
from cotenant.core.prediction.loss_points import CELLS_MAX, LossPoints
from cotenant.policies.history import Summary, summarize

P90_SIGMAS = 1.2816  # the 90th percentile of the normal distribution

AllocationKey = tuple[int, str]  # cores per replica and GPU type
NOT_SEEN = Estimate(source="it has not reported steps or losses yet")
NO_END = Estimate(source="it reports neither its number of steps nor the loss at which it is done")


@dataclass(slots=True)
class Reported:
    """What one job reported: losses by step, and its latest rates by allocation, the present one last."""

    points: LossPoints = field(default_factory=LossPoints)
    rates: OrderedDict[AllocationKey, list[float]] = field(default_factory=OrderedDict)
    step: int = 0
    forecasts: dict[LossGoal, tuple[float, Forecast]] = field(default_factory=dict)  # with the last step known then
    user: str = ""  # the job's user: other users who query its id get no answer; "" in records of older versions

    @property
    def pace(self) -> Summary | None:
        """The rate under the present allocation."""
        return summarize(next(reversed(self.rates.values()))) if self.rates else None


class LossCurve:
    """Fit each job's loss curve, predict the step that reaches its goal, and divide by the job's rate.

    The curve is ℓ(k) = 1/(β₀k + β₁) + β₂ (Optimus, Peng et al., EuroSys 2018), fitted online; a job is predictable from
    a confidence of 0.5 (AITurbo, Zhao et al., HPDC 2021 [D]) and unpredictable again when the fit breaks. How the
    confidence is computed is our own [R]: see `cotenant.core.prediction.loss_fit`. A job that reports its total number
    of steps needs no curve: its remaining steps decide. Otherwise it reports the loss, or the decrease of the loss, at
    which it is done.

    >>> from cotenant.core.model.loss_goal import LossGoal
    >>> curve, goal = LossCurve(), LossGoal(target=1.0)  # reached at step 3,000 by the curve below
    >>> for step in range(20, 1220, 20):
    ...     loss = 2 / (1 + step / 1000) + 0.5
    ...     seen = Observation("ann", "bert", "", 1000, 1, Candidate(4), 2.0, 10.0, job_id="j1", step=step, loss=loss)
    ...     curve.observe(seen)
    >>> estimate = curve.estimate(Query("ann", "bert", "", 1000, 1, job_id="j1", step=1200, loss_goal=goal))
    >>> estimate.predictable, round(estimate.remaining_seconds)
    (True, 900)
    """

    name = "loss-curve"
    api_version = 1

    @dataclass(frozen=True, slots=True)
    class Options:
        """How much is remembered, and how much confidence is needed.

        jobs_max: jobs remembered; the least recently used job is dropped first. Ended jobs are dropped at once.
        rates_max: latest rates remembered of each allocation of a job.
        allocations_max: latest allocations of a job whose rates are remembered.
        confidence_min: minimum confidence from which a job is predictable.
        refit_share: a curve is refitted once its job has advanced by this share of its steps; 0: with every loss.
        """

        jobs_max: int = 10_000
        rates_max: int = 16
        allocations_max: int = 8
        confidence_min: float = 0.5
        refit_share: float = 0.02

        def check(self) -> Iterator[Violation]:
            """Yield a violation for each invalid option."""
            for name in ("jobs_max", "rates_max", "allocations_max"):
                if getattr(self, name) < 1:
                    yield Violation(name, f"must be 1 or more, not {getattr(self, name)}")
            for name in ("confidence_min", "refit_share"):
                if not 0 <= getattr(self, name) <= 1:
                    yield Violation(name, f"must be from 0 to 1, not {getattr(self, name):g}")

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()
        self._reported: JobClassMemory[Reported] = JobClassMemory(self.options.jobs_max, Reported, _write, _read)
        self._due: dict[Key, LossGoal] = {}  # jobs whose curve has new points

    def observe(self, observation: Observation) -> None:
        """Record a training step, its loss and its rate; an ended job is dropped.

        Other phases, such as validation, have another curve and another rate, and are ignored.

        Raises:
            ValueError: an invalid figure; nothing of the observation is kept.
        """
        rate, step = validated_rate(observation), observation.step
        if step is not None and step < 0:
            raise ValueError(f"a step must not be negative, not {step}")
        key = _key(observation)
        if observation.run_seconds is not None:
            self._reported.forget(key)
            self._due.pop(key, None)
            return
        if observation.phase != TRAINING or (not rate and step is None):
            return
        reported = self._reported.change(key)
        reported.user = observation.user
        if step is not None:
            reported.step = step
            if observation.loss is not None:
                reported.points.add(step, observation.loss)
                if observation.loss_goal.given:
                    self._due[key] = observation.loss_goal
                    if len(self._due) > self.options.jobs_max:
                        del self._due[next(iter(self._due))]
        if rate:
            self._note(reported, (observation.allocation.cores, observation.allocation.gpu_type), rate)

    def _note(self, reported: Reported, held: AllocationKey, rate: float) -> None:
        rates = reported.rates.setdefault(held, [])
        rates.append(rate)
        del rates[: -self.options.rates_max]
        reported.rates.move_to_end(held)
        if len(reported.rates) > self.options.allocations_max:
            reported.rates.popitem(last=False)

    def prepare(self, fits_max: int) -> int:
        """Fit some of the curves with new points in advance of queries."""
        for key in list(self._due)[:fits_max]:
            goal, reported = self._due.pop(key), self._reported.get(key)
            if reported is not None:
                self._by_curve(reported, goal)
        return len(self._due)

    def estimate(self, query: Query) -> Estimate:
        """Return when this job will finish by its own reports, with the confidence and the source."""
        key = _key(query)
        reported = self._reported.get(key)
        if reported is None or (reported.user and reported.user != query.user):
            return replace(NOT_SEEN, candidates=(CandidateEstimate(),) * len(query.candidates))
        step = query.step or reported.step
        end = _by_total(query, step) or self._by_curve(reported, query.loss_goal)
        rest = self._remaining(reported, end, step)
        left = max(0.0, end.step - step) if rest.predictable else None
        judged = tuple([_judge(candidate, reported, left, end.confidence) for candidate in query.candidates])
        return replace(rest, candidates=judged)

    def _by_curve(self, reported: Reported, goal: LossGoal) -> Forecast:
        """Return the forecast of the step that reaches the goal; refits the curve only if it has enough new points.

        A fit costs a millisecond or two, and a single further loss changes next to nothing.
        """
        last = reported.points.step
        if not goal.given:
            return Forecast(why=NO_END.source)
        if reported.points.wild:
            return Forecast(why="its loss was recently not a finite number")
        since, found = reported.forecasts.get(goal, (math.inf, None))
        if found is None or not since <= last <= since * (1 + self.options.refit_share):
            found = forecast(reported.points.cells, goal)
            reported.forecasts = {goal: (last, found)}  # a job has one goal; queries with other goals pay for a refit
        return found

    def _remaining(self, reported: Reported, end: Forecast, step: int) -> Estimate:
        pace = reported.pace
        if end.why or pace is None:
            return Estimate(source=end.why or "its rate is unknown")
        sure = min(end.confidence, pace.confidence)
        if sure < self.options.confidence_min:
            return Estimate(source=_unsure(end, pace))
        left, spread = max(0.0, end.step - step), end.error * P90_SIGMAS * end.step
        return Estimate(
            True,
            sure,
            left / pace.middle,
            max(0.0, left - spread) / pace.high,
            (left + spread) / pace.low,
            source=f"{_ahead(end, left)} at {pace.middle:.3g} steps per second",
        )

    def dump(self) -> Mapping[str, bytes]:
        """Return the records changed since the last dump; an empty record was dropped."""
        return self._reported.dump()

    def restore(self, records: Mapping[str, bytes]) -> Sequence[str]:
        """Restore dumped records; returns the names of the records that could not be read."""
        return self._reported.restore(records)


def _key(about: Observation | Query) -> Key:
    """Return a job's key: its id, else its job class, in which case equal jobs spoil each other's curve."""
    if about.job_id:
        return (about.job_id,)
    return job_class_of(about)


def _by_total(query: Query, step: int) -> Forecast | None:
    if not query.steps_total:
        return None
    if step > query.steps_total:
        return Forecast(why=f"it is at step {step}, beyond its total of {query.steps_total}")
    return Forecast(float(query.steps_total), 0.0, 1.0)


def _unsure(end: Forecast, pace: Summary) -> str:
    if pace.confidence < end.confidence:
        return "its rates are too few or too different"
    off = f"off by about {100 * end.error:.0f} %" if end.error < 1 else "its losses fit other ends as well"
    return f"its loss curve points to step {end.step:.0f}, with low confidence: {off}"


def _ahead(end: Forecast, left: float) -> str:
    if end.curve is None:
        return f"{plural(round(left), 'step')} left"
    beta_0, beta_1, beta_2 = end.curve.betas
    return f"the loss curve 1/({beta_0:.3g}·k + {beta_1:.3g}) + {beta_2:.3g} reaches its goal at step {end.step:.0f}"


def _judge(candidate: Candidate, reported: Reported, left: float | None, sure: float) -> CandidateEstimate:
    """Judge an allocation by the rates under it; without a GPU type any type matches, the latest first."""
    for (cores, gpu_type), rates in reversed(reported.rates.items()):
        if cores == candidate.cores and candidate.gpu_type in ("", gpu_type):
            pace = summarize(rates)
            rest = None if left is None else left / pace.middle
            return CandidateEstimate(
                pace.middle, rest, min(sure, pace.confidence) if left is not None else pace.confidence
            )
    return CandidateEstimate()


def _write(key: Key, reported: Reported) -> bytes:
    rates = [[cores, gpu_type, figures] for (cores, gpu_type), figures in reported.rates.items()]
    record = {
        "key": key,
        "user": reported.user,
        "step": reported.step,
        "wildness": reported.points.wildness,
        "rates": rates,
    }
    return json.dumps(record | {"cells": reported.points.cells}, separators=(",", ":")).encode()


def _read(content: bytes) -> tuple[Key, Reported]:
    """Decode a record.

    Raises:
        ValueError, TypeError, KeyError: the content is not a valid record.
    """
    record = json.loads(content)
    key = tuple(record["key"])
    cells = [
        (
            kept.between(step, 0, kept.STEPS_MAX),
            kept.between(loss, -kept.LOSS_MAX, kept.LOSS_MAX),
            kept.whole(points, 1, kept.STEPS_MAX),
        )
        for step, loss, points in record["cells"]
    ]
    wildness = kept.between(record["wildness"], 0, kept.LOSS_MAX)
    step, user = kept.whole(record["step"], 0, kept.STEPS_MAX), kept.text(record.get("user", ""))
    reported = Reported(LossPoints(cells, wildness), step=step, user=user)
    if (
        not all(isinstance(part, str) and kept.text(part) == part for part in key)
        or len(key) not in (1, 4)
        or len(cells) > CELLS_MAX
    ):
        raise ValueError("not a record of a job")
    steps = [step for step, _, _ in cells]
    if steps != sorted(set(steps)):
        raise ValueError("the losses are not ordered by step")
    for cores, gpu_type, figures in record["rates"]:
        rates = [kept.rate(figure) for figure in figures]
        if not rates:
            raise ValueError("an allocation without rates")
        reported.rates[kept.cores(cores), kept.text(gpu_type)] = rates
    return key, reported
