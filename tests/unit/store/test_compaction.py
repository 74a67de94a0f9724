"""Compaction: old history is dropped, and its space released."""

from __future__ import annotations

import asyncio

import pytest
from aetcd import rpc  # type: ignore[import-untyped]  # ships no types
from tests.contract.stores import put, take
from tests.support.etcd_server import EtcdServer

from cotenant.store import etcd as adapter
from cotenant.store.compaction import Compactor
from cotenant.store.etcd import EtcdStore
from cotenant.store.memory import MemoryStore
from cotenant.store.port import Relisted
from cotenant.store.revision_offset import BASE, OffsetStore


class Clock:
    """A clock set by the test."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.mark.parametrize("shifted", [False, True])
async def test_old_history_is_compacted(shifted: bool) -> None:
    inner = MemoryStore()
    if shifted:
        await put(inner, BASE, b"1000")
    store = OffsetStore(inner)
    clock = Clock()
    upkeep = Compactor(store, kept_seconds=600, now=clock)
    first = await put(store, "a", b"1")
    await upkeep.run_once()
    clock.seconds = 599
    second = await put(store, "a", b"2")
    assert await upkeep.run_once() == 0
    (update,) = await take(store.watch("a", after_revision=first - 1), 1)
    assert not isinstance(update, Relisted)
    clock.seconds = 601
    assert await upkeep.run_once() == first
    (update,) = await take(store.watch("a", after_revision=first - 1), 1)
    assert isinstance(update, Relisted)
    (update,) = await take(store.watch("a", after_revision=first), 1)
    assert update.revision == second
    entry = await store.get("a")
    assert entry
    assert entry.value == b"2"


async def test_a_mostly_unused_file_is_defragmented(etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "LOOSE_BYTES", 4 * 1024 * 1024)
    inner = EtcdStore([etcd.endpoint])
    store = OffsetStore(inner)
    try:
        for number in range(16):
            await put(store, "large", bytes([number]) * 900_000)
        async with asyncio.timeout(60):
            while (before := await size(inner)) < 16 * 900_000:  # etcd counts only what it has written to disk
                await put(store, "small")
                await asyncio.sleep(0.05)
        assert await store.defragment() == []  # all of it is history that is still kept
        clock = Clock()
        upkeep = Compactor(store, kept_seconds=1, now=clock)
        await upkeep.run_once()
        clock.seconds = 2
        await put(store, "small")
        assert await upkeep.run_once() > 0
        async with asyncio.timeout(60):
            while await size(inner) >= before / 2:  # etcd frees pages in the background
                await put(store, "small")  # etcd counts freed pages with the next write
                clock.seconds += 1
                await upkeep.run_once()
                await asyncio.sleep(0.05)
    finally:
        await store.close()


async def size(store: EtcdStore) -> int:
    """Return the size of the member's file, in bytes."""
    member = await store._members.ready(5.0)
    status = await member.maintenance.Status(rpc.StatusRequest())
    return int(status.dbSize)
