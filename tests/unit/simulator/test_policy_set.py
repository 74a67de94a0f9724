"""The simulator's support of queue policies: reports to learning policies, and removal of given-up jobs."""

from __future__ import annotations

import json
from math import inf

import numpy as np
import pytest
from tests.unit.simulator.histories import Tape

from cotenant.core.model.job_table import Jobs
from cotenant.core.policy.protocols import EndedJob, Order
from cotenant.simulator import PolicyFailed, Trace, TraceJob, simulate
from cotenant.simulator.recording.events import Kind
from cotenant.simulator.traces import workers

DROP = {"queue": {"lost": "drop"}}


def trace(*jobs: tuple[float, float, int, float]) -> Trace:
    """Return a trace of (submitted, seconds, GPUs, deadline); jobs are called a, b, c…"""
    made = (
        TraceJob(chr(ord("a") + n), at, seconds, workers(gpus), deadline_seconds=None if end == inf else end)
        for n, (at, seconds, gpus, end) in enumerate(jobs)
    )
    return Trace("made up", "none", tuple(made))


HOPELESS = trace((0, 50, 2, 50), (0, 20, 1, 45), (10, 5, 1, 90), (60, 5, 2, 61))


def test_a_job_is_given_up_on_time_without_other_events() -> None:
    tape = Tape()
    result = simulate(HOPELESS, "1x2", queue="swaf", placement="count", options=DROP, recorder=tape)
    told = [(one.id, one.finished_seconds, one.given_up_seconds) for one in result.outcomes]
    assert told == [
        ("a", 50.0, None),
        ("b", None, pytest.approx(25.001)),
        ("c", 55.0, None),
        ("d", None, 60.0),
    ]
    events = [event for event in tape.events if event.kind is Kind.GIVEN_UP]
    assert [(event.job_id, event.code) for event in events] == [("b", "GIVEN_UP"), ("d", "GIVEN_UP")]


def test_the_given_up_are_counted_apart_and_are_not_unschedulable() -> None:
    result = simulate(HOPELESS, "1x2", queue="swaf", placement="count", options=DROP)
    assert result.finished + result.given_up == result.jobs == 4
    assert not result.unschedulable
    assert result.as_json()["given_up"] == result.given_up > 0
    json.dumps(result.as_json(), allow_nan=False)
    kept = simulate(HOPELESS, "1x2", queue="swaf", placement="count")
    assert (kept.finished, kept.given_up) == (4, 0)


class Pupil:
    """First in, first out, and remembers reported jobs."""

    name, api_version, preemptive, strict, running_first = "pupil", 1, False, False, False

    def __init__(self, fault: Exception | None = None) -> None:
        self.ended: list[EndedJob] = []
        self._fault = fault

    def order(self, jobs: Jobs, now: float) -> Order:
        return Order(np.zeros(len(jobs), dtype=np.int64), jobs.arrival_seconds.copy())

    def learn(self, ended: EndedJob) -> None:
        if self._fault:
            raise self._fault
        self.ended.append(ended)


def test_a_learning_policy_gets_each_ended_job() -> None:
    pupil = Pupil()
    simulate(trace((0, 30, 2, inf), (0, 5, 1, inf), (0, 7, 4, inf)), "1x4", queue=pupil, placement="count")
    assert pupil.ended == [
        EndedJob(1000, 0, 1, 5.0, 5.0, 5.0, 1.0),  # the oracle's prediction
        EndedJob(2000, 0, 2, 30.0, 60.0, 30.0, 1.0),
        EndedJob(4000, 0, 4, 7.0, 28.0, 7.0, 1.0),
    ]
    unknowing = Pupil()
    simulate(trace((0, 5, 1, inf)), "1x4", queue=unknowing, placement="count", predictor="none")
    assert unknowing.ended == [EndedJob(1000, 0, 1, 5.0, 5.0, None, 0.0)]


def test_a_policy_that_fails_to_learn_is_named() -> None:
    with pytest.raises(PolicyFailed, match="'pupil' failed over the end of a: KeyError"):
        simulate(trace((0, 30, 2, inf)), "1x4", queue=Pupil(KeyError("gone")), placement="count")


@pytest.mark.parametrize(("placement", "kept"), [("consolidate", 200 / 3), ("qos", 100.0)])
def test_the_oracle_gives_candidates_to_a_policy_that_uses_them(placement: str, kept: float) -> None:
    """A gang that would slow its neighbor below its deadline waits for it, though there is room."""
    jobs = trace((0, 100, 2, 105), (1, 100, 4, 250), (2, 100, 2, 600))
    speed = {"speed": "locality,colocation", "interference": "philly"}
    options = {"queue": {"mode": "backfill"}, "simulator": speed}
    result = simulate(jobs, "1x8", placement=placement, options=options)
    assert result.qos_guarantee_percent == pytest.approx(kept)
