"""Contract of the store's port, for every adapter."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import cast
from uuid import uuid4

import pytest
from tests.contract.stores import EtcdHome, Home, MemoryHome, ShiftedHome, SqliteHome, changed_next, drain, put, take

from cotenant.store.port import (
    VALUE_BYTES_MAX,
    Change,
    Changes,
    Committed,
    Compare,
    Conflict,
    Delete,
    Entry,
    LeaseLost,
    Listing,
    Operation,
    Put,
    Relisted,
    Store,
    StoreUnavailable,
)


@pytest.fixture(params=["memory", "shifted", "sqlite", "etcd"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Home:
    if request.param == "memory":
        return MemoryHome()
    if request.param == "shifted":
        return ShiftedHome()
    if request.param == "sqlite":
        return SqliteHome(tmp_path)
    return EtcdHome(request.getfixturevalue("shared_etcd"))


@pytest.fixture
async def store(home: Home) -> AsyncIterator[Store]:
    async with home.opened() as store:
        yield store


@pytest.fixture
def at() -> str:
    """A prefix of this test's own."""
    return f"/{uuid4()}/"


async def revision_of(store: Store) -> int:
    return (await store.list("/none/")).revision


async def test_an_adapter_is_a_store(store: Store) -> None:
    assert isinstance(store, Store)


async def test_a_missing_key_is_none(store: Store, at: str) -> None:
    assert await store.get(at + "a") is None
    assert (await store.list(at)).entries == ()


async def test_a_key_remembers_who_made_it_and_who_changed_it_last(store: Store, at: str) -> None:
    made = await put(store, at + "a", b"1")
    assert await store.get(at + "a") == Entry(at + "a", b"1", made, made)
    changed = await put(store, at + "a", b"2")
    assert await store.get(at + "a") == Entry(at + "a", b"2", made, changed)


async def test_a_recreated_key_has_a_new_creation_revision(store: Store, at: str) -> None:
    await put(store, at + "a", b"1")
    await store.transact([], [Delete(at + "a")])
    again = await put(store, at + "a", b"2")
    assert await store.get(at + "a") == Entry(at + "a", b"2", again, again)


async def test_each_writing_transaction_raises_the_revision_by_one(store: Store, at: str) -> None:
    before = await revision_of(store)
    outcome = await store.transact([], [Put(at + "a", b""), Put(at + "b", b""), Delete(at + "c")])
    assert outcome == Committed(before + 1)
    assert await store.transact([], [Put(at + "a", b"")]) == Committed(before + 2)  # the same value is a change too
    assert await revision_of(store) == before + 2


@pytest.mark.parametrize("operations", [[], [Delete("/none/a")], [Delete("/none/a"), Delete("/none/b")]])
async def test_a_transaction_without_effect_raises_no_revision(store: Store, operations: list[Operation]) -> None:
    before = await revision_of(store)
    assert await store.transact([], operations) == Committed(before)
    assert await revision_of(store) == before


async def test_a_transaction_may_only_delete(store: Store, at: str) -> None:
    await store.transact([], [Put(at + key, b"") for key in "abc"])
    before = await revision_of(store)
    assert await store.transact([], [Delete(at + "a"), Delete(at + "c"), Delete(at + "d")]) == Committed(before + 1)
    assert [entry.key for entry in (await store.list(at)).entries] == [at + "b"]


async def test_a_transaction_whose_comparisons_hold_is_done(store: Store, at: str) -> None:
    made = await put(store, at + "a", b"1")
    compares = [Compare(at + "a", made), Compare(at + "b", 0)]
    outcome = await store.transact(compares, [Put(at + "a", b"2"), Put(at + "b", b"2")])
    assert outcome == Committed(made + 1)
    assert [entry.value for entry in (await store.list(at)).entries] == [b"2", b"2"]


@pytest.mark.parametrize("off", [-1, 1])
async def test_a_transaction_with_one_comparison_that_fails_does_nothing(store: Store, at: str, off: int) -> None:
    made = await put(store, at + "a", b"1")
    compares = [Compare(at + "b", 0), Compare(at + "a", made + off)]
    assert await store.transact(compares, [Put(at + "b", b"2"), Delete(at + "a")]) == Conflict(made)
    assert await store.list(at) == Listing((Entry(at + "a", b"1", made, made),), made)


