"""The robust order: what it makes of ages, of predictions, and of a history."""

from __future__ import annotations

import math
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.conformance.worlds import tables
from cotenant.core.model.job_table import JobRow, JobTable
from cotenant.core.policy.protocols import EndedJob
from cotenant.core.scheduling.ordering import rank
from cotenant.policies.borda_mlfq import BordaMlfq
from cotenant.policies.robust_order import order
from cotenant.policies.robust_order.order import ERRORS_FIRST, RobustOrder

NOW = 1_000_000.0


def ended(seconds: float, predicted: float | None = None, confidence: float = 1.0, gpus: int = 1) -> EndedJob:
    return EndedJob(gpus * 1000, 3 * gpus, gpus, seconds, seconds * gpus, predicted, confidence)


def heavy_tailed(count: int, seed: int = 0) -> list[float]:
    return [float(one) for one in np.exp(np.random.default_rng(seed).normal(7.0, 2.5, count))]


def taught(history: list[EndedJob]) -> BordaMlfq:
    policy = BordaMlfq()
    for one in history:
        policy.learn(one)
    return policy


def table_of(**jobs: tuple[float, float]) -> JobTable:
    """Jobs of one GPU, with what they attained and what is predicted, in order of arrival."""
    table = JobTable()
    for number, (job_id, (attained, predicted)) in enumerate(jobs.items()):
        table.add(JobRow(job_id, arrival_seconds=float(number), sequence=number, gpu_milli=1000))
        table.attain(job_id, attained)
        table.update(job_id, predicted_seconds=predicted, confidence=0.0 if math.isnan(predicted) else 1.0)
    return table


def in_order(table: JobTable, policy: BordaMlfq) -> list[str]:
    jobs = table.jobs(NOW)
    return [table.ids[row] for row in rank(jobs, policy.order(jobs, NOW), running_first=True)]


UNKNOWN = math.nan
RIGHT = [
    ended(seconds, seconds * error)
    for seconds, error in zip(heavy_tailed(200), [0.8, 1.0, 1.25, 0.9] * 50, strict=True)
]
WRONG = [ended(seconds, other) for seconds, other in zip(heavy_tailed(200), heavy_tailed(200, seed=1), strict=True)]


def test_without_predictions_those_that_ran_least_are_first() -> None:
    table = table_of(old=(50_000.0, UNKNOWN), middle=(2000.0, UNKNOWN), new=(0.0, UNKNOWN))
    assert in_order(table, taught([ended(seconds) for seconds in heavy_tailed(200)])) == ["new", "middle", "old"]


def test_jobs_of_one_length_keep_those_that_ran_most() -> None:
    table = table_of(new=(0.0, UNKNOWN), old=(3000.0, UNKNOWN))
    assert in_order(table, taught([ended(3600.0)] * 200)) == ["old", "new"]


def test_right_predictions_decide_and_wrong_ones_do_not() -> None:
    table = table_of(long=(0.0, 200_000.0), short=(0.0, 300.0))
    assert in_order(table, taught(RIGHT)) == ["short", "long"]
    assert in_order(table, taught(WRONG)) == ["long", "short"], "by arrival"
    assert in_order(table, taught([])) == ["long", "short"], "no prediction has been right yet"


def test_predictions_of_too_little_confidence_neither_count_nor_are_judged() -> None:
    policy = RobustOrder(confidence_min=0.5)
    for one in RIGHT:
        policy.learn(EndedJob(one.gpu_milli, one.cores, 1, one.attained_seconds, 0.0, one.predicted_seconds, 0.4))
    assert (policy.explained, policy.trust) == (0.0, 0.0)


def test_trust_is_earned_by_predictions_made_before_the_end_was_known() -> None:
    policy = RobustOrder(confidence_min=0.5)
    assert policy.trust == 0.0
    trusts = []
    for one in (*RIGHT, *WRONG, *WRONG):
        policy.learn(one)
        trusts.append(policy.trust)
    assert trusts[len(RIGHT) - 1] == 1.0
    assert trusts[-1] < 0.2


