"""Stores and their derivatives: damaged SQLite files and archives, backups that are complete and contradictory.

Every operation is complete or has no effect: a target store that could not be filled is unchanged, and so is a store
that was read.
"""

from __future__ import annotations

import asyncio
import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import aclosing, closing, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from random import Random

from tests.unit.services.mesh import spec
from tests.verification.fuzz.messages import Drawer
from tests.verification.fuzz.targets import Prepared, Target

from cotenant.cli import views
from cotenant.cli.jobs.history import _found, _row
from cotenant.cli.mesh.backup import _fill, _is_of_others, _read, _run
from cotenant.cli.outcome import CommandError
from cotenant.services.queue.jobs.archive import Archive
from cotenant.services.queue.jobs.archived_jobs import ArchivedJobs
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.visibility import View
from cotenant.store.backup_file import BadBackup, Contents, read_file, read_store, restore_entries, write_file
from cotenant.store.eras import ERAS
from cotenant.store.identity_check import IDENTITY, PROGRESS
from cotenant.store.memory import MemoryStore
from cotenant.store.port import Put, Relisted, StoreUnavailable
from cotenant.store.revision_offset import BASE, FILLING, OWN, OffsetStore
from cotenant.store.sqlite import SqliteStore
from cotenant.v1 import job_pb2

OWN_AFTER_FILLING = {BASE, ERAS, IDENTITY, PROGRESS}
WATCH_SECONDS_MAX = 2.0
PAGE_BYTES = 512  # SQLite's minimum, so that most of a file is data
ODD: tuple[object, ...] = (
    *(None, "", "x", b"", b"\xff", "\ud800".encode(errors="surrogatepass"), 0, 1, -1, 2**63 - 1, -(2**63), 0.5),
    *(
        float("inf"),
        float("-inf"),
        1e308,
        "9" * 400,
        "queue/jobs/a",
        "store/base",
        "store/filling",
        "x/leader",
        2,
        3,
        5,
    ),
)
SCHEMA_WORDS = ("DROP TABLE {}", "DELETE FROM {}", "ALTER TABLE {} RENAME TO other", "DROP TABLE other; DELETE FROM {}")
TABLES = ("entries", "history", "leases", "compaction", "sqlite_sequence")


def targets() -> Iterator[Target]:
    """Yield the targets."""
    yield Target("SQLite store", _stores, (StoreUnavailable,))
    yield Target("migrate", _migrate, (CommandError,))
    yield Target("archive", _archives, (CommandError,))
    yield Target("archive writes", _archives_to_write, (OSError,))
    yield Target("restore", _restore, (BadBackup,))
    yield Target("restore file", _restore_bytes, (CommandError,))


# SQLite files ------------------------------------------------------------------------------------------------------


def _damaged(good: bytes, data: bytes, place: Path, tables: tuple[str, ...]) -> bytes:
    """Return a valid file changed by SQL, as `data` determines; every second input is `data` itself."""
    if zlib.crc32(data) % 2:
        return data
    rng = Random(data)
    path = place / "changed.sqlite"
    _write(path, good)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        for _ in range(rng.choice((1, 1, 2, 3))):
            with suppress(sqlite3.Error, UnicodeError, LookupError, TypeError):  # earlier changes may prevent it
                _change(connection, rng, tables)
    return path.read_bytes()


def _change(connection: sqlite3.Connection, rng: Random, tables: tuple[str, ...]) -> None:
    table = rng.choice(tables)
    if rng.random() < 0.15:
        connection.executescript(rng.choice(SCHEMA_WORDS).format(table))
        return
    if rng.random() < 0.1:
        number = rng.choice((0, 1, 2, -1, 0x436F746E))
        connection.execute(f"PRAGMA {rng.choice(('user_version', 'application_id'))} = {number}")
        return
    if rng.random() < 0.3:  # columns without constraints
        shown = connection.execute(f"SELECT sql FROM sqlite_master WHERE name = '{table}'").fetchone()
        plain = shown[0].replace(" NOT NULL", "").replace(" PRIMARY KEY", "").replace("WITHOUT ROWID", "")
        connection.execute(f"ALTER TABLE {table} RENAME TO before")
        connection.execute(plain.replace("AUTOINCREMENT", ""))
        connection.execute(f"INSERT INTO {table} SELECT * FROM before")
        connection.execute("DROP TABLE before")
    columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
    where = rng.choice(("", f" WHERE rowid = {rng.randint(1, 4)}", " WHERE key = 'a'"))
    connection.execute(f"UPDATE {table} SET {rng.choice(columns)} = ?{where}", (rng.choice(ODD),))


def _write(path: Path, data: bytes) -> None:
    for name in (path, path.with_name(path.name + "-wal"), path.with_name(path.name + "-shm")):
        name.unlink(missing_ok=True)
    path.write_bytes(data)


