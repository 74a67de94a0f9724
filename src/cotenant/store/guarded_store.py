"""A store that is used only as long as it is the one that was written, and no older.

Once something is wrong with it (see `trust`), nothing is read from it or written to it: what a service read would
become its picture of the world, and agents would be told to stop what that picture lacks. So services go on with what
they have in memory, as they do while a store is away. Once the store is believed again, every watch lists anew and
leases count as lost, so that every leader reads its state again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import TypeVar

from cotenant.store.capacity import Capacity, capacity_of
from cotenant.store.compaction import CollectsParts
from cotenant.store.identity_check import Trust
from cotenant.store.member_status import Standing
from cotenant.store.port import (
    Changes,
    Committed,
    Compare,
    Conflict,
    Entry,
    Lease,
    LeaseLost,
    Listing,
    Operation,
    Relisted,
    StoreDistrusted,
    StoreUnavailable,
)
from cotenant.store.revision_offset import ShiftedStore
from cotenant.telemetry.recent_durations import Recent

RETRY_SECONDS = 0.2

T = TypeVar("T")


class GuardedStore:
    """A store that refuses everything while it is not what it was; `memory` is the file that remembers it."""

    def __init__(self, shifted: ShiftedStore, memory: Path | None = None) -> None:
        self.inner = shifted
        self.latency = Recent()  # of transactions, and of looks at an etcd
        self.trust = Trust(shifted, memory, self._returned, self.latency.add)
        self._turn = asyncio.Event()  # set and replaced when the store is believed again
        self._leases: set[int] = set()
        self._void: set[int] = set()  # leases of the time before the store was believed again
        self._closed = False

    def _returned(self) -> None:
        self._void |= self._leases
        self._leases.clear()
        turn, self._turn = self._turn, asyncio.Event()
        turn.set()

    async def _done(self, work: Awaitable[T]) -> T:
        """Return what came of a call, unless the store is not believed by then."""
        try:
            result = await work
        except StoreDistrusted as error:
            await self.trust.doubt(error)
            self.trust.check()
            raise
        self.trust.check()
        return result

    async def _ready(self) -> None:
        await self.trust.open()
        self.trust.check()

    async def get(self, key: str) -> Entry | None:
        """Read one key."""
        await self._ready()
        return await self._done(self.inner.get(key))

    async def list(self, prefix: str) -> Listing:
        """Read all keys under a prefix."""
        await self._ready()
        return await self._done(self.inner.list(prefix))

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Committed | Conflict:
        """Do all operations if all comparisons hold, else nothing."""
        await self._ready()
        begin = time.monotonic()
        result = await self._done(self.inner.transact(compares, operations))
        self.latency.add(time.monotonic() - begin)
        return result

    async def watch(self, prefix: str, *, after_revision: int) -> AsyncGenerator[Changes | Relisted, None]:
        """Yield what is committed after a revision; all of the prefix once the store is believed again."""
        await self._patiently()
        while not self._closed:
            turn = self._turn
            updates = self.inner.watch(prefix, after_revision=after_revision)
            async with aclosing(updates):
                while (update := await _unless(turn, updates)) is not None:
                    if self.trust.verdict:
                        break
                    after_revision = update.revision
                    yield update
            if not turn.is_set() and not self.trust.verdict:
                return  # the store was closed
            await self._patiently()
            if listing := await self._listed(prefix):
                after_revision = listing.revision
                yield Relisted(listing.revision, listing.entries)

    async def _patiently(self) -> None:
        """Wait until the store is there, and believed; or closed."""
        while not self._closed:
            with suppress(StoreUnavailable):
                await self._ready()
                return
            await asyncio.sleep(RETRY_SECONDS)

    async def _listed(self, prefix: str) -> Listing | None:
        while not self._closed:
            try:
                return await self.list(prefix)
            except StoreUnavailable:
                await asyncio.sleep(RETRY_SECONDS)
        return None

    async def grant(self, ttl_seconds: float) -> Lease:
        """Make a lease."""
        await self._ready()
        lease = await self._done(self.inner.grant(ttl_seconds))
        self._leases.add(lease.id)
        return lease

    async def keep_alive(self, lease: Lease, *, for_seconds: float = 0.0) -> None:
        """Start the lease's time anew."""
        if lease.id in self._void:
            raise LeaseLost(f"lease {lease.id} is of the time before the store was trusted again")
        self.trust.check()
        await self.inner.keep_alive(lease, for_seconds=for_seconds)

    async def revoke(self, lease: Lease) -> None:
        """End the lease and delete its keys."""
        self.trust.check()
        self._leases.discard(lease.id)
        await self.inner.revoke(lease)

    async def compact(self, revision: int) -> None:
        """Forget the history up to and including a revision."""
        await self._ready()
        await self.inner.compact(revision)

    async def defragment(self) -> Sequence[str]:
        """Have the store give back room, where it can."""
        self.trust.check()
        return await self.inner.defragment()

    async def capacity(self) -> Capacity | None:
        """Return how full the store is; None where it has no limit."""
        return await capacity_of(self.inner)

    async def hold_ballast(self) -> None:
        """Have the store take its ballast again, where it has any and there is room for it."""
        await self.inner.hold_ballast()

    async def collect_parts(self) -> int:
        """Delete parts of specs that no record names, where the store keeps them apart; return how many there were."""
        await self._ready()
        return await self.inner.collect_parts() if isinstance(self.inner, CollectsParts) else 0

    async def standing(self) -> Sequence[Standing]:
        """Ask each member how it is, where there are members."""
        return await self.inner.standing()

    async def close(self) -> None:
        """Let go of the store, and keep what is known of it."""
        if self._closed:
            return
        self._closed = True
        await self.trust.close()
        self._turn.set()
        await self.inner.close()


def trust_of(store: object) -> Trust | None:
    """Return what is known of the store below a store; None where it is not guarded."""
    while store is not None and not isinstance(store, GuardedStore):
        store = getattr(store, "inner", None)
    return store.trust if store else None


async def _unless(turn: asyncio.Event, updates: AsyncGenerator[Changes | Relisted, None]) -> Changes | Relisted | None:
    """Return the next of a watch's updates; None at its end, or once `turn` is set."""
    coming = asyncio.ensure_future(anext(updates, None))
    turned = asyncio.ensure_future(turn.wait())
    try:
        await asyncio.wait((coming, turned), return_when=asyncio.FIRST_COMPLETED)
        if coming.done():
            return coming.result()
        return None
    finally:
        turned.cancel()
        if not coming.done():
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)
