"""Jobs that the queue keeps no longer: how they ended, as its archive tells, and whether another archive would.

Theory of operation. Whoever leads writes ended jobs into a file of its own before it forgets them, so that after a
change of leaders some are in a file that is not here. Every such file has an id, and before the first of its jobs is
forgotten the store has a record of it. So a leader knows whether what it finds nowhere never was, or may be in a file
that it cannot read. Then it says so, and settles nothing by it.

How a job ended changes no more. What a new job waits for in the archive is settled for good when it is taken in: it is
met, or the job is cancelled in the very transaction that takes it in; nobody needs to look it up again.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import grpc
import structlog

from cotenant.codec import errors, specs
from cotenant.codec.errors import Problem
from cotenant.core.model.dependencies import Verdict, verdict
from cotenant.core.model.job import JobSpec
from cotenant.core.model.validation import DEPENDENCIES_MAX
from cotenant.services.queue.jobs.archive import Archive, Ended
from cotenant.services.queue.jobs.dependency_gate import never
from cotenant.services.queue.jobs.job_ids import is_id
from cotenant.services.queue.jobs.transitions import SCHEMA_VERSION, Record
from cotenant.services.queue.jobs.visibility import View
from cotenant.store import schema
from cotenant.store.port import Put, Store
from cotenant.v1 import job_pb2, records_pb2

log = structlog.get_logger()

ARCHIVES = "queue/archives/"
ELSEWHERE = "ARCHIVED_ELSEWHERE"


@dataclass(frozen=True, slots=True)
class Before:
    """What a new job is to come after and the queue keeps no longer."""

    ended: Mapping[str, Ended]
    unknowable: Sequence[str] = ()  # of which nobody can tell here

    def hopeless(self, spec: JobSpec) -> str:
        """Say which of the jobs that were to succeed did not; "" where all did."""
        for dependency in spec.dependencies:
            ended = self.ended.get(dependency.job_id)
            if ended and verdict(dependency.condition, left=0, failed=ended.failed) is Verdict.NEVER:
                return never(ended.id, ended.phases, array=ended.job is None)
        return ""


NOTHING = Before({})


class Past:
    """The archive of the queue that leads, and what is known of others."""

    def __init__(self, store: Store, archive: Archive | None) -> None:
        self._store, self._archive = store, archive
        self._places: dict[str, str] = {}  # of archives, by id
        self._own = ""

    async def start(self) -> None:
        """Read which archives there are, and let the store know of this one.

        Raises:
            StoreUnavailable: the store is away.
            NewerSchema: a newer version wrote a record of one.
            BadRecord: a record is damaged.
        """
        for entry in (await self._store.list(ARCHIVES)).entries:
            stored = schema.read(records_pb2.StoredArchive, entry)
            with schema.reading(entry):
                if entry.key != ARCHIVES + stored.id:
                    raise ValueError(f"it says that it is {stored.id!r}")
            self._places[stored.id] = stored.place
        if self._archive and self._archive.path.exists():
            try:
                await self.declare()
            except OSError as error:
                log.warning("archive_unreadable", error=str(error))

    async def keep(self, jobs: Sequence[job_pb2.Job]) -> None:
        """Write jobs into the archive, so that they may be forgotten.

        Raises:
            StoreUnavailable: the store is away.
            OSError: the archive cannot be written.
        """
        if self._archive:
            await self._archive.add(jobs)
            await self.declare()

    @property
    def keeps(self) -> bool:
        """Whether there is an archive."""
        return self._archive is not None

    async def declare(self) -> None:
        """Let the store know of this archive, unless it does."""
        if self._archive is None or self._own:
            return
        own, place = await self._archive.id(), f"{socket.gethostname()}:{self._archive.path.absolute()}"
        if self._places.get(own) != place:
            stored = records_pb2.StoredArchive(schema_version=SCHEMA_VERSION, id=own, place=place)
            await self._store.transact([], [Put(ARCHIVES + own, stored.SerializeToString())])
            self._places[own] = place
        self._own = own

    # Questions -----------------------------------------------------------------------------------------------

    async def job(self, view: View, job_id: str) -> Record:
        """Return a job that the caller may see and, where the call changes it, change, also from the archive.

        Raises:
            Problem: as `View.job` does; FAILED_PRECONDITION where it may be in an archive that is not here.
        """
        try:
            return view.job(job_id)
        except Problem as problem:
            if problem.code is not grpc.StatusCode.NOT_FOUND:
                raise
            unknown = problem
        found, readable = await self._find([job_id])
        ended = found.get(job_id)
        if ended and view.sees_tenant(ended.tenant):
            if ended.job is None:
                told = f"{job_id} was an array of {sum(ended.phases.values())} jobs, all of which ended long ago"
                raise errors.failed_precondition(
                    "IS_ARRAY", f"{told}; name one of them, such as {ended.first}", first=ended.first
                )
            if record := _record(ended.job):
                return view.owned(record)
            readable = False
        if self._may_be_elsewhere(job_id, readable):
            raise self._elsewhere(view, [job_id], readable)
        raise unknown

    async def named(self, view: View, ids: Iterable[str]) -> list[Record]:
        """Return those of the archive's jobs that the caller names and may see."""
        found, _ = await self._find(list(ids))
        seen = (one.job for one in found.values() if one.job and view.sees_tenant(one.tenant))
        return [record for job in seen if (record := _record(job))]

    async def before(self, view: View, spec: job_pb2.JobSpec) -> Before:
        """Find what a new job is to come after and the queue does not know. While that is looked up, more may go."""
        ids = [one.id for one in spec.dependencies[:DEPENDENCIES_MAX]]
        asked: dict[str, Ended | None] = {}
        all_readable = True
        while unknown := [one for one in ids if one not in asked and not view.knows(one)]:
            found, readable = await self._find(unknown)
            all_readable = all_readable and readable
            for one in unknown:
                ended = found.get(one)
                asked[one] = ended if ended and view.sees_tenant(ended.tenant) else None
        unknowable = [one for one, ended in asked.items() if not ended and self._may_be_elsewhere(one, all_readable)]
        return Before({one: ended for one, ended in asked.items() if ended}, unknowable)

    def check(self, view: View, before: Before) -> None:
        """Refuse a job that would come after something of which it cannot be known here how it ended.

        Raises:
            Problem: FAILED_PRECONDITION.
        """
        if before.unknowable:
            raise self._elsewhere(view, before.unknowable, readable=True)

    async def _find(self, ids: Sequence[str]) -> tuple[Mapping[str, Ended], bool]:
        """Look ids up; and tell whether that could be done."""
        if self._archive is None:
            return {}, True
        try:
            return await self._archive.find(ids), True
        except OSError as error:
            log.warning("archive_unreadable", error=str(error))
            return {}, False

    def _may_be_elsewhere(self, thing_id: str, readable: bool) -> bool:
        others = self._places.keys() - {self._own}
        return bool(others or not readable) and is_id(thing_id)

    def _elsewhere(self, view: View, ids: Sequence[str], readable: bool) -> Problem:
        places = sorted(place for one, place in self._places.items() if one != self._own or not readable)
        where = f" ({', '.join(places)})" if view.everything and places else ""
        told = (
            f"the queue keeps no {' and no '.join(ids)}, and cannot tell whether there was such a job, nor how it "
            f"ended; some that ended long ago are in an archive that it cannot read{where}: "
            "`cotenant history --id` tells there"
        )
        return errors.failed_precondition(ELSEWHERE, told)


def _record(job: job_pb2.Job) -> Record | None:
    """Make a record of a job that is none of the store's: nothing of it can be changed, for it has ended.

    None where it is damaged so that it could still be parsed.
    """
    job.archived = True
    stored = records_pb2.StoredJob(schema_version=SCHEMA_VERSION, job=job)
    try:
        record = Record(stored, specs.spec_from_wire(job.spec))
        return record if record.phase.ended else None
    except (ValueError, LookupError, TypeError, ArithmeticError, AssertionError) as error:
        log.warning("archived_job_damaged", job=job.id, error=str(error))
        return None
