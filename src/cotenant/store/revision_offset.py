"""A store whose revisions go on from another's: what a restored or moved state needs.

Revisions are epochs, and an agent never obeys an epoch below one that it has seen. But a fresh etcd, and a fresh file,
begin at revision 1. So whoever fills one with what another store held keeps beside it the revision that the other had
reached (`BASE`), and everybody who opens it sees its own revisions with that added: they rise over the change of stores
as if there had been none. A key's revision is shifted like the store's, and 0, for no key, stays 0.
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
from cotenant.store.member_status import HasMembers, Standing
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

OWN = "store/"  # keys about the store itself, of which its users see nothing
BASE = f"{OWN}base"  # decimal: what is added to revisions
REVISION_MAX = 1 << 62  # epochs are revisions, and have to stay numbers of 64 bits
RETRY_SECONDS = 0.2
FILLING = f"{OWN}filling"  # there while the store is being filled by `restore` or `migrate`


class HalfFilled(StoreUnavailable):
    """The store was being filled when that was cut off: what is in it is not whole."""


def base_of(entry: Entry | None) -> int | None:
    """Read what is added to revisions; None where that cannot be, or nothing is said of it."""
    if entry is None or len(entry.value) > len(str(REVISION_MAX)) or not entry.value.isdigit():
        return None
    base = int(entry.value)
    return base if base <= REVISION_MAX else None


class ShiftedStore:
    """A store seen with its revisions shifted by what it keeps under `BASE`, which is read at the first call."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self._base: int | None = None
        self._closed = False
        self._reading = asyncio.Lock()

    @property
    def base(self) -> int | None:
        """What is added to revisions; None before that was read."""
        return self._base

    def reload(self) -> None:
        """Read anew, at the next call, by how much revisions are shifted: the store was filled or accepted."""
        self._base = None

    async def _shift(self) -> int:
        """By how much revisions are shifted.

        Raises:
            HalfFilled: the store is being filled, or that was cut off.
        """
        if self._base is not None:
            return self._base
        async with self._reading:
            if self._base is None:
                if await self.inner.get(FILLING):
                    raise HalfFilled(
                        "the store is being filled, or that was cut off; run `cotenant restore --replace` again"
                    )
                entry = await self.inner.get(BASE)
                base = base_of(entry)
                if entry and base is None:
                    raise HalfFilled(f"{BASE} is damaged: {entry.value[:40]!r} is no revision; restore a backup")
                self._base = base or 0
        return self._base

    async def get(self, key: str) -> Entry | None:
        """Read one key."""
        shift = await self._shift()
        entry = await self.inner.get(key)
        return _shifted(entry, shift) if entry and shift else entry

    async def list(self, prefix: str) -> Listing:
        """Read all keys under a prefix."""
        shift = await self._shift()
        listing = await self.inner.list(prefix)
        entries = _without_own(listing.entries) if OWN.startswith(prefix) else listing.entries
        if shift:
            entries = tuple(_shifted(entry, shift) for entry in entries)
        return Listing(entries, listing.revision + shift)

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Committed | Conflict:
        """Do all operations if all comparisons hold, else nothing."""
        shift = await self._shift()
        if shift:
            compares = [replace(one, mod_revision=_back(one.mod_revision, shift)) for one in compares]
        result = await self.inner.transact(compares, operations)
        return type(result)(result.revision + shift)

    async def watch(self, prefix: str, *, after_revision: int) -> AsyncGenerator[Changes | Relisted, None]:
        """Yield what is committed after a revision; one from before the store was filled is answered by a listing."""
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
        """Wait until it is known by how much revisions are shifted, as a watch waits for the store; None at its end."""
        while not self._closed:
            try:
                return await self._shift()
            except HalfFilled:
                raise
            except StoreUnavailable:
                await asyncio.sleep(RETRY_SECONDS)
        return None

    async def grant(self, ttl_seconds: float) -> Lease:
        """Make a lease."""
        await self._shift()
        return await self.inner.grant(ttl_seconds)

    async def keep_alive(self, lease: Lease, *, for_seconds: float = 0.0) -> None:
        """Start the lease's time anew."""
        await self.inner.keep_alive(lease, for_seconds=for_seconds)

    async def revoke(self, lease: Lease) -> None:
        """End the lease and delete its keys."""
        await self.inner.revoke(lease)

    async def compact(self, revision: int) -> None:
        """Forget the history up to and including a revision."""
        await self.inner.compact(max(0, revision - await self._shift()))  # 0 is forgotten in every store

    async def defragment(self) -> Sequence[str]:
        """Have the store give back room, where it can."""
        return await self.inner.defragment() if isinstance(self.inner, Defragments) else []

    async def capacity(self) -> Capacity | None:
        """Return how full the store is; None where it has no limit."""
        return await capacity_of(self.inner)

    async def hold_ballast(self) -> None:
        """Have the store take its ballast again, where it has any and there is room for it."""
        if isinstance(self.inner, HoldsBallast):
            await self.inner.hold_ballast()

    async def standing(self) -> Sequence[Standing]:
        """Ask each member how it is, where there are members."""
        return await self.inner.standing() if isinstance(self.inner, HasMembers) else []

    async def close(self) -> None:
        """Let go of the store."""
        self._closed = True
        await self.inner.close()


def is_of_one_process(store: Store) -> bool:
    """Tell whether nobody but this process can have the store open."""
    while not isinstance(store, LocalStore) and (inner := getattr(store, "inner", None)):
        store = inner
    return isinstance(store, LocalStore)


def _back(revision: int, shift: int) -> int:
    """Name a key's revision as the store itself does; one from before it was filled is nobody's."""
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
    """A change as users see it; None where it is about the store itself."""
    changes = tuple(
        Change(one.key, one.value, one.mod_revision + shift) for one in update.changes if not one.key.startswith(OWN)
    )
    return Changes(update.revision + shift, changes) if changes else None