async def test_zero_holds_only_while_there_is_no_such_key(store: Store, at: str) -> None:
    absent = [Compare(at + "a", 0)]
    assert isinstance(await store.transact(absent, [Put(at + "a", b"")]), Committed)
    assert isinstance(await store.transact(absent, [Put(at + "a", b"")]), Conflict)
    await store.transact([], [Delete(at + "a")])
    assert isinstance(await store.transact(absent, [Put(at + "a", b"")]), Committed)


async def test_a_transaction_may_only_compare(store: Store, at: str) -> None:
    made = await put(store, at + "a")
    assert await store.transact([Compare(at + "a", made)], []) == Committed(made)
    assert await store.transact([Compare(at + "a", 0)], []) == Conflict(made)


@pytest.mark.parametrize("first", [Put("/twice", b"1"), Delete("/twice")])
@pytest.mark.parametrize("second", [Put("/twice", b"2"), Delete("/twice")])
async def test_a_key_is_written_only_once_in_a_transaction(store: Store, first: Operation, second: Operation) -> None:
    before = await revision_of(store)
    with pytest.raises(ValueError, match="'/twice' is written twice"):
        await store.transact([], [Put("/other", b""), first, second])
    assert await revision_of(store) == before


@pytest.mark.parametrize("key", ["", "\ud800"])
async def test_an_invalid_key_is_refused(store: Store, key: str) -> None:
    with pytest.raises(ValueError, match=r"empty|surrogates"):
        await store.get(key)
    with pytest.raises(ValueError, match=r"empty|surrogates"):
        await store.transact([], [Put(key, b"")])
    with pytest.raises(ValueError, match=r"empty|surrogates"):
        await store.transact([Compare(key, 0)], [])


async def test_a_value_is_bytes(store: Store, at: str) -> None:
    with pytest.raises(TypeError, match="not bytes"):
        await store.transact([], [Put(at + "a", cast(bytes, bytearray(b"can change later")))])


