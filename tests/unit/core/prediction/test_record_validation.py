"""Figures in persisted records are taken to both ends of their range, and no further."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from cotenant.core.model.validation import CORES_MAX, GPU_MILLI_MAX, REPLICAS_MAX
from cotenant.core.prediction import record_validation as records


@pytest.mark.parametrize(
    ("read", "least", "most"),
    [
        (records.cores, 0, CORES_MAX),
        (lambda value: records.cores(value, 1), 1, CORES_MAX),
        (records.nodes, 1, records.NODES_MAX),
        (records.gpu_milli, 0, GPU_MILLI_MAX * REPLICAS_MAX),
        (records.replicas, 1, REPLICAS_MAX),
        (lambda value: records.replicas(value, 0), 0, REPLICAS_MAX),
        (lambda value: records.whole(value, -3, 9), -3, 9),
    ],
)
def test_a_count_is_taken_from_its_least_to_its_most(read: Callable[[object], int], least: int, most: int) -> None:
    assert [read(least), read(str(most))] == [least, most]
    for value in (least - 1, most + 1, "many", None, math.inf):
        with pytest.raises((ValueError, TypeError, OverflowError)):
            read(value)


@pytest.mark.parametrize(
    ("read", "least", "most"),
    [
        (records.rate, records.RATE_MIN_PER_SECOND, records.RATE_MAX_PER_SECOND),
        (lambda value: records.between(value, -1.0, 2.5), -1.0, 2.5),
        (lambda value: records.between(value, -math.inf, math.inf), -1e300, 1e300),
    ],
)
def test_a_number_is_taken_from_its_least_to_its_most(
    read: Callable[[object], float], least: float, most: float
) -> None:
    assert [read(least), read(str(most))] == [least, most]
    beyond = [math.nextafter(least, -math.inf), math.nextafter(most, math.inf)] if most < 1e300 else []
    for value in (*beyond, math.nan, math.inf, -math.inf, "many", None):
        with pytest.raises((ValueError, TypeError)):
            read(value)


def test_a_text_is_taken_to_its_greatest_length_if_it_can_be_sent() -> None:
    longest = "ü" * records.TEXT_LENGTH_MAX
    assert records.text(longest) == longest
    for text in (longest + "x", "\ud800"):
        with pytest.raises(ValueError, match=r"characters|surrogates"):
            records.text(text)


def test_a_job_class_has_two_texts_and_two_counts() -> None:
    assert records.kind(["ann", "bert", "500", 2]) == ("ann", "bert", "500", "2")
    for parts in (["ann", "bert", -1, 2], ["ann", "bert", 500, 0], ["ann", "bert", 500]):
        with pytest.raises(ValueError, match=r"is not from|not enough"):
            records.kind(parts)
