"""The distribution of latency against the chain of batch sizes, written down term by term, and its approximations."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cotenant.core.prediction import batch_queueing
from cotenant.core.prediction.batch_queueing import BatchTime, Latencies, fixed_batch_mean_seconds, latencies

CASES = [(BatchTime(0.001, 0.01), 300.0), (BatchTime(0.004, 0.002), 200.0), (BatchTime(0.0, 0.02), 400.0)]
SIZES_MAX = 120


def poisson(mean: float, count: int) -> float:
    return math.exp(count * math.log(mean) - mean - math.lgamma(count + 1))


class Chain:
    """The same, by sums over all sizes and counts."""

    def __init__(self, batch: BatchTime, rate: float) -> None:
        self._batch, self._sizes = batch, range(1, SIZES_MAX)
        self._came = {
            size: [poisson(rate * batch.seconds(size), count) for count in range(SIZES_MAX)] for size in self._sizes
        }
        moves = np.array([[came[0] + came[1], *came[2:]] for came in self._came.values()])
        shares = np.full(len(moves), 1 / len(moves))
        for _ in range(500):
            shares = shares @ moves
            shares /= shares.sum()
        while_busy = [share * rate * batch.seconds(size) for share, size in zip(shares, self._sizes, strict=True)]
        none_came = sum(share * self._came[size][0] for share, size in zip(shares, self._sizes, strict=True))
        total = sum(while_busy) + none_came
        self.busy, self.idle = [one / total for one in while_busy], none_came / total

    def share_within(self, seconds: float) -> float:
        share = self.idle if seconds >= self._batch.seconds(1) else 0.0
        for busy, size in zip(self.busy, self._sizes, strict=True):
            for count, chance in enumerate(self._came[size]):
                left = (seconds - self._batch.seconds(1 + count)) / self._batch.seconds(size)
                share += busy * chance * min(1.0, max(0.0, left))
        return float(share)

    @property
    def mean_seconds(self) -> float:
        answers = (
            busy
            * (
                self._batch.seconds(size) / 2
                + sum(p * self._batch.seconds(1 + n) for n, p in enumerate(self._came[size]))
            )
            for busy, size in zip(self.busy, self._sizes, strict=True)
        )
        return float(sum(answers) + self.idle * self._batch.seconds(1))


@pytest.mark.parametrize(("batch", "rate"), CASES)
def test_the_distribution_is_that_of_all_sizes_and_counts(batch: BatchTime, rate: float) -> None:
    found, slow = latencies(batch, rate), Chain(batch, rate)
    assert found.idle == pytest.approx(slow.idle, abs=1e-9)
    assert found.mean_seconds == pytest.approx(slow.mean_seconds, rel=1e-6)
    for share in (0.3, 0.7, 1.0, 1.5, 2.5):
        seconds = share * found.mean_seconds
        assert found.share_within(seconds) == pytest.approx(slow.share_within(seconds), abs=1e-6)
    for percent in (5.0, 50.0, 99.0):
        seconds = found.percentile_seconds(percent)
        assert slow.share_within(seconds * (1 - 1e-6)) <= percent / 100 + 1e-6
        assert slow.share_within(seconds * (1 + 1e-6)) >= percent / 100 - 1e-6


@pytest.mark.parametrize(
    ("batch", "rate", "states"),
    [
        (BatchTime(0.001, 0.01), 700.0, 24),  # sizes from 1, of which some stand for their neighbors
        (BatchTime(0.0005, 0.02), 1500.0, 40),
        (BatchTime(0.0005, 0.1), 1000.0, 64),  # all sizes are large
        (BatchTime(0.0002, 0.1), 3000.0, 64),
    ],
)
def test_sizes_that_stand_for_others_change_little(
    batch: BatchTime, rate: float, states: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_states(most: int) -> Latencies:
        monkeypatch.setattr(batch_queueing, "STATES_MAX", most)
        return latencies(batch, rate)

    exact, rough = with_states(10**6), with_states(states)
    assert len(rough.busy) < len(exact.busy)
    assert rough.mean_seconds == pytest.approx(exact.mean_seconds, rel=2e-3)
    assert rough.idle == pytest.approx(exact.idle, abs=1e-3)
    for percent in (5.0, 50.0, 95.0, 99.0):
        assert rough.percentile_seconds(percent) == pytest.approx(exact.percentile_seconds(percent), rel=1e-2)


def test_a_full_batch_needs_one_request_and_less_time_to_serve_than_to_fill() -> None:
    batch = BatchTime(0.01, 0.02)
    assert fixed_batch_mean_seconds(batch, 1, 10.0) == pytest.approx(0.03)
    assert fixed_batch_mean_seconds(BatchTime(0.0, 0.5), 2, 4.0) == math.inf, "it fills as fast as it is served"
    assert fixed_batch_mean_seconds(BatchTime(0.0, 0.5), 2, 3.99) < math.inf
    with pytest.raises(ValueError, match="one request or more"):
        fixed_batch_mean_seconds(batch, 0, 10.0)


def test_a_mean_of_zero_arrivals_has_all_its_weight_on_zero() -> None:
    table = batch_queueing._poisson_table(np.array([0.0, 2.0]), np.arange(40.0))
    assert table[0] == pytest.approx([1.0] + [0.0] * 39, abs=1e-300)
    assert table.sum(axis=1) == pytest.approx([1.0, 1.0])
