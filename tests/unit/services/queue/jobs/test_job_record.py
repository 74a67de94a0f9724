"""Compacted records keep their values, in less memory."""

from __future__ import annotations

import pytest

from cotenant.core.model.job import JobSpec, Role
from cotenant.core.model.lifecycle import Phase
from cotenant.services.queue.jobs.compaction import Compaction
from cotenant.services.queue.jobs.job_record import Record
from cotenant.services.queue.jobs.job_store import JOBS
from cotenant.services.queue.jobs.messages import stored_message
from cotenant.services.queue.jobs.queue_state import State, clone
from cotenant.services.queue.jobs.transitions import PHASES, load_record, new_record
from cotenant.store.port import Entry
from cotenant.v1 import job_pb2

SPEC = JobSpec(name="a", roles=(Role(),))
NAMES = (
    "id",
    "phase",
    "wish",
    "not_before_seconds",
    "avoids",
    "waiting_since",
    "migrating",
    "in_pre_run",
    "attempt_number",
)


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
    return one._stored is None  # not visible through the public API


def said(one: Record) -> dict[str, object]:
    return {name: getattr(one, name) for name in NAMES}


@pytest.mark.parametrize("phase", [phase for phase in Phase if not phase.holds_resources])
def test_a_compacted_record_keeps_its_values(phase: Phase) -> None:
    one = record(phase)
    stored, before, ended = clone(one.stored), said(one), one.ended_seconds
    one.compact()
    assert rests(one)
    assert one.ended_seconds == ended == (80 if phase.ended else 0)
    assert one.packed == stored.SerializeToString()
    assert said(one) == before
    one.compact()
    assert one.stored == stored


def test_changes_in_place_survive_compaction() -> None:
    one = record()
    one.compact()
    one.job.phase_reason = "changed"
    assert not rests(one)
    one.compact()
    assert rests(one)
    assert one.job.phase_reason == "changed"


def test_reading_an_ended_record_keeps_it_compacted() -> None:
    one = record(Phase.SUCCEEDED)
    one.compact()
    assert one.job.id == "j1"
    assert rests(one)


@pytest.mark.parametrize("phase", list(Phase))
def test_showing_a_record_keeps_it_as_it_is(phase: Phase) -> None:
    one = record(phase)
    one.compact()
    packed, rested = one.packed, rests(one)
    shown = stored_message(one)
    shown.spec.ClearField("command")
    assert shown.id == "j1"
    assert (one.packed, rests(one)) == (packed, rested)


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase.holds_resources])
def test_records_of_jobs_with_resources_are_not_compacted(phase: Phase) -> None:
    one = record(phase)
    one.compact()
    assert not rests(one)


def test_records_with_a_wish_or_migration_are_not_compacted() -> None:
    one, other = record(), record()
    one.stored.wish = job_pb2.JOB_PHASE_CANCELLED
    other.job.attempt.state = job_pb2.ATTEMPT_STATE_STOPPED
    other.job.attempt.stop_reason = job_pb2.STOP_REASON_MIGRATED
    assert other.migrating
    for each in (one, other):
        each.compact()
        assert not rests(each)


def test_a_compacted_record_shares_its_bytes_with_the_store() -> None:
    entry = Entry(JOBS + "j1", record().packed, 3, 4)
    assert load_record(entry).packed is entry.value
    held = Entry(JOBS + "j1", record(Phase.RUNNING).packed, 3, 4)
    assert load_record(held).phase is Phase.QUEUED  # until placement reports its attempt
    assert load_record(held).job.phase == job_pb2.JOB_PHASE_QUEUED


async def test_a_sweep_compacts_all_idle_records() -> None:
    state = State()
    for number, phase in enumerate((Phase.QUEUED, Phase.RUNNING, Phase.SUCCEEDED)):
        one = new_record(f"j{number}", SPEC, "eve", "")
        one.job.phase = PHASES.to_wire(phase)
        state.add(one)
    await Compaction(state).sweep()
    assert [rests(one) for one in state.records.values()] == [True, False, True]
    assert len({id(one.spec) for one in state.records.values()}) == 1
