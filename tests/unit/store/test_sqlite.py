"""The embedded store's promises beyond the port: crashes, full disks, one owner, limited history."""

from __future__ import annotations

import asyncio
import resource
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.contract.stores import Model, changed_next, drain, put, take
from tests.support.properties import examples
from tests.unit.store.clocks import ManualClock

from cotenant.store.keyspace import Draft, HistoryLimit
from cotenant.store.port import (
    Changes,
    Committed,
    Compare,
    Conflict,
    Delete,
    LeaseLost,
    Listing,
    Operation,
    Put,
    Relisted,
    Store,
    StoreInUse,
    StoreUnavailable,
)
from cotenant.store.sqlite import SqliteStore
from cotenant.store.sqlite_journal import Journal

CRASH_WRITER = Path(__file__).with_name("crash_writer.py")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.db"


@pytest.mark.parametrize("seed", range(2))
async def test_acknowledged_writes_survive_a_kill_and_no_write_is_partial(path: Path, seed: int) -> None:
    for acknowledged_max in (1, 300, 3_000):
        acknowledged = killed_after(path, acknowledged_max + seed)
        store = SqliteStore(path)
        history = await history_of(store)
        for revision, writer, number in acknowledged:
            assert history[revision] == {f"/{writer}/left": number, f"/{writer}/right": number}
        state = {key: number for changed in history.values() for key, number in changed.items()}
        listing = await store.list("/")
        assert {entry.key: number_in(entry.value) for entry in listing.entries} == state
        await store.close()


def killed_after(path: Path, acknowledged_max: int) -> list[tuple[int, int, int]]:
    """Run a writer process, kill it after enough output, and return its output."""
    with subprocess.Popen([sys.executable, CRASH_WRITER, path], stdout=subprocess.PIPE) as writer:
        assert writer.stdout
        lines = [writer.stdout.readline() for _ in range(acknowledged_max)]
        writer.kill()
        lines += writer.stdout.readlines()
    if not lines[-1].endswith(b"\n"):
        lines.pop()  # killed while printing it
    return [(int(revision), int(by), int(number)) for revision, by, number in map(bytes.split, lines)]


async def history_of(store: Store) -> dict[int, dict[str, int]]:
    """Return what each revision changed; each must have changed a pair of keys, and none is missing."""
    revision = (await store.list("")).revision
    history = {}
    for update in await drain(store.watch("", after_revision=1), to_revision=revision):
        assert isinstance(update, Changes)
        assert len(update.changes) == 2
        history[update.revision] = {change.key: number_in(change.value) for change in update.changes}
    assert list(history) == list(range(2, revision + 1))
    return history


def number_in(value: bytes | None) -> int:
    assert value is not None
    return int(value.split()[0])


async def written_and_cut_off(directory: Path) -> tuple[Model, Path]:
    """Write to a store without a checkpoint, and copy its file and log as a power cut leaves them."""
    store, model = SqliteStore(directory / "whole.db"), Model(1)
    for number in range(30):
        operations: list[Operation] = [Put(f"/{number % 5}", bytes(number * 300)), Delete(f"/{(number + 2) % 5}")]
        assert await store.transact([], operations) == model.transact([], operations)
    copy = directory / "cut.db"
    for suffix in ("", "-wal"):
        shutil.copy(f"{directory / 'whole.db'}{suffix}", f"{copy}{suffix}")
    await store.close()
    return model, copy


def test_a_truncated_log_leaves_whole_transactions(tmp_path: Path) -> None:
    model, cut = asyncio.run(written_and_cut_off(tmp_path))
    wal = Path(f"{cut}-wal").read_bytes()
    numbers = count()
    seen: set[int] = set()

    @given(st.integers(0, len(wal)))
    @settings(max_examples=examples(200), deadline=None)
    def opens_at_some_revision(length: int) -> None:
        path = tmp_path / f"{next(numbers)}.db"
        shutil.copy(cut, path)
        Path(f"{path}-wal").write_bytes(wal[:length])
        journal = Journal(path)
        keyspace = journal.load()
        journal.close()
        seen.add(keyspace.revision)
        assert keyspace.listing("").entries == model.listed("", keyspace.revision)
        assert list(keyspace.since(1)) == model.changes("", 1, keyspace.revision)

    opens_at_some_revision()
    assert len(seen) > 3


async def test_a_file_has_one_owner_in_this_process(path: Path) -> None:
    store = SqliteStore(path)
    with pytest.raises(StoreInUse, match=str(path)):
        SqliteStore(path)
    await put(store, "a")
    await store.close()
    await SqliteStore(path).close()


