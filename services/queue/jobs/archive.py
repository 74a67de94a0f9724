"""The archive: an SQLite file of ended jobs that were deleted from the store, for people, accounting, dependencies."""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from google.protobuf.message import DecodeError

from cotenant.codec import specs
from cotenant.core.model.lifecycle import Phase
from cotenant.v1 import job_pb2

FILE = "archive.sqlite"
WAIT_SECONDS_MAX = 10.0  # for another writer of the file
SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    id TEXT PRIMARY KEY, name TEXT NOT NULL, tenant TEXT NOT NULL, submitter TEXT NOT NULL, kind TEXT NOT NULL,
    phase TEXT NOT NULL, reason TEXT NOT NULL, create_time REAL NOT NULL, end_time REAL NOT NULL,
    run_seconds REAL NOT NULL, gpu_seconds REAL NOT NULL, job BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_end ON jobs (end_time);
CREATE INDEX IF NOT EXISTS by_tenant ON jobs (tenant, end_time);
CREATE TABLE IF NOT EXISTS archive (id TEXT PRIMARY KEY) WITHOUT ROWID;
"""
NAME = "INSERT INTO archive SELECT ? WHERE NOT EXISTS (SELECT 1 FROM archive)"
TASKS = """
SELECT min(id), min(tenant), phase, count(*), max(end_time) FROM jobs WHERE id > ? AND id < ? GROUP BY phase
"""
TASK_IDS = "SELECT id FROM jobs WHERE id > ? AND id < ?"
SEPARATOR, AFTER_SEPARATOR = "_", "`"  # between an array's id and a task's index; and the character after it
AT_ONCE_MAX = 500  # ids per query
DAMAGED = (sqlite3.Error, DecodeError, ValueError, TypeError, LookupError)  # what reading a damaged file can raise

T = TypeVar("T")
INSERT = """
INSERT OR REPLACE INTO jobs (
    id, name, tenant, submitter, kind, phase, reason, create_time, end_time, run_seconds, gpu_seconds, job
) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
READ = "SELECT job FROM jobs WHERE id = ?"
ENDED_SINCE = """
SELECT end_time, id, job FROM jobs
WHERE (end_time, id) > (?, ?) AND create_time < ? ORDER BY end_time, id LIMIT ?
"""


@dataclass(frozen=True, slots=True)
class ArchiveEntry:
    """An archived job, or all archived jobs of an array: its tenant, and the count of jobs by phase."""

    id: str
    tenant: str
    phases: Mapping[Phase, int]
    first: str  # id of the job, or of one task of the array
    job: job_pb2.Job | None = None  # None for an array
    ended_seconds: float = 0.0  # when the last job of an array ended

    @property
    def failed(self) -> int:
        """Number of jobs that did not succeed."""
        return sum(self.phases.values()) - self.phases.get(Phase.SUCCEEDED, 0)

    @property
    def never_ran(self) -> int:
        """Number of jobs that ended before they ever ran; those of an array count as if they had run."""
        return int(self.job is not None and not self.job.HasField("start_time"))


