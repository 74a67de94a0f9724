"""The leader's view of the store: fenced by its term, and warm from the cache it filled as a follower."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from cotenant.history.events import Wrote
from cotenant.history.recording import record
from cotenant.leadership.leadership_term import LeadershipTerm
from cotenant.leadership.store_cache import StoreCache
from cotenant.store.capacity import Capacity, capacity_of
from cotenant.store.port import (
    Changes,
    Committed,
    Compare,
    Conflict,
    Entry,
    Lease,
    Listing,
    NotLeader,
    Operation,
    Relisted,
    Store,
)

WARM_SECONDS_MAX = 1.0  # if the cache has not caught up by then, the store is read


class DelegatingStore:
    """A store that delegates to another store; subclasses override single methods."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def inner(self) -> Store:
        """The store to which calls are delegated."""
        return self._store

    async def get(self, key: str) -> Entry | None:
        """Read one key."""
        return await self._store.get(key)

    async def list(self, prefix: str) -> Listing:
        """Read all keys under a prefix."""
        return await self._store.list(prefix)

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Committed | Conflict:
        """Apply all operations if all comparisons hold, else none."""
        return await self._store.transact(compares, operations)

    def watch(self, prefix: str, *, after_revision: int) -> AsyncIterator[Changes | Relisted]:
        """Yield what is committed under a prefix after a revision."""
        return self._store.watch(prefix, after_revision=after_revision)

    async def grant(self, ttl_seconds: float) -> Lease:
        """Grant a lease."""
        return await self._store.grant(ttl_seconds)

    async def keep_alive(self, lease: Lease, *, for_seconds: float = 0.0) -> None:
        """Restart the lease's time to live."""
        await self._store.keep_alive(lease, for_seconds=for_seconds)

    async def revoke(self, lease: Lease) -> None:
        """Revoke the lease."""
        await self._store.revoke(lease)

    async def compact(self, revision: int) -> None:
        """Compact the history up to and including a revision."""
        await self._store.compact(revision)

    async def capacity(self) -> Capacity | None:
        """Return how full the store is; None if it has no limit."""
        return await capacity_of(self._store)

    async def close(self) -> None:
        """Leave the store open: it belongs to the process, not to the leader."""


class FencedStore(DelegatingStore):
    """A store for one leadership term: every transaction also compares the term's fence."""

    def __init__(self, store: Store, leadership_term: LeadershipTerm) -> None:
        super().__init__(store)
        self._leadership_term = leadership_term

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Committed | Conflict:
        """Apply all operations if all comparisons hold and the term is current, else none.

        Raises:
            NotLeader: the term is over; nothing was applied.
        """
        fence = self._leadership_term.fence
        result = await self._store.transact([fence, *compares], operations)
        if isinstance(result, Conflict):
            entry = await self._store.get(fence.key)
            if entry is None or entry.mod_revision != fence.mod_revision:
                self._leadership_term.lose(f"the key {fence.key} has changed since term {fence.mod_revision}")
                raise NotLeader(f"another process leads now; term {fence.mod_revision} is over")
        else:
            record(Wrote(result.revision, fence.key.partition("/")[0], self._leadership_term.identity))
        return result


class WarmStore(DelegatingStore):
    """A store whose keys were followed: they are listed from memory as long as the cache is kept.

    Only the leader writes these keys. So once the cache has reached the leader's term it holds what the store holds,
    except for the leader's own later writes, which the leader knows.
    """

    def __init__(self, store: Store, cache: StoreCache, term: int) -> None:
        super().__init__(store)
        self._cache, self._term = cache, term

    async def list(self, prefix: str) -> Listing:
        """Return all keys under a prefix, from the cache if possible."""
        if prefix.startswith(self._cache.prefix) and await self._cache.reaches(self._term, WARM_SECONDS_MAX):
            return self._cache.listing(prefix)
        return await self._store.list(prefix)
