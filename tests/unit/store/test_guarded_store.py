"""A guarded etcd that is restored, copied back, emptied or overtaken: nothing is written until it is repaired."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import cast

import pytest
from tests.contract.stores import put
from tests.support.etcd_server import EtcdServer

from cotenant.store import identity_check
from cotenant.store.etcd import EtcdStore
from cotenant.store.guarded_store import GuardedStore
from cotenant.store.open import open_store
from cotenant.store.port import (
    Compare,
    Conflict,
    LeaseLost,
    Put,
    Relisted,
    StoreRegressed,
    StoreReplaced,
    StoreUnavailable,
)
from cotenant.store.regression_acceptance import accept

PATIENCE_SECONDS = 120.0


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity_check, "LOOK_SECONDS", 0.1)


@asynccontextmanager
async def opened(etcd: EtcdServer, memory: Path | None = None) -> AsyncIterator[GuardedStore]:
    store = cast("GuardedStore", await open_store(etcd.url, memory))
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def raw(etcd: EtcdServer) -> AsyncIterator[EtcdStore]:
    store = EtcdStore([etcd.endpoint])
    try:
        yield store
    finally:
        await store.close()


async def keys_of(etcd: EtcdServer) -> set[str]:
    async with raw(etcd) as store:
        return {entry.key for entry in (await store.list("/")).entries}


async def refused(store: GuardedStore, ask: Callable[[], Awaitable[object]], kind: type[Exception]) -> None:
    """Wait until a call is rejected because of the store's identity, through the time in which it is unavailable."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            try:
                await ask()
            except kind:
                return
            except StoreUnavailable:
                with suppress(StoreUnavailable):
                    await store.trust.look()


async def taken(store: GuardedStore, ask: Callable[[], Awaitable[object]]) -> None:
    """Wait until a call is answered."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            try:
                await ask()
                return
            except StoreUnavailable:
                with suppress(StoreUnavailable):
                    await store.trust.look()


async def test_members_that_open_the_store_during_writes_disturb_no_writer(etcd: EtcdServer, tmp_path: Path) -> None:
    async with opened(etcd, tmp_path / "a") as one, opened(etcd, tmp_path / "b") as other:
        revisions = []

        async def write(store: GuardedStore, name: str) -> None:
            revisions.extend([await put(store, f"/{name}/{number}") for number in range(40)])

        async def come_and_go() -> None:
            for number in range(8):
                async with opened(etcd) as third:
                    await put(third, f"/third/{number}")

        await asyncio.gather(write(one, "one"), write(other, "other"), come_and_go())
        assert len(set(revisions)) == 80
        for store in (one, other):
            await store.trust.look()
            assert store.trust.verdict is None
        conflict = await one.transact([Compare("/one/0", 1)], [Put("/one/0", b"")])
        assert isinstance(conflict, Conflict)  # and nothing else
    async with opened(etcd, tmp_path / "a") as again:
        assert await again.get("/one/0")


@pytest.mark.parametrize("overtaken", [False, True])
async def test_nothing_is_written_to_older_data(etcd: EtcdServer, tmp_path: Path, overtaken: bool) -> None:
    async with opened(etcd) as store:
        await put(store, "/a")
        etcd.kill()
        etcd.keep_data(tmp_path / "old")
        etcd.start()
        await taken(store, lambda: put(store, "/b"))
        etcd.kill()
        etcd.put_data_back(tmp_path / "old")
        etcd.start()
        if overtaken:  # as `etcdutl snapshot restore --bump-revision` has it: no revision goes backwards
            async with raw(etcd) as others:
                for _ in range(50):
                    await others.transact([], [Put("junk", b"")])
        await refused(store, lambda: put(store, "/c"), StoreRegressed)
        with pytest.raises(StoreRegressed):
            await store.get("/a")
        assert await keys_of(etcd) == {"/a"}
        async with opened(etcd) as stranger:  # it remembers nothing, and finds the note
            await refused(stranger, lambda: put(stranger, "/d"), StoreRegressed)


async def test_an_empty_etcd_counts_as_replaced_and_stays_empty(etcd: EtcdServer, tmp_path: Path) -> None:
    etcd.kill()
    etcd.keep_data(tmp_path / "empty")
    etcd.start()
    async with opened(etcd, tmp_path / "memory") as store:
        await put(store, "/a")
        etcd.kill()
        etcd.put_data_back(tmp_path / "empty")
        etcd.start()
        await refused(store, lambda: put(store, "/b"), StoreReplaced)
    async with opened(etcd, tmp_path / "memory") as store:
        await refused(store, lambda: put(store, "/b"), StoreReplaced)
    assert await keys_of(etcd) == set()


async def test_watches_list_again_and_leases_are_lost_once_the_store_is_accepted(
    etcd: EtcdServer, tmp_path: Path
) -> None:
    async with opened(etcd, tmp_path / "memory") as store:
        first = await put(store, "/a")
        lease = await store.grant(60.0)
        etcd.kill()
        etcd.keep_data(tmp_path / "old")
        etcd.start()
        await taken(store, lambda: put(store, "/b"))
        highest = store.trust.revision
        seen: list[Relisted] = []

        async def watch() -> None:
            async with aclosing(store.watch("/", after_revision=highest)) as updates:
                async for update in updates:
                    if isinstance(update, Relisted):
                        seen.append(update)
                        return

        watching = asyncio.create_task(watch())
        etcd.kill()
        etcd.put_data_back(tmp_path / "old")
        etcd.start()
        await refused(store, lambda: put(store, "/c"), StoreRegressed)
        memory = store.trust.remembered
        assert memory
        async with raw(etcd) as operator:
            await accept(operator, [memory])
        await taken(store, lambda: store.get("/a"))
        await asyncio.wait_for(watching, PATIENCE_SECONDS)
        assert [entry.key for entry in seen[0].entries] == ["/a"]
        with pytest.raises(LeaseLost):
            await store.keep_alive(lease)
        assert await put(store, "/d") > highest > first
    async with opened(etcd, tmp_path / "memory") as again:
        assert await again.get("/d")


async def test_the_right_data_is_trusted_again(etcd: EtcdServer, tmp_path: Path) -> None:
    async with opened(etcd) as store:
        await put(store, "/0")
        etcd.kill()
        etcd.keep_data(tmp_path / "old")
        etcd.start()
        await taken(store, lambda: put(store, "/a"))
        etcd.kill()
        etcd.keep_data(tmp_path / "right")
        etcd.put_data_back(tmp_path / "old")
        etcd.start()
        await refused(store, lambda: put(store, "/b"), StoreRegressed)
        etcd.kill()
        etcd.put_data_back(tmp_path / "right")
        etcd.start()
        await taken(store, lambda: put(store, "/b"))
        assert await keys_of(etcd) == {"/0", "/a", "/b"}
