from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.properties import examples, some
from tests.support.queue_simulation import simulate, simulate_full_batches

from cotenant.core.prediction.batch_queueing import (
    LOAD_MAX,
    BatchTime,
    answer,
    fixed_batch_mean_seconds,
    fixed_batch_worst_seconds,
    latencies,
    mean_seconds_max,
    replicas_needed,
)

SHAPES = [BatchTime(0.001, 0.01), BatchTime(0.001, 0.0001), BatchTime(0.001, 0.1), BatchTime(0.01, 0.0)]

batches = st.builds(BatchTime, st.floats(1e-6, 0.1), st.floats(0, 1))
loads = st.floats(0.01, 0.95)


@pytest.mark.parametrize("load", some([0.1, 0.5, 0.9], 2))
@pytest.mark.parametrize("batch", some(SHAPES, 3), ids=lambda batch: f"{batch.per_request}b+{batch.fixed}")
def test_mean_and_percentiles_are_those_of_a_long_simulation(batch: BatchTime, load: float) -> None:
    rate = load / batch.per_request
    told = latencies(batch, rate)
    seen = np.array(simulate(batch.per_request, batch.fixed, rate, 300_000, seed=7))
    assert told.mean_seconds == pytest.approx(seen.mean(), rel=0.05)
    for percent in (50, 95, 99):
        assert told.percentile_seconds(percent) == pytest.approx(np.percentile(seen, percent), rel=0.1)


@settings(max_examples=examples(30), deadline=None)
@given(batches, loads)
def test_the_mean_is_within_its_bound_and_below_the_percentiles_order(batch: BatchTime, load: float) -> None:
    rate = load / batch.per_request
    told = latencies(batch, rate)
    assert batch.seconds(1) * (1 - 1e-9) <= told.mean_seconds <= mean_seconds_max(batch, rate) * 1.01
    figures = [told.percentile_seconds(percent) for percent in (1, 50, 95, 99, 99.9)]
    assert all(lower <= higher for lower, higher in pairwise(figures))
    assert figures[0] >= batch.seconds(1) * (1 - 1e-6)


@settings(max_examples=examples(30), deadline=None)
@given(batches, loads)
def test_shares_add_up_and_the_flow_of_requests_is_kept(batch: BatchTime, load: float) -> None:
    told = latencies(batch, load / batch.per_request)
    assert told.busy.sum() + told.idle == pytest.approx(1)
    assert told.further.sum(axis=1) == pytest.approx(1)
    assert told.share_within(math.inf) == pytest.approx(1)
    assert told.share_within(0) == 0


@settings(max_examples=examples(20), deadline=None)
@given(batches, loads, st.sampled_from([90.0, 99.0]))
def test_more_requests_wait_longer(batch: BatchTime, load: float, percent: float) -> None:
    less, more = (latencies(batch, share * load / batch.per_request).percentile_seconds(percent) for share in (0.5, 1))
    assert less <= more * 1.01


def test_hardly_any_requests_take_the_time_of_one_alone() -> None:
    told = latencies(BatchTime(0.001, 0.01), 0.001)
    assert told.idle == pytest.approx(1, abs=1e-4)
    assert told.percentile_seconds(95) == pytest.approx(0.011, rel=1e-3)


def test_a_server_whose_batches_take_the_same_whatever_their_size_never_fails_to_keep_up() -> None:
    batch = BatchTime(0.0, 0.02)
    told = latencies(batch, 10_000.0)
    assert told.mean_seconds == pytest.approx(0.03, rel=0.01)
    assert told.percentile_seconds(99) == pytest.approx(0.0398, rel=0.01)
    assert mean_seconds_max(batch, 10_000.0) == pytest.approx(0.03, rel=0.01)


