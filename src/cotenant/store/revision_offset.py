"""A store whose revisions continue from another store's, for restored or migrated state.

Revisions are epochs, and an agent never obeys an epoch below one that it has seen. But a fresh etcd, and a fresh file,
start at revision 1. So a restore also stores the revision that the other store had reached (`BASE`), and every user of
the new store sees its own revisions plus that offset: they keep rising as if the store had not changed. A key's
revision is shifted like the store's, and 0, for no key, stays 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import cast

from cotenant.store.ballast import HoldsBallast
from cotenant.store.capacity import Capacity, capacity_of
from cotenant.store.compaction import Defragments
from cotenant.store.local_store import LocalStore
from cotenant.store.member_status import HasMembers, MemberStatus
from cotenant.store.port import (
    Change,
    Changes,
    Committed,
    Compare,
    Conflict,
    Entry,
    Lease,
    Listing,
    Operation,
    Relisted,
    Store,
    StoreUnavailable,
)

OWN = "store/"  # keys about the store itself, hidden from its users
BASE = f"{OWN}base"  # decimal: the offset of revisions
REVISION_MAX = 1 << 62  # epochs are revisions, and must fit into 64 bits
RETRY_SECONDS = 0.2
FILLING = f"{OWN}filling"  # present while `restore` or `migrate` is writing


class PartialRestore(StoreUnavailable):
    """A restore was interrupted: the store is incomplete."""


def base_of(entry: Entry | None) -> int | None:
    """Return the offset of revisions; None if it is missing or invalid."""
    if entry is None or len(entry.value) > len(str(REVISION_MAX)) or not entry.value.isdigit():
        return None
    base = int(entry.value)
    return base if base <= REVISION_MAX else None


class OffsetStore:
    """A store with its revisions shifted by the offset under `BASE`, which is read at the first call."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self._base: int | None = None
        self._closed = False
        self._reading = asyncio.Lock()

    @property
    def base(self) -> int | None:
        """The offset of revisions; None before it was read."""
        return self._base

    def reload(self) -> None:
        """Read the offset again at the next call: the store was restored or accepted."""
        self._base = None

    async def _offset(self) -> int:
        """Return the offset of revisions.

        Raises:
            PartialRestore: a restore is in progress or was interrupted.
        """
        if self._base is not None:
            return self._base
        async with self._reading:
            if self._base is None:
                if await self.inner.get(FILLING):
                    raise PartialRestore(
                        "a restore is in progress or was interrupted; run `cotenant restore --replace` again"
                    )
                entry = await self.inner.get(BASE)
                base = base_of(entry)
                if entry and base is None:
                    raise PartialRestore(f"{BASE} is damaged: {entry.value[:40]!r} is not a revision; restore a backup")
                self._base = base or 0
        return self._base

    async def get(self, key: str) -> Entry | None:
        """Read one key."""
        shift = await self._offset()
        entry = await self.inner.get(key)
        return _shifted(entry, shift) if entry and shift else entry

    async def list(self, prefix: str) -> Listing:
        """Read all keys under a prefix."""
        shift = await self._offset()
        listing = await self.inner.list(prefix)
        entries = _without_own(listing.entries) if OWN.startswith(prefix) else listing.entries
        if shift:
            entries = tuple(_shifted(entry, shift) for entry in entries)
        return Listing(entries, listing.revision + shift)

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Committed | Conflict:
        """Apply all operations if all comparisons hold, else none."""
        shift = await self._offset()
        if shift:
            compares = [replace(one, mod_revision=_back(one.mod_revision, shift)) for one in compares]
        result = await self.inner.transact(compares, operations)
        return type(result)(result.revision + shift)

    async def watch(self, prefix: str, *, after_revision: int) -> AsyncGenerator[Changes | Relisted, None]:
        """Yield what is committed after a revision; if that is older than the restore, start with a listing."""
        shift = await self._patient_shift()
        if shift is None:
            return
        after = max(0, after_revision - shift)
        if shift and after_revision < shift:
            listing = await self.inner.list(prefix)
            after = listing.revision
            yield _relisted(Relisted(listing.revision, listing.entries), shift)
        async with aclosing(
            cast("AsyncGenerator[Changes | Relisted, None]", self.inner.watch(prefix, after_revision=after))
        ) as updates:
            async for update in updates:
                if isinstance(update, Relisted):
                    yield _relisted(update, shift)
                elif moved := _moved(update, shift):
                    yield moved

    async def _patient_shift(self) -> int | None:
        """Wait until the offset is known, as a watch waits for the store; return None at its end."""
        while not self._closed:
            try:
                return await self._offset()
            except PartialRestore:
                raise
            except StoreUnavailable:
                await asyncio.sleep(RETRY_SECONDS)
        return None

    async def grant(self, ttl_seconds: float) -> Lease:
        """Grant a lease."""
        await self._offset()
        return await self.inner.grant(ttl_seconds)

    async def keep_alive(self, lease: Lease, *, for_seconds: float = 0.0) -> None:
        """Restart the lease's time to live."""
        await self.inner.keep_alive(lease, for_seconds=for_seconds)

    async def revoke(self, lease: Lease) -> None:
        """Revoke the lease and delete its keys."""
        await self.inner.revoke(lease)

    async def compact(self, revision: int) -> None:
        """Compact the history up to and including a revision."""
        await self.inner.compact(max(0, revision - await self._offset()))  # 0 is always compacted

    async def defragment(self) -> Sequence[str]:
        """Release unused space, if the store supports it."""
        return await self.inner.defragment() if isinstance(self.inner, Defragments) else []

    async def capacity(self) -> Capacity | None:
        """Return how full the store is; None if it has no limit."""
        return await capacity_of(self.inner)

    async def hold_ballast(self) -> None:
        """Allocate the store's ballast again, if it has one and there is space."""
        if isinstance(self.inner, HoldsBallast):
            await self.inner.hold_ballast()

    async def member_statuses(self) -> Sequence[MemberStatus]:
        """Return the status of each member, if there are members."""
        return await self.inner.member_statuses() if isinstance(self.inner, HasMembers) else []

    async def close(self) -> None:
        """Close the store."""
        self._closed = True
        await self.inner.close()


def is_of_one_process(store: Store) -> bool:
    """Return whether only this process can have the store open."""
    while not isinstance(store, LocalStore) and (inner := getattr(store, "inner", None)):
        store = inner
    return isinstance(store, LocalStore)


def _back(revision: int, shift: int) -> int:
    """Return a key's revision in the inner store; -1, which no key has, if it is older than the restore."""
    if revision == 0:
        return 0
    return revision - shift if revision > shift else -1


def _shifted(entry: Entry, shift: int) -> Entry:
    return Entry(entry.key, entry.value, entry.create_revision + shift, entry.mod_revision + shift)


def _without_own(entries: Sequence[Entry]) -> tuple[Entry, ...]:
    return tuple(entry for entry in entries if not entry.key.startswith(OWN))


def _relisted(update: Relisted, shift: int) -> Relisted:
    return Relisted(update.revision + shift, tuple(_shifted(entry, shift) for entry in _without_own(update.entries)))


def _moved(update: Changes, shift: int) -> Changes | None:
    """Return changes with shifted revisions; None if they concern only the store itself."""
    changes = tuple(
        Change(one.key, one.value, one.mod_revision + shift) for one in update.changes if not one.key.startswith(OWN)
    )
    return Changes(update.revision + shift, changes) if changes else None
