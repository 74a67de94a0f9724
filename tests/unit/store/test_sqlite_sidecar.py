"""The sidecar of an SQLite store: a lost log, a truncated log and an older copy are noticed, a crash is no alarm."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.contract.stores import put

from cotenant.store.open import open_store
from cotenant.store.port import StoreRegressed
from cotenant.store.sqlite import SqliteStore
from cotenant.store.sqlite_sidecar import SLOT_BYTES, Note, newest_note, packed

CRASH_WRITER = Path(__file__).with_name("crash_writer.py")
KILLS = 12


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.db"


def wal_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


def copied(path: Path, to: Path) -> Path:
    """Copy a store as it is on disk, with its sidecar."""
    to.mkdir()
    for part in path.parent.glob(f"{path.name}*"):
        shutil.copy(part, to / part.name)
    return to / path.name


async def test_a_lost_log_is_noticed(path: Path, tmp_path: Path) -> None:
    store = SqliteStore(path)
    for number in range(12):
        await put(store, f"/{number}")
    crashed = copied(path, tmp_path / "crashed")
    await store.close()
    whole = SqliteStore(copied(crashed, tmp_path / "whole"))
    assert whole.regression == ""
    await whole.close()
    wal_of(crashed).unlink()
    cut = SqliteStore(crashed)
    assert "write-ahead log" in cut.regression
    await cut.close()
    again = SqliteStore(crashed)
    assert again.regression  # until it is accepted
    await again.accept()
    await again.close()
    accepted = SqliteStore(crashed)
    assert accepted.regression == ""
    await accepted.close()


@pytest.mark.parametrize("kept_share", [0.25, 0.5, 0.9])
async def test_a_truncated_log_is_noticed(path: Path, tmp_path: Path, kept_share: float) -> None:
    store = SqliteStore(path)
    for number in range(12):
        await put(store, f"/{number}")
    crashed = copied(path, tmp_path / "crashed")
    await store.close()
    content = wal_of(crashed).read_bytes()
    wal_of(crashed).write_bytes(content[: int(len(content) * kept_share)])
    cut = SqliteStore(crashed)
    assert cut.regression
    await cut.close()


async def test_an_older_copy_is_noticed_and_so_is_another_store_of_the_same_length(path: Path, tmp_path: Path) -> None:
    store = SqliteStore(path)
    await put(store, "/a")
    await store.close()
    older = tmp_path / "older.db"
    shutil.copy(path, older)
    store = SqliteStore(path)
    await put(store, "/b")
    await store.close()
    shutil.copy(older, path)
    store = SqliteStore(path)
    assert "older copy" in store.regression
    await put(store, "/c")  # another second write
    await store.close()
    store = SqliteStore(path)
    assert "another store" in store.regression
    await store.close()


async def test_nothing_is_read_from_or_written_to_a_regressed_store(path: Path) -> None:
    store = await open_store(f"sqlite:{path}")
    await put(store, "/a")
    await store.close()
    older = path.with_name("older")
    shutil.copy(path, older)
    store = await open_store(f"sqlite:{path}")
    await put(store, "/b")
    await store.close()
    shutil.copy(older, path)
    store = await open_store(f"sqlite:{path}")
    with pytest.raises(StoreRegressed):
        await store.get("/a")
    with pytest.raises(StoreRegressed):
        await put(store, "/c")
    await store.close()


def test_no_kill_at_any_moment_looks_like_a_loss(path: Path) -> None:
    for kill in range(KILLS):
        writer = subprocess.Popen([sys.executable, CRASH_WRITER, path], stdout=subprocess.PIPE)
        assert writer.stdout
        for _ in range(1 + kill * 37 % 200):
            assert writer.stdout.readline()
        writer.kill()
        writer.wait()
        writer.stdout.close()
        store = SqliteStore(path)
        assert store.regression == ""
        store._journal.close()


@given(
    first=st.integers(1, 1 << 60),
    revision=st.integers(1, 1 << 60),
    cut=st.integers(0, SLOT_BYTES - 1),
    flipped=st.integers(0, 8 * SLOT_BYTES - 1),
)
def test_a_torn_or_damaged_slot_leaves_the_other_note(first: int, revision: int, cut: int, flipped: int) -> None:
    older, newer = Note(first, revision, bytes(16)), Note(first + 1, revision + 1, bytes(16))
    assert newest_note(packed(older) + packed(newer)) == newer
    torn = packed(newer)[:cut].ljust(SLOT_BYTES, b"\xff")
    assert newest_note(packed(older) + torn) in (older, newer)
    damaged = bytearray(packed(newer))
    damaged[flipped // 8] ^= 1 << flipped % 8
    assert newest_note(packed(older) + bytes(damaged)) in (older, newer)  # the padding is not significant
