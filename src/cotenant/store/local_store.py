"""The common part of adapters that hold all keys in memory: everything but how a draft is made durable."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import TypeVar

from cotenant.store.argument_checks import check_key, check_transaction, check_ttl
from cotenant.store.keyspace import Draft, HistoryLimit, Keyspace
from cotenant.store.lease_deadlines import LeaseDeadlines
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
    StoreUnavailable,
)
from cotenant.telemetry.plain_structlog import structlog

log = structlog.get_logger()

Result = TypeVar("Result")

EXPIRY_PAUSE_SECONDS = 0.1  # leases end at most this late; many leases then cost one scan


class LocalStore(ABC):
    """A store whose committed state is in memory, so that reads neither wait nor access a disk."""

    def __init__(self, keyspace: Keyspace, limit: HistoryLimit, now: Callable[[], float]) -> None:
        self._keyspace = keyspace
        self._limit = limit
        self._deadlines = LeaseDeadlines(now)
        self._waiting: dict[_Watcher, None] = {}  # in order of arrival
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._expiring: set[asyncio.Task[None]] = set()
        for lease in keyspace.leases.values():
            self._deadlines.start(lease)

    @property
    def revision(self) -> int:
        """The committed revision."""
        return self._keyspace.revision

    @abstractmethod
    async def _submit(self, step: Callable[[Draft], Result]) -> Result:
        """Apply a step to a draft and return its result once the draft is committed."""

    async def get(self, key: str) -> Entry | None:
        """Read one committed key."""
        check_key(key)
        await asyncio.sleep(0)  # a reader in a loop must not block writers
        self._require_open()
        held = self._keyspace.held(key)
        return held.entry if held else None

    async def list(self, prefix: str) -> Listing:
        """Read all committed keys under a prefix."""
        await asyncio.sleep(0)
        self._require_open()
        return self._keyspace.listing(prefix)

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Committed | Conflict:
        """Apply all operations if all comparisons hold, else none."""
        check_transaction(compares, operations)
        self._require_open()
        return await self._submit(lambda draft: draft.transact(compares, operations))

    async def watch(self, prefix: str, *, after_revision: int) -> AsyncGenerator[Changes | Relisted, None]:
        """Yield what is committed under a prefix after a revision, until the store is closed."""
        position = after_revision
        while not self._closed:
            if position < self._keyspace.compacted:
                listing = self._keyspace.listing(prefix)
                position = listing.revision
                yield Relisted(listing.revision, listing.entries)
            elif history := self._keyspace.since(position):
                for changes in history:
                    position = changes.revision
                    if self._closed:
                        return
                    if under := changes_under(prefix, changes):
                        yield under
            else:
                self._arm()
                position = await self._wait_for_change(prefix, position)

    async def _wait_for_change(self, prefix: str, position: int) -> int:
        """Wait for a commit under a prefix, or the end of the store; return the position from which to read on."""
        waiting = _Watcher(prefix, position)
        self._waiting[waiting] = None
        try:
            await waiting.over
        finally:
            self._waiting.pop(waiting, None)
        return waiting.position

    async def grant(self, ttl_seconds: float) -> Lease:
        """Grant a lease."""
        check_ttl(ttl_seconds)
        self._require_open()
        return await self._submit(lambda draft: draft.grant(ttl_seconds))

    async def keep_alive(self, lease: Lease, *, for_seconds: float = 0.0) -> None:
        """Restart the lease's time to live. Nothing renews it for a busy caller: caller and store are one process."""
        self._require_open()
        if lease.id in self._deadlines:
            self._deadlines.start(self._keyspace.leases[lease.id])
            return
        await self._submit(lambda draft: draft.revoke(lease.id))  # it may be ending: delete its keys before the error
        raise LeaseLost(f"lease {lease.id} has expired or was revoked")

    async def revoke(self, lease: Lease) -> None:
        """Revoke the lease and delete its keys."""
        self._require_open()
        await self._submit(lambda draft: draft.revoke(lease.id))

    async def compact(self, revision: int) -> None:
        """Compact the history up to and including a revision."""
        self._require_open()
        await self._submit(lambda draft: draft.forget(revision))

    async def expire(self) -> None:
        """End the expired leases. A timer does this too; a test with its own clock calls it."""
        await self._end(self._deadlines.take_over())

    async def _end(self, leases: Sequence[Lease]) -> None:
        for lease in leases:
            try:
                await self._submit(partial(Draft.revoke, lease_id=lease.id))
            except StoreUnavailable as error:
                log.warning("lease_expiry_failed", lease=lease.id, error=str(error))
                if lease.id in self._keyspace.leases:
                    self._deadlines.start(lease)  # its keys still exist: try again later

    async def close(self) -> None:
        """End all watches, and reject later calls."""
        self._closed = True
        self._disarm()
        if self._expiring:
            await asyncio.wait(self._expiring)
        for waiting in self._waiting:
            waiting.wake()

    def _keep(self, draft: Draft) -> None:
        """Make a committed draft visible to readers and watches."""
        self._keyspace.keep(draft)
        self._deadlines.drop(draft.revoked)
        for lease in draft.granted.values():
            self._deadlines.start(lease)
        if draft.granted:
            self._disarm()  # the new lease may expire before the one that the timer waits for
        self._arm()
        self._wake_watchers([change.key for changes in draft.history for change in changes.changes])

    def _wake_watchers(self, keys: Sequence[str]) -> None:
        """Wake the watches with a commit under their prefix; the others only advance."""
        revision = self._keyspace.revision
        for waiting in self._waiting:
            if waiting.over.done():
                continue  # it reads everything after its position
            prefix = waiting.prefix
            for key in keys:
                if key.startswith(prefix):
                    waiting.wake()
                    break
            else:
                waiting.position = revision

    def _require_open(self) -> None:
        if self._closed:
            raise StoreUnavailable("the store is closed")
        self._arm()

    def _arm(self) -> None:
        """Start the timer for the next lease to expire."""
        if self._timer or self._closed:
            return
        wait_seconds = self._deadlines.seconds_to_next()
        if wait_seconds is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(wait_seconds, EXPIRY_PAUSE_SECONDS), self._expire_soon)

    def _disarm(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None

    def _expire_soon(self) -> None:
        self._timer = None
        if leases := self._deadlines.take_over():
            task = asyncio.get_running_loop().create_task(self._end(leases))
            self._expiring.add(task)
            task.add_done_callback(self._expiring.discard)
        self._arm()


class _Watcher:
    """A watch that has delivered everything up to a position."""

    __slots__ = ("over", "position", "prefix")

    def __init__(self, prefix: str, position: int) -> None:
        self.prefix, self.position = prefix, position
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def wake(self) -> None:
        """Wake the watch."""
        if not self.over.done():
            self.over.set_result(None)


def changes_under(prefix: str, changes: Changes) -> Changes | None:
    """Return what a revision changed under a prefix; None if nothing."""
    under = tuple(change for change in changes.changes if change.key.startswith(prefix))
    if len(under) == len(changes.changes):
        return changes
    return Changes(changes.revision, under) if under else None
