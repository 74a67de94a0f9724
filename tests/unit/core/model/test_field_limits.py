"""Limits on single values hold to both ends and no further, and say so."""

from __future__ import annotations

import math

import pytest

from cotenant.core.model.field_limits import (
    FINITE,
    ID,
    NAME,
    NOT_NEGATIVE,
    PATH,
    PERCENTILE,
    ZERO_OR_POSITIVE,
    Limit,
    at_least,
    between,
    positive,
    shown,
)
from cotenant.core.model.limits import NAME_LENGTH_MAX, PATH_LENGTH_MAX

TINY = 5e-324


@pytest.mark.parametrize(
    ("limit", "valid", "invalid"),
    [
        (between(2, 5), [2, 5], [0, 1, 6]),
        (between(2, 5, or_zero=True), [0, 2, 5], [-1, 1, 6]),
        (between(0.5, 2.0), [0.5, 2.0], [0.0, math.nextafter(0.5, 0), math.nextafter(2.0, 3), math.nan]),
        (at_least(10.0), [10.0, 1e300], [math.nextafter(10.0, 0), math.inf, math.nan]),
        (positive(), [TINY, 1e300], [0.0, -1.0, math.inf, math.nan]),
        (NOT_NEGATIVE, [0, 0.0, math.inf], [-1, -TINY]),
        (ZERO_OR_POSITIVE, [0.0, TINY, 1e300], [-TINY, math.inf, math.nan]),
        (PERCENTILE, [0.0, math.nextafter(100.0, 0)], [-TINY, 100.0, math.nan]),
        (FINITE, [0.0, -1e300], [math.inf, -math.inf, math.nan]),
        (NAME, ["", "ResNet 50", "n" * NAME_LENGTH_MAX], ["n" * (NAME_LENGTH_MAX + 1), "a/b", "a\\b", ".", "..", "\n"]),
        (ID, ["a", "7", "team-7", "a" * 63], ["", "A", "-a", "a-", "a_b", "a" * 64]),
        (PATH, ["", "/", "/" + "a" * (PATH_LENGTH_MAX - 1)], ["a", "/\0", "/" + "a" * PATH_LENGTH_MAX]),
    ],
)
def test_a_value_is_taken_to_both_ends_of_its_limit(limit: Limit, valid: list[object], invalid: list[object]) -> None:
    assert [value for value in valid if limit.reason(value)] == []
    assert [value for value in invalid if not limit.reason(value)] == []


@pytest.mark.parametrize(
    ("limit", "text", "least", "most"),
    [
        (between(2, 5, " cores"), "be from 2 to 5 cores", 2, 5),
        (between(2, 5, or_zero=True), "be 0, or from 2 to 5", None, None),
        (between(0.5, 2.0), "be from 0.5 to 2", None, None),
        (between(0, 2.0), "be from 0 to 2", None, None),
        (at_least(10.0, " seconds"), "be at least 10 seconds", None, None),
        (positive(" seconds"), "be positive", None, None),
    ],
)
def test_a_limit_says_what_it_is_and_whole_numbers_give_its_ends(
    limit: Limit, text: str, least: int | None, most: int | None
) -> None:
    assert (limit.text, limit.least, limit.most) == (text, least, most)


def test_a_quoted_text_has_at_most_forty_characters_of_the_original() -> None:
    assert shown("a" * 40) == f"'{'a' * 40}'"
    assert shown("a" * 41) == f"'{'a' * 40}…'"
