"""The contract of group commit, for both writers of the control plane and all stores, with kills in the middle."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

import pytest
from tests.conftest import require_etcd
from tests.contract.stores import WAIT_SECONDS_MAX, EtcdHome, Home, MemoryHome, SqliteHome
from tests.support.etcd_server import EtcdServer, leader_of, start_cluster

from cotenant.leadership.fenced_store import DelegatingStore, FencedStore
from cotenant.leadership.leadership_term import HeldTerm
from cotenant.services.placement.cluster.committer import Committer, Fenced, Outdated, Write
from cotenant.services.queue.jobs.grouped_store import GroupedStore
from cotenant.store.etcd import EtcdStore
from cotenant.store.port import Committed, Compare, Conflict, NotLeader, Operation, Put, Store, StoreUnavailable

STALE = Compare("/nothing/here", 7)


class Counting(DelegatingStore):
    """A store that counts its transactions."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.transactions = 0

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Committed | Conflict:
        self.transactions += 1
        return await super().transact(compares, operations)


class Refused(Exception):
    """The write's condition does not hold."""


class Writer(ABC):
    """A writer in its leadership term."""

    def __init__(self, store: Store, held: HeldTerm) -> None:
        self.store = store

    @abstractmethod
    async def write(self, key: str, value: bytes, under: Sequence[Compare] = ()) -> int:
        """Write a key, and return the revision. Raises `Refused` if a condition does not hold."""

    @abstractmethod
    async def close(self) -> None:
        """Stop writing."""


class Queue(Writer):
    """The queue's writer. It writes each key once: it compares the revisions that it knows."""

    def __init__(self, store: Store, held: HeldTerm) -> None:
        super().__init__(store, held)
        self._grouped = GroupedStore(FencedStore(store, held))

    async def write(self, key: str, value: bytes, under: Sequence[Compare] = ()) -> int:
        result = await self._grouped.transact([Compare(key, 0), *under], [Put(key, value)])
        if isinstance(result, Conflict):
            raise Refused
        return result.revision

    async def close(self) -> None:
        pass


class Placement(Writer):
    """Placement's writer."""

    def __init__(self, store: Store, held: HeldTerm) -> None:
        super().__init__(store, held)
        self._committer = Committer(store, held)
        self._committer.start(held.fence, {})

    async def write(self, key: str, value: bytes, under: Sequence[Compare] = ()) -> int:
        try:
            return await self._committer.commit([Write(key, value)], under)
        except Outdated:
            raise Refused from None

    async def close(self) -> None:
        await self._committer.close()


