"""Laws that hold whatever policies are combined, over random worlds; `hunting` looks at thousands of them."""

from __future__ import annotations

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.simulation import laws
from tests.simulation.combinations import FOUND, cases

every_queue = pytest.mark.parametrize("queue", [plugin.name for plugin in FOUND["queue"]])
QUICKLY = [Phase.explicit, Phase.reuse, Phase.generate]  # to shrink a whole simulation takes minutes: `hunting` does it


@every_queue
@settings(max_examples=8, phases=QUICKLY)
@given(data=st.data())
def test_nothing_is_given_twice_gangs_are_whole_limits_hold_and_nobody_is_forgotten(
    queue: str, data: st.DataObject
) -> None:
    laws.audited(data.draw(cases({"queue": queue})))


@every_queue
@settings(max_examples=6, phases=QUICKLY)
@given(data=st.data())
def test_whoever_waits_starts_once_it_is_alone(queue: str, data: st.DataObject) -> None:
    laws.explained(data.draw(cases({"queue": queue})))


@every_queue
@settings(max_examples=3, phases=QUICKLY)
@given(data=st.data())
def test_the_same_input_and_seed_give_the_same_recording_byte_for_byte(queue: str, data: st.DataObject) -> None:
    laws.replayed(data.draw(cases({"queue": queue})))
