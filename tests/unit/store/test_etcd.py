"""The etcd adapter's promises when servers die, freeze, answer in pieces or refuse."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import count
from pathlib import Path
from uuid import uuid4

import grpc
import pytest
from aetcd import rpc  # type: ignore[import-untyped]  # ships no types
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import require_etcd
from tests.contract.stores import changed_next, drain, put, take
from tests.support.etcd_server import EtcdServer, free_ports, leader_of, start_cluster
from tests.unit.store.lossy_wire import LossyWire

from cotenant.store.etcd import EtcdStore
from cotenant.store.etcd_members import Refused, store_error
from cotenant.store.etcd_watch import Assembly
from cotenant.store.member_status import HasMembers
from cotenant.store.memory import MemoryStore
from cotenant.store.port import (
    VALUE_BYTES_MAX,
    Change,
    Changes,
    Committed,
    Compare,
    Entry,
    Put,
    Relisted,
    Store,
    StoreUnavailable,
)
from cotenant.store.revision_offset import OffsetStore

SHORT_SECONDS = 0.5  # the deadline of calls that should miss it


@pytest.fixture
async def store(etcd: EtcdServer) -> AsyncIterator[EtcdStore]:
    store = EtcdStore([etcd.endpoint])
    yield store
    await store.close()


async def restart(etcd: EtcdServer) -> None:
    await asyncio.to_thread(etcd.restart)


async def write_until_told(store: Store, key: str, stop: asyncio.Event) -> list[Committed]:
    """Raise a number at a key, through outages, and return the acknowledged writes."""
    acknowledged = []
    for number in count():
        if stop.is_set():
            break
        try:
            outcome = await store.transact([], [Put(key, b"%d" % number), Put(f"{key}/too", b"%d" % number)])
        except StoreUnavailable:
            continue
        assert isinstance(outcome, Committed)
        acknowledged.append(outcome)
    return acknowledged


async def test_a_watch_neither_loses_nor_repeats_changes_when_etcd_is_killed(
    etcd: EtcdServer, store: EtcdStore
) -> None:
    before = (await store.list("/")).revision
    stop = asyncio.Event()
    watches = [store.watch("/", after_revision=before) for _ in range(3)]
    first = [asyncio.create_task(take(watch, 50)) for watch in watches]
    writing = [asyncio.create_task(write_until_told(store, f"/{writer}", stop)) for writer in range(3)]
    seen = await asyncio.gather(*first)
    for _ in range(2):
        await restart(etcd)
        for watch, updates in zip(watches, seen, strict=True):
            updates += await take(watch, 50)
    stop.set()
    acknowledged = [committed.revision for each in await asyncio.gather(*writing) for committed in each]
    last = await put(store, "/end")

    for watch, updates in zip(watches, seen, strict=True):
        updates += await drain(watch, to_revision=last)
    truth = await drain(store.watch("/", after_revision=before), to_revision=last)
    assert [update.revision for update in truth] == list(range(before + 1, last + 1))
    assert all(len(changes_in(update)) == 2 for update in truth[:-1])
    written = [(change.key, change.value) for update in truth for change in changes_in(update)]
    assert len(set(written)) == len(written), "a transaction was done twice"
    assert set(acknowledged) <= {update.revision for update in truth}
    for updates in seen:
        assert updates == truth


def changes_in(update: Changes | Relisted) -> tuple[Change, ...]:
    assert isinstance(update, Changes)
    return update.changes


async def test_an_idle_watch_survives_a_restart(etcd: EtcdServer, store: EtcdStore) -> None:
    updates = store.watch("/", after_revision=await put(store, "/a"))
    waiting = asyncio.create_task(changed_next(updates))
    await put(store, "0")  # not under the prefix
    await restart(etcd)
    await put(store, "/b", b"2")
    assert await waiting == {"/b": b"2"}


async def test_a_watch_that_was_away_too_long_gets_the_whole_prefix(etcd: EtcdServer, store: EtcdStore) -> None:
    updates = store.watch("/", after_revision=await put(store, "/a"))
    made = await put(store, "/b", b"1")
    assert await changed_next(updates) == {"/b": b"1"}

    port_of_store = etcd.client_port
    etcd.kill()
    (etcd.client_port,) = free_ports(1)  # where the watch cannot find it
    await restart(etcd)
    other = EtcdStore([etcd.endpoint])
    await put(other, "/a", b"2")
    last = await put(other, "/a", b"3")
    await other.compact(last)
    await other.close()
    etcd.kill()
    etcd.client_port = port_of_store
    await restart(etcd)

    assert await take(updates, 1) == [
        Relisted(last, (Entry("/a", b"3", made - 1, last), Entry("/b", b"1", made, made)))
    ]
    await put(store, "/c", b"4")
    assert await changed_next(updates) == {"/c": b"4"}


async def test_every_call_fails_within_its_deadline_without_etcd_and_works_afterwards(
    etcd: EtcdServer,
) -> None:
    store = EtcdStore([etcd.endpoint], timeout_seconds=SHORT_SECONDS)
    lease = await store.grant(60)
    await put(store, "/a", lease_id=lease.id)
    loop = asyncio.get_running_loop()
    for take_away, bring_back in ((etcd.kill, etcd.start), (etcd.freeze, etcd.thaw)):
        take_away()
        calls = (
            store.get("/a"),
            store.list("/"),
            store.transact([Compare("/b", 0)], [Put("/b", b"")]),
            store.grant(60),
            store.keep_alive(lease),
            store.revoke(lease),
            store.compact(1),
        )
        began = loop.time()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [StoreUnavailable] * len(calls)
        assert all(etcd.endpoint in str(outcome) for outcome in outcomes)
        assert loop.time() - began < SHORT_SECONDS + 5  # a busy machine is slow, but does not hang
        await asyncio.to_thread(bring_back)
        async with EtcdOpened(etcd) as patient:
            await patient.list("/")
    await store.close()


class EtcdOpened:
    """A store for the duration of a block."""

    def __init__(self, *servers: EtcdServer, timeout_seconds: float = 5.0) -> None:
        self._store = EtcdStore([server.endpoint for server in servers], timeout_seconds=timeout_seconds)

    async def __aenter__(self) -> EtcdStore:
        return self._store

    async def __aexit__(self, *_: object) -> None:
        await self._store.close()


async def test_a_read_waits_for_etcd_to_come_back(etcd: EtcdServer) -> None:
    store = EtcdStore([etcd.endpoint], timeout_seconds=30)
    await put(store, "/a", b"1")
    etcd.kill()
    reading = [asyncio.create_task(store.list("/")), asyncio.create_task(store.list("/"))]
    await restart(etcd)
    assert [[entry.value for entry in (await task).entries] for task in reading] == [[b"1"], [b"1"]]
    await store.close()


async def test_a_transaction_is_never_applied_twice(etcd: EtcdServer) -> None:
    store = EtcdStore([etcd.endpoint], timeout_seconds=SHORT_SECONDS)
    before = await put(store, "/a")
    etcd.freeze()
    with pytest.raises(StoreUnavailable):
        await put(store, "/a", b"once")
    etcd.thaw()
    async with EtcdOpened(etcd) as patient:
        assert await put(patient, "/a", b"then") - before in (1, 2)
    await store.close()


async def test_a_transaction_whose_answer_is_lost_is_not_repeated_but_a_read_is(
    etcd: EtcdServer, store: EtcdStore
) -> None:
    before = await put(store, "/a")
    updates = store.watch("/", after_revision=before)
    async with LossyWire(etcd.client_port).laid() as wire:
        over_wire = EtcdStore([wire.endpoint], timeout_seconds=20)
        assert await over_wire.get("/a")
        wire.lose_answers()
        writing = asyncio.create_task(put(over_wire, "/a", b"once"))
        reading = asyncio.create_task(over_wire.get("/a"))
        assert await changed_next(updates) == {"/a": b"once"}
        wire.cut()
        with pytest.raises(StoreUnavailable):
            await writing
        assert await reading == await over_wire.get("/a") == Entry("/a", b"once", before, before + 1)
        await over_wire.close()


async def test_a_lease_outlives_a_restart_of_etcd(etcd: EtcdServer, store: EtcdStore) -> None:
    lease = await store.grant(30)
    await put(store, "/leased", lease_id=lease.id)
    await restart(etcd)
    await store.keep_alive(lease)
    assert await store.get("/leased")
    await store.revoke(lease)
    assert await store.get("/leased") is None


@pytest.mark.parametrize("is_up", [True, False])
async def test_closing_ends_calls_and_watches_at_once(etcd: EtcdServer, is_up: bool) -> None:
    store = EtcdStore([etcd.endpoint], timeout_seconds=60)
    before = await put(store, "/a")
    if is_up:
        etcd.freeze()  # calls are sent, and not answered
    else:
        etcd.kill()  # calls wait for a connection
    calls = [asyncio.create_task(call) for call in (store.get("/a"), store.list("/"), store.compact(1))]
    watching = asyncio.create_task(anext(store.watch("/", after_revision=before), None))
    assert not (await asyncio.wait([*calls, watching], timeout=0.2))[0]
    async with asyncio.timeout(60):
        await store.close()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [StoreUnavailable] * 3
        assert await watching is None


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[list[EtcdServer]]:
    require_etcd()
    servers = start_cluster(tmp_path, members=3)
    yield servers
    for server in servers:
        server.kill()


async def test_each_member_reports_its_status(cluster: list[EtcdServer]) -> None:
    store = OffsetStore(EtcdStore([server.endpoint for server in cluster]))
    assert isinstance(store, HasMembers)
    first, second, third = sorted(cluster, key=lambda server: server.endpoint)
    try:
        await put(store, "/n")
        found = await store.member_statuses()
        assert [one.endpoint for one in found] == [server.endpoint for server in (first, second, third)]
        assert [one.leads for one in found].count(True) == 1
        assert all(one.version and one.size_bytes and not one.problem for one in found)
        second.kill()
        problems = [one.problem for one in await store.member_statuses()]
        assert (problems[0], problems[2]) == ("", "") or "no leader" in f"{problems}"  # where it led them
        assert problems[1]
        third.kill()
        async with asyncio.timeout(60):
            while (alone := (await store.member_statuses())[0]).problem != "no leader: most members are unavailable":
                continue  # it takes it a moment to notice
        assert alone.version
    finally:
        await store.close()
    assert await OffsetStore(MemoryStore()).member_statuses() == []


@pytest.mark.deep
async def test_a_cluster_serves_on_without_any_one_of_its_members(cluster: list[EtcdServer]) -> None:
    async with EtcdOpened(*cluster) as store:
        revision = await put(store, "/n", b"start")
        updates = store.watch("/", after_revision=revision)
        for number, server in enumerate(cluster):
            server.kill()
            assert await store.get("/n")  # as often as needed, until the others have a leader
            revision = await put_when_possible(store, "/n", b"%d" % number)
            assert (await drain(updates, to_revision=revision))[-1].revision == revision
            await restart(server)


@pytest.mark.parametrize("lose", [EtcdServer.kill, EtcdServer.freeze], ids=["dead", "frozen"])
@pytest.mark.parametrize("through", ["leader", "follower"])
async def test_a_transaction_lost_with_its_member_is_not_awaited(
    cluster: list[EtcdServer], lose: Callable[[EtcdServer], None], through: str
) -> None:
    leader = leader_of(cluster)
    first = leader if through == "leader" else next(one for one in cluster if one is not leader)
    members = [first, *(one for one in cluster if one is not first)]
    async with EtcdOpened(*members, timeout_seconds=30.0) as store:
        await put(store, "/a")
        lose(leader)
        begun = time.monotonic()
        await put_when_possible(
            store, "/a", b"2"
        )  # those after the first may be lost as well, until a leader is elected
        assert time.monotonic() - begun < 20  # far less than the deadline, on a slow machine too


async def put_when_possible(store: Store, key: str, value: bytes) -> int:
    async with asyncio.timeout(30):
        while True:
            try:
                return await put(store, key, value)
            except StoreUnavailable:
                continue  # a leader is being elected


@pytest.mark.deep
async def test_a_cluster_without_a_majority_is_unavailable_and_its_watches_wait(cluster: list[EtcdServer]) -> None:
    async with EtcdOpened(*cluster, timeout_seconds=1.0) as store:
        updates = store.watch("/", after_revision=await put(store, "/a"))
        for server in cluster[:2]:
            server.kill()
        with pytest.raises(StoreUnavailable):
            await store.get("/a")
        for server in cluster[:2]:
            server.start(wait=False)
        last = await put_when_possible(store, "/a", b"2")
        assert (await drain(updates, to_revision=last))[-1].revision == last


@pytest.mark.deep
async def test_a_silent_member_is_abandoned_by_watches_and_calls(tmp_path: Path) -> None:
    require_etcd()
    servers = start_cluster(tmp_path, members=3, arguments=["--grpc-keepalive-min-time=100ms"])
    try:
        for frozen in servers:
            store = EtcdStore(
                [frozen.endpoint, *(server.endpoint for server in servers if server is not frozen)],
                timeout_seconds=4.0,
                silence_seconds_max=1.5,
            )
            updates = store.watch("/", after_revision=await put(store, "/a"))
            watching = asyncio.create_task(changed_next(updates))
            await put(store, "0")  # not under the prefix; the watch has begun by now
            frozen.freeze()  # its connections stay open
            assert await store.get("/a")
            await put_when_possible(store, "/a", b"2")
            assert await watching == {"/a": b"2"}
            frozen.thaw()
            await store.close()
    finally:
        for server in servers:
            server.kill()


async def test_a_dead_endpoint_among_live_ones_is_skipped(shared_etcd: EtcdServer) -> None:
    dead = f"127.0.0.1:{free_ports(1)[0]}"
    store = EtcdStore([dead, shared_etcd.endpoint])
    assert await put(store, f"/{uuid4()}") > 0
    await store.close()


def test_a_store_without_endpoints_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one endpoint"):
        EtcdStore([])


async def test_a_too_large_request_is_rejected_and_not_reported_as_unavailable(shared_etcd: EtcdServer) -> None:
    async with EtcdOpened(shared_etcd) as store:
        with pytest.raises(ValueError, match="too many operations"):
            await store.transact([], [Put(f"/many/{number}", b"") for number in range(129)])
        for values in (2, 3):  # refused by etcd itself, and by gRPC on its way there
            with pytest.raises(ValueError, match=r"too large|larger than max"):
                await store.transact([], [Put(f"/large/{number}", bytes(VALUE_BYTES_MAX)) for number in range(values)])


class Failed(Exception):
    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code, self.details = lambda: code, lambda: details


def test_a_connection_with_garbled_frames_is_abandoned_and_no_request_is_blamed() -> None:
    told = "Stream removed (Failed parsing HTTP/2 (Frame size 16777215 is larger than max frame size 4194304))"
    assert isinstance(store_error(Failed(grpc.StatusCode.INTERNAL, told), "e:1"), StoreUnavailable)
    for told in (
        "CLIENT: Received message larger than max (5 vs. 4)",
        "grpc: received message larger than max (5 vs. 4)",
    ):
        assert isinstance(store_error(Failed(grpc.StatusCode.RESOURCE_EXHAUSTED, told), "e:1"), Refused)


@pytest.mark.deep
async def test_a_listing_larger_than_any_message_comes_in_pages(etcd: EtcdServer, store: EtcdStore) -> None:
    for number in range(70):
        await put(store, f"/{number:02}", bytes(VALUE_BYTES_MAX))
    listing = await store.list("/")
    assert [entry.key for entry in listing.entries] == [f"/{number:02}" for number in range(70)]
    assert {len(entry.value) for entry in listing.entries} == {VALUE_BYTES_MAX}


async def test_revisions_stay_complete_if_etcd_sends_fragments(etcd: EtcdServer, store: EtcdStore) -> None:
    for number in range(12):
        await store.transact([], [Put(f"/{key}", bytes([number]) * 150_000) for key in range(7)])
    updates = await drain(store.watch("/", after_revision=1), to_revision=13)
    assert [update.revision for update in updates] == list(range(2, 14))
    for number, update in enumerate(updates):
        assert isinstance(update, Changes)
        assert [(change.key, change.value) for change in update.changes] == [
            (f"/{key}", bytes([number]) * 150_000) for key in range(7)
        ]


@given(sizes=st.lists(st.integers(1, 4), max_size=8), cuts=st.data(), after=st.integers(0, 9))
def test_each_revision_is_delivered_completely_and_once_however_the_stream_is_split(
    sizes: list[int], cuts: st.DataObject, after: int
) -> None:
    revisions = [
        Changes(revision, tuple(Change(f"/{key}", b"v" if key % 2 else None, revision) for key in range(size)))
        for revision, size in enumerate(sizes, start=1)
    ]
    events = [event_of(change) for revision in revisions for change in revision.changes]
    assembly, seen = Assembly(after), list[Changes]()
    while events:
        size = cuts.draw(st.integers(1, len(events)))
        part, events = events[:size], events[size:]
        ends_within = bool(events) and events[0].kv.mod_revision == part[-1].kv.mod_revision
        seen += assembly.add(part, is_fragment=ends_within or cuts.draw(st.booleans()))
    seen += assembly.add([], is_fragment=False)
    assert seen == [revision for revision in revisions if revision.revision > after]
    assert (
        assembly.add([event_of(change) for change in revisions[-1].changes] if revisions else [], is_fragment=False)
        == []
    )


def event_of(change: Change) -> rpc.Event:
    kind = rpc.Event.DELETE if change.value is None else rpc.Event.PUT
    key = rpc.KeyValue(key=change.key.encode(), value=change.value or b"", mod_revision=change.mod_revision)
    return rpc.Event(type=kind, kv=key)