@pytest.fixture(params=["memory", "sqlite", "etcd"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Home:
    if request.param == "memory":
        return MemoryHome()
    return SqliteHome(tmp_path) if request.param == "sqlite" else EtcdHome(request.getfixturevalue("shared_etcd"))


@pytest.fixture(params=[Queue, Placement])
def kind(request: pytest.FixtureRequest) -> type[Writer]:
    writer: type[Writer] = request.param
    return writer


@pytest.fixture
def at() -> str:
    """A prefix of this test's own."""
    return f"/{uuid4()}/"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[list[EtcdServer]]:
    """Yield an etcd of three members: an etcd of one before 3.5.5 acknowledges writes before they are in its log."""
    require_etcd()
    servers = start_cluster(tmp_path, members=3)
    yield servers
    for server in servers:
        server.kill()


@asynccontextmanager
async def writing(kind: type[Writer], store: Store, at: str) -> AsyncIterator[Writer]:
    """A writer that has begun its term."""
    held = HeldTerm(store, f"{at}leader")
    await held.renew()
    writer = kind(store, held)
    try:
        yield writer
    finally:
        await writer.close()


async def test_concurrent_writes_take_few_transactions(home: Home, kind: type[Writer], at: str) -> None:
    async with home.opened() as inner, writing(kind, counting := Counting(inner), at) as writer:
        counting.transactions = 0
        keys = [f"{at}k{number:03}" for number in range(250)]
        revisions = await asyncio.gather(*(writer.write(key, key.encode()) for key in keys))
        assert counting.transactions <= 5
        found = {entry.key: entry for entry in (await inner.list(f"{at}k")).entries}
        assert [(found[key].value, found[key].mod_revision) for key in keys] == [
            (key.encode(), revision) for key, revision in zip(keys, revisions, strict=True)
        ]
        assert revisions == sorted(revisions)


async def test_refused_writes_fail_alone(home: Home, kind: type[Writer], at: str) -> None:
    async with home.opened() as inner, writing(kind, inner, at) as writer:
        stale = {3, 17, 38}
        results = await asyncio.gather(
            *(writer.write(f"{at}k{one:02}", b"x", [STALE] if one in stale else []) for one in range(40)),
            return_exceptions=True,
        )
        assert {one for one, result in enumerate(results) if isinstance(result, Refused)} == stale
        assert sum(isinstance(result, int) for result in results) == 37
        assert len((await inner.list(f"{at}k")).entries) == 37


async def test_a_replaced_leader_writes_nothing_of_a_group(home: Home, kind: type[Writer], at: str) -> None:
    async with home.opened() as inner, writing(kind, inner, at) as writer:
        await writer.write(f"{at}k", b"before")
        await HeldTerm(inner, f"{at}leader").renew()
        results = await asyncio.gather(
            *(writer.write(f"{at}k{number}", b"x") for number in range(20)), return_exceptions=True
        )
        assert not any(isinstance(one, int | Refused) for one in results)
        assert [entry.value for entry in (await inner.list(f"{at}k")).entries] == [b"before"]


async def test_kills_of_etcd_lose_no_acknowledged_write(cluster: list[EtcdServer], kind: type[Writer], at: str) -> None:
    """Each write is acknowledged at the revision at which it stands; only the queue's may fail, and then either way."""
    store = EtcdStore([server.endpoint for server in cluster], timeout_seconds=WAIT_SECONDS_MAX)
    acknowledged: dict[str, int] = {}
    failed: set[str] = set()
    async with writing(kind, store, at) as writer:

        async def write(key: str) -> None:
            try:
                acknowledged[key] = await writer.write(key, key.encode())
            except StoreUnavailable:
                failed.add(key)

        tasks = []
        for turn in range(3):
            tasks += [asyncio.create_task(write(f"{at}k{turn}-{number}")) for number in range(120)]
            await asyncio.wait(tasks[-120:], return_when=asyncio.FIRST_COMPLETED)  # some groups are still to come
            tasks += [asyncio.create_task(write(f"{at}late{turn}-{number}")) for number in range(30)]
            await asyncio.sleep(0)
            await asyncio.to_thread(leader_of(cluster).restart)
        async with asyncio.timeout(2 * WAIT_SECONDS_MAX):
            await asyncio.gather(*tasks)
        found = {entry.key: entry for entry in (await store.list(at)).entries if entry.key != f"{at}leader"}
        assert {key: found[key].mod_revision for key in acknowledged} == acknowledged
        assert found.keys() <= acknowledged.keys() | failed
        assert len(acknowledged) + len(failed) == 450
        if kind is Placement:
            assert not failed
    await store.close()


async def test_a_term_lost_while_etcd_is_away_writes_nothing(etcd: EtcdServer, at: str) -> None:
    store = EtcdStore([etcd.endpoint], timeout_seconds=WAIT_SECONDS_MAX)
    async with writing(Placement, store, at) as writer:
        etcd.kill()
        tasks = [asyncio.create_task(writer.write(f"{at}k{number}", b"x")) for number in range(20)]
        await asyncio.sleep(0)
        await asyncio.to_thread(etcd.start)
        etcd.put(f"{at}leader", b"another")
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 2 * WAIT_SECONDS_MAX)
        assert {type(one) for one in results} <= {NotLeader, Fenced, int}
        written = {entry.key for entry in (await store.list(f"{at}k")).entries}
        assert written == {f"{at}k{number}" for number, one in enumerate(results) if isinstance(one, int)}
    await store.close()
