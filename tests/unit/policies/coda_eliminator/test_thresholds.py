"""Thresholds that only make sense together."""

from __future__ import annotations

import math

import pytest

from cotenant.policies.coda_eliminator.thresholds import Thresholds

EQUAL = Thresholds(slowdown=0.15, bandwidth_calm_percent=75.0, calm_seconds=960.0, suspended_within_seconds=300.0)


def test_thresholds_that_order_each_other_may_be_equal() -> None:
    assert list(EQUAL.check()) == []


@pytest.mark.parametrize(
    ("larger", "wrong"),
    [
        ("slowdown", "slowdown_fast"),
        ("bandwidth_calm_percent", "bandwidth_calm_percent"),
        ("calm_seconds", "calm_seconds_max"),
        ("suspended_seconds_max", "suspended_within_seconds"),
    ],
)
def test_a_threshold_beyond_the_one_that_limits_it_is_named(larger: str, wrong: str) -> None:
    figures = {name: getattr(EQUAL, name) for name in Thresholds.__slots__}
    beyond = Thresholds(**figures | {larger: math.nextafter(figures[larger], math.inf)})
    assert [violation.field for violation in beyond.check()] == [wrong]
