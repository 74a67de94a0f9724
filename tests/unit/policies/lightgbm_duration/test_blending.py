"""Weights of models and ends of intervals, against those computed one by one."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.support.properties import examples

from cotenant.policies.lightgbm_duration.blending import GROUPS_MAX, LOSS_MAX, OFFSET_MAX, OFFSET_MIN, Blend, remaining

SHARES = (0.1, 0.5, 0.9)
quantiles = st.lists(st.integers(-40, 40).map(lambda eighths: eighths / 8), min_size=3, max_size=3).map(sorted)
told = st.lists(quantiles | st.just([math.nan] * 3), min_size=2, max_size=2).filter(
    lambda models: not math.isnan(models[0][0]) or not math.isnan(models[1][0])
)
outcomes = st.lists(
    st.tuples(st.sampled_from("ab"), told, st.integers(-9, 9).map(lambda whole: whole + 1 / 3)), max_size=12
)


class ByHand:
    """The slow twin of one group."""

    def __init__(self) -> None:
        self.losses = [[0.0] * 3 for _ in range(2)]
        self.offsets = [0.0, 0.0]
        self.count = 0

    def of(self, models: Sequence[Sequence[float]]) -> list[float]:
        blended = []
        for place in range(3):
            speaking = [number for number, one in enumerate(models) if not math.isnan(one[place])]
            least = max(min(self.losses[number][place] for number in speaking), 1e-6)
            best = min(self.losses[number][place] for number in speaking)
            weights = [math.exp(-20 * (self.losses[number][place] / least - 1)) for number in speaking]
            assert best <= least
            figures = [models[number][place] for number in speaking]
            blended.append(sum(map(math.prod, zip(weights, figures, strict=True))) / sum(weights))
        low, middle, high = sorted(blended)
        return [
            min(middle, low - self.offsets[0] * max(middle - low, 0.02)),
            middle,
            max(middle, high + self.offsets[1] * max(high - middle, 0.02)),
        ]

    def learn(self, models: Sequence[Sequence[float]], outcome: float) -> None:
        low, _, high = self.of(models)
        for end, missed in enumerate((outcome < low, outcome > high)):
            moved = self.offsets[end] + 0.03 * (missed - 0.1)
            self.offsets[end] = min(max(moved, OFFSET_MIN), OFFSET_MAX)
        self.count += 1
        for number, one in enumerate(models):
            for place, (share, quantile) in enumerate(zip(SHARES, one, strict=True)):
                if not math.isnan(quantile):
                    loss = (share if outcome > quantile else share - 1) * (outcome - quantile)
                    self.losses[number][place] += max(1 / 500, 1 / self.count) * (loss - self.losses[number][place])


@settings(max_examples=examples(60))
@given(outcomes, st.lists(told, min_size=1, max_size=2))
def test_a_blend_follows_the_losses_and_the_misses_of_each_group(
    seen: list[tuple[str, list[list[float]], float]], asked: list[list[list[float]]]
) -> None:
    blend, slow = Blend(2), {"a": ByHand(), "b": ByHand()}
    for group, models, outcome in seen:
        blend.learn(group, np.array(models), outcome)
        slow[group].learn(models, outcome)
    for group in "ab":
        for one in asked:
            assert blend.of([group], np.array([one]))[0] == pytest.approx(slow[group].of(one), abs=1e-6)
    both = blend.of(["a", "b"], np.array([asked[0], asked[-1]]))
    assert both == pytest.approx(np.array([slow["a"].of(asked[0]), slow["b"].of(asked[-1])]), abs=1e-6)


def test_after_many_outcomes_one_replaces_a_five_hundredth_and_ends_stay_within_their_bounds() -> None:
    blend, slow = Blend(2), ByHand()
    models = [[1.0, 2.0, 3.0], [1.5, 2.5, 4.0]]
    for number in range(900):
        outcome = 2.0 if number < 600 else 99.0
        blend.learn("a", np.array(models), outcome)
        slow.learn(models, outcome)
    assert blend.of(["a"], np.array([models]))[0] == pytest.approx(slow.of(models))
    assert slow.offsets[0] == OFFSET_MIN


def test_the_group_used_last_is_kept() -> None:
    blend = Blend(2)
    for number in range(GROUPS_MAX):
        blend.learn(f"g{number}", np.zeros((2, 3)), 1.0)
    blend.learn("g0", np.zeros((2, 3)), 1.0)
    blend.learn("new", np.zeros((2, 3)), 1.0)
    kept = json.loads(blend.dump())
    assert len(kept) == GROUPS_MAX
    assert {"g0", "new"} <= kept.keys()
    assert "g1" not in kept


@pytest.mark.parametrize(
    ("losses", "offsets", "count", "valid"),
    [
        ([[0, 0, LOSS_MAX]] * 2, [OFFSET_MIN, OFFSET_MAX], 0, True),
        ([[0, 0, LOSS_MAX * 1.01]] * 2, [0, 0], 1, False),
        ([[0, 0, -1e-9]] * 2, [0, 0], 1, False),
        ([[0, 0, math.nan]] * 2, [0, 0], 1, False),
        ([[0, 0, 0]], [0, 0], 1, False),
        ([[0, 0, 0]] * 2, [0], 1, False),
        ([[0, 0, 0]] * 2, [OFFSET_MIN - 0.01, 0], 1, False),
        ([[0, 0, 0]] * 2, [0, OFFSET_MAX + 0.01], 1, False),
        ([[0, 0, 0]] * 2, [0, math.nan], 1, False),
        ([[0, 0, 0]] * 2, [0, 0], -1, False),
    ],
)
def test_a_record_with_invalid_figures_is_refused_as_a_whole(
    losses: object, offsets: object, count: int, valid: bool
) -> None:
    blend, content = Blend(2), json.dumps({"g": [[[0, 0, 0]] * 2, [0, 0], 1], "h": [losses, offsets, count]}).encode()
    if valid:
        blend.restore(content)
        assert list(json.loads(blend.dump())) == ["g", "h"]
    else:
        with pytest.raises(ValueError, match="invalid figures"):
            blend.restore(content)
        assert blend.dump() == b"{}"


@given(quantiles, st.sampled_from([0.0, 0.01, 0.5, 1.0, 3.0, 50.0, 1e4]))
def test_what_remains_is_the_rest_of_a_distribution_that_is_normal_on_either_side(
    figures: list[float], so_far: float
) -> None:
    low, middle, high = figures
    (rest,) = remaining(np.array([figures]), np.array([so_far])).tolist()
    if not so_far:
        assert rest == pytest.approx([math.exp(one) for one in figures])
        return
    unit = NormalDist().inv_cdf(0.9)
    below, above = (NormalDist(middle, max(width, 1e-6) / unit) for width in (middle - low, high - middle))
    passed = (below if math.log(so_far) < middle else above).cdf(math.log(so_far))
    if passed > 0.99:
        assert all(math.isnan(one) for one in rest)
        return
    for share, found in zip(SHARES, rest, strict=True):
        at = passed + share * (1 - passed)
        assert found == pytest.approx(
            max(0.0, math.exp((below if at < 0.5 else above).inv_cdf(at)) - so_far), rel=1e-4, abs=1e-6
        )


@settings(max_examples=examples(60))
@given(quantiles, st.floats(OFFSET_MIN, OFFSET_MAX), st.floats(OFFSET_MIN, OFFSET_MAX))
@example([0.0, 0.0, 1.0], OFFSET_MIN, 0.0)
@example([-1.0, 0.0, 0.0], 0.0, OFFSET_MIN)
def test_an_interval_contains_its_median_wherever_its_ends_have_moved(
    figures: list[float], below: float, above: float
) -> None:
    blend = Blend(1)
    blend.restore(json.dumps({"g": [[[0, 0, 0]], [below, above], 1]}).encode())
    low, middle, high = blend.of(["g"], np.array([[figures]]))[0].tolist()
    assert low <= middle <= high
    assert middle == pytest.approx(figures[1])
