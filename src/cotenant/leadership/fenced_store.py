"""The store as a leader is given it: fenced by its term, and warm from what it saw while it followed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from cotenant.history.events import Wrote
from cotenant.history.recording import record
from cotenant.leadership.leadership_term import Tenure
from cotenant.leadership.store_cache import Mirror
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

WARM_SECONDS_MAX = 1.0  # what the mirror has not heard of by then is read instead


class Through:
    """A store that passes everything on to another one, but for what a subclass does otherwise."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def inner(self) -> Store:
        """The store to which everything is passed on."""
        return self._store

    async def get(self, key: str) -> Entry | None:
        """Read one key."""
        return await self._store.get(key)

    async def list(self, prefix: str) -> Listing:
        """Read all keys under a prefix."""
        return await self._store.list(prefix)

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Committed | Conflict:
        """Do all operations if all comparisons hold, else nothing."""
        return await self._store.transact(compares, operations)

    def watch(self, prefix: str, *, after_revision: int) -> AsyncIterator[Changes | Relisted]:
        """Yield what is committed under a prefix after a revision."""
        return self._store.watch(prefix, after_revision=after_revision)

    async def grant(self, ttl_seconds: float) -> Lease:
        """Make a lease."""
        return await self._store.grant(ttl_seconds)

    async def keep_alive(self, lease: Lease, *, for_seconds: float = 0.0) -> None:
        """Start the lease's time anew."""
        await self._store.keep_alive(lease, for_seconds=for_seconds)

    async def revoke(self, lease: Lease) -> None:
        """End the lease."""
        await self._store.revoke(lease)

    async def compact(self, revision: int) -> None:
        """Forget the history up to and including a revision."""
        await self._store.compact(revision)

    async def capacity(self) -> Capacity | None:
        """Return how full the store is; None where it has no limit."""
        return await capacity_of(self._store)

    async def close(self) -> None:
        """Leave the store open: it is the process's, not the leader's."""


class FencedStore(Through):
    """A store for one tenure: every transaction compares the tenure's fence as well."""

    def __init__(self, store: Store, tenure: Tenure) -> None:
        super().__init__(store)
        self._tenure = tenure

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Committed | Conflict:
        """Do all operations if all comparisons hold and the tenure lasts, else nothing.

        Raises:
            NotLeader: it is over; nothing was done.
        """
        fence = self._tenure.fence
        result = await self._store.transact([fence, *compares], operations)
        if isinstance(result, Conflict):
            entry = await self._store.get(fence.key)
            if entry is None or entry.mod_revision != fence.mod_revision:
                self._tenure.lose(f"the key {fence.key} has changed since term {fence.mod_revision}")
                raise NotLeader(f"another process leads now; term {fence.mod_revision} is over")
        else:
            record(Wrote(result.revision, fence.key.partition("/")[0], self._tenure.identity))
        return result


class WarmStore(Through):
    """A store whose keys have been followed: they are listed from memory as long as the mirror is kept.

    Whoever leads is the only one who writes them. So what the mirror holds once it has come to the leader's term is
    what the store holds, but for what the leader itself has written since, of which it need not be told.
    """

    def __init__(self, store: Store, mirror: Mirror, term: int) -> None:
        super().__init__(store)
        self._mirror, self._term = mirror, term

    async def list(self, prefix: str) -> Listing:
        """Read all keys under a prefix, without asking for what is known."""
        if prefix.startswith(self._mirror.prefix) and await self._mirror.reaches(self._term, WARM_SECONDS_MAX):
            return self._mirror.listing(prefix)
        return await self._store.list(prefix)
