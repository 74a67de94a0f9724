"""How long a job will run on, from the steps and losses that it tells."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cotenant.core.model.estimate import TRAINING, Candidate, CandidateEstimate, Estimate, Observation, Query, rate_of
from cotenant.core.model.loss_goal import LossGoal
from cotenant.core.model.refusal import plural
from cotenant.core.model.validation import Violation
from cotenant.core.prediction import record_validation as kept
from cotenant.core.prediction.job_class_memory import Key, Remembered, kind_of
from cotenant.core.prediction.loss_fit import Forecast, forecast
from cotenant.core.prediction.loss_points import CELLS_MAX, LossPoints
from cotenant.policies.history import Summary, summarise

P90_SIGMAS = 1.2816  # the 90th percentile of the normal distribution

Held = tuple[int, str]  # cores per replica and GPU type
NOT_SEEN = Estimate(source="it has told neither steps nor losses yet")
NO_END = Estimate(source="it tells neither how many steps it takes nor the loss at which it is done")


@dataclass(slots=True)
class Told:
    """What one job told: its losses by step, and its latest rates by what it held; what it holds now comes last."""

    points: LossPoints = field(default_factory=LossPoints)
    rates: OrderedDict[Held, list[float]] = field(default_factory=OrderedDict)
    step: int = 0
    forecasts: dict[LossGoal, tuple[float, Forecast]] = field(default_factory=dict)  # with the last step known then
    user: str = ""  # whose it is: others who ask by its id are told nothing; "" of what older versions wrote down

    @property
    def pace(self) -> Summary | None:
        """The rate under what the job holds now."""
        return summarise(next(reversed(self.rates.values()))) if self.rates else None


class LossCurve:
    """Fit each job's own loss curve, ask it when the goal will be reached, and divide the steps by the job's rate.

    The curve is ℓ(k) = 1/(β₀k + β₁) + β₂ (Optimus, Peng et al., EuroSys 2018), fitted on line; a job is predictable
    from a confidence of 0.5 on (AITurbo, Zhao et al., HPDC 2021 [D]) and unpredictable again when the fit breaks. How
    the confidence is found is our own [R]: see `core/predicting/loss_curve.py`. A job that says how many steps it takes
    needs no curve: the steps that are left decide. Otherwise it says at which loss it is done, or at which fall of it.

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
        """How much is remembered, and how sure is sure.

        jobs_max: jobs remembered; the one unused for longest is forgotten first. Jobs that ended are forgotten at once.
        rates_max: latest rates remembered of each allocation of a job.
        allocations_max: latest allocations of a job whose rates are remembered.
        confidence_min: from this confidence on a job is predictable.
        refit_share: a curve is fitted anew once its job has gone on by this share of its steps; 0: with every loss.
        """

        jobs_max: int = 10_000
        rates_max: int = 16
        allocations_max: int = 8
        confidence_min: float = 0.5
        refit_share: float = 0.02

        def check(self) -> Iterator[Violation]:
            """Name every option that makes no sense."""
            for name in ("jobs_max", "rates_max", "allocations_max"):
                if getattr(self, name) < 1:
                    yield Violation(name, f"must be 1 or more, not {getattr(self, name)}")
            for name in ("confidence_min", "refit_share"):
                if not 0 <= getattr(self, name) <= 1:
                    yield Violation(name, f"must be from 0 to 1, not {getattr(self, name):g}")

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()
        self._told: Remembered[Told] = Remembered(self.options.jobs_max, Told, _write, _read)
        self._due: dict[Key, LossGoal] = {}  # jobs whose curve has something new to be seen

    def observe(self, observation: Observation) -> None:
        """Take in a step, its loss and the rate of a training; a job that ended is forgotten.

        What is told of other phases, such as validation, is another curve at another rate, and passed over.

        Raises:
            ValueError: a figure that cannot be; nothing of the observation is kept.
        """
        rate, step = rate_of(observation), observation.step
        if step is not None and step < 0:
            raise ValueError(f"a step must not be negative, not {step}")
        key = _key(observation)
        if observation.run_seconds is not None:
            self._told.forget(key)
            self._due.pop(key, None)
            return
        if observation.phase != TRAINING or (not rate and step is None):
            return
        told = self._told.change(key)
        told.user = observation.user
        if step is not None:
            told.step = step
            if observation.loss is not None:
                told.points.add(step, observation.loss)
                if observation.loss_goal.given:
                    self._due[key] = observation.loss_goal
                    if len(self._due) > self.options.jobs_max:
                        del self._due[next(iter(self._due))]
        if rate:
            self._note(told, (observation.allocation.cores, observation.allocation.gpu_type), rate)

    def _note(self, told: Told, held: Held, rate: float) -> None:
        rates = told.rates.setdefault(held, [])
        rates.append(rate)
        del rates[: -self.options.rates_max]
        told.rates.move_to_end(held)
        if len(told.rates) > self.options.allocations_max:
            told.rates.popitem(last=False)

    def prepare(self, fits_max: int) -> int:
        """Fit some of the curves that have something new to be seen, before somebody asks."""
        for key in list(self._due)[:fits_max]:
            goal, told = self._due.pop(key), self._told.get(key)
            if told is not None:
                self._by_curve(told, goal)
        return len(self._due)

    def estimate(self, query: Query) -> Estimate:
        """Tell when this job will be done by its own word: how sure, and from what."""
        key = _key(query)
        told = self._told.get(key)
        if told is None or (told.user and told.user != query.user):
            return replace(NOT_SEEN, candidates=(CandidateEstimate(),) * len(query.candidates))
        step = query.step or told.step
        end = _by_total(query, step) or self._by_curve(told, query.loss_goal)
        rest = self._rest(told, end, step)
        left = max(0.0, end.step - step) if rest.predictable else None
        judged = tuple([_judge(candidate, told, left, end.confidence) for candidate in query.candidates])
        return replace(rest, candidates=judged)

    def _by_curve(self, told: Told, goal: LossGoal) -> Forecast:
        """Ask the curve when the goal will be reached. It is fitted anew only once there is something new to be seen.

        A fit costs a millisecond or two, and a single further loss changes next to nothing.
        """
        last = told.points.step
        if not goal.given:
            return Forecast(why=NO_END.source)
        if told.points.wild:
            return Forecast(why="its loss was no finite number lately")
        since, found = told.forecasts.get(goal, (math.inf, None))
        if found is None or not since <= last <= since * (1 + self.options.refit_share):
            found = forecast(told.points.cells, goal)
            told.forecasts = {goal: (last, found)}  # a job has one goal; whoever asks about others pays for it
        return found

    def _rest(self, told: Told, end: Forecast, step: int) -> Estimate:
        pace = told.pace
        if end.why or pace is None:
            return Estimate(source=end.why or "its rate is not known")
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
        """Write down what changed since the last dump; a record without content was forgotten."""
        return self._told.dump()

    def restore(self, records: Mapping[str, bytes]) -> Sequence[str]:
        """Take back what was dumped; names the records that could not be read."""
        return self._told.restore(records)


