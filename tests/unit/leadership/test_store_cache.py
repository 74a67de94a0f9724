"""A store cache holds what the store holds, through any changes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from cotenant.leadership.fenced_store import WarmStore
from cotenant.leadership.store_cache import StoreCache
from cotenant.store.memory import MemoryStore
from cotenant.store.port import Delete, Listing, Operation, Put

KEYS = ("svc/a", "svc/b", "svc/c/d", "svd", "other")


def written(keys: Sequence[str]) -> st.SearchStrategy[list[Operation]]:
    return st.lists(
        st.one_of(
            st.builds(Put, st.sampled_from(keys), st.binary(max_size=3)), st.builds(Delete, st.sampled_from(keys))
        ),
        min_size=1,
        max_size=3,
        unique_by=lambda operation: operation.key,
    )


@given(before=st.lists(written(KEYS), max_size=4), after=st.lists(written(KEYS), max_size=8))
async def test_the_cache_lists_what_the_store_lists(
    before: list[list[Operation]], after: list[list[Operation]]
) -> None:
    store = MemoryStore()
    for operations in before:
        await store.transact([], operations)
    cache = StoreCache(store, "svc/")
    running = asyncio.create_task(cache.run())
    for operations in after:
        await store.transact([], operations)
    last = (await store.transact([], [Put("svc/leader", b"")])).revision
    await asyncio.sleep(0)  # until it follows
    assert await cache.reaches(last, 5.0)
    for prefix in ("svc/", "svc/a", "svc/c/"):
        assert cache.listing(prefix) == Listing((await store.list(prefix)).entries, last)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_store_is_warm_as_long_as_its_cache_follows() -> None:
    store = MemoryStore()
    cache = StoreCache(store, "svc/")
    running = asyncio.create_task(cache.run())
    term = (await store.transact([], [Put("svc/leader", b"")])).revision
    await asyncio.sleep(0)
    warm = WarmStore(store, cache, term)
    asked = []
    store.list = lambda prefix: asked.append(prefix)  # type: ignore[method-assign, assignment, return-value]  # it is not to be asked
    assert (await warm.list("svc/")).revision == term
    assert asked == []
    del store.list
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await store.transact([], [Put("svc/later", b"")])
    assert [entry.key for entry in (await warm.list("svc/")).entries] == ["svc/later", "svc/leader"]