def test_a_file_has_one_owner_among_processes_until_that_dies(path: Path) -> None:
    with subprocess.Popen([sys.executable, CRASH_WRITER, path], stdout=subprocess.PIPE) as writer:
        assert writer.stdout
        assert writer.stdout.readline()
        with pytest.raises(StoreInUse, match=str(path)):
            SqliteStore(path)
        writer.kill()
        writer.stdout.read()
    asyncio.run(SqliteStore(path).close())


def test_no_other_process_writes_while_the_store_is_open(path: Path) -> None:
    store = SqliteStore(path)
    code = "import sqlite3, sys; sqlite3.connect(sys.argv[1], 0).execute('DELETE FROM entries')"
    intruder = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=False)
    assert "database is locked" in intruder.stderr
    asyncio.run(store.close())


@contextmanager
def disk_full(size_bytes: int) -> Iterator[None]:
    """Limit the size of this process's files, as a full disk would."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


async def test_a_full_disk_makes_the_store_unavailable_until_space_is_freed(path: Path) -> None:
    store = SqliteStore(path)
    before = await put(store, "/before", b"1")
    listing = await store.list("")
    with disk_full(size_bytes=64 * 1024):
        lease_and_writes = [store.grant(60), *(put(store, f"/{number}", bytes(200_000)) for number in range(3))]
        outcomes = await asyncio.gather(*lease_and_writes, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [StoreUnavailable] * 4
        assert str(path) in str(outcomes[0])
        assert await store.list("") == listing  # what is committed can still be read
    assert await put(store, "/after", b"2") == before + 1
    expected = await store.list("")
    await store.close()
    again = SqliteStore(path)
    assert await again.list("") == expected
    await again.close()


async def test_a_lease_that_cannot_end_on_a_full_disk_ends_later(path: Path) -> None:
    clock = ManualClock()
    store = SqliteStore(path, now=clock)
    lease = await store.grant(5)
    await put(store, "/leased", bytes(200_000), lease_id=lease.id)
    clock.advance(5)
    with disk_full(size_bytes=64 * 1024):
        await store.expire()
    assert await store.get("/leased")
    clock.advance(5)
    await store.expire()
    assert await store.get("/leased") is None
    await store.close()


async def test_a_lease_has_its_whole_time_again_after_a_restart(path: Path) -> None:
    clock = ManualClock()
    store = SqliteStore(path, now=clock)
    lease, revoked = await store.grant(10), await store.grant(10)
    await put(store, "/leased", lease_id=lease.id)
    await store.revoke(revoked)
    clock.advance(9)
    await store.close()

    store = SqliteStore(path, now=clock)
    clock.advance(9)
    await store.expire()
    assert await store.get("/leased")
    with pytest.raises(LeaseLost):
        await store.keep_alive(revoked)
    clock.advance(1)
    await store.expire()
    assert await store.get("/leased") is None
    await store.close()

    store = SqliteStore(path, now=clock)
    with pytest.raises(LeaseLost):
        await store.keep_alive(lease)
    assert (await store.grant(10)).id not in (lease.id, revoked.id)
    await store.close()


async def test_a_lease_from_before_a_restart_expires(path: Path) -> None:
    store = SqliteStore(path)
    lease = await store.grant(0.2)
    before = await put(store, "/leased", lease_id=lease.id)
    await store.close()
    store = SqliteStore(path)
    assert await changed_next(store.watch("/", after_revision=before)) == {"/leased": None}
    await store.close()


async def test_concurrent_transactions_are_one_commit_and_are_checked_separately(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts: list[Draft] = []
    write = Journal.write

    def note(journal: Journal, draft: Draft) -> None:
        drafts.append(draft)
        write(journal, draft)

    monkeypatch.setattr(Journal, "write", note)
    store = SqliteStore(path)
    absent = [Compare("/a", 0)]
    outcomes = await asyncio.gather(
        store.transact(absent, [Put("/a", b"1")]),
        store.transact(absent, [Put("/a", b"2"), Put("/b", b"2")]),
        store.transact([Compare("/a", 2)], [Put("/a", b"3")]),
        store.transact([], [Put("/c", b"", lease_id=7)]),
        store.transact([], [Put("/c", b"4")]),
        store.compact(1_000),
        return_exceptions=True,
    )
    assert list(outcomes[:3]) == [Committed(2), Conflict(2), Committed(3)]
    assert isinstance(outcomes[3], LeaseLost)
    assert outcomes[4] == Committed(4)
    assert isinstance(outcomes[5], ValueError)
    assert len(drafts) == 1
    assert [entry.key for entry in (await store.list("")).entries] == ["/a", "/c"]
    await store.close()


@pytest.fixture
def disk_may_go_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Yield an event; until it is set, every commit waits for the disk."""
    event, write = threading.Event(), Journal.write
    event.set()

    def write_in_time(journal: Journal, draft: Draft) -> None:
        assert event.wait(10)
        write(journal, draft)

    monkeypatch.setattr(Journal, "write", write_in_time)
    yield event
    event.set()


