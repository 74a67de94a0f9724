"""Archived jobs: how they ended, by this leader's archive, and whether another archive may have them.

Theory of operation. Each leader writes ended jobs to a file of its own before it deletes them from the store. After a
change of leaders, some jobs are therefore in a file on another machine. Every file has an id, and a record of it is in
the store before the first of its jobs is deleted. So the leader can tell an id that never existed from an id that may
be in an archive that it cannot read. In the second case it says so, and decides nothing.

How a job ended is final. A dependency found in the archive is settled at submission: it is met, or the new job is
cancelled in the transaction that creates it. It is never looked up again.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass

import grpc
import structlog

from cotenant.codec import errors, specs
from cotenant.codec.errors import Problem
from cotenant.core.model.dependencies import Counts, Verdict, verdict
from cotenant.core.model.job import JobSpec
from cotenant.core.model.validation import DEPENDENCIES_MAX
from cotenant.services.queue.jobs.archive import Archive, ArchiveEntry
from cotenant.services.queue.jobs.dependency_gate import Array, unmet_reason
from cotenant.services.queue.jobs.job_ids import is_id
from cotenant.services.queue.jobs.transitions import SCHEMA_VERSION, Record
from cotenant.services.queue.jobs.visibility import View, is_array, is_job
from cotenant.storage.v1 import records_pb2
from cotenant.store import schema
from cotenant.store.port import Put, Store
from cotenant.v1 import job_pb2

log = structlog.get_logger()

ARCHIVES = "queue/archives/"
ELSEWHERE = "ARCHIVED_ELSEWHERE"


@dataclass(frozen=True, slots=True)
class ArchivedDependencies:
    """Dependencies of a new job that are no longer in the store."""

    ended: Mapping[str, ArchiveEntry]
    unknowable: Sequence[str] = ()  # may be in an archive that cannot be read here

    def unsatisfiable_reason(self, spec: JobSpec) -> str:
        """Return which dependency ended so that its condition can never hold; "" if none did."""
        for dependency in spec.dependencies:
            ended = self.ended.get(dependency.job_id)
            if ended is None:
                continue
            counts = Counts(failed=ended.failed, never_ran=ended.never_ran)
            if verdict(dependency.condition, counts) is Verdict.NEVER:
                return unmet_reason(dependency, ended.phases, array=ended.job is None)
        return ""


@dataclass(frozen=True, slots=True)
class ArchivedArray:
    """An archived array: the count of its jobs by phase, one of them, and the ids of all that are in the archive."""

    entry: ArchiveEntry
    first: Record
    task_ids: Sequence[str]


NOTHING = ArchivedDependencies({})


class ArchivedJobs:
    """The leader's archive, and the archives of other leaders that the store names."""

    def __init__(self, store: Store, archive: Archive | None) -> None:
        self._store, self._archive = store, archive
        self._archive_places: dict[str, str] = {}  # by archive id
        self._own_id = ""

    async def start(self) -> None:
        """Read the records of all archives, and register this one in the store.

        Raises:
            StoreUnavailable: the store is unavailable.
            NewerSchema: a newer version wrote the record of an archive.
            BadRecord: a record is damaged.
        """
        for entry in (await self._store.list(ARCHIVES)).entries:
            stored = schema.read(records_pb2.StoredArchive, entry)
            with schema.reading(entry):
                if entry.key != ARCHIVES + stored.id:
                    raise ValueError(f"its id is {stored.id!r}")
            self._archive_places[stored.id] = stored.place
        if self._archive and self._archive.path.exists():
            try:
                await self.register_archive()
            except OSError as error:
                log.warning("archive_unreadable", error=str(error))

    async def keep(self, jobs: Sequence[job_pb2.Job]) -> None:
        """Write jobs to the archive, so that they may be deleted.

        Raises:
            StoreUnavailable: the store is unavailable.
            OSError: the archive cannot be written.
        """
        if self._archive:
            await self._archive.add(jobs)
            await self.register_archive()

    @property
    def enabled(self) -> bool:
        """Whether there is an archive."""
        return self._archive is not None

    async def register_archive(self) -> None:
        """Register this archive in the store, once."""
        if self._archive is None or self._own_id:
            return
        own, place = await self._archive.id(), f"{socket.gethostname()}:{self._archive.path.absolute()}"
        if self._archive_places.get(own) != place:
            stored = records_pb2.StoredArchive(schema_version=SCHEMA_VERSION, id=own, place=place)
            await self._store.transact([], [Put(ARCHIVES + own, stored.SerializeToString())])
            self._archive_places[own] = place
        self._own_id = own

    # Lookups -------------------------------------------------------------------------------------------------

    async def get(self, view: View, job_id: str, array_call: str = "") -> Record:
        """Return a job that the caller may see (and change, if the call changes it), also from the archive.

        For `array_call` see `View.job`.

        Raises:
            Problem: as `View.job` does; FAILED_PRECONDITION if the job may be in an archive that cannot be read here.
        """
        try:
            return view.job(job_id, array_call)
        except Problem as problem:
            if problem.code is not grpc.StatusCode.NOT_FOUND:
                raise
            unknown = problem
        found, readable = await self._find([job_id])
        ended = found.get(job_id)
        if ended and view.sees_tenant(ended.tenant):
            if ended.job is None:
                count = sum(ended.phases.values())
                raise is_array(f"{job_id} is an archived array of {count} jobs", ended.first, array_call)
            if record := _record(ended.job):
                return view.authorize(record)
            readable = False
        if self._may_be_elsewhere(job_id, readable):
            raise self._elsewhere(view, [job_id], readable)
        raise unknown

    async def array(self, view: View, array_id: str) -> Array | ArchivedArray:
        """Return an array that the caller may see (and change, if the call changes it), also from the archive.

        Raises:
            Problem: as `View.array` does; FAILED_PRECONDITION if the array may be in an archive that cannot be read
                here.
        """
        try:
            return view.array(array_id)
        except Problem as problem:
            if problem.code is not grpc.StatusCode.NOT_FOUND:
                raise
            unknown = problem
        found, readable = await self._find([array_id])
        ended = found.get(array_id)
        if ended and view.sees_tenant(ended.tenant):
            if ended.job is not None:
                raise is_job(array_id)
            if archived := await self._archived_array(ended):
                view.require_owner(f"array {array_id}", archived.first.job.submitter)
                return archived
            readable = False
        if self._may_be_elsewhere(array_id, readable):
            raise self._elsewhere(view, [array_id], readable)
        raise unknown

    async def _archived_array(self, ended: ArchiveEntry) -> ArchivedArray | None:
        """Return an archived array with one of its jobs; None if the archive is damaged."""
        found, _ = await self._find([ended.first])
        job = found[ended.first].job if ended.first in found else None
        first = _record(job) if job else None
        if first is None or first.spec.array_task is None or self._archive is None:
            return None
        try:
            return ArchivedArray(ended, first, await self._archive.task_ids(ended.id))
        except OSError as error:
            log.warning("archive_unreadable", error=str(error))
            return None

    async def list(self, view: View, ids: Iterable[str]) -> list[Record]:
        """Return the archived jobs among `ids` that the caller may see."""
        found, _ = await self._find(list(ids))
        seen = (one.job for one in found.values() if one.job and view.sees_tenant(one.tenant))
        return [record for job in seen if (record := _record(job))]

    async def ended_since(
        self, view: View, since: float, created_before: float
    ) -> AsyncIterator[Sequence[job_pb2.Job]]:
        """Yield archived jobs that the caller may see, ended at a time or later and created before another.

        Raises:
            OSError: the archive cannot be read.
        """
        if self._archive:
            async for jobs in self._archive.ended_since(since, created_before):
                yield [job for job in jobs if view.sees_tenant(job.spec.tenant)]

    @property
    def missing_archives(self) -> int:
        """Number of archives, of other leaders, that cannot be read here."""
        return len(self._archive_places.keys() - {self._own_id})

    async def find_dependencies(self, view: View, spec: job_pb2.JobSpec) -> ArchivedDependencies:
        """Return the dependencies of a new job that are not in memory. Loops, because jobs may be deleted during a
        lookup.
        """
        ids = [one.id for one in spec.dependencies[:DEPENDENCIES_MAX]]
        asked: dict[str, ArchiveEntry | None] = {}
        all_readable = True
        while unknown := [one for one in ids if one not in asked and not view.knows(one)]:
            found, readable = await self._find(unknown)
            all_readable = all_readable and readable
            for one in unknown:
                ended = found.get(one)
                asked[one] = ended if ended and view.sees_tenant(ended.tenant) else None
        unknowable = [one for one, ended in asked.items() if not ended and self._may_be_elsewhere(one, all_readable)]
        return ArchivedDependencies({one: ended for one, ended in asked.items() if ended}, unknowable)

    def check_known(self, view: View, before: ArchivedDependencies) -> None:
        """Reject a job with a dependency whose outcome cannot be known here.

        Raises:
            Problem: FAILED_PRECONDITION.
        """
        if before.unknowable:
            raise self._elsewhere(view, before.unknowable, readable=True)

    async def _find(self, ids: Sequence[str]) -> tuple[Mapping[str, ArchiveEntry], bool]:
        """Look ids up; return also whether the archive could be read."""
        if self._archive is None:
            return {}, True
        try:
            return await self._archive.find(ids), True
        except OSError as error:
            log.warning("archive_unreadable", error=str(error))
            return {}, False

    def _may_be_elsewhere(self, thing_id: str, readable: bool) -> bool:
        others = self._archive_places.keys() - {self._own_id}
        return bool(others or not readable) and is_id(thing_id)

    def _elsewhere(self, view: View, ids: Sequence[str], readable: bool) -> Problem:
        places = sorted(place for one, place in self._archive_places.items() if one != self._own_id or not readable)
        where = f" ({', '.join(places)})" if view.sees_all and places else ""
        message = (
            f"{' and '.join(ids)} not found in the store; may be in an archive that the queue cannot read{where}: "
            "run `cotenant history --id` there"
        )
        return errors.failed_precondition(ELSEWHERE, message)


def _record(job: job_pb2.Job) -> Record | None:
    """Return a read-only record of an archived job.

    None if it is damaged in a way that still parses.
    """
    job.archived = True
    stored = records_pb2.StoredJob(schema_version=SCHEMA_VERSION, job=job)
    try:
        record = Record(stored, specs.spec_from_wire(job.spec))
        return record if record.phase.ended else None
    except (ValueError, LookupError, TypeError, ArithmeticError, AssertionError) as error:
        log.warning("archived_job_damaged", job=job.id, error=str(error))
        return None
