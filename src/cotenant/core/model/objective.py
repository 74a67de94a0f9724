"""The status of a job's objectives: met, at risk, missed or unknown, with the margin and the reason in numbers.

`statuses` is a function of what is known about a job at a moment. The queue asks it about live and ended jobs, at
submission about a job that does not exist yet, and the simulator about the jobs of a trace; so all of them count alike.

- A deadline is met by a job that succeeds in time; at risk if the median of the forecast finish is later; missed once
  it has passed, or if the job fails. A job that its owner cancels neither meets nor misses it.
- A minimum rate is at risk while the measured rate is lower, and missed by a job whose mean rate was lower. Before it
  runs, the rate expected on its best candidate allocation counts.
- A latency target is at risk while the latency at its percentile, computed from measured batches, is longer, or a
  single batch takes longer than the target.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from cotenant.core.model.job import JobSpec, Qos
from cotenant.core.model.lifecycle import Phase

NO_QOS = Qos()


class ObjectiveKind(StrEnum):
    """What an objective is about."""

    DEADLINE = "deadline"
    RATE = "rate"
    LATENCY = "latency"


class ObjectiveState(StrEnum):
    """Whether an objective is kept."""

    MET = "met"
    AT_RISK = "at_risk"
    MISSED = "missed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Finish:
    """When a job is expected to finish, in unix seconds: the median, and the range of 8 of 10 cases."""

    seconds: float
    low_seconds: float
    high_seconds: float


@dataclass(frozen=True, slots=True)
class JobFacts:
    """What is known about a job at a moment; None for what is not.

    Times are in unix seconds, or on the clock of a simulation. `rate_per_second` is the measured rate: of the last
    window while the job runs, the mean once it has ended; before it runs, the best that is expected. `latency_seconds`
    is the latency at the objective's percentile; infinity if the replicas do not keep up. `batch_seconds` is the
    duration of the last batch. `unforecast` says why there is no expected finish.
    """

    phase: Phase
    deadline_seconds: float | None = None
    qos: Qos = NO_QOS
    ended_seconds: float | None = None
    finish: Finish | None = None
    rate_per_second: float | None = None
    latency_seconds: float | None = None
    batch_seconds: float | None = None
    unforecast: str = ""


@dataclass(frozen=True, slots=True)
class ObjectiveStatus:
    """The status of one objective.

    `target`, `value` and `margin` are in the objective's unit: unix seconds, with a margin in seconds; steps per
    second; or seconds of latency. A positive margin is on the right side. `final`: it cannot change any more.
    """

    kind: ObjectiveKind
    state: ObjectiveState
    target: float
    detail: str
    value: float | None = None
    final: bool = False

    @property
    def margin(self) -> float | None:
        """By how much the objective is kept; negative: by how much it is not."""
        if self.value is None:
            return None
        return self.value - self.target if self.kind is ObjectiveKind.RATE else self.target - self.value


def has_objective(spec: JobSpec) -> bool:
    """Return whether a job has any objective.

    >>> has_objective(JobSpec()), has_objective(JobSpec(deadline_seconds=5.0))
    (False, True)
    """
    return spec.deadline_seconds is not None or bool(spec.qos.rate_min_per_second or spec.qos.latency_seconds)


def statuses(facts: JobFacts, now: float) -> tuple[ObjectiveStatus, ...]:
    """Return the status of each objective of a job.

    >>> facts = JobFacts(Phase.RUNNING, deadline_seconds=7800, finish=Finish(6300, 5400, 6900))
    >>> [status] = statuses(facts, now=0)
    >>> status.state.value, status.margin, status.detail
    ('met', 1500, 'deadline in 2 h 10 min; expected to finish 25 min before it (15 to 40)')
    """
    return tuple(_statuses(facts, now))


def _statuses(facts: JobFacts, now: float) -> Iterator[ObjectiveStatus]:
    if facts.deadline_seconds is not None:
        yield _deadline(facts, facts.deadline_seconds, now)
    if facts.qos.rate_min_per_second:
        yield _rate(facts, facts.qos.rate_min_per_second)
    if facts.qos.latency_seconds:
        yield _latency(facts, facts.qos)


# Deadlines -----------------------------------------------------------------------------------------------------


def _deadline(facts: JobFacts, deadline: float, now: float) -> ObjectiveStatus:
    if facts.phase.ended:
        return _ended_deadline(facts, deadline, now if facts.ended_seconds is None else facts.ended_seconds)
    kind, finish = ObjectiveKind.DEADLINE, facts.finish
    value = None if finish is None else max(now, finish.seconds)
    if now > deadline:
        rest = "" if value is None else f"; expected to finish in {in_span(value - now)}"
        detail = f"deadline passed {in_span(now - deadline)} ago{rest}"
        return ObjectiveStatus(kind, ObjectiveState.MISSED, deadline, detail, value, final=True)
    left = f"deadline in {in_span(deadline - now)}"
    if finish is None or value is None:
        why = facts.unforecast or "its finish is not forecast"
        return ObjectiveStatus(kind, ObjectiveState.UNKNOWN, deadline, f"{left}; {why}")
    state = ObjectiveState.MET if value <= deadline else ObjectiveState.AT_RISK
    return ObjectiveStatus(kind, state, deadline, f"{left}; expected to finish {_beside(finish, deadline)}", value)


def _ended_deadline(facts: JobFacts, deadline: float, ended: float) -> ObjectiveStatus:
    how = {Phase.SUCCEEDED: "finished", Phase.FAILED: "failed"}.get(facts.phase, "was cancelled")
    side = "before" if ended <= deadline else "after"
    detail = f"{how} {in_span(abs(deadline - ended))} {side} its deadline"
    state, value = ObjectiveState.MISSED, ended
    if facts.phase is Phase.SUCCEEDED and ended <= deadline:
        state = ObjectiveState.MET
    elif facts.phase is Phase.CANCELLED:
        state, detail = ObjectiveState.UNKNOWN, f"{detail}, which counts neither as met nor as missed"
    return ObjectiveStatus(ObjectiveKind.DEADLINE, state, deadline, detail, value, final=True)


def _beside(finish: Finish, deadline: float) -> str:
    """Describe a finish as "25 min before it (15 to 40)".

    >>> _beside(Finish(5400, 3600, 9000), 7200)
    '30 min before it (1 h before to 30 min after)'
    >>> _beside(Finish(9600, 9000, 10800), 7200)
    '40 min after it (30 min to 1 h)'
    >>> _beside(Finish(600, 600, 1800), 1200)
    '10 min before it (10 min before to 10 min after)'
    """
    side = "before" if finish.seconds <= deadline else "after"
    told = f"{in_span(abs(deadline - finish.seconds))} {side} it"
    ends = sorted((finish.low_seconds, finish.high_seconds), key=lambda end: abs(deadline - end))
    near, far = (abs(deadline - end) for end in ends)
    straddles = finish.low_seconds <= deadline < finish.high_seconds
    if in_span(near) == in_span(far) == in_span(abs(deadline - finish.seconds)) and not straddles:
        return told
    if straddles:
        early, late = in_span(deadline - finish.low_seconds), in_span(finish.high_seconds - deadline)
        return f"{told} ({early} before to {late} after)"
    first, last = in_span(near), in_span(far)
    units = {text.split(" ", 1)[1] for text in (first, last, in_span(abs(deadline - finish.seconds)))}
    if len(units) == 1 and not any(text.isdecimal() for text in units.pop().split()):
        first, last = first.split(" ")[0], last.split(" ")[0]
    return f"{told} ({first} to {last})"


def in_span(seconds: float) -> str:
    """Format a time span in its two largest units.

    >>> in_span(41.2), in_span(740), in_span(7800), in_span(7200), in_span(200_000)
    ('41 s', '12 min', '2 h 10 min', '2 h', '2 days 8 h')
    """
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100 and minutes != 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(round(seconds / 3600), 24)
    return f"{days} days {hours} h" if hours else f"{days} days"


# Rates and latencies -------------------------------------------------------------------------------------------


def _rate(facts: JobFacts, least: float) -> ObjectiveStatus:
    rate, ended = facts.rate_per_second, facts.phase.ended
    if rate is None:
        why = "no rate was measured" if ended else "no rate is known yet"
        detail = f"wants at least {least:g} steps/s; {why}"
        return ObjectiveStatus(ObjectiveKind.RATE, ObjectiveState.UNKNOWN, least, detail, final=ended)
    if ended:
        runs = "ran at {} steps/s on average"
    elif facts.phase.holds_resources:
        runs = "runs at {} steps/s"
    else:
        runs = "is expected to run at {} steps/s at best"
    below = ObjectiveState.MISSED if ended else ObjectiveState.AT_RISK
    state = ObjectiveState.MET if rate >= least else below
    detail = f"{runs.format(f'{rate:.3g}')}; its minimum is {least:g}"
    return ObjectiveStatus(ObjectiveKind.RATE, state, least, detail, rate, final=ended)


def _latency(facts: JobFacts, qos: Qos) -> ObjectiveStatus:
    target, ended = qos.latency_seconds, facts.phase.ended
    promise = f"its target is {target:g} s for {qos.latency_percentile:g} %"
    late = ObjectiveState.MISSED if ended else ObjectiveState.AT_RISK
    kind, seconds = ObjectiveKind.LATENCY, facts.latency_seconds
    if seconds is not None and math.isinf(seconds):
        detail = f"its replicas do not keep up with {qos.arrivals_per_second:g} requests a second; {promise}"
        return ObjectiveStatus(kind, late, target, detail, final=ended)
    if seconds is not None:
        detail = f"answers {qos.latency_percentile:g} % of its requests within {seconds:.3g} s; {promise}"
        return ObjectiveStatus(kind, ObjectiveState.MET if seconds <= target else late, target, detail, seconds, ended)
    if facts.batch_seconds is not None and facts.batch_seconds > target:
        detail = f"its last batch alone took {facts.batch_seconds:.3g} s; {promise}"
        return ObjectiveStatus(kind, late, target, detail, facts.batch_seconds, ended)
    detail = f"its latency is not known; {promise}"
    return ObjectiveStatus(kind, ObjectiveState.UNKNOWN, target, detail, final=ended)


# What would help -----------------------------------------------------------------------------------------------


def remedy_of(status: ObjectiveStatus, facts: JobFacts, now: float, start_seconds: float | None = None) -> str:
    """Return what would help a job to keep an objective; "" if it is kept. `start_seconds`: when it would start.

    >>> facts = JobFacts(Phase.QUEUED, deadline_seconds=3600, finish=Finish(6000, 5000, 8000))
    >>> remedy_of(statuses(facts, 0)[0], facts, 0, start_seconds=4200)
    'a deadline 2 h 13 min from now or later, or a start within 30 min, for example by a higher priority'
    """
    if status.state is ObjectiveState.MET:
        return ""
    if status.kind is ObjectiveKind.RATE:
        if status.value is None:
            return "a run of a similar job: its rates are learned by user and model"
        return f"a minimum of {status.value:.3g} steps/s or less, or faster resources"
    if status.kind is ObjectiveKind.LATENCY:
        if status.value is None and status.state is ObjectiveState.UNKNOWN:
            return "a run of a similar service that reports its batches, and the predictor `latency`"
        return "more replicas, a longer target, or fewer requests a second"
    finish = facts.finish
    if finish is None:
        return "give its run time (expected), or steps and a model whose jobs have run before"
    later = f"a deadline {in_span(max(finish.seconds, finish.high_seconds) - now)} from now or later"
    if start_seconds is None:
        return later
    spare = status.target - now - (finish.seconds - start_seconds)
    if spare > 0:
        return f"{later}, or a start within {in_span(spare)}, for example by a higher priority"
    return f"{later}, or a shorter run: it takes {in_span(finish.seconds - start_seconds)} even if it starts now"
