"""A store that commits small transactions in groups under load."""

from __future__ import annotations

from collections.abc import Sequence

from cotenant.leadership.fenced_store import DelegatingStore
from cotenant.store.group_commit import GroupCommit, Limits
from cotenant.store.port import Committed, Compare, Conflict, Entry, Listing, Operation, Store

# etcd accepts 128 operations, as many comparisons and 1.5 MiB; a fence and parts of large specs are added
LIMITS = Limits(operations=92, compares=92, size_bytes=256 * 1024)


class GroupedStore(DelegatingStore):
    """A store whose transactions are committed in groups under load."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._commits = GroupCommit("store-groups", store.transact, LIMITS)

    async def get(self, key: str) -> Entry | None:
        """Read one key, after writes to it that are in flight.

        Their callers may have been cancelled, and be reading back what became of them.
        """
        await self._commits.settled(key)
        return await super().get(key)

    async def list(self, prefix: str) -> Listing:
        """Read all keys under a prefix, after writes to them that are in flight; see `get`."""
        await self._commits.settled(prefix)
        return await super().list(prefix)

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Committed | Conflict:
        """Apply all operations if all comparisons hold, else none; together with other waiting transactions.

        A caller that is cancelled before its commit starts is left out.
        """
        return await self._commits.submit(compares, operations)
