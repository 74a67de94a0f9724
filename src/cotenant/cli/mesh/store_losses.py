"""What accepting an older store loses or changes, and what the mesh's memory and agents can restore.

The memory of the running mesh is the best source: jobs that the store lacks, or has in an older state, are written
back, including their ends. Agents come next: an attempt that runs here but is missing in the store is adopted, because
its agent holds the whole assignment; the records of job and attempt are written back. That needs the assignments of all
its nodes; without them only the job is written back, and its attempt is stopped and the job requeued. An attempt that
is running according to the store but has ended here has an unknown outcome: its job is requeued, and the next attempt
gets another number.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from google.protobuf.message import DecodeError

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.codec import specs
from cotenant.codec.job_events import EVENT_KINDS, EventKind
from cotenant.core.model.lifecycle import ENDED
from cotenant.core.model.validation import check_amounts
from cotenant.node_agent.runtime.attempt_directory import key_of
from cotenant.services.placement.cluster.live_records import check_amounts as check_held
from cotenant.storage.v1 import records_pb2
from cotenant.store.port import Delete, Entry, Operation, Put
from cotenant.store.schema import PARTED_VERSION, NewerSchema
from cotenant.v1 import job_pb2

JOBS, ATTEMPTS = "queue/jobs/", "placement/attempts/"
SCHEMA_VERSION = 1
IDS_AT_ONCE = 500
UNREADABLE = (ValueError, LookupError, TypeError, ArithmeticError, AssertionError)
M = TypeVar("M", records_pb2.StoredJob, records_pb2.StoredAttempt)

Key = tuple[str, int]  # a job's id and the number of its attempt


@dataclass(slots=True)
class Found:
    """What the nodes of a state directory know: assignments of attempts by node rank, and attempts that have ended."""

    parts: dict[Key, dict[int, agent_pb2.Assignment]] = field(default_factory=dict)
    over: set[Key] = field(default_factory=set)

    def newest(self) -> dict[str, Key]:
        """Return the last attempt of each job with an assignment here."""
        return {key[0]: key for key in sorted(self.parts)}


@dataclass(frozen=True, slots=True)
class Loss:
    """What happens to one job."""

    job_id: str
    what: str  # adopted, queued_again, runs_again, written_again
    detail: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The effects of accepting a store, and the writes that restore what can be restored."""

    losses: tuple[Loss, ...]
    changes: tuple[Operation, ...]


def found_on_nodes(state_dir: Path) -> Found:
    """Return what the agents of a state directory know; damaged files are skipped."""
    found = Found()
    for directory in sorted((state_dir / "nodes").glob("*/attempts/*-*")):
        assignment = agent_pb2.Assignment()
        try:
            assignment.ParseFromString((directory / "assignment").read_bytes())
        except (OSError, DecodeError):
            continue
        if not _is_whole(assignment, directory):
            continue
        key = (assignment.job_id, assignment.number)
        found.parts.setdefault(key, {})[assignment.node_rank] = assignment
    for directory in (state_dir / "nodes").glob("*/kept/*-*"):
        if ended := key_of(directory):
            found.over.add((ended.job_id, ended.number))
    return found


def _is_whole(assignment: agent_pb2.Assignment, directory: Path) -> bool:
    """Return whether services can load the records of an assignment found in a directory."""
    try:
        check_held((specs.allocation_from_wire(assignment.allocation),))
        spec = specs.spec_from_wire(assignment.spec)
    except UNREADABLE:
        return False
    named = directory.name == f"{assignment.job_id}-{assignment.number}" and assignment.number > 0
    return named and not check_amounts(spec)


def archived(path: Path, ids: Sequence[str]) -> dict[str, str]:
    """Return the phases of archived jobs by id; empty without an archive."""
    if not path.exists():
        return {}
    phases: dict[str, str] = {}
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
            for begin in range(0, len(ids), IDS_AT_ONCE):
                some = ids[begin : begin + IDS_AT_ONCE]
                marks = ", ".join("?" * len(some))
                phases |= dict(connection.execute(f"SELECT id, phase FROM jobs WHERE id IN ({marks})", some))
    except (sqlite3.Error, UnicodeDecodeError):
        return {}
    return {job_id: phase for job_id, phase in phases.items() if isinstance(phase, str)}


