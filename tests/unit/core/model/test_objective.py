"""The status of objectives, from facts about a job."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.model.job import JobSpec, Qos
from cotenant.core.model.lifecycle import ENDED, Phase
from cotenant.core.model.objective import (
    Finish,
    JobFacts,
    ObjectiveKind,
    ObjectiveState,
    ObjectiveStatus,
    has_objective,
    remedy_of,
    statuses,
)

HOUR = 3600.0
RATE = Qos(rate_min_per_second=4.0)
LATENCY = Qos(latency_seconds=0.05, latency_percentile=99.0, arrivals_per_second=400.0)
times = st.floats(0, 1e6)
finishes = st.lists(times, min_size=3, max_size=3).map(sorted).map(lambda one: Finish(one[1], one[0], one[2]))
figures = st.none() | st.floats(0, 1e3) | st.just(math.inf)
qos = st.builds(Qos, st.sampled_from([0.0, 4.0]), st.sampled_from([0.0, 0.05]), st.just(99.0), st.just(400.0))
facts_of_any_job = st.builds(
    JobFacts,
    st.sampled_from(Phase),
    deadline_seconds=st.none() | times,
    qos=qos,
    ended_seconds=times,
    finish=st.none() | finishes,
    rate_per_second=st.none() | st.floats(0, 1e3),
    latency_seconds=figures,
    batch_seconds=st.none() | st.floats(0, 1e3),
)


def status(facts: JobFacts, now: float = 0.0) -> ObjectiveStatus:
    [found] = statuses(facts, now)
    return found


@pytest.mark.parametrize(
    ("finish", "state", "text"),
    [
        (Finish(5400, 5400, 5400), "met", "deadline in 2 h; expected to finish 30 min before it"),
        (Finish(5400, 4800, 6000), "met", "deadline in 2 h; expected to finish 30 min before it (20 to 40)"),
        (Finish(7200, 7200, 7200), "met", "deadline in 2 h; expected to finish 0 s before it"),
        (Finish(9600, 5400, 9900), "at_risk", "expected to finish 40 min after it (30 min before to 45 min after)"),
        (Finish(9600, 8400, 12600), "at_risk", "expected to finish 40 min after it (20 to 90)"),
        (Finish(9600, 7230, 180_000), "at_risk", "expected to finish 40 min after it (30 s to 2 days)"),
    ],
)
def test_a_live_deadline_is_judged_by_the_median_and_says_the_range(finish: Finish, state: str, text: str) -> None:
    found = status(JobFacts(Phase.RUNNING, deadline_seconds=2 * HOUR, finish=finish))
    assert found.state.value == state
    assert found.detail.endswith(text)
    assert found.margin == 2 * HOUR - finish.seconds
    assert not found.final


@pytest.mark.parametrize(
    ("phase", "ended", "state", "text"),
    [
        (Phase.SUCCEEDED, 90.0, "met", "finished 10 s before its deadline"),
        (Phase.SUCCEEDED, 100.0, "met", "finished 0 s before its deadline"),
        (Phase.SUCCEEDED, 130.0, "missed", "finished 30 s after its deadline"),
        (Phase.FAILED, 90.0, "missed", "failed 10 s before its deadline"),
        (Phase.CANCELLED, 90.0, "unknown", "was cancelled 10 s before its deadline, which counts neither"),
    ],
)
def test_an_ended_job_keeps_the_outcome_of_its_deadline(phase: Phase, ended: float, state: str, text: str) -> None:
    found = status(JobFacts(phase, deadline_seconds=100.0, ended_seconds=ended), now=1e6)
    assert (found.state.value, found.final) == (state, True)
    assert found.detail.startswith(text)


def test_a_passed_deadline_is_missed_for_good_while_the_job_runs() -> None:
    facts = JobFacts(Phase.RUNNING, deadline_seconds=100.0, finish=Finish(700.0, 700.0, 700.0))
    found = status(facts, now=400.0)
    assert (found.state, found.final, found.margin) == (ObjectiveState.MISSED, True, -600.0)
    assert found.detail == "deadline passed 5 min ago; expected to finish in 5 min"
    assert status(replace(facts, finish=None), now=400.0).detail == "deadline passed 5 min ago"


def test_a_deadline_without_a_forecast_is_unknown_and_says_why() -> None:
    found = status(JobFacts(Phase.QUEUED, deadline_seconds=100.0, unforecast="its run time is not known"))
    assert (found.state, found.margin) == (ObjectiveState.UNKNOWN, None)
    assert found.detail == "deadline in 2 min; its run time is not known"


@pytest.mark.parametrize(
    ("phase", "rate", "state", "text"),
    [
        (Phase.RUNNING, 4.4, "met", "runs at 4.4 steps/s; its minimum is 4"),
        (Phase.RUNNING, 3.6, "at_risk", "runs at 3.6 steps/s; its minimum is 4"),
        (Phase.QUEUED, 3.6, "at_risk", "is expected to run at 3.6 steps/s at best; its minimum is 4"),
        (Phase.SUCCEEDED, 3.6, "missed", "ran at 3.6 steps/s on average; its minimum is 4"),
        (Phase.CANCELLED, 4.0, "met", "ran at 4 steps/s on average; its minimum is 4"),
        (Phase.RUNNING, None, "unknown", "wants at least 4 steps/s; no rate is known yet"),
        (Phase.FAILED, None, "unknown", "wants at least 4 steps/s; no rate was measured"),
    ],
)
def test_rates(phase: Phase, rate: float | None, state: str, text: str) -> None:
    found = status(JobFacts(phase, qos=RATE, rate_per_second=rate))
    assert (found.state.value, found.detail, found.final) == (state, text, phase.ended)
    assert found.margin == (None if rate is None else rate - 4.0)


@pytest.mark.parametrize(
    ("phase", "latency", "batch", "state", "text"),
    [
        (Phase.RUNNING, 0.043, None, "met", "answers 99 % of its requests within 0.043 s"),
        (Phase.RUNNING, 0.062, 0.01, "at_risk", "answers 99 % of its requests within 0.062 s"),
        (Phase.RUNNING, math.inf, None, "at_risk", "its replicas do not keep up with 400 requests a second"),
        (Phase.RUNNING, None, 0.07, "at_risk", "its last batch alone took 0.07 s"),
        (Phase.RUNNING, None, 0.04, "unknown", "its latency is not known"),
        (Phase.CANCELLED, 0.043, None, "met", "answers 99 % of its requests within 0.043 s"),
        (Phase.CANCELLED, 0.062, None, "missed", "answers 99 % of its requests within 0.062 s"),
    ],
)
def test_latencies(phase: Phase, latency: float | None, batch: float | None, state: str, text: str) -> None:
    found = status(JobFacts(phase, qos=LATENCY, latency_seconds=latency, batch_seconds=batch))
    assert (found.state.value, found.final) == (state, phase.ended)
    assert found.detail == f"{text}; its target is 0.05 s for 99 %"


def test_what_would_help_fits_the_objective() -> None:
    facts = JobFacts(Phase.QUEUED, deadline_seconds=600.0, finish=Finish(2400, 2400, 2400))
    late = status(facts)
    assert remedy_of(late, facts, 0.0, start_seconds=600.0).endswith(
        "or a shorter run: it takes 30 min even if it starts now"
    )
    assert remedy_of(late, facts, 0.0, start_seconds=2000.0).endswith(
        "or a start within 3 min, for example by a higher priority"
    )
    unknown = replace(facts, finish=None)
    assert remedy_of(status(unknown), unknown, 0.0).startswith("give its run time (expected)")
    slow = JobFacts(Phase.QUEUED, qos=RATE, rate_per_second=3.0)
    assert remedy_of(status(slow), slow, 0.0) == "a minimum of 3 steps/s or less, or faster resources"
    fine = replace(slow, rate_per_second=9.0)
    assert remedy_of(status(fine), fine, 0.0) == ""
    silent = JobFacts(Phase.RUNNING, qos=LATENCY)
    assert remedy_of(status(silent), silent, 0.0).startswith("a run of a similar service that reports its batches")
    tardy = replace(silent, latency_seconds=0.07)
    assert remedy_of(status(tardy), tardy, 0.0).startswith("more replicas, a longer target")


@given(facts_of_any_job, times)
def test_every_objective_has_one_status_that_agrees_with_its_margin(facts: JobFacts, now: float) -> None:
    found = statuses(facts, now)
    spec = JobSpec(deadline_seconds=facts.deadline_seconds, qos=facts.qos)
    assert bool(found) == has_objective(spec)
    kinds = [one.kind for one in found]
    assert len(set(kinds)) == len(kinds)
    for one in found:
        assert one.detail
        if one.state is ObjectiveState.MET:
            assert one.margin is not None
            assert one.margin >= 0
        if one.state is ObjectiveState.AT_RISK:
            assert not one.final
            assert one.margin is None or one.margin < 0
        if facts.phase in ENDED:
            assert one.final
            assert one.state is not ObjectiveState.AT_RISK
        if one.margin is not None and one.margin < 0 and facts.phase is not Phase.CANCELLED:
            assert one.state in (ObjectiveState.AT_RISK, ObjectiveState.MISSED)


@given(facts_of_any_job, times, st.floats(0, 1e6))
def test_a_later_deadline_is_never_worse(facts: JobFacts, now: float, more: float) -> None:
    if facts.deadline_seconds is None:
        return
    order = [ObjectiveState.MET, ObjectiveState.AT_RISK, ObjectiveState.MISSED]
    later = replace(facts, deadline_seconds=facts.deadline_seconds + more)
    first, second = (
        next(one.state for one in statuses(some, now) if one.kind is ObjectiveKind.DEADLINE) for some in (facts, later)
    )
    if first in order and second in order:
        assert order.index(second) <= order.index(first)
