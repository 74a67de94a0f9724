"""Ended jobs that the mesh no longer keeps: in an SQLite file, for people and for accounting."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path

from cotenant.rpc import translate
from cotenant.v1 import job_pb2

FILE = "archive.sqlite"
WAIT_SECONDS_MAX = 10.0  # for whoever else writes into the file
SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    id TEXT PRIMARY KEY, name TEXT NOT NULL, tenant TEXT NOT NULL, submitter TEXT NOT NULL, kind TEXT NOT NULL,
    phase TEXT NOT NULL, reason TEXT NOT NULL, create_time REAL NOT NULL, end_time REAL NOT NULL,
    run_seconds REAL NOT NULL, gpu_seconds REAL NOT NULL, job BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_end ON jobs (end_time);
CREATE INDEX IF NOT EXISTS by_tenant ON jobs (tenant, end_time);
"""
INSERT = "INSERT OR REPLACE INTO jobs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"


class Archive:
    """Writes jobs down before they are forgotten. A job that is written twice is there once.

    The columns are for queries by hand; `job` is the whole job as `cotenant.v1.Job`, without its environment.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    async def add(self, jobs: Sequence[job_pb2.Job]) -> None:
        """Write jobs, all or none.

        Raises:
            OSError: they cannot be written.
        """
        try:
            await asyncio.to_thread(self._add, [_row(job) for job in jobs])
        except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter where a damaged schema is quoted
            raise OSError(f"cannot write {self.path}: {error}") from error

    def _add(self, rows: Iterable[Sequence[object]]) -> None:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with closing(sqlite3.connect(self.path, timeout=WAIT_SECONDS_MAX)) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.executescript(SCHEMA)
            with connection:
                connection.executemany(INSERT, rows)
        self.path.chmod(0o600)


def _row(job: job_pb2.Job) -> tuple[object, ...]:
    kept = job_pb2.Job()
    kept.CopyFrom(job)
    kept.spec.environment.clear()  # may hold what is nobody's business for years
    return (
        job.id,
        job.spec.name,
        job.spec.tenant,
        job.submitter,
        translate.KINDS.from_wire(job.spec.kind).value,
        translate.PHASES.from_wire(job.phase).value,
        job.phase_reason,
        translate.seconds(job.create_time),
        translate.seconds(job.end_time),
        translate.seconds(job.run_time),
        job.attained_gpu_seconds,
        kept.SerializeToString(),
    )
