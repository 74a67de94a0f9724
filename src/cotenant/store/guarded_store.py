"""A store that is used only while it is the store that was written, and not an older state of it.

Once it is distrusted (see `identity_check`), nothing is read from it or written to it: a service would build its state
from what it reads, and agents would be told to stop everything that this state lacks. So services continue with their
state in memory, as they do while a store is unavailable. Once the store is trusted again, every watch lists again and
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
from cotenant.store.member_status import MemberStatus
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
from cotenant.store.revision_offset import OffsetStore
from cotenant.telemetry.recent_durations import RecentDurations

RETRY_SECONDS = 0.2

T = TypeVar("T")


class GuardedStore:
    """A store that rejects everything while it is distrusted; `memory` is the file with what is remembered of it."""

    def __init__(self, shifted: OffsetStore, memory: Path | None = None) -> None:
        self.inner = shifted
        self.latency = RecentDurations()  # of transactions, and of checks of an etcd
        self.trust = Trust(shifted, memory, self._returned, self.latency.add)
        self._turn = asyncio.Event()  # set and replaced when the store is trusted again
        self._leases: set[int] = set()
        self._void: set[int] = set()  # leases from before the store was trusted again
        self._closed = False

    def _returned(self) -> None:
        self._void |= self._leases
        self._leases.clear()
        turn, self._turn = self._turn, asyncio.Event()
        turn.set()

    async def _done(self, work: Awaitable[T]) -> T:
        """Return the result of a call, unless the store is distrusted by then."""
        try:
            result = await work
        except StoreDistrusted as error:
            await self.trust.check_after_error(error)
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
        """Apply all operations if all comparisons hold, else none."""
        await self._ready()
        begin = time.monotonic()
        result = await self._done(self.inner.transact(compares, operations))
        self.latency.add(time.monotonic() - begin)
        return result

    async def watch(self, prefix: str, *, after_revision: int) -> AsyncGenerator[Changes | Relisted, None]:
        """Yield what is committed after a revision; the whole prefix once the store is trusted again."""
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
        """Wait until the store is available and trusted, or closed."""
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
        """Grant a lease."""
        await self._ready()
        lease = await self._done(self.inner.grant(ttl_seconds))
        self._leases.add(lease.id)
        return lease

    async def keep_alive(self, lease: Lease, *, for_seconds: float = 0.0) -> None:
        """Restart the lease's time to live."""
        if lease.id in self._void:
            raise LeaseLost(f"lease {lease.id} was granted before the store was trusted again")
        self.trust.check()
        await self.inner.keep_alive(lease, for_seconds=for_seconds)

    async def revoke(self, lease: Lease) -> None:
        """Revoke the lease and delete its keys."""
        self.trust.check()
        self._leases.discard(lease.id)
        await self.inner.revoke(lease)

    async def compact(self, revision: int) -> None:
        """Compact the history up to and including a revision."""
        await self._ready()
        await self.inner.compact(revision)

    async def defragment(self) -> Sequence[str]:
        """Release unused space, if the store supports it."""
        self.trust.check()
        return await self.inner.defragment()

    async def capacity(self) -> Capacity | None:
        """Return how full the store is; None if it has no limit."""
        return await capacity_of(self.inner)

    async def hold_ballast(self) -> None:
        """Allocate the store's ballast again, if it has one and there is space."""
        await self.inner.hold_ballast()

    async def collect_parts(self) -> int:
        """Delete unreferenced spec parts, if the store stores them separately; return how many there were."""
        await self._ready()
        return await self.inner.collect_parts() if isinstance(self.inner, CollectsParts) else 0

    async def member_statuses(self) -> Sequence[MemberStatus]:
        """Return the status of each member, if there are members."""
        return await self.inner.member_statuses()

    async def close(self) -> None:
        """Close the store, and save what is known of it."""
        if self._closed:
            return
        self._closed = True
        await self.trust.close()
        self._turn.set()
        await self.inner.close()


def trust_of(store: object) -> Trust | None:
    """Return the trust of the guarded store below a store; None if there is none."""
    while store is not None and not isinstance(store, GuardedStore):
        store = getattr(store, "inner", None)
    return store.trust if store else None


async def _unless(turn: asyncio.Event, updates: AsyncGenerator[Changes | Relisted, None]) -> Changes | Relisted | None:
    """Return the next update of a watch; None at its end, or once `turn` is set."""
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
