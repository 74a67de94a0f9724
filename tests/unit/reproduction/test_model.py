"""Verdicts of claims, and the treatment of unfinished cases."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.reproduction.model import (
    BadData,
    Better,
    Claim,
    Data,
    Done,
    Figures,
    Measured,
    Verdict,
    gain_percent,
    verdict_of,
)
from cotenant.simulator.comparison.summary import Spread

UP = Claim("up", "more of it", 20.0, "%", Better.HIGHER, "[P]")
WAY = Claim("way", "less of it, without a figure", 0.0, "%", Better.LOWER, "[P]", figure=False)
DOWN = Claim("down", "less of it", -30.0, "%", Better.LOWER, "[P]")


@pytest.mark.parametrize(
    ("claim", "seeds", "verdict"),
    [
        (UP, (20.8, 20.9, 21.0), Verdict.EXCEEDED),
        (UP, (19.7,), Verdict.REACHED),
        (UP, (19.0,), Verdict.MISSED),
        (UP, (14.0, 24.0), Verdict.REACHED),  # its spread is wider than the difference
        (DOWN, (-40.0,), Verdict.EXCEEDED),
        (WAY, (-4.0, -5.0), Verdict.REACHED),  # only a direction is published: there is nothing to exceed
        (WAY, (1.0,), Verdict.MISSED),
        (WAY, (-4.0, 5.0), Verdict.MISSED),
        (DOWN, (-20.0, -20.1), Verdict.MISSED),
    ],
)
def test_a_verdict_follows_from_the_figures(claim: Claim, seeds: tuple[float, ...], verdict: Verdict) -> None:
    assert verdict_of(claim, Spread(seeds)) is verdict


@given(st.floats(-100, 100), st.floats(0, 50))
def test_more_of_what_is_better_is_never_judged_worse(value: float, more: float) -> None:
    order = [Verdict.MISSED, Verdict.REACHED, Verdict.EXCEEDED]
    assert order.index(verdict_of(UP, Spread((value + more,)))) >= order.index(verdict_of(UP, Spread((value,))))
    assert order.index(verdict_of(DOWN, Spread((value - more,)))) >= order.index(verdict_of(DOWN, Spread((value,))))


def test_what_was_not_measured_is_open() -> None:
    assert Measured(UP, "load", "ours", "theirs", None).verdict is Verdict.OPEN


def test_arms_are_set_against_each_other_seed_by_seed() -> None:
    done = Done(
        {
            ("load", "ours", 1): Figures({"jct": 30.0}),
            ("load", "ours", 2): Figures({"jct": 10.0}),
            ("load", "theirs", 2): Figures({"jct": 20.0}),
            ("load", "theirs", 3): Figures({"jct": 99.0}),
            ("load", "nothing", 2): Figures({"jct": 0.0}),
        }
    )
    compared = done.versus("load", "ours", "theirs", "jct", gain_percent)
    assert compared is not None
    assert compared.per_seed == (-50.0,)  # the only seed with which both ran
    assert done.versus("load", "ours", "nothing", "jct", gain_percent) is None
    assert done.spread("load", "nobody", "jct") is None
    assert math.isnan(gain_percent(1.0, 0.0))


def test_a_directory_that_lacks_a_file_is_named(tmp_path: Path) -> None:
    assert Data().file("openb/nodes.csv") is None
    with pytest.raises(BadData, match=r"has no openb/nodes\.csv; docs/reproduction\.md lists"):
        Data(tmp_path).file("openb/nodes.csv")