def plan(
    entries: Sequence[Entry],
    found: Found,
    mesh: Mapping[str, job_pb2.Job] | None = None,
    archive: Mapping[str, str] | None = None,
) -> Plan:
    """Return the effects of accepting a store, from a comparison with the running mesh, nodes and archive.

    `mesh` holds the jobs in the running mesh's memory, `archive` the phases of archived jobs. Damaged records count as
    missing: they are written back if another source has them.

    Raises:
        NewerSchema: a newer version wrote one of the records.
    """
    known = _Known(dict(_jobs(entries)), dict(_attempts(entries)))
    for job in (mesh or {}).values():
        known.take_job(job)
    for job_id, key in found.newest().items():
        known.take_parts(job_id, key, found.parts[key])
    for key in sorted(found.over - found.parts.keys()):
        known.take_end(key)
    for job_id, phase in (archive or {}).items():
        known.take_archived(job_id, phase)
    losses = sorted(known.losses.values(), key=lambda one: (one.what, one.job_id))
    return Plan(tuple(losses), tuple(known.changes.values()))


class _Known:
    """A store's jobs and attempts, and the corrections to write."""

    def __init__(
        self, jobs: Mapping[str, records_pb2.StoredJob], attempts: Mapping[str, records_pb2.StoredAttempt]
    ) -> None:
        self._jobs, self._attempts = jobs, attempts
        self.losses: dict[str, Loss] = {}
        self.changes: dict[str, Operation] = {}

    def take_job(self, job: job_pb2.Job) -> None:
        """Write back a job from the mesh's memory if the store has an older version or none."""
        kept, phase = self._jobs.get(job.id), specs.PHASES.from_wire(job.phase)
        before = specs.PHASES.from_wire(kept.job.phase) if kept else None
        number = max(kept.job.attempt.number, self._number(job.id)) if kept else 0
        older = kept is None or _is_ended(kept) != (phase in ENDED) or number < job.attempt.number
        runs = phase not in ENDED and job.attempt.allocations and not _attempt_ended(job.attempt)
        unknown = runs and self._number(job.id) < job.attempt.number
        if not older and not unknown:
            return
        self._put_job(_stored_again(job, kept))
        if unknown:
            self._put_attempt(job.attempt, job.spec, job.trace_parent, job.submitter)
        elif phase in ENDED and job.id in self._attempts:
            self.changes[ATTEMPTS + job.id] = Delete(ATTEMPTS + job.id)
        stored = f"{before} in the store" if before else "not in the store"
        self.losses[job.id] = Loss(job.id, "written_again", f"{phase} in the mesh's memory, {stored}")

    def take_parts(self, job_id: str, key: Key, parts: Mapping[int, agent_pb2.Assignment]) -> None:
        """Adopt an attempt that runs here but is missing in the store."""
        job = self._jobs.get(job_id)
        if job_id in self.losses or self._number(job_id) >= key[1] or _is_ended(job):
            return
        first = parts[min(parts)]
        if job is None:
            self._put_job(_job_of(first))
        tasks = sum(len(part.allocation.tasks) for part in parts.values())
        if sorted(parts) != list(range(len(parts))) or tasks != first.world_size:
            detail = f"attempt {key[1]} also runs on nodes not found here; it is stopped"
            self.losses[job_id] = Loss(job_id, "queued_again", detail)
            return
        attempt = job_pb2.Attempt(
            job_id=job_id,
            number=key[1],
            pre_run=first.pre_run,
            master_address=first.master_address,
            master_port=first.master_port,
            allocations=[parts[rank].allocation for rank in sorted(parts)],
        )
        attempt.assign_time.GetCurrentTime()
        self._put_attempt(attempt, first.spec, first.trace_parent, first.submitter)
        known = "" if job else ", like its job"
        self.losses[job_id] = Loss(job_id, "adopted", f"attempt {key[1]} is running but missing in the store{known}")

    def take_end(self, key: Key) -> None:
        """Requeue a job whose attempt is running according to the store but has ended here."""
        job, attempt = self._jobs.get(key[0]), self._attempts.get(key[0])
        if key[0] in self.losses or job is None or attempt is None:
            return
        if attempt.attempt.number == key[1] and not _attempt_ended(attempt.attempt):
            self.changes[ATTEMPTS + key[0]] = Delete(ATTEMPTS + key[0])
            self._put_job(_queued_after(job, attempt.attempt))
            detail = f"attempt {key[1]} has ended here with an outcome missing in the store"
            self.losses[key[0]] = Loss(key[0], "queued_again", detail)

    def take_archived(self, job_id: str, phase: str) -> None:
        """Record the loss of a job that is archived but live according to the store."""
        if job_id in self._jobs and job_id not in self.losses and not _is_ended(self._jobs[job_id]):
            self.losses[job_id] = Loss(job_id, "runs_again", f"{phase} in the archive, live in the store")

    def _number(self, job_id: str) -> int:
        stored = self._attempts.get(job_id)
        return stored.attempt.number if stored else 0

    def _put_job(self, stored: records_pb2.StoredJob) -> None:
        self.changes[JOBS + stored.job.id] = Put(JOBS + stored.job.id, stored.SerializeToString())

    def _put_attempt(self, attempt: job_pb2.Attempt, spec: job_pb2.JobSpec, trace_parent: str, submitter: str) -> None:
        record = records_pb2.StoredAttempt(
            schema_version=SCHEMA_VERSION, attempt=attempt, spec=spec, trace_parent=trace_parent, submitter=submitter
        )
        record.attempt.epoch = 0
        record.attempt.state = job_pb2.ATTEMPT_STATE_RUNNING
        self.changes[ATTEMPTS + attempt.job_id] = Put(ATTEMPTS + attempt.job_id, record.SerializeToString())


