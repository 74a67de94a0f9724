"""Keep-alives of leases while the event loop is busy."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator

import pytest
from tests.contract.stores import put
from tests.support.etcd_server import EtcdServer
from tests.unit.store.lossy_wire import LossyWire

from cotenant.store.etcd import EtcdStore
from cotenant.store.port import LeaseLost, StoreUnavailable

TTL_SECONDS = 1.0
WAIT_SECONDS = 60.0


@pytest.fixture
async def store(shared_etcd: EtcdServer) -> AsyncIterator[EtcdStore]:
    store = EtcdStore([shared_etcd.endpoint])
    yield store
    await store.close()


def come_to_nothing(seconds: float) -> None:
    """Block the event loop."""
    time.sleep(seconds)


async def test_a_lease_survives_a_loop_blocked_for_longer_than_its_time_to_live(store: EtcdStore) -> None:
    lease = await store.grant(2 * TTL_SECONDS)
    await put(store, "/busy", lease_id=lease.id)
    await store.keep_alive(lease, for_seconds=60)
    come_to_nothing(1.75 * lease.ttl_seconds)  # without renewals it would have expired a second earlier
    await store.keep_alive(lease)
    assert await store.get("/busy")
    await store.revoke(lease)


async def gone(store: EtcdStore, key: str) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while await store.get(key):  # noqa: ASYNC110  # the store, not this process, knows when
            await asyncio.sleep(0.02)


async def test_a_lease_expires_if_its_holder_is_blocked_for_too_long(store: EtcdStore) -> None:
    lease = await store.grant(TTL_SECONDS)
    await put(store, "/stuck", lease_id=lease.id)
    began = time.monotonic()
    await store.keep_alive(lease, for_seconds=lease.ttl_seconds)
    await gone(store, "/stuck")
    assert time.monotonic() - began > 1.5 * lease.ttl_seconds  # it was renewed for a while first
    with pytest.raises(LeaseLost):
        await store.keep_alive(lease, for_seconds=60)


async def test_a_lease_that_was_renewed_once_is_not_renewed_further(store: EtcdStore) -> None:
    lease = await store.grant(TTL_SECONDS)
    await put(store, "/once", lease_id=lease.id)
    await store.keep_alive(lease)
    await gone(store, "/once")


async def test_a_closed_store_lets_its_leases_expire(shared_etcd: EtcdServer, store: EtcdStore) -> None:
    before = set(threading.enumerate())
    closing = EtcdStore([shared_etcd.endpoint])
    lease = await closing.grant(TTL_SECONDS)
    await put(store, "/closed", lease_id=lease.id)
    await closing.keep_alive(lease, for_seconds=60)
    await closing.close()
    assert not [one for one in set(threading.enumerate()) - before if one.name == "etcd-beats"]
    with pytest.raises(StoreUnavailable, match="closed"):
        await closing.keep_alive(lease)
    await gone(store, "/closed")


async def test_a_member_that_does_not_answer_costs_no_lease(shared_etcd: EtcdServer, store: EtcdStore) -> None:
    async with LossyWire(shared_etcd.client_port).laid() as wire:
        over_wire = EtcdStore([wire.endpoint, shared_etcd.endpoint])
        lease = await over_wire.grant(2 * TTL_SECONDS)
        await put(store, "/wired", lease_id=lease.id)
        await over_wire.keep_alive(lease, for_seconds=60)
        wire.lose_answers()
        loop = asyncio.get_running_loop()
        for _ in range(3):
            began = loop.time()
            await over_wire.keep_alive(lease)
            assert loop.time() - began < lease.ttl_seconds
        assert await store.get("/wired")
        await over_wire.close()
        await store.revoke(lease)
