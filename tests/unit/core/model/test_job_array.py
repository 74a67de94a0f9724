"""Arrays as users write them, and which of an array's jobs may run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.model.job_array import COUNT_MAX, Slots, from_indices, invalid_reason, read_array


@pytest.mark.parametrize(
    ("text", "indices", "running_max"),
    [
        ("0-3", [0, 1, 2, 3], 0),
        ("1,3,5-9", [1, 3, 5, 6, 7, 8, 9], 0),
        ("0-10:5%2", [0, 5, 10], 2),
        (" 7 , 7, 6-8 % 1", [6, 7, 8], 1),
        ("999999", [999_999], 0),
    ],
)
def test_arrays_are_read_as_they_are_written(text: str, indices: list[int], running_max: int) -> None:
    spec = read_array(text)
    assert (spec.indices, spec.running_max) == (indices, running_max)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "-1",
        "3-1",
        "1-",
        "0-9:0",
        "0-9%",
        "0-9%0",
        "0-9%-1",
        "1000000",
        "0-10000",
        "0-999999999",
        "1,,2",
        "0-9%x",
    ],
)
def test_invalid_and_oversized_arrays_are_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"must|has"):
        read_array(text)


@given(st.sets(st.integers(0, 300), min_size=1), st.integers(0, 5))
def test_indices_round_trip(indices: set[int], running_max: int) -> None:
    spec = from_indices(indices, running_max)
    assert read_array(str(spec)) == spec
    assert spec.indices == sorted(indices)
    assert not invalid_reason(spec)
    assert len(indices) <= COUNT_MAX


Step = tuple[str, int, int]
STEPS = st.lists(
    st.tuples(st.sampled_from(["wait", "hold", "leave"]), st.integers(0, 7), st.integers(0, 2)), max_size=40
)


@given(STEPS, st.integers(1, 4))
def test_returned_jobs_are_all_that_opened_or_closed(steps: list[Step], running_max: int) -> None:
    """A slow model recomputes after each step which jobs may be tried."""
    slots = Slots(running_max)
    waiting: dict[str, tuple[int, int]] = {}
    holding: set[str] = set()
    seen: dict[str, bool] = {}
    for what, index, priority in steps:
        job_id = f"a_{index}"
        waiting.pop(job_id, None)
        holding.discard(job_id)
        if what == "wait":
            waiting[job_id] = (-priority, index)
            told = slots.wait(job_id, priority=priority, index=index)
        elif what == "hold":
            holding.add(job_id)
            told = slots.hold(job_id)
        else:
            told = slots.leave(job_id)
        free = max(0, running_max - len(holding))
        now_open = set(sorted(waiting, key=lambda one: waiting[one])[:free])
        for other in (*told, job_id):
            seen[other] = slots.open(other)
        assert {one for one, is_open in seen.items() if is_open} == now_open
        assert slots.holding == len(holding)
