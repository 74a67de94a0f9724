"""A job's baseline, and how rarely and how soon a fall below it is detected."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.properties import examples

from cotenant.policies.coda_eliminator.baselines import Baseline, threshold

BETWEEN = 552_960.0  # windows of 8 jobs in 4 days


def baseline_of(rates: list[float], **others: float) -> Baseline:
    baseline = Baseline(**others)  # type: ignore[arg-type]  # floats, by name
    for rate in rates:
        baseline.observe(rate, BETWEEN, pressed=False, throttled=False)
    return baseline


def noisy(rate: float, count: int, seed: int, spread: float = 0.05) -> list[float]:
    rng = random.Random(seed)
    return [rate * (1 + spread * rng.gauss(0, 1)) for _ in range(count)]


def run_length(allowance: float, h: float, states: int = 100) -> float:
    """Reference: the mean run length of a cumulative sum of normal noise as a Markov chain (Brook and Evans, 1972)."""
    width = 2 * h / (2 * states - 1)
    edges = (np.arange(states) + 0.5) * width
    steps = edges[None, :] - width * np.arange(states)[:, None] + allowance
    below = np.vectorize(math.erf)(steps / math.sqrt(2))
    within = (1 + below) / 2
    moves = np.diff(within, axis=1, prepend=0.0)
    return float(np.linalg.solve(np.eye(states) - moves, np.ones(states))[0])


@pytest.mark.parametrize("allowance", [0.4, 0.75, 1.0, 1.5])
@pytest.mark.parametrize("between", [500, 20_000, 552_960])
def test_noise_alone_triggers_alarms_at_most_at_the_configured_rate(allowance: float, between: float) -> None:
    assert run_length(allowance, threshold(allowance, between)) == pytest.approx(between, rel=0.3)


@given(st.floats(0.1, 10), st.floats(10, 1e9))
def test_fewer_alarms_take_a_higher_threshold(allowance: float, between: float) -> None:
    assert 1 <= threshold(allowance, between) <= threshold(allowance, 2 * between)


@pytest.mark.parametrize("spread", [0.01, 0.05, 0.15])
def test_a_baseline_learns_rate_and_noise(spread: float) -> None:
    baseline = baseline_of(noisy(40.0, 400, 1, spread))
    assert baseline.trusted
    assert baseline.rate == pytest.approx(40, rel=max(0.003, 0.2 * spread))
    assert baseline.noise == pytest.approx(spread, rel=0.35, abs=0.01)


def test_it_is_trusted_after_a_minute_whatever_two_of_its_windows_were() -> None:
    rates = noisy(10.0, 12, 3, 0.01)
    rates[0], rates[5] = 1.0, 90.0
    assert not baseline_of(rates[:11]).trusted
    assert baseline_of(rates).rate == pytest.approx(10, rel=0.02)


@pytest.mark.parametrize("bad", [0.0, 5.0])
def test_one_bad_window_is_no_fall_and_two_are(bad: float) -> None:
    baseline = baseline_of([*noisy(10.0, 60, 1, 0.01), bad])
    assert not baseline.slowed
    baseline.observe(bad, BETWEEN, pressed=False, throttled=False)
    assert baseline.slowed
    assert baseline.slowdown == pytest.approx(1 - bad / 10, abs=0.02)


def test_a_slowdown_below_5_percent_never_counts() -> None:
    assert not baseline_of([*noisy(10.0, 120, 2, 0.005), *noisy(9.6, 300, 3, 0.005)]).slowed


@pytest.mark.parametrize("slowdown", [0.07, 0.1, 0.2])
def test_where_there_is_less_noise_smaller_falls_are_seen(slowdown: float) -> None:
    baseline = baseline_of(noisy(10.0, 120, 2, 0.01))
    for rate in noisy(10 * (1 - slowdown), 4, 3, 0.01):
        baseline.observe(rate, BETWEEN, pressed=True, throttled=False)
    assert baseline.slowed


def test_neither_a_fall_nor_a_slow_decline_under_pressure_is_learned() -> None:
    baseline = baseline_of([*noisy(10.0, 120, 1), *noisy(7.0, 30, 2)])
    assert baseline.rate == pytest.approx(10, rel=0.03)
    baseline = baseline_of(noisy(10.0, 240, 1, 0.01))
    for number in range(240):
        baseline.observe(10 - number / 300, BETWEEN, pressed=True, throttled=False)
    assert baseline.slowed
    assert baseline.rate == pytest.approx(10, rel=0.03)


def test_a_job_that_becomes_faster_was_slowed_before() -> None:
    assert baseline_of([*noisy(6.0, 60, 1), *noisy(10.0, 12, 2)]).rate == pytest.approx(10, rel=0.05)


def test_what_is_adopted_is_the_baseline_from_then_on() -> None:
    baseline = baseline_of([*noisy(10.0, 60, 1), *noisy(6.0, 12, 2)])
    assert baseline.slowed
    baseline.adopt()
    assert not baseline.slowed
    assert baseline.reference == pytest.approx(6, rel=0.05)


def test_a_prediction_counts_until_a_baseline_is_known() -> None:
    assert baseline_of([6.0] * 3, expected=10.0).slowed
    assert not baseline_of([8.0] * 11, expected=10.0).slowed, "that far it may be wrong"
    assert baseline_of(noisy(9.0, 60, 1), expected=10.0).reference == pytest.approx(9, rel=0.03)
    assert not baseline_of([6.0] * 11).slowed


@given(st.lists(st.floats(0, 1e9), max_size=80), st.none() | st.floats(0, 1e9))
def test_a_baseline_stays_a_number_for_any_input(rates: list[float], expected: float | None) -> None:
    baseline = Baseline(expected)
    for rate in rates:
        baseline.observe(rate, BETWEEN, pressed=False, throttled=False)
        assert math.isfinite(baseline.rate)
        assert 0.005 <= baseline.noise < math.inf
        assert 0 <= baseline.slowdown <= 1
        assert baseline.rate <= max(rates, default=0.0) * (1 + 1e-9)


@pytest.mark.parametrize("allowance", [0.2, 0.75, 1.5])
@pytest.mark.parametrize("between", [50.0, 20_000.0, 1e9])
def test_a_threshold_solves_siegmunds_formula_unless_that_is_below_one(allowance: float, between: float) -> None:
    def run(h: float) -> float:
        power = 2 * allowance * (h + 1.166)
        return (math.exp(power) - power - 1) / (2 * allowance**2)

    found = threshold(allowance, between)
    assert run(found) == pytest.approx(between, rel=1e-6) or (found == 1.0 and run(1.0) >= between)


@dataclass
class ByHand:
    """The slow twin of a baseline: lists of windows instead of sums."""

    expected: float | None
    rate: float = 0.0
    windows: int = 0
    trusted: bool = False
    first: list[float] = field(default_factory=list)
    variance: float = 0.0
    fallen: list[tuple[float, float]] = field(default_factory=list)  # excess and rate
    risen: list[tuple[float, float]] = field(default_factory=list)
    h: float = math.inf

    @property
    def reference(self) -> float:
        return self.rate if self.trusted else 0.85 * (self.expected or 0.0)

    @property
    def noise(self) -> float:
        seen = min(self.windows, 120) * self.trusted
        return max(0.005, math.sqrt((12 * 0.05**2 + seen * self.variance) / (12 + seen)))

    @property
    def falls(self) -> float:
        return sum(excess for excess, _ in self.fallen)

    @property
    def slowdown(self) -> float:
        rates = [rate for _, rate in self.fallen]
        return min(1.0, max(0.0, 1 - sum(rates) / len(rates) / self.reference)) if rates else 0.0

    def observe(self, rate: float, pressed: bool, throttled: bool) -> None:
        if self.reference > 0:
            noise = self.noise
            allowance = max(0.05, min(0.075, 1.5 * noise)) + 1.28 * noise / math.sqrt(max(1, min(self.windows, 120)))
            self.h = threshold(round(allowance / noise, 2), BETWEEN)
            below = 1 - rate / self.reference
            for run, off in ((self.fallen, below), (self.risen, -below)):
                run.append((min((off - allowance) / noise, 0.6 * self.h), rate))
                if sum(excess for excess, _ in run) <= 0:
                    run.clear()
        if self.trusted and sum(excess for excess, _ in self.risen) >= self.h:
            self.rate, self.windows = sum(seen for _, seen in self.risen) / len(self.risen), len(self.risen)
            self.fallen, self.risen = [], []
        elif self.falls <= self.h / 2 and (throttled or not pressed or self.windows < 120):
            self.learn(rate)

    def learn(self, rate: float) -> None:
        self.windows += 1
        if self.trusted:
            weight, most = 1 / min(self.windows, 120), 3 * self.noise
            error = max(-most, min(most, rate / self.rate - 1))
            self.variance += weight * (error**2 - self.variance)
            self.rate += weight * error * self.rate
            return
        self.first = sorted([*self.first, rate])
        if self.windows == 12:
            self.rate, self.trusted = sum(self.first[2:10]) / 8, True
            self.variance = (1.4826 * sorted(abs(seen / self.rate - 1) for seen in self.first)[6]) ** 2
            self.fallen, self.risen = [], []


LEVELS = st.lists(
    st.tuples(st.integers(1, 40), st.sampled_from([1.0, 1.0, 0.9, 0.7, 1.2]), st.booleans(), st.booleans()), max_size=5
)


@settings(max_examples=examples(30))
@given(LEVELS, st.sampled_from([0.0, 0.02, 0.1]), st.none() | st.sampled_from([8.0, 20.0]), st.integers(0, 99))
def test_a_baseline_is_that_computed_from_all_windows_since_it_began(
    levels: list[tuple[int, float, bool, bool]], spread: float, expected: float | None, seed: int
) -> None:
    rng = random.Random(seed)
    baseline, slow = Baseline(expected), ByHand(expected)
    for count, level, pressed, throttled in [(100, 1.0, False, False), *levels]:
        for _ in range(count):
            rate = max(0.1, 10 * level * rng.gauss(1, spread))
            baseline.observe(rate, BETWEEN, pressed=pressed, throttled=throttled)
            slow.observe(rate, pressed, throttled)
            assert (baseline.reference, baseline.noise, baseline.slowdown) == pytest.approx(
                (slow.reference, slow.noise, slow.slowdown)
            )
            assert baseline.fallen.sum == pytest.approx(slow.falls, abs=1e-6)
            assert (baseline.windows, baseline.fallen.windows) == (slow.windows, len(slow.fallen))
            assert baseline.slowed == (slow.falls >= slow.h)
            assert baseline.suspicious == (slow.falls > slow.h / 2)


@pytest.mark.parametrize("unit", [1e-6, 0.01, 1.0, 1e6])
def test_the_unit_of_a_rate_makes_no_difference(unit: float) -> None:
    rates = [*noisy(1.0, 300, seed=3), *[0.7] * 6]
    plain, scaled = baseline_of(rates), baseline_of([rate * unit for rate in rates])
    assert plain.slowdown > 0.2
    assert scaled.slowdown == pytest.approx(plain.slowdown)
    assert scaled.noise == pytest.approx(plain.noise)
    assert scaled.below(0.5 * unit) == pytest.approx(plain.below(0.5))
    assert (scaled.slowed, scaled.suspicious) == (plain.slowed, plain.suspicious)
