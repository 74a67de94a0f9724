"""Jobs at rest say what they said before, in less memory."""

from __future__ import annotations

import pytest

from cotenant.core.model.job import JobSpec, Role
from cotenant.core.model.lifecycle import Phase
from cotenant.services.queue.jobs.compaction import Resting
from cotenant.services.queue.jobs.job_record import Record
from cotenant.services.queue.jobs.job_store import JOBS
from cotenant.services.queue.jobs.queue_state import State, clone
from cotenant.services.queue.jobs.transitions import PHASES, loaded, new_record
from cotenant.store.port import Entry
from cotenant.v1 import job_pb2

SPEC = JobSpec(name="a", roles=(Role(),))
NAMES = ("id", "phase", "wish", "not_before_seconds", "avoids", "waiting_since", "moving", "pre_runs", "attempt_number")


def record(phase: Phase = Phase.QUEUED) -> Record:
    made = new_record("j1", SPEC, "eve", "")
    job = made.job
    job.phase, job.attempt.number = PHASES.to_wire(phase), 2
    job.attempt.state = job_pb2.ATTEMPT_STATE_FAILED
    job.attempt.end_time.seconds, job.create_time.seconds, made.stored.not_before_time.seconds = 70, 50, 90
    if phase.ended:
        job.end_time.seconds = 80
    job.avoided_nodes.add(node_id="n1").until.seconds = 100
    return made


def rests(one: Record) -> bool:
    return one._stored is None  # nothing else tells


def said(one: Record) -> dict[str, object]:
    return {name: getattr(one, name) for name in NAMES}


@pytest.mark.parametrize("phase", [phase for phase in Phase if not phase.holds_resources])
def test_a_job_at_rest_says_what_it_said(phase: Phase) -> None:
    one = record(phase)
    stored, before, ended = clone(one.stored), said(one), one.ended_seconds
    one.rest()
    assert rests(one)
    assert one.ended_seconds == ended == (80 if phase.ended else 0)
    assert one.packed == stored.SerializeToString()
    assert said(one) == before
    one.rest()
    assert one.stored == stored


def test_what_is_changed_in_place_is_kept() -> None:
    one = record()
    one.rest()
    one.job.phase_reason = "changed"
    assert not rests(one)
    one.rest()
    assert rests(one)
    assert one.job.phase_reason == "changed"


def test_what_has_ended_is_read_without_waking_it() -> None:
    one = record(Phase.SUCCEEDED)
    one.rest()
    assert one.job.id == "j1"
    assert rests(one)


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase.holds_resources])
def test_who_holds_something_does_not_rest(phase: Phase) -> None:
    one = record(phase)
    one.rest()
    assert not rests(one)


def test_who_is_wished_for_or_moves_does_not_rest() -> None:
    one, other = record(), record()
    one.stored.wish = job_pb2.JOB_PHASE_CANCELLED
    other.job.attempt.state = job_pb2.ATTEMPT_STATE_STOPPED
    other.job.attempt.stop_reason = job_pb2.STOP_REASON_MIGRATED
    assert other.moving
    for each in (one, other):
        each.rest()
        assert not rests(each)


def test_what_was_read_shares_its_bytes_with_whoever_read_it() -> None:
    entry = Entry(JOBS + "j1", record().packed, 3, 4)
    assert loaded(entry).packed is entry.value
    held = Entry(JOBS + "j1", record(Phase.RUNNING).packed, 3, 4)
    assert loaded(held).phase is Phase.QUEUED  # until placement says otherwise
    assert loaded(held).job.phase == job_pb2.JOB_PHASE_QUEUED


async def test_all_are_put_to_rest_to_which_nothing_happens() -> None:
    state = State()
    for number, phase in enumerate((Phase.QUEUED, Phase.RUNNING, Phase.SUCCEEDED)):
        one = new_record(f"j{number}", SPEC, "eve", "")
        one.job.phase = PHASES.to_wire(phase)
        state.add(one)
    await Resting(state).sweep()
    assert [rests(one) for one in state.records.values()] == [True, False, True]
    assert len({id(one.spec) for one in state.records.values()}) == 1