def _attempt_ended(attempt: job_pb2.Attempt) -> bool:
    return specs.ATTEMPT_STATES.from_wire(attempt.state).ended


def _stored_again(job: job_pb2.Job, kept: records_pb2.StoredJob | None) -> records_pb2.StoredJob:
    """Return the record of a job from the mesh's memory; its resources are left to placement's record."""
    stored = records_pb2.StoredJob(schema_version=SCHEMA_VERSION)
    if kept:
        stored.CopyFrom(kept)
    stored.job.CopyFrom(job)
    stored.schema_version = SCHEMA_VERSION
    stored.ClearField("spec_parts")  # the mesh has the whole spec in memory
    if specs.PHASES.from_wire(job.phase).holds_resources:
        stored.job.phase = job_pb2.JOB_PHASE_QUEUED
        before = kept.job.attempt if kept else job_pb2.Attempt()
        stored.job.attempt.CopyFrom(before)  # placement has the current attempt
    _add_event(stored, "written back from the mesh's memory: the store was older")
    return stored


def _add_event(stored: records_pb2.StoredJob, detail: str) -> None:
    event = stored.events.add(kind=EVENT_KINDS.to_wire(EventKind.STORE_ACCEPTED), detail=detail)
    event.time.GetCurrentTime()


def _jobs(entries: Sequence[Entry]) -> Iterator[tuple[str, records_pb2.StoredJob]]:
    for entry in entries:
        stored = _record(records_pb2.StoredJob, entry) if entry.key.startswith(JOBS) else None
        if stored and stored.job.id == entry.key.removeprefix(JOBS) and stored.job.phase in specs.PHASES:
            yield stored.job.id, stored


def _attempts(entries: Sequence[Entry]) -> Iterator[tuple[str, records_pb2.StoredAttempt]]:
    for entry in entries:
        if entry.key.startswith(ATTEMPTS) and (stored := _record(records_pb2.StoredAttempt, entry)):
            attempt = stored.attempt
            if attempt.job_id == entry.key.removeprefix(ATTEMPTS) and attempt.state in specs.ATTEMPT_STATES:
                yield attempt.job_id, stored


def _record(kind: type[M], entry: Entry) -> M | None:
    """Return a decoded record; None if it is damaged."""
    record = kind()
    try:
        record.ParseFromString(entry.value)
    except DecodeError:
        return None
    if record.schema_version > PARTED_VERSION:
        raise NewerSchema(
            f"{entry.key} has schema {record.schema_version}, but this version reads up to {PARTED_VERSION}: a newer "
            "version wrote it; hint: run that version"
        )
    return record


def _is_ended(job: records_pb2.StoredJob | None) -> bool:
    return job is not None and specs.PHASES.from_wire(job.job.phase) in ENDED


def _job_of(assignment: agent_pb2.Assignment) -> records_pb2.StoredJob:
    stored = records_pb2.StoredJob(schema_version=SCHEMA_VERSION)
    job = stored.job
    job.id, job.submitter, job.trace_parent = assignment.job_id, assignment.submitter, assignment.trace_parent
    job.spec.CopyFrom(assignment.spec)
    job.phase = job_pb2.JOB_PHASE_QUEUED
    job.create_time.GetCurrentTime()
    _add_event(stored, "written back from its node's assignment: the store was older")
    return stored


def _queued_after(job: records_pb2.StoredJob, attempt: job_pb2.Attempt) -> records_pb2.StoredJob:
    """Return a job requeued after an attempt with an unknown outcome, whose number is not used again."""
    stored = records_pb2.StoredJob()
    stored.CopyFrom(job)
    stored.job.phase = job_pb2.JOB_PHASE_QUEUED
    stored.job.attempt.CopyFrom(attempt)
    stored.job.attempt.state = job_pb2.ATTEMPT_STATE_STOPPED
    stored.job.attempt.message = "it ended, but the store has lost the record of its end"
    _add_event(stored, "requeued: the store has lost the end of its attempt")
    return stored
