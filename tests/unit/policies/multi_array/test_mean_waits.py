"""Mean waits by incremental sums, against a loop over all waits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.policies.slow_multi_array import SlowWaits

from cotenant.policies.multi_array.mean_waits import MeanWaits

EVENTS = st.tuples(st.sampled_from("abc"), st.booleans(), st.floats(0, 60), st.floats(0, 1e6))


@given(st.floats(0, 2e9), st.lists(EVENTS, max_size=20))
def test_the_mean_is_that_of_all_waits_within_the_window(
    begin: float, events: list[tuple[str, bool, float, float]]
) -> None:
    quick, slow, now = MeanWaits(100.0), SlowWaits(100.0), begin
    for job_id, starts, passed, waited in events:
        now += passed
        for waits in (quick, slow):
            (waits.started if starts else waits.refused)(job_id, now, waited)
        assert quick.mean(now) == pytest.approx(slow.mean(now), abs=1e-5, rel=1e-9)
