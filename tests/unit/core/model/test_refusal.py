"""Refusals: what time alone changes, what a job waits for, and how amounts and durations are written."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.model.job import Locality
from cotenant.core.model.node import HeldNode
from cotenant.core.model.refusal import (
    Code,
    PrecedingJob,
    Refusal,
    Wait,
    about,
    blocked_by_strict_head,
    format_duration,
    format_duration_range,
    nodes_held,
    outranked,
    wait_of,
)
from cotenant.core.model.resources import Resources

GIB = 2**30
seconds = st.integers(0, 10**6).map(float)
refusals = st.builds(
    lambda holds, held: Refusal(Code.FRAGMENTED, "", holds_seconds=holds, held_seconds=held),
    seconds | st.just(math.inf),
    seconds | st.just(math.inf),
)


@given(refusals, seconds, seconds)
def test_time_that_passes_counts_once_however_it_is_divided(refusal: Refusal, first: float, second: float) -> None:
    later = refusal.after(first + second)
    assert refusal.after(first).after(second) == later
    assert later.holds_seconds == max(0.0, refusal.holds_seconds - first - second)
    assert later.held_seconds == refusal.held_seconds + first + second
    assert refusal.after(0.0) is refusal


@given(refusals, seconds)
def test_a_gang_that_has_waited_less_had_the_refusal_for_longer_and_not_before_it_began(
    refusal: Refusal, less: float
) -> None:
    earlier = refusal.after(-less)
    assert earlier.holds_seconds == refusal.holds_seconds + less
    assert earlier.held_seconds == max(0.0, refusal.held_seconds - less)


@pytest.mark.parametrize(
    ("relaxes_to", "holds_seconds", "told"),
    [(Locality.RACK, 60.0, "d; relaxes to rack in 60 s"), (None, 60.0, "d"), (Locality.RACK, math.inf, "d")],
)
def test_a_level_that_relaxes_in_a_known_time_is_told(
    relaxes_to: Locality | None, holds_seconds: float, told: str
) -> None:
    assert Refusal(Code.FRAGMENTED, "d", holds_seconds=holds_seconds, relaxes_to=relaxes_to).full_detail == told


@pytest.mark.parametrize("code", Code)
def test_beyond_its_share_a_job_waits_for_its_share_unless_something_outside_holds_it(code: Code) -> None:
    own = wait_of(code, over_share=False)
    outside = {
        Code.DEPENDENCY, Code.SUSPENDED, Code.BACK_OFF, Code.BEGIN_TIME, Code.ARRAY_LIMIT, Code.SECRETS,
    }  # fmt: skip
    assert (own is Wait.DEPENDENCY) == (code in outside)
    assert (own is Wait.FRAGMENTATION) == (code in {Code.FRAGMENTED, Code.QOS})
    assert (own is Wait.FAIR_SHARE) == (code is Code.QUOTA)
    stays = own is Wait.DEPENDENCY or code is Code.NEVER_FITS
    assert wait_of(code, over_share=True) is (own if stays else Wait.FAIR_SHARE)


@pytest.mark.parametrize(
    ("seconds", "exact", "rough"),
    [
        (0.0, "0 s", "0 s"),
        (0.4, "1 s", "0 s"),
        (59.0, "59 s", "59 s"),
        (99.6, "100 s", "100 s"),
        (100.0, "100 s", "2 min"),
        (101.0, "2 min", "2 min"),
        (120.0, "2 min", "2 min"),
        (120.1, "3 min", "2 min"),
        (5999.0, "100 min", "100 min"),
        (6000.0, "100 min", "1.7 h"),
        (6001.0, "2 h", "1.7 h"),
        (7200.0, "2 h", "2 h"),
        (35_640.0, "10 h", "9.9 h"),
        (37_000.0, "11 h", "10 h"),
        (3 * 86_400.0 - 1, "72 h", "72 h"),
        (3 * 86_400.0, "72 h", "3 days"),
    ],
)
def test_a_duration_is_rounded_up_in_its_unit_and_an_approximate_one_to_the_nearest(
    seconds: float, exact: str, rough: str
) -> None:
    assert format_duration(seconds) == exact
    assert about(seconds) == rough
    assert format_duration_range(seconds, None) == f"{rough} or more"


@pytest.mark.parametrize(
    ("low", "high", "told"), [(60.0, 90.0, "60–90 s"), (90.0, 120.0, "90 s–2 min"), (600.0, 600.0, "10–10 min")]
)
def test_a_range_has_its_unit_once_if_both_ends_have_the_same(low: float, high: float, told: str) -> None:
    assert format_duration_range(low, high) == told


def test_a_job_behind_others_is_told_what_they_leave_and_how_near_it_is() -> None:
    nearest = PrecedingJob("a", 1.5, 2.5, 3000)
    refusal = outranked(3, 2, ["a"], Resources(1500, 1, GIB), nearest)
    assert refusal.numbers == {
        "rank": 3,
        "ahead": 2,
        "left_gpu_milli": 1500,
        "left_cores": 1,
        "left_memory_bytes": GIB,
        "ahead_gpu_milli": 3000,
        "score": 2.5,
        "nearest_score": 1.5,
    }
    assert "leave 1.5 GPUs, 1 core and 1 GiB of memory; 2 waiting jobs before it want 3 GPUs" in refusal.detail
    assert "the nearest, a, has score 1.5, this job 2.5" in refusal.detail
    assert "1 waiting job before it wants" in outranked(3, 1, nearest=nearest).detail
    assert outranked(3, 0, nearest=nearest).numbers == {"rank": 3, "ahead": 0}
    head = blocked_by_strict_head(3, 2, "a", Resources(4000, 8, 2 * GIB), Resources(), nearest).numbers
    assert (head["head_memory_bytes"], head["left_memory_bytes"], head["score"]) == (2 * GIB, 0, 2.5)


def test_of_held_nodes_three_are_named_and_the_first_free_canary_counts() -> None:
    held = [HeldNode(f"n{number}", "broken", 10.0 - number) for number in range(5)]
    three, four = (nodes_held(held[:count], "1 GPU") for count in (3, 4))
    assert (
        "3 servers that could hold it are held: n0 (broken), n1 (broken), n2 (broken); next try in 8 s" in three.detail
    )
    assert "n2 (broken) and 1 more; next try in 7 s" in four.detail
    assert four.numbers == {"held_nodes": 4.0, "next_canary_seconds": 7.0}
    busy = HeldNode("n", "broken", 1.0, canary="job-1/1")
    assert nodes_held([busy, held[0]], "1 GPU").numbers["next_canary_seconds"] == 10.0
    tried = nodes_held([busy], "1 GPU")
    assert "1 server that could hold it is held: n (broken); job-1/1 is being tried there" in tried.detail
    assert tried.numbers == {"held_nodes": 1.0}
    assert "the next job that fits is tried there" in nodes_held([HeldNode("n", "broken")], "1 GPU").detail