def test_one_absurd_prediction_costs_a_bounded_part_of_the_trust() -> None:
    policy = RobustOrder(confidence_min=0.5)
    for one in RIGHT:
        policy.learn(one)
    before = policy.explained
    policy.learn(ended(10.0, 1e300))
    assert 0 < before - policy.explained < 9.0 / ERRORS_FIRST / 10


def test_a_job_of_fewer_gpus_is_first_among_equals() -> None:
    table = JobTable()
    for number, gpus in enumerate([64, 1]):
        table.add(JobRow(f"{gpus}", arrival_seconds=float(number), sequence=number, gpu_milli=1000 * gpus))
    assert in_order(table, taught([])) == ["1", "64"]


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0, 0.0, 1e12])
def test_an_impossible_run_time_teaches_nothing(seconds: float) -> None:
    policy = taught(RIGHT)
    policy.learn(ended(seconds, 100.0))
    table = table_of(a=(10_000.0, UNKNOWN), b=(100.0, 5000.0), c=(0.0, UNKNOWN))
    levels = policy.order(table.jobs(NOW), NOW).level
    np.testing.assert_array_equal(levels, taught(RIGHT).order(table.jobs(NOW), NOW).level)


@given(tables(), st.integers(0, 400))
def test_a_restart_with_the_same_ended_jobs_gives_the_same_order(table: JobTable, count: int) -> None:
    """The order between two ends was asked for or not: nothing is learned from that."""
    history, asked = [*RIGHT, *WRONG][:count], BordaMlfq()
    for number, one in enumerate(history):
        asked.learn(one)
        if number % 7 == 0:
            asked.order(table.jobs(NOW - count + number), NOW - count + number)
    jobs = table.jobs(NOW)
    first, again = asked.order(jobs, NOW), taught(history).order(jobs, NOW)
    np.testing.assert_array_equal(first.level, again.level)
    np.testing.assert_array_equal(first.score, again.score)
    assert first.valid_seconds == again.valid_seconds


@given(tables(), st.lists(st.sampled_from([math.nan, 10.0, 3000.0, 1e5]), min_size=1, max_size=5))
def test_orders_are_the_same_whether_rows_are_taken_together_or_in_parts(
    table: JobTable, predicted: list[float]
) -> None:
    for number, job_id in enumerate(table.ids):
        table.update(job_id, predicted_seconds=predicted[number % len(predicted)], confidence=1.0)
    jobs, policy = table.jobs(NOW), taught(RIGHT)
    together = policy.order(jobs, NOW)
    with mock.patch.object(order, "PART", 2):
        in_parts = taught(RIGHT).order(jobs, NOW)
    np.testing.assert_array_equal(together.level, in_parts.level)


def test_memory_is_bounded() -> None:
    policy = RobustOrder(confidence_min=0.5)
    for _ in range(3):
        for one in RIGHT:
            policy.learn(one)
    assert len(policy._unknown) == len(policy._predicted) == 150


@pytest.mark.parametrize("seed", range(3))
def test_a_job_without_gpus_counts_by_its_cores_as_one_with_gpus_does(seed: int) -> None:
    """Three cores count as one GPU, so both histories teach the same."""
    by_gpus, by_cores = RobustOrder(0.5), RobustOrder(0.5)
    for number, seconds in enumerate(heavy_tailed(60, seed)):
        gpus = 1 + number % 7
        by_gpus.learn(EndedJob(gpus * 1000, 0, 1, seconds, seconds * gpus, seconds, 1.0))
        by_cores.learn(EndedJob(0, 3 * gpus, 1, seconds, 0.0, seconds, 1.0))
    assert by_gpus.explained == by_cores.explained
    table = table_of(a=(100.0, UNKNOWN), b=(5000.0, 300.0), c=(0.0, 7000.0))
    found = [one.levels(table.jobs(NOW), NOW, NOW)[0].tolist() for one in (by_gpus, by_cores)]
    assert found[0] == found[1]