def _small(path: Path) -> None:
    """Create a file with small pages and no content."""
    _write(path, b"")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        connection.execute("PRAGMA journal_mode = WAL")


def _good_store(directory: Path) -> bytes:
    path = directory / "good.sqlite"
    _small(path)

    async def made() -> None:
        store = SqliteStore(path)
        lease = await store.grant(30.0)
        for key, value in (("queue/jobs/a", b"1"), ("queue/jobs/b", b"\x00" * 40), ("queue/leader", b"x"), ("z", b"")):
            await store.transact([], [Put(key, value, lease.id if key == "z" else 0)])
        await store.transact([], [Put("queue/jobs/a", b"2")])
        await store.compact(3)
        await store.close()

    asyncio.run(made())
    return path.read_bytes()


def _stores(directory: Path) -> Prepared:
    """Open, read and write it; what was written is there after a reopen."""
    good, path, loop = _good_store(directory), directory / "store.sqlite", asyncio.new_event_loop()

    async def used() -> None:
        store = SqliteStore(path)
        try:
            before = await store.list("")
            await store.transact([], [Put("fresh", b"here")])
            written = await store.list("")
            for revision in (0, before.revision - 1, before.revision):
                await asyncio.wait_for(_wait_for_change(store, "fresh", revision), WATCH_SECONDS_MAX)
        finally:
            await store.close()
        again = SqliteStore(path)
        try:
            if await again.list("") != written:
                raise AssertionError("another content after the reopen")
        finally:
            await again.close()

    def run(data: bytes) -> None:
        _write(path, data)
        loop.run_until_complete(used())

    return Prepared(run, (good,), pack=lambda data: _damaged(good, data, directory, TABLES))


async def _wait_for_change(store: SqliteStore, key: str, revision: int) -> None:
    """Watch from a revision until the change of a key is reported."""
    async with aclosing(store.watch("", after_revision=revision)) as news:
        async for update in news:
            written = update.entries if isinstance(update, Relisted) else update.changes
            if any(one.key == key for one in written):
                return


def _migrate(directory: Path) -> Prepared:
    """Read a store as `migrate` does, and fill another one; neither is left incomplete."""
    good, source, to = _good_store(directory), directory / "from.sqlite", directory / "to.sqlite"
    _small(to)
    asyncio.run(_closed(SqliteStore(to)))
    empty = to.read_bytes()

    def run(data: bytes) -> None:
        _write(source, data)
        _write(to, empty)
        try:
            _is_of_others(source)
            contents = _run(_read([f"sqlite:{source}"]))
            _run(_fill(f"sqlite:{to}", contents, replace=False))
        except CommandError:
            _must_hold(to, ())
            raise
        _must_hold(to, contents.entries)

    return Prepared(run, (good,), pack=lambda data: _damaged(good, data, directory, TABLES))


async def _closed(store: SqliteStore) -> None:
    await store.close()


def _must_hold(path: Path, entries: tuple[tuple[str, bytes], ...]) -> None:
    with closing(sqlite3.connect(path)) as connection:
        found = dict(connection.execute("SELECT key, value FROM entries"))
    own = {key for key in found if key.startswith(OWN)}
    if own and not own <= OWN_AFTER_FILLING:
        raise AssertionError(f"incomplete: it holds {sorted(own)}")
    found = {key: value for key, value in found.items() if key not in own}
    if found != dict(entries):
        raise AssertionError(f"incomplete: it holds {sorted(found)}, not {[key for key, _ in entries]}")


# Archives ----------------------------------------------------------------------------------------------------------


def _good_archive(directory: Path) -> bytes:
    path = directory / "good-archive.sqlite"
    _small(path)
    asyncio.run(Archive(path).add(_jobs()))
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
    return path.read_bytes()


def _jobs() -> list[job_pb2.Job]:
    jobs = []
    for number, phase in enumerate(
        (job_pb2.JOB_PHASE_SUCCEEDED, job_pb2.JOB_PHASE_FAILED, job_pb2.JOB_PHASE_CANCELLED)
    ):
        job = job_pb2.Job(id=f"j{number}", spec=spec(gpus=number, tenant="t", kind=1 + number), phase=phase)
        job.create_time.FromSeconds(1_000)
        job.end_time.FromSeconds(2_000 + number)
        jobs.append(job)
    return jobs