class Archive:
    """Writes ended jobs to an SQLite file before they are deleted. A job that is written twice is there once.

    The columns are for queries by hand; `job` is the whole `cotenant.v1.Job` without its environment. The file has an
    id of its own, by which it is recognized at any path.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    async def add(self, jobs: Sequence[job_pb2.Job]) -> None:
        """Write jobs, all or none. They are read back before they count as written: a damaged file may take them.

        Raises:
            OSError: they cannot be written.
        """
        rows = [_row(job) for job in jobs]

        def write(connection: sqlite3.Connection) -> None:
            connection.executemany(INSERT, rows)
            for job_id, *_, message in rows:
                if connection.execute(READ, (job_id,)).fetchall() != [(message,)]:
                    raise sqlite3.DatabaseError(f"{job_id} cannot be read back")

        await self._query("write", write, make=True)

    async def id(self) -> str:
        """Return the id of the file; creates file and id if needed.

        Raises:
            OSError: the file is missing and cannot be created, or cannot be read.
        """
        found: Sequence[str] = await self._query(
            "read", lambda connection: connection.execute("SELECT id FROM archive").fetchone(), make=True
        )
        return found[0]

    async def find(self, ids: Sequence[str]) -> Mapping[str, ArchiveEntry]:
        """Return jobs and arrays by id, each by one index lookup; missing ids are left out.

        Raises:
            OSError: the file cannot be read.
        """
        if not ids or not self.path.exists():
            return {}
        return await self._query("read", lambda connection: {one.id: one for one in _found(connection, ids)})

    async def task_ids(self, array_id: str) -> Sequence[str]:
        """Return the ids of an array's jobs.

        Raises:
            OSError: the file cannot be read.
        """
        found = await self._query(
            "read", lambda connection: connection.execute(TASK_IDS, _range_of(array_id)).fetchall()
        )
        return [task_id for (task_id,) in found]

    async def ended_since(self, since: float, created_before: float) -> AsyncIterator[Sequence[job_pb2.Job]]:
        """Yield the jobs that ended at a time or later and were created before another, some at a time.

        Raises:
            OSError: the file cannot be read.
        """
        if not self.path.exists():
            return
        after = (since, "")
        while True:
            keys = (*after, created_before, AT_ONCE_MAX)
            rows = await self._query("read", partial(_ended, keys=keys))
            if not rows:
                return
            yield [job for _, _, job in rows]
            after = rows[-1][:2]

    async def _query(self, what: str, query: Callable[[sqlite3.Connection], T], *, make: bool = False) -> T:
        """Query the file in a thread; `make` creates a missing file.

        Raises:
            OSError: it is damaged, or cannot be opened.
        """
        try:
            return await asyncio.to_thread(self._run_query, query, make)
        except DAMAGED as error:  # also decoding errors: a damaged schema is quoted in them
            raise OSError(f"cannot {what} {self.path}: {error}") from error

    def _run_query(self, query: Callable[[sqlite3.Connection], T], make: bool) -> T:
        if not make:
            with closing(sqlite3.connect(f"{self.path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
                return query(connection)
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with closing(sqlite3.connect(self.path, timeout=WAIT_SECONDS_MAX)) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.executescript(SCHEMA)
            with connection:
                connection.execute(NAME, (secrets.token_hex(8),))
                result = query(connection)
        self.path.chmod(0o600)
        return result


def _ended(connection: sqlite3.Connection, keys: Sequence[object]) -> list[tuple[float, str, job_pb2.Job]]:
    rows = connection.execute(ENDED_SINCE, keys).fetchall()
    return [(end_time, job_id, job_pb2.Job.FromString(message)) for end_time, job_id, message in rows]


def _found(connection: sqlite3.Connection, ids: Sequence[str]) -> Iterable[ArchiveEntry]:
    rest = dict.fromkeys(ids)
    for start in range(0, len(ids), AT_ONCE_MAX):
        some = ids[start : start + AT_ONCE_MAX]
        marks = ", ".join("?" * len(some))
        # only question marks
        for (message,) in connection.execute(f"SELECT job FROM jobs WHERE id IN ({marks})", some):
            job = job_pb2.Job.FromString(message)
            rest.pop(job.id, None)
            yield ArchiveEntry(job.id, job.spec.tenant, {specs.PHASES.from_wire(job.phase): 1}, job.id, job)
    for thing_id in rest:
        rows = connection.execute(TASKS, _range_of(thing_id)).fetchall()
        if rows:
            phases = Counter({Phase(phase): count for _, _, phase, count, _ in rows})
            first, tenant, *_ = min(rows)
            yield ArchiveEntry(thing_id, tenant, phases, first, ended_seconds=max(row[-1] for row in rows))


def _range_of(array_id: str) -> tuple[str, str]:
    """Return the ids between which the ids of an array's jobs are."""
    return array_id + SEPARATOR, array_id + AFTER_SEPARATOR


def _row(job: job_pb2.Job) -> tuple[object, ...]:
    kept = job_pb2.Job()
    kept.CopyFrom(job)
    kept.spec.ClearField("submit_directory")
    kept.spec.environment.clear()  # may hold secrets, and the archive is kept for years
    return (
        job.id,
        job.spec.name,
        job.spec.tenant,
        job.submitter,
        specs.KINDS.from_wire(job.spec.kind).value,
        specs.PHASES.from_wire(job.phase).value,
        job.phase_reason,
        specs.seconds(job.create_time),
        specs.seconds(job.end_time),
        specs.seconds(job.run_time),
        job.attained_gpu_seconds,
        kept.SerializeToString(),
    )
