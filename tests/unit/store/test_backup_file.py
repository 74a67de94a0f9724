"""Backups: complete or rejected, and revisions that never fall."""

from __future__ import annotations

import asyncio
import gzip
import os
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.contract.stores import put

from cotenant.store import backup_file
from cotenant.store.backup_file import (
    BadBackup,
    Contents,
    InUse,
    NotEmpty,
    read_file,
    read_store,
    restore_entries,
    write_file,
)
from cotenant.store.memory import MemoryStore
from cotenant.store.port import Changes, Committed, Compare, Conflict, Operation, Put, Relisted, StoreUnavailable
from cotenant.store.revision_offset import BASE, FILLING, OffsetStore, PartialRestore

FEW = Contents(7, (("a/1", b"one"), ("a/2", b"\x00\xff"), ("b", b"")))
keys = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8).filter(lambda key: not key.startswith("store/"))


class DiesAfter(MemoryStore):
    """A store that fails after so many transactions."""

    def __init__(self, transactions: int) -> None:
        super().__init__()
        self.left = transactions

    async def transact(self, compares: object, operations: object) -> Committed | Conflict:
        if self.left == 0:
            raise StoreUnavailable("gone")
        self.left -= 1
        return await super().transact(compares, operations)  # type: ignore[arg-type]  # a stand-in


class Shared(OffsetStore):
    """Looks like a store that other processes may have open as well."""

    def __init__(self) -> None:
        super().__init__(_NotLocal())  # type: ignore[arg-type]  # a stand-in


class _NotLocal:
    def __init__(self) -> None:
        self._inner = MemoryStore()

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


@given(st.dictionaries(keys, st.binary(max_size=20)), st.integers(1, 2**50))
def test_a_backup_is_read_as_written(
    tmp_path_factory: pytest.TempPathFactory, kept: dict[str, bytes], revision: int
) -> None:
    path = tmp_path_factory.mktemp("backup") / "b"
    contents = Contents(revision, tuple(sorted(kept.items())))
    write_file(contents, path)
    assert read_file(path) == contents
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(path.parent) == ["b"]