def _archives(directory: Path) -> Prepared:
    """Query it as `cotenant history` does; every third input has complete rows with invalid jobs."""
    good, path = _good_archive(directory), directory / "archive.sqlite"
    drawer = Drawer(Random("archive"), {"id": ["x"]})

    def pack(data: bytes) -> bytes:
        if zlib.crc32(data) % 3:
            return _damaged(good, data, directory, ("jobs",))
        changed = directory / "changed.sqlite"
        _write(changed, good)
        job = data if len(data) % 2 else drawer.change(_jobs()[0]).SerializeToString()
        with closing(sqlite3.connect(changed)) as connection, connection:
            connection.execute("UPDATE jobs SET job = ? WHERE id = 'j1'", (job,))
        return changed.read_bytes()

    def run(data: bytes) -> None:
        _write(path, data)
        every: dict[str, str | float] = {}
        some: dict[str, str | float] = {"tenant = ?": "t", "end_time >= ?": 5.0}
        for wanted in (every, some):
            found = list(_found(path, wanted, 10))
            with redirect_stdout(StringIO()):
                views.print_json([views.job_view(job, 5.0) for job in found])
            for job in found:
                _row(job)
        with suppress(OSError):  # a report of usage goes on without an archive that cannot be read
            asyncio.run(_ended_in(Archive(path)))

    return Prepared(run, (good, _jobs()[1].SerializeToString()), pack=pack)


async def _ended_in(archive: Archive) -> int:
    """Return how many jobs have ended, as far as they can be read."""
    return sum([len(jobs) async for jobs in archive.ended_since(0.0, 2e9)])


def _archives_to_write(directory: Path) -> Prepared:
    """Add jobs, as a queue does that removes them from the store; they can be read, and earlier ones are found."""
    good, path = _good_archive(directory), directory / "written.sqlite"
    archive, loop = Archive(path), asyncio.new_event_loop()
    past, view = ArchivedJobs(MemoryStore(), archive), View(State())

    def run(data: bytes) -> None:
        _write(path, data)
        loop.run_until_complete(past.list(view, ["j1", "array", "j2"]))
        loop.run_until_complete(archive.add(_jobs()))
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("SELECT job FROM jobs WHERE id = 'j2'").fetchone()

    return Prepared(run, (good,), pack=lambda data: _damaged(good, data, directory, ("jobs",)))


# Backups -----------------------------------------------------------------------------------------------------------


KEYS = ("queue/jobs/a", "queue/jobs/b", "queue/tenants/default", "placement/nodes/n", "predictor/x/y", "queue/leader")
ODD_KEYS = ("", "\0", "é" * 40, "\ud800", BASE, FILLING, "store/x", "x/leader", "a" * 5000, *KEYS)
ODD_REVISIONS = (0, -1, 7, 2**40, 2**63 - 1, 2**63, 2**70, 10**30)
ODD_VALUES = (b"", b"1", b"x" * 5000, b"x" * ((1 << 20) + 1))
BASES = (b"12", b"-5", b"x", b"", b"9" * 30, b"9" * 5000, "²".encode())


def _restore(directory: Path) -> Prepared:
    """Fill a store from a backup with a valid digest and arbitrary content."""
    loop = asyncio.new_event_loop()

    async def filled(data: bytes) -> None:
        rng = Random(data)
        entries = [(key, rng.choice((b"1", b"22"))) for key in KEYS if rng.random() < 0.7]
        for _ in range(rng.choice((0, 1, 2))):
            entries.insert(rng.randint(0, len(entries)), (rng.choice(ODD_KEYS), rng.choice(ODD_VALUES)))
        contents = Contents(rng.choice(ODD_REVISIONS), tuple(entries))
        store, before = MemoryStore(), {key: b"before" for key in KEYS[:3] if rng.random() < 0.5}
        if rng.random() < 0.3:
            before[BASE] = rng.choice(BASES)
        for key, value in before.items():
            await store.transact([], [Put(key, value)])
        try:
            goes_on = await restore_entries(OffsetStore(store), contents, replace=True)
        except BadBackup:
            found = {entry.key: entry.value for entry in (await store.list("")).entries}
            if found != before:
                raise AssertionError(f"incomplete: {sorted(found)}") from None
            raise
        written = await read_store(restored := OffsetStore(store))
        if dict(written.entries) != {key: value for key, value in entries if not key.endswith("/leader")}:
            raise AssertionError("the store holds something else")
        if not max(contents.revision, 0) < goes_on <= written.revision < 2**63:
            raise AssertionError(f"it continues from {goes_on}, at {written.revision}")
        await restored.transact([], [Put("queue/jobs/fresh", b"")])

    return Prepared(lambda data: loop.run_until_complete(filled(data)), (b"0", b"1", b"abc"))


def _restore_bytes(directory: Path) -> Prepared:
    """Read a backup file and fill an SQLite file, as the command does."""
    path, to = directory / "backup", directory / "filled.sqlite"
    write_file(Contents(7, tuple((key, b"x" * number) for number, key in enumerate(KEYS[:-1]))), path)
    good = path.read_bytes()

    def run(data: bytes) -> None:
        path.write_bytes(data)
        _write(to, b"")
        try:
            contents = read_file(path)
        except BadBackup as error:
            raise CommandError(str(error)) from None
        _run(_fill(f"sqlite:{to}", contents, replace=False))
        _must_hold(to, contents.entries)

    return Prepared(run, (good, good[: len(good) // 2]))
