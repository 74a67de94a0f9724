from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from itertools import product
from typing import TypeVar

import pytest

from cotenant.core.model.lifecycle import (
    ATTEMPT_ENDED,
    ATTEMPT_NEXT,
    ENDED,
    HOLDING,
    JOB_NEXT,
    AttemptEvent,
    AttemptState,
    InvalidTransition,
    JobEvent,
    Phase,
    next_phase,
    next_state,
)

State = TypeVar("State", bound=StrEnum)
Event = TypeVar("Event", bound=StrEnum)


def reachable(table: Mapping[tuple[State, Event], State], first: State) -> set[State]:
    seen, ahead = set[State](), [first]
    while ahead:
        state = ahead.pop()
        if state not in seen:
            seen.add(state)
            ahead += [after for (before, _), after in table.items() if before == state]
    return seen


def test_every_phase_can_be_reached_from_the_queue() -> None:
    assert reachable(JOB_NEXT, Phase.QUEUED) == set(Phase)


def test_every_state_of_an_attempt_can_be_reached_from_its_assignment() -> None:
    assert reachable(ATTEMPT_NEXT, AttemptState.ASSIGNED) == set(AttemptState)


def test_what_has_ended_has_no_exit() -> None:
    assert not [phase for phase, _ in JOB_NEXT if phase.ended]
    assert not [state for state, _ in ATTEMPT_NEXT if state.ended]


def test_every_phase_that_has_not_ended_can_still_end_in_every_way_it_should() -> None:
    for phase in set(Phase) - ENDED:
        assert reachable(JOB_NEXT, phase) == set(Phase)
    for state in set(AttemptState) - ATTEMPT_ENDED:
        assert reachable(ATTEMPT_NEXT, state) >= ATTEMPT_ENDED


def test_every_event_is_known_somewhere() -> None:
    assert {event for _, event in JOB_NEXT} == set(JobEvent)
    assert {event for _, event in ATTEMPT_NEXT} == set(AttemptEvent)


def test_every_phase_that_holds_resources_can_be_stopped_and_requeued() -> None:
    for phase in HOLDING:
        assert next_phase("a", phase, JobEvent.STOP_ORDERED) is Phase.STOPPING
        assert next_phase("a", phase, JobEvent.REQUEUED) is Phase.QUEUED
        assert next_phase("a", phase, JobEvent.FAILED) is Phase.FAILED
    assert {phase for phase in Phase if phase.holds_resources} == HOLDING


def test_every_live_attempt_can_be_lost() -> None:
    for state in set(AttemptState) - ATTEMPT_ENDED:
        assert next_state("a/1", state, AttemptEvent.LOST) is AttemptState.LOST


def test_an_invalid_transition_carries_the_history() -> None:
    with pytest.raises(InvalidTransition, match="job a is queued and cannot be started; history: submitted at 3"):
        next_phase("a", Phase.QUEUED, JobEvent.STARTED, "submitted at 3")
    with pytest.raises(InvalidTransition, match="attempt a/1 is lost and cannot be launched"):
        next_state("a/1", AttemptState.LOST, AttemptEvent.LAUNCHED)


@pytest.mark.parametrize(("phase", "event"), list(product(Phase, JobEvent)))
def test_a_phase_takes_exactly_the_events_of_its_rows(phase: Phase, event: JobEvent) -> None:
    if (phase, event) in JOB_NEXT:
        assert next_phase("a", phase, event) is JOB_NEXT[phase, event]
    else:
        with pytest.raises(InvalidTransition):
            next_phase("a", phase, event)