async def test_reads_do_not_wait_for_the_disk_and_see_only_durable_state(
    path: Path, disk_may_go_on: threading.Event
) -> None:
    store = SqliteStore(path)
    disk_may_go_on.clear()
    updates = store.watch("", after_revision=1)
    writing = [asyncio.create_task(put(store, "/a", b"%d" % number)) for number in range(3)]
    seeing = asyncio.create_task(take(updates, 3))
    for _ in range(10):
        assert await store.list("") == Listing((), 1)
    assert not any(task.done() for task in [*writing, seeing])
    disk_may_go_on.set()
    assert await asyncio.gather(*writing) == [2, 3, 4]
    assert [update.revision for update in await seeing] == [2, 3, 4]
    await store.close()


async def test_a_lease_is_not_reported_lost_before_its_keys_are_deleted(
    path: Path, disk_may_go_on: threading.Event
) -> None:
    clock = ManualClock()
    store = SqliteStore(path, now=clock)
    lease = await store.grant(5)
    await put(store, "/leased", lease_id=lease.id)
    clock.advance(5)
    disk_may_go_on.clear()
    expiring, keeping = asyncio.create_task(store.expire()), asyncio.create_task(store.keep_alive(lease))
    for _ in range(10):
        assert await store.get("/leased")
    assert not keeping.done()
    disk_may_go_on.set()
    with pytest.raises(LeaseLost):
        await keeping
    assert await store.get("/leased") is None
    await expiring
    await store.close()


async def test_a_cancelled_caller_affects_no_other(path: Path) -> None:
    store = SqliteStore(path)
    writing = [asyncio.create_task(put(store, f"/{number}")) for number in range(10)]
    await store.get("/")  # all of them have asked now
    writing[3].cancel()
    outcomes = await asyncio.gather(*writing, return_exceptions=True)
    assert isinstance(outcomes[3], asyncio.CancelledError)
    assert all(isinstance(outcome, int) for index, outcome in enumerate(outcomes) if index != 3)
    await store.close()


async def test_closing_commits_waiting_transactions(path: Path) -> None:
    store = SqliteStore(path)
    writing = [asyncio.create_task(put(store, f"/{number}")) for number in range(100)]
    await store.get("/")
    await store.close()
    assert sorted(await asyncio.gather(*writing)) == list(range(2, 102))
    again = SqliteStore(path)
    assert len((await again.list("")).entries) == 100
    await again.close()


async def test_history_stays_within_its_limit_also_on_disk(path: Path) -> None:
    store = SqliteStore(path, limit=HistoryLimit(revisions=100))
    for number in range(500):
        await put(store, f"/{number % 10}")
    (relisted,) = await take(store.watch("", after_revision=300), 1)
    assert isinstance(relisted, Relisted)
    assert len(await drain(store.watch("", after_revision=401), to_revision=501)) == 100
    await store.close()
    with closing(sqlite3.connect(path)) as file:
        ((rows,),) = file.execute("SELECT count(*) FROM history")
    assert 100 <= rows <= 125
    again = SqliteStore(path, limit=HistoryLimit(revisions=100))
    (relisted,) = await take(again.watch("", after_revision=300), 1)
    assert isinstance(relisted, Relisted)
    assert await put(again, "/more") == 502
    await again.close()


async def test_history_of_large_values_is_short(path: Path) -> None:
    store = SqliteStore(path, limit=HistoryLimit(bytes=1_000_000))
    for _ in range(50):
        await put(store, "/large", bytes(100_000))
    (relisted,) = await take(store.watch("", after_revision=30), 1)
    assert isinstance(relisted, Relisted)
    assert len(await drain(store.watch("", after_revision=43), to_revision=51)) == 8
    await store.close()


