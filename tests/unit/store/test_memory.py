"""What the in-memory store adds to the port: a clock that a test can move, and limited history."""

from __future__ import annotations

import asyncio

import pytest
from tests.contract.stores import changed_next, put, take
from tests.unit.store.clocks import ManualClock

from cotenant.store.keyspace import HistoryLimit
from cotenant.store.memory import MemoryStore
from cotenant.store.port import Changes, LeaseLost, Relisted


async def test_a_lease_lasts_its_time_to_live_since_the_last_renewal() -> None:
    clock = ManualClock()
    store = MemoryStore(now=clock)
    lease = await store.grant(10)
    before = await put(store, "/leased", lease_id=lease.id)
    for _ in range(5):
        clock.advance(9.9)
        await store.expire()
        await store.keep_alive(lease)
    clock.advance(9.9)
    await store.expire()
    assert await store.get("/leased")
    clock.advance(0.1)
    await store.expire()
    assert await changed_next(store.watch("/", after_revision=before)) == {"/leased": None}
    with pytest.raises(LeaseLost):
        await store.keep_alive(lease)
    await store.close()


async def test_an_ending_lease_cannot_be_renewed_and_its_keys_are_gone() -> None:
    clock = ManualClock()
    store = MemoryStore(now=clock)
    lease = await store.grant(10)
    await put(store, "/leased", lease_id=lease.id)
    clock.advance(10)
    ending = asyncio.create_task(store.expire())
    await asyncio.sleep(0)  # start it
    with pytest.raises(LeaseLost):
        await store.keep_alive(lease)
    assert await store.get("/leased") is None
    await ending
    await store.close()


async def test_a_short_lease_expires_in_time_after_a_long_one() -> None:
    store = MemoryStore()
    await store.grant(3_600)
    short = await store.grant(0.05)
    before = await put(store, "/leased", lease_id=short.id)
    assert await changed_next(store.watch("/", after_revision=before)) == {"/leased": None}
    await store.close()


async def test_leases_that_expire_together_end_one_after_another() -> None:
    clock = ManualClock()
    store = MemoryStore(now=clock)
    leases = [await store.grant(ttl_seconds) for ttl_seconds in (3, 1, 2)]
    for lease in leases:
        await put(store, f"/{lease.id}", lease_id=lease.id)
    updates = store.watch("/", after_revision=(await store.list("/")).revision)
    clock.advance(3)
    await store.expire()
    assert [await changed_next(updates) for _ in leases] == [{f"/{lease.id}": None} for lease in leases]
    await store.close()


async def test_history_stays_within_its_limit() -> None:
    store = MemoryStore(limit=HistoryLimit(revisions=10))
    for number in range(50):
        await put(store, f"/{number}")
    (relisted,) = await take(store.watch("/", after_revision=30), 1)
    assert isinstance(relisted, Relisted)
    assert len(await take(store.watch("/", after_revision=41), 10)) == 10
    await store.close()


@pytest.mark.parametrize("limit", [(0, 1), (1, -1)])
def test_an_empty_history_limit_is_rejected(limit: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="at least one revision"):
        HistoryLimit(*limit)


async def test_a_woken_watch_delivers_all_changes_under_its_prefix() -> None:
    store = MemoryStore()
    news = store.watch("/here/", after_revision=1)
    first = asyncio.ensure_future(anext(news))
    await asyncio.sleep(0)  # it waits
    await asyncio.gather(put(store, "/here/a"), put(store, "/elsewhere"))  # both before it resumes
    told = await asyncio.wait_for(first, 5)
    assert isinstance(told, Changes)
    assert [change.key for change in told.changes] == ["/here/a"]
    await news.aclose()
    await store.close()


async def test_an_idle_watch_needs_no_history_of_other_prefixes() -> None:
    store = MemoryStore(limit=HistoryLimit(revisions=4))
    news = store.watch("/quiet/", after_revision=1)
    first = asyncio.ensure_future(anext(news))
    for _ in range(20):
        await put(store, "/loud")
    await put(store, "/quiet/a")
    assert not isinstance(await asyncio.wait_for(first, 5), Relisted)
    await news.aclose()
    await store.close()