def test_the_bound_is_close_above_the_mean_as_others_found() -> None:
    for batch in SHAPES:
        for load in (0.1, 0.3, 0.5, 0.7, 0.9):
            rate = load / batch.per_request
            assert -0.005 <= mean_seconds_max(batch, rate) / latencies(batch, rate).mean_seconds - 1 < 0.1


@pytest.mark.parametrize(("size", "rate"), [(4, 100.0), (16, 500.0)])
def test_full_batches_follow_the_formulas_if_the_server_is_mostly_idle(size: int, rate: float) -> None:
    batch = BatchTime(0.0001, 0.001)
    seen = simulate_full_batches(0.0001, 0.001, size, rate, 200_000, seed=3)
    assert fixed_batch_mean_seconds(batch, size, rate) == pytest.approx(float(np.mean(seen)), rel=0.02)
    assert fixed_batch_worst_seconds(batch, size, rate) == pytest.approx((size - 1) / rate + batch.seconds(size))
    first = np.array(seen[: len(seen) // size * size]).reshape(-1, size)[:, 0]
    assert fixed_batch_worst_seconds(batch, size, rate) == pytest.approx(float(first.mean()), rel=0.02)


def test_full_batches_that_fill_faster_than_they_are_served_wait_for_ever() -> None:
    assert fixed_batch_mean_seconds(BatchTime(0.01, 0.1), 4, 100.0) == math.inf


@settings(max_examples=examples(25), deadline=None)
@given(st.floats(1e-4, 1e-2), st.floats(0, 0.1), st.floats(1.0, 2000.0), st.floats(1.1, 20.0))
def test_the_replicas_are_the_fewest_that_keep_the_promise(
    per_request: float, fixed: float, rate: float, slack: float
) -> None:
    batch = BatchTime(per_request, fixed)
    target = slack * batch.seconds(1)
    needed = replicas_needed(batch, rate, 99.0, target)
    if needed is None:
        return
    told = answer(batch, rate / needed, (99.0,))
    assert told is not None
    assert told.percentiles_seconds[0] <= target
    if needed > 1:
        fewer = answer(batch, rate / (needed - 1), (99.0,))
        assert fewer is None or fewer.percentiles_seconds[0] > target


def test_no_number_of_replicas_answers_faster_than_an_idle_server() -> None:
    assert replicas_needed(BatchTime(0.001, 0.01), 100.0, 99.0, 0.0109) is None
    assert replicas_needed(BatchTime(0.001, 0.01), 1e9, 99.0, 0.03) is None, "it would take more than there can be"


def test_a_server_that_hardly_keeps_up_does_not() -> None:
    batch = BatchTime(0.001, 0.01)
    assert answer(batch, 1000 * LOAD_MAX * 1.001, (99.0,)) is None
    assert mean_seconds_max(batch, 1000.0) == math.inf
    with pytest.raises(ValueError, match="does not keep up"):
        latencies(batch, 2000.0)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf])
def test_a_rate_that_cannot_be_is_named(rate: float) -> None:
    for ask in (latencies, mean_seconds_max):
        with pytest.raises(ValueError, match="an arrival rate must be positive and finite"):
            ask(BatchTime(0.001, 0.01), rate)
    with pytest.raises(ValueError, match="an arrival rate must be positive and finite"):
        fixed_batch_mean_seconds(BatchTime(0.001, 0.01), 4, rate)


@pytest.mark.parametrize(("per_request", "fixed"), [(-1.0, 1.0), (math.nan, 1.0), (1.0, math.inf), (0.0, 0.0)])
def test_batches_that_cannot_be_are_named(per_request: float, fixed: float) -> None:
    with pytest.raises(ValueError, match="a batch cannot take"):
        BatchTime(per_request, fixed)


def test_answers_are_the_same_for_inputs_that_round_to_the_same() -> None:
    one, other = (
        answer(BatchTime(0.001, 0.01), 500.0, (95.0,)),
        answer(BatchTime(0.0010000001, 0.01), 500.0001, (95.0,)),
    )
    assert one is other