def test_every_damage_is_found(tmp_path: Path) -> None:
    path = tmp_path / "b"
    write_file(FEW, path)
    whole, rng = path.read_bytes(), Random(5)
    for _ in range(60):
        at = rng.randrange(10, len(whole))
        path.write_bytes(rng.choice([whole[:at], whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :]]))
        with suppress(BadBackup):
            assert read_file(path) == FEW  # some bits of gzip's header do not matter


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "not the header of a backup"),
        ("{}\n{}\n", "not the head"),
        ('{"cotenant_backup":2,"revision":1,"keys":0}\n{"sha256":""}\n', "its format is 2"),
        ('{"cotenant_backup":1,"revision":1,"keys":0}\n{"sha256":""}\n', "is incomplete"),
        ('{"cotenant_backup":1,"revision":1,"keys":1}\n{"k":"a"}\n{"sha256":""}\n', "not a key and value"),
        ('{"cotenant_backup":1,"revision":1,"keys":1}\nnonsense\n{"sha256":""}\n', "line 2 is not JSON"),
        ("[]\n[]\n", "line 1 is not a JSON object"),
    ],
)
def test_invalid_backups_are_rejected(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "b"
    path.write_bytes(gzip.compress(text.encode()))
    with pytest.raises(BadBackup, match=told):
        read_file(path)
    path.write_text(text)
    with pytest.raises(BadBackup):
        read_file(path)


@pytest.mark.parametrize(
    ("contents", "told"),
    [
        (Contents(7, (("", b"1"),)), "must not be empty"),
        (Contents(7, (("a", b"1"), ("b", b"2"), ("a", b"3"))), "'a' occurs more than once"),
        (Contents(7, (("\ud800", b"1"),)), "cannot be stored"),
        (Contents(7, (("a", b"x" * ((1 << 20) + 1)),)), "the limit is 1048576"),
        (Contents(7, ((BASE, b"1"),)), "belongs to a single store"),
        (Contents(7, (("queue/leader", b"1"),)), "belongs to a single store"),
        (Contents(-1, ()), "invalid revision -1"),
        (Contents(1 << 63, ()), "invalid revision"),
    ],
)
async def test_invalid_contents_are_rejected_and_nothing_is_written(contents: Contents, told: str) -> None:
    store = MemoryStore()
    await put(store, "queue/jobs/a", b"mine")
    before = await store.list("")
    with pytest.raises(BadBackup, match=told):
        await restore_entries(OffsetStore(store), contents, replace=True)
    assert await store.list("") == before


async def test_keys_in_any_order_are_taken() -> None:
    store = OffsetStore(MemoryStore())
    await restore_entries(store, Contents(7, (("b", b"2"), ("a", b"1"))))
    assert [entry.key for entry in (await store.list("")).entries] == ["a", "b"]


@pytest.mark.parametrize("base", [b"x", b"", b"9" * 30, b"9" * 5000])
async def test_a_store_with_a_damaged_offset_is_reported_and_can_be_restored(base: bytes) -> None:
    inner = MemoryStore()
    await put(inner, BASE, base)
    with pytest.raises(PartialRestore, match="is damaged"):
        await OffsetStore(inner).list("")
    await restore_entries(OffsetStore(inner), FEW, replace=True)
    assert (await read_store(OffsetStore(inner))).entries == FEW.entries


async def test_a_restored_store_continues_above_both_revisions() -> None:
    source = OffsetStore(MemoryStore())
    for number in range(250):
        await put(source, f"jobs/{number:03}", bytes([number]))
    await put(source, "placement/leader", b"me")
    contents = await read_store(source)
    assert len(contents.entries) == 250
    target = OffsetStore(MemoryStore())
    seen: list[tuple[int, int]] = []
    goes_on = await restore_entries(target, contents, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (250, 250)
    assert goes_on > contents.revision
    listing = await target.list("")
    assert [(one.key, one.value) for one in listing.entries] == list(contents.entries)
    assert listing.revision > goes_on
    assert all(one.mod_revision > goes_on for one in listing.entries)
    revision = await put(target, "jobs/new")
    assert revision == listing.revision + 1

    # and again, into the same store: never back
    again = await restore_entries(OffsetStore(target.inner), contents, replace=True)
    assert again > revision


async def test_a_store_that_is_not_empty_is_kept() -> None:
    inner = MemoryStore()
    await put(inner, "mine", b"1")
    with pytest.raises(NotEmpty, match="holds 1 keys"):
        await restore_entries(OffsetStore(inner), FEW)
    assert [entry.key for entry in (await inner.list("")).entries] == ["mine"]
    await restore_entries(OffsetStore(inner), FEW, replace=True)
    assert await OffsetStore(inner).get("mine") is None


async def test_a_store_on_which_services_run_is_kept() -> None:
    store = Shared()
    await put(store, "queue/leader", b"me")
    with pytest.raises(InUse, match="queue/leader"):
        await restore_entries(store, FEW, replace=True)


@pytest.mark.parametrize("transactions", range(1, 7))
async def test_an_interrupted_restore_is_reported_until_it_is_repeated(transactions: int) -> None:
    contents = Contents(9, tuple((f"k/{number:03}", bytes(40)) for number in range(350)))
    inner = DiesAfter(transactions)
    try:
        await restore_entries(OffsetStore(inner), contents)
        pytest.fail("it was to be cut off") if transactions < 6 else None
    except StoreUnavailable:
        with pytest.raises(PartialRestore, match="restore --replace"):
            await OffsetStore(inner).get("k/001")
        inner.left = 100
        await restore_entries(OffsetStore(inner), contents, replace=True)
    assert (await read_store(OffsetStore(inner))).entries == contents.entries
    assert await inner.get(FILLING) is None


async def test_a_transaction_from_before_the_restore_never_commits() -> None:
    source = OffsetStore(MemoryStore())
    old = await put(source, "a")
    target = OffsetStore(MemoryStore())
    await restore_entries(target, await read_store(source))
    assert isinstance(await target.transact([Compare("a", old)], [Put("a", b"2")]), Conflict)
    entry = await target.get("a")
    assert entry
    assert isinstance(await target.transact([Compare("a", entry.mod_revision)], [Put("a", b"2")]), Committed)
    assert isinstance(await target.transact([Compare("none", 0)], [Put("none", b"")]), Committed)


async def test_a_watch_from_before_the_restore_starts_with_a_listing() -> None:
    source = OffsetStore(MemoryStore())
    old = await put(source, "a/1", b"x")
    target = OffsetStore(MemoryStore())
    goes_on = await restore_entries(target, await read_store(source))
    updates = target.watch("a/", after_revision=old)
    first = await anext(updates)
    assert isinstance(first, Relisted)
    assert [entry.key for entry in first.entries] == ["a/1"]
    revision = await put(target, "a/2")
    second = await anext(updates)
    assert isinstance(second, Changes)
    assert second.revision == revision > goes_on


async def test_a_watch_of_a_store_that_closes_ends() -> None:
    inner = MemoryStore()
    await inner.close()
    store = OffsetStore(inner)
    ended = asyncio.create_task(_all(store))
    await asyncio.sleep(0)
    await store.close()
    async with asyncio.timeout(60):
        assert await ended == []


async def _all(store: OffsetStore) -> list[object]:
    return [update async for update in store.watch("a", after_revision=1)]


async def test_keys_about_the_store_itself_are_hidden() -> None:
    inner = MemoryStore()
    await put(inner, BASE, b"50")
    store = OffsetStore(inner)
    assert (await store.list("")).entries == ()
    assert (await store.list("s")).entries == ()


def test_batches_fit_into_transactions_of_every_store() -> None:
    operations: list[Operation] = [Put(f"{number}", bytes(100_000)) for number in range(30)]
    batches = list(backup_file._batches(operations))
    assert [one for batch in batches for one in batch] == operations
    assert (
        max(sum(len(one.value) for one in batch if isinstance(one, Put)) for batch in batches) <= backup_file.BYTES_MAX
    )
    assert (
        max(map(len, backup_file._batches([Put(str(number), b"") for number in range(999)])))
        == backup_file.OPERATIONS_MAX
    )