async def test_a_value_may_be_a_mebibyte_and_no_more(store: Store, at: str) -> None:
    value = bytes(range(256)) * (VALUE_BYTES_MAX // 256)
    updates = store.watch(at, after_revision=await put(store, at + "a", value))
    entry = await store.get(at + "a")
    assert entry
    assert entry.value == value
    await put(store, at + "b", value)
    assert await changed_next(updates) == {at + "b": value}
    with pytest.raises(ValueError, match="the limit is 1048576"):
        await put(store, at + "a", value + b"!")


async def test_an_empty_value_is_not_a_deletion(store: Store, at: str) -> None:
    updates = store.watch(at, after_revision=await revision_of(store))
    await put(store, at + "a", b"")
    await store.transact([], [Delete(at + "a")])
    assert await changed_next(updates) == {at + "a": b""}
    assert await changed_next(updates) == {at + "a": None}


async def test_a_listing_is_sorted_and_holds_exactly_the_prefix(store: Store, at: str) -> None:
    inside = ["", "\0", "/", "0", "A", "a", "z", "~", "\x7f", "é", "ü", "中", "\uffff", "🂡", "\U0010ffff"]
    keys = [at + "jobs" + rest for rest in inside]
    outside = [at + "job", at + "jobr", at + "jobt", at + "job\uffff", at, "/"]
    await store.transact([], [Put(key, key.encode()) for key in [*reversed(keys), *outside]])
    listing = await store.list(at + "jobs")
    assert [entry.key for entry in listing.entries] == sorted(keys)
    assert all(entry.value == entry.key.encode() for entry in listing.entries)
    for key in keys:
        assert await store.get(key) in listing.entries


async def test_no_prefix_means_every_key(store: Store, at: str) -> None:
    keys = ["\0" + at, "0" + at, "\U0010ffff" + at]
    await store.transact([], [Put(key, b"") for key in keys])
    everything = (await store.list("")).entries
    assert [entry.key for entry in everything if entry.key.endswith(at)] == keys
    updates = store.watch("", after_revision=await revision_of(store))
    await store.transact([], [Delete(key) for key in keys])
    assert await changed_next(updates) == dict.fromkeys(keys)


async def test_a_large_listing_is_of_one_revision_though_writes_go_on(store: Store, at: str) -> None:
    for first in range(0, 1_000, 50):
        await store.transact([], [Put(f"{at}{number:04}", bytes(10_000)) for number in range(first, first + 50)])
    both = [f"{at}0000", f"{at}0999"]

    async def keep_writing() -> None:
        for number in itertools.count():
            await store.transact([], [Put(key, b"%d" % number) for key in both])

    await store.transact([], [Put(key, b"-1") for key in both])
    writing = asyncio.create_task(keep_writing())
    listings = [await store.list(at)]
    while len({listing.revision for listing in listings}) < 3:
        listings.append(await store.list(at))
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    for listing in listings:
        assert [entry.key for entry in listing.entries] == [f"{at}{number:04}" for number in range(1_000)]
        assert listing.entries[0].value == listing.entries[-1].value


async def test_one_of_many_writers_comparing_the_same_revision_wins(store: Store, at: str) -> None:
    made = await put(store, at + "a")
    outcomes = await asyncio.gather(
        *(store.transact([Compare(at + "a", made)], [Put(at + "a", b"%d" % number)]) for number in range(20))
    )
    winners = [number for number, outcome in enumerate(outcomes) if isinstance(outcome, Committed)]
    entry = await store.get(at + "a")
    assert entry
    assert [entry.value] == [b"%d" % number for number in winners]
    assert entry.mod_revision == made + 1


async def test_a_counter_raised_by_many_loses_nothing(store: Store, at: str) -> None:
    async def raise_ten_times() -> None:
        done = 0
        while done < 10:
            entry = await store.get(at + "n")
            value, revision = (int(entry.value), entry.mod_revision) if entry else (0, 0)
            outcome = await store.transact([Compare(at + "n", revision)], [Put(at + "n", b"%d" % (value + 1))])
            done += isinstance(outcome, Committed)

    await asyncio.gather(*(raise_ten_times() for _ in range(8)))
    entry = await store.get(at + "n")
    assert entry
    assert entry.value == b"80"


async def test_a_watch_yields_past_and_then_new_changes(store: Store, at: str) -> None:
    first = await put(store, at + "a", b"1")
    second = await put(store, at + "a", b"2")
    updates = store.watch(at, after_revision=first)
    assert await take(updates, 1) == [Changes(second, (Change(at + "a", b"2", second),))]
    next_one = asyncio.create_task(take(updates, 1))
    third = await put(store, at + "b", b"3")
    assert await next_one == [Changes(third, (Change(at + "b", b"3", third),))]


async def test_a_watch_yields_a_transaction_at_once_and_only_its_prefix(store: Store, at: str) -> None:
    before = await put(store, at + "in/c")
    updates = store.watch(at + "in/", after_revision=before)
    await put(store, at + "in")
    await put(store, at + "in0")
    await store.transact([], [Put(at + "in/b", b"1"), Put(at + "out", b""), Delete(at + "in/c"), Delete(at + "in/d")])
    assert await changed_next(updates) == {at + "in/b": b"1", at + "in/c": None}


async def test_a_watch_from_a_future_revision_waits_for_it(store: Store, at: str) -> None:
    now = await revision_of(store)
    updates = store.watch(at, after_revision=now + 2)
    taken = asyncio.create_task(take(updates, 1))
    for value in (b"1", b"2", b"3"):
        await put(store, at + "a", value)
    assert await taken == [Changes(now + 3, (Change(at + "a", b"3", now + 3),))]


async def test_many_watches_see_the_same(store: Store, at: str) -> None:
    before = await revision_of(store)
    watching = [asyncio.create_task(take(store.watch(at, after_revision=before), 30)) for _ in range(5)]
    await asyncio.gather(*(put(store, f"{at}{number}") for number in range(30)))
    first, *others = await asyncio.gather(*watching)
    assert [update.revision for update in first] == list(range(before + 1, before + 31))
    assert all(other == first for other in others)


async def test_a_watch_from_a_compacted_revision_relists_once(store: Store, at: str) -> None:
    first = await put(store, at + "a", b"1")
    await put(store, at + "b", b"2")
    deleted = await store.transact([], [Delete(at + "b")])
    await put(store, "/elsewhere" + at)
    await store.compact(deleted.revision)
    updates = store.watch(at, after_revision=deleted.revision - 1)
    (relisted,) = await take(updates, 1)
    assert relisted == Relisted(deleted.revision + 1, (Entry(at + "a", b"1", first, first),))
    await put(store, at + "c", b"3")
    assert await changed_next(updates) == {at + "c": b"3"}


async def test_a_watch_from_the_beginning_relists_after_compaction(store: Store, at: str) -> None:
    await put(store, at + "a", b"1")
    await store.compact(await put(store, at + "a", b"2"))
    (relisted,) = await take(store.watch(at, after_revision=0), 1)
    assert isinstance(relisted, Relisted)
    assert [entry.value for entry in relisted.entries] == [b"2"]


async def test_a_watch_from_the_oldest_kept_revision_resumes(store: Store, at: str) -> None:
    await put(store, at + "a", b"1")
    last = await put(store, at + "a", b"2")
    gone = await store.transact([], [Delete(at + "a")])
    await store.compact(last)
    updates = store.watch(at, after_revision=last)
    assert await take(updates, 1) == [Changes(gone.revision, (Change(at + "a", None, gone.revision),))]
    await store.compact(gone.revision)
    await put(store, at + "b", b"3")
    assert await changed_next(updates) == {at + "b": b"3"}


async def test_compaction_keeps_current_values_and_is_idempotent(store: Store, at: str) -> None:
    made = await put(store, at + "a", b"1")
    now = await put(store, at + "b", b"2")
    await store.compact(now)
    await store.compact(now)
    await store.compact(made)
    await store.compact(0)
    assert [entry.value for entry in (await store.list(at)).entries] == [b"1", b"2"]
    assert await store.transact([Compare(at + "a", made)], [Put(at + "a", b"3")]) == Committed(now + 1)


async def test_a_future_revision_cannot_be_compacted(store: Store) -> None:
    with pytest.raises(ValueError, match="revision"):
        await store.compact(await revision_of(store) + 1)


async def test_revoking_a_lease_deletes_its_keys_at_one_revision(store: Store, at: str) -> None:
    lease = await store.grant(60)
    assert lease.ttl_seconds >= 60
    await store.transact([], [Put(at + key, b"", lease.id) for key in "cab"])
    before = await put(store, at + "d")
    updates = store.watch(at, after_revision=before)
    await store.revoke(lease)
    assert await changed_next(updates) == {at + "a": None, at + "b": None, at + "c": None}
    assert [entry.key for entry in (await store.list(at)).entries] == [at + "d"]
    assert await revision_of(store) == before + 1


async def test_a_lost_lease_stays_lost(store: Store) -> None:
    lease = await store.grant(60)
    await store.keep_alive(lease)
    before = await revision_of(store)
    await store.revoke(lease)
    await store.revoke(lease)
    assert await revision_of(store) == before
    with pytest.raises(LeaseLost, match=str(lease.id)):
        await store.keep_alive(lease)
    assert (await store.grant(60)).id != lease.id


async def test_a_put_under_a_lost_lease_fails(store: Store, at: str) -> None:
    lease = await store.grant(60)
    await store.revoke(lease)
    before = await revision_of(store)
    with pytest.raises(LeaseLost):
        await store.transact([], [Put(at + "a", b""), Put(at + "b", b"", lease.id)])
    assert await store.transact([Compare(at + "a", 1)], [Put(at + "b", b"", lease.id)]) == Conflict(before)
    assert await store.list(at) == Listing((), before)


async def test_a_key_belongs_to_the_lease_it_was_last_put_under(store: Store, at: str) -> None:
    old, new = await store.grant(60), await store.grant(60)
    for key in "abc":
        await put(store, at + key, lease_id=old.id)
    await put(store, at + "a")
    await put(store, at + "b", lease_id=new.id)
    await store.revoke(old)
    assert [entry.key for entry in (await store.list(at)).entries] == [at + "a", at + "b"]
    await store.revoke(new)
    assert [entry.key for entry in (await store.list(at)).entries] == [at + "a"]


async def test_only_an_expired_lease_deletes_its_keys(store: Store, at: str) -> None:
    kept, left = await store.grant(1), await store.grant(1)
    await put(store, at + "kept", lease_id=kept.id)
    updates = store.watch(at, after_revision=await put(store, at + "left", lease_id=left.id))
    expiry = asyncio.create_task(changed_next(updates))
    while not (await asyncio.wait([expiry], timeout=kept.ttl_seconds / 5))[0]:
        await store.keep_alive(kept)
    assert expiry.result() == {at + "left": None}
    assert [entry.key for entry in (await store.list(at)).entries] == [at + "kept"]
    with pytest.raises(LeaseLost):
        await store.keep_alive(left)
    await store.revoke(kept)


@pytest.mark.parametrize("ttl_seconds", [0.0, -1.0, float("nan")])
async def test_a_lease_needs_a_positive_ttl(store: Store, ttl_seconds: float) -> None:
    with pytest.raises(ValueError, match="time to live"):
        await store.grant(ttl_seconds)


async def test_closing_the_store_ends_its_watches(store: Store, at: str) -> None:
    before = await revision_of(store)
    idle = asyncio.create_task(take_all(store.watch(at + "x", after_revision=before)))
    busy = store.watch(at, after_revision=before)
    for key in "abc":
        await put(store, at + key)
    assert await changed_next(busy) == {at + "a": b""}
    await store.close()
    assert await idle == []
    assert await take_all(busy) == []
    assert await take_all(store.watch(at, after_revision=before)) == []


async def take_all(updates: AsyncIterator[Changes | Relisted]) -> list[Changes | Relisted]:
    async with asyncio.timeout(60):
        return [update async for update in updates]


async def test_a_closed_store_stays_unavailable(store: Store, at: str) -> None:
    lease = await store.grant(60)
    await store.revoke(lease)
    await store.close()
    await store.close()
    for call in (
        store.get(at + "a"),
        store.list(at),
        store.transact([], [Put(at + "a", b"")]),
        store.grant(60),
        store.keep_alive(lease),
        store.revoke(lease),
        store.compact(1),
    ):
        with pytest.raises(StoreUnavailable, match="closed"):
            await call


async def test_closing_a_watch_ends_it_and_no_other(store: Store, at: str) -> None:
    before = await revision_of(store)
    one, other = (cast(AsyncGenerator[Changes], store.watch(at, after_revision=before)) for _ in range(2))
    await put(store, at + "a")
    assert await changed_next(one) == {at + "a": b""}
    await one.aclose()
    await put(store, at + "b")
    assert len(await drain(other, to_revision=before + 2)) == 2
    assert await take_all(one) == []


async def test_cancelling_a_watch_reader_cancels_no_other_task(store: Store, at: str) -> None:
    before = await revision_of(store)
    one, other = (asyncio.create_task(take(store.watch(at, after_revision=before), 1)) for _ in range(2))
    await put(store, "/elsewhere" + at)
    one.cancel()
    with pytest.raises(asyncio.CancelledError):
        await one
    await put(store, at + "a")
    assert len(await other) == 1


async def test_acknowledged_writes_survive_reopening(home: Home, at: str) -> None:
    store = await home.open()
    made = await put(store, at + "a", b"1")
    await store.transact([], [Put(at + "b", b"2"), Put(at + "c", b"3")])
    gone = await store.transact([], [Delete(at + "b")])
    store = await home.reopen(store)
    try:
        assert await store.list(at) == Listing(
            (Entry(at + "a", b"1", made, made), Entry(at + "c", b"3", made + 1, made + 1)), gone.revision
        )
        updates = store.watch(at, after_revision=made)
        assert await changed_next(updates) == {at + "b": b"2", at + "c": b"3"}
        assert await changed_next(updates) == {at + "b": None}
        assert await put(store, at + "d") == gone.revision + 1
    finally:
        await store.close()
