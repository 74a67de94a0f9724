"""What a store forgets: old history, and the room that it took."""

from __future__ import annotations

import asyncio

import pytest
from aetcd import rpc  # type: ignore[import-untyped]  # ships no types
from tests.contract.stores import put, take
from tests.support.etcd_server import EtcdServer

from cotenant.store import etcd as adapter
from cotenant.store.compaction import Upkeep
from cotenant.store.etcd import EtcdStore
from cotenant.store.memory import MemoryStore
from cotenant.store.port import Relisted
from cotenant.store.revision_offset import BASE, ShiftedStore


class Clock:
    """Time as the test has it."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.mark.parametrize("shifted", [False, True])
async def test_history_is_forgotten_once_it_is_old(shifted: bool) -> None:
    inner = MemoryStore()
    if shifted:
        await put(inner, BASE, b"1000")
    store = ShiftedStore(inner)
    clock = Clock()
    upkeep = Upkeep(store, kept_seconds=600, now=clock)
    first = await put(store, "a", b"1")
    await upkeep.tend()
    clock.seconds = 599
    second = await put(store, "a", b"2")
    assert await upkeep.tend() == 0
    (update,) = await take(store.watch("a", after_revision=first - 1), 1)
    assert not isinstance(update, Relisted)
    clock.seconds = 601
    assert await upkeep.tend() == first
    (update,) = await take(store.watch("a", after_revision=first - 1), 1)
    assert isinstance(update, Relisted)
    (update,) = await take(store.watch("a", after_revision=first), 1)
    assert update.revision == second
    entry = await store.get("a")
    assert entry
    assert entry.value == b"2"


async def test_a_file_that_is_mostly_empty_is_made_small(etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "LOOSE_BYTES", 4 * 1024 * 1024)
    inner = EtcdStore([etcd.endpoint])
    store = ShiftedStore(inner)
    try:
        for number in range(16):
            await put(store, "large", bytes([number]) * 900_000)
        async with asyncio.timeout(60):
            while (before := await size(inner)) < 16 * 900_000:  # etcd counts what it has written to disk, and no more
                await put(store, "small")
                await asyncio.sleep(0.05)
        assert await store.defragment() == []  # all of it is history, and still wanted
        clock = Clock()
        upkeep = Upkeep(store, kept_seconds=1, now=clock)
        await upkeep.tend()
        clock.seconds = 2
        await put(store, "small")
        assert await upkeep.tend() > 0
        async with asyncio.timeout(60):
            while await size(inner) >= before / 2:  # etcd forgets behind our back
                await put(store, "small")  # etcd counts what it forgot with the next write
                clock.seconds += 1
                await upkeep.tend()
                await asyncio.sleep(0.05)
    finally:
        await store.close()


async def size(store: EtcdStore) -> int:
    """How large the member's file is, in bytes."""
    member = await store._members.ready(5.0)
    status = await member.maintenance.Status(rpc.StatusRequest())
    return int(status.dbSize)