async def test_many_rows_of_every_kind_survive_a_restart(path: Path) -> None:
    store, model = SqliteStore(path), Model(1)
    for size, stride in ((700, 1), (300, 2), (257, 3)):
        operations: list[Operation] = [
            Put(f"/{number}", b"%d" % stride) if number % 5 else Delete(f"/{number}")
            for number in range(0, size * stride, stride)
        ]
        assert await store.transact([], operations) == model.transact([], operations)
    await store.close()
    again = SqliteStore(path)
    assert (await again.list("")).entries == model.listed("", model.revision)
    assert await drain(again.watch("", after_revision=1), to_revision=model.revision) == model.log
    await again.close()


def test_a_write_that_fails_halfway_leaves_nothing(path: Path) -> None:
    journal = Journal(path)
    keyspace = journal.load()
    first, again = Draft(keyspace), Draft(keyspace)
    first.transact([], [Put("/a", b"1")])
    again.transact([], [Put("/b", b"2")])  # at the same revision: its entry can be written, its history cannot
    journal.write(first)
    with pytest.raises(StoreUnavailable, match="UNIQUE"):
        journal.write(again)
    keyspace = journal.load()
    assert [entry.key for entry in keyspace.listing("").entries] == ["/a"]
    then = Draft(keyspace)
    then.transact([], [Put("/b", b"3")])
    journal.write(then)
    assert [entry.key for entry in journal.load().listing("").entries] == ["/a", "/b"]
    journal.close()


def test_a_commit_waits_for_the_disk(path: Path) -> None:
    journal = Journal(path)
    assert journal._pragma("synchronous") == 2  # FULL; no test can cut the power
    journal.close()


def test_an_unusable_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="nowhere"):
        SqliteStore(tmp_path / "nowhere" / "state.db")


@pytest.mark.parametrize("content", [b"not a database at all, but long enough to look at" * 100, b"SQLite format 3\0"])
def test_a_file_that_is_not_a_database_is_left_unchanged(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(StoreUnavailable, match=str(path)):
        SqliteStore(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("change", ["CREATE TABLE theirs (x)", "PRAGMA user_version = 99"])
async def test_a_foreign_or_newer_database_is_rejected(path: Path, change: str) -> None:
    if "user_version" in change:
        await SqliteStore(path).close()
    with closing(sqlite3.connect(path)) as file:
        file.execute(change)
    with pytest.raises(StoreUnavailable, match="not a store of this version"):
        SqliteStore(path)


def test_a_store_is_private_even_if_an_older_version_created_it(path: Path) -> None:
    """It contains commands and environments of jobs, and other users may enter a state directory."""

    async def modes_while_it_is_written() -> set[int]:
        store = SqliteStore(path)
        await put(store, "/a")
        modes = modes_of_all()
        await store.close()
        return modes

    def modes_of_all() -> set[int]:
        return {one.stat().st_mode & 0o777 for one in path.parent.glob(f"{path.name}*")}

    for _ in range(2):
        assert asyncio.run(modes_while_it_is_written()) == {0o600}
        path.chmod(0o644)


def test_a_foreign_file_keeps_its_mode(path: Path) -> None:
    path.write_bytes(b"not a database at all, but long enough to look at" * 100)
    path.chmod(0o644)
    with pytest.raises(StoreUnavailable):
        SqliteStore(path)
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        ("UPDATE entries SET value = 'text'", "rows of entries are invalid"),
        ("UPDATE entries SET mod_revision = 0", "rows of entries are invalid"),
        ("UPDATE entries SET mod_revision = 99 WHERE key = 'a'", "an entry has revision 99"),
        ("DELETE FROM history WHERE revision = 3", "its history goes from"),
        ("UPDATE history SET value = 5", "rows of history are invalid"),
        ("DELETE FROM compaction", "compaction has 0 rows"),
        ("UPDATE compaction SET revision = -1", "rows of compaction are invalid"),
        ("INSERT INTO leases VALUES (1, -5)", "rows of leases are invalid"),
        ("DROP TABLE leases", "its table leases is missing"),
        ("ALTER TABLE entries ADD COLUMN more", "its table entries is missing or different"),
    ],
)
async def test_an_inconsistent_file_is_rejected_and_closed(path: Path, damage: str, told: str) -> None:
    store = SqliteStore(path)
    for key in "abc":
        await put(store, key)
    await store.close()
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute(damage)
    with pytest.raises(StoreUnavailable, match=f"{told}.*restore a backup"):
        SqliteStore(path)
    with closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as connection:
        connection.execute("BEGIN EXCLUSIVE")  # nobody holds it