def _key(about: Observation | Query) -> Key:
    """Know a job by its id; without one by what it looks like, so that two that look alike spoil each other's curve."""
    if about.job_id:
        return (about.job_id,)
    return kind_of(about)


def _by_total(query: Query, step: int) -> Forecast | None:
    if not query.steps_total:
        return None
    if step > query.steps_total:
        return Forecast(why=f"it is at step {step}, beyond the {query.steps_total} that it was to take")
    return Forecast(float(query.steps_total), 0.0, 1.0)


def _unsure(end: Forecast, pace: Summary) -> str:
    if pace.confidence < end.confidence:
        return "its rates are too few or differ too much"
    off = f"off by {100 * end.error:.0f} % or so" if end.error < 1 else "what it has told fits other ends as well"
    return f"its loss curve points to step {end.step:.0f}, but not surely: {off}"


def _ahead(end: Forecast, left: float) -> str:
    if end.curve is None:
        return f"{plural(round(left), 'step')} left"
    beta_0, beta_1, beta_2 = end.curve.betas
    return f"the loss curve 1/({beta_0:.3g}·k + {beta_1:.3g}) + {beta_2:.3g} reaches its goal at step {end.step:.0f}"


def _judge(candidate: Candidate, told: Told, left: float | None, sure: float) -> CandidateEstimate:
    """Judge an allocation by the rates under it; any GPU type where none is named, the latest first."""
    for (cores, gpu_type), rates in reversed(told.rates.items()):
        if cores == candidate.cores and candidate.gpu_type in ("", gpu_type):
            pace = summarise(rates)
            rest = None if left is None else left / pace.middle
            return CandidateEstimate(
                pace.middle, rest, min(sure, pace.confidence) if left is not None else pace.confidence
            )
    return CandidateEstimate()


def _write(key: Key, told: Told) -> bytes:
    rates = [[cores, gpu_type, figures] for (cores, gpu_type), figures in told.rates.items()]
    record = {"key": key, "user": told.user, "step": told.step, "wildness": told.points.wildness, "rates": rates}
    return json.dumps(record | {"cells": told.points.cells}, separators=(",", ":")).encode()


def _read(content: bytes) -> tuple[Key, Told]:
    """Read a record.

    Raises:
        ValueError, TypeError, KeyError: it is none.
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
    told = Told(LossPoints(cells, wildness), step=step, user=user)
    if (
        not all(isinstance(part, str) and kept.text(part) == part for part in key)
        or len(key) not in (1, 4)
        or len(cells) > CELLS_MAX
    ):
        raise ValueError("this is no record of a job")
    steps = [step for step, _, _ in cells]
    if steps != sorted(set(steps)):
        raise ValueError("these are no losses by step")
    for cores, gpu_type, figures in record["rates"]:
        rates = [kept.rate(figure) for figure in figures]
        if not rates:
            raise ValueError("an allocation of which no rate is told")
        told.rates[kept.cores(cores), kept.text(gpu_type)] = rates
    return key, told
