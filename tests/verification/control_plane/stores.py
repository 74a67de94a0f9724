"""A shared store that reports each commit, and each process's connection, which may lose requests and answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from random import Random

from tests.verification.control_plane.virtual_time import Dead, Process

from cotenant.history.events import Wrote
from cotenant.leadership.fenced_store import DelegatingStore
from cotenant.storage.v1 import records_pb2
from cotenant.store.keyspace import Draft, HistoryLimit
from cotenant.store.memory import MemoryStore
from cotenant.store.port import (
    Changes,
    Committed,
    Compare,
    Conflict,
    Entry,
    Lease,
    Listing,
    Operation,
    Put,
    Relisted,
    StoreUnavailable,
)

WAIT_SECONDS = 0.001
DEADLINE_SECONDS = 2.0
LEADER = "/leader"
NO_SPACE = "etcdserver: mvcc: database space exceeded"  # as etcd words it


class RecordedStore(MemoryStore):
    """Reports each commit as it happens."""

    def __init__(self, now: Callable[[], float], on_commit: Callable[[Changes], None]) -> None:
        super().__init__(limit=HistoryLimit(revisions=1_000_000), now=now)
        self.away = False
        self.full = False  # refuses to grow, and answers reads
        self.lag_seconds = 0.0  # minimum latency of every request
        self._notified_revision, self._on_commit = 1, on_commit

    def now(self, key: str) -> Entry | None:
        """Return the current value of a key, at once."""
        held = self._keyspace.held(key)
        return held.entry if held else None

    def _keep(self, draft: Draft) -> None:
        super()._keep(draft)
        for changes in self._keyspace.since(self._notified_revision):
            self._notified_revision = changes.revision
            self._on_commit(changes)


class ProcessStore(DelegatingStore):
    """A process's connection to the store. `losing` is the share of transactions that fail, half of them committed."""

    def __init__(self, store: RecordedStore, process: Process, rng: Random, record: Callable[[Wrote], None]) -> None:
        super().__init__(store)
        self.losing = 0.0
        self.reached = True
        self._shared, self._process, self._rng, self._record = store, process, rng, record

    async def _pass(self) -> None:
        await asyncio.sleep(WAIT_SECONDS * self._rng.random() + self._shared.lag_seconds)
        if not self._process.goes:
            try:
                await self._process.gate()
            except Dead as error:
                raise StoreUnavailable("the process has ended") from error
        if self._shared.away or not self.reached:
            await asyncio.sleep(DEADLINE_SECONDS * self._rng.random())
            raise StoreUnavailable("the store is unavailable")

    async def get(self, key: str) -> Entry | None:
        """Read one key."""
        await self._pass()
        entry = await super().get(key)
        await self._pass()
        return entry

    async def list(self, prefix: str) -> Listing:
        """Read all keys under a prefix."""
        await self._pass()
        listing = await super().list(prefix)
        await self._pass()
        return listing

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Committed | Conflict:
        """Commit all operations if all comparisons hold; or lose the request, or the answer."""
        await self._pass()
        if self._shared.full and any(isinstance(one, Put) for one in operations):
            raise StoreUnavailable(NO_SPACE)
        lost = self._rng.random() < self.losing
        if lost and self._rng.random() < 0.5:
            raise StoreUnavailable("the request was lost")
        identity = self._identify(operations)
        result = await super().transact(compares, operations)
        services = {one.key.partition("/")[0] for one in operations if not one.key.endswith(LEADER)}
        if isinstance(result, Committed):
            for service in sorted(services):
                self._record(Wrote(result.revision, service, identity))
        if lost:
            raise StoreUnavailable("the answer was lost")
        await self._pass()
        return result

    def _identify(self, operations: Sequence[Operation]) -> str:
        """Record the identity under which this process leads."""
        for operation in operations:
            if isinstance(operation, Put) and operation.key.endswith(LEADER):
                self._process.identity = records_pb2.StoredLeader.FromString(operation.value).identity
        return self._process.identity

    async def watch(self, prefix: str, *, after_revision: int) -> AsyncIterator[Changes | Relisted]:
        """Yield commits while the store is reachable."""
        async for news in super().watch(prefix, after_revision=after_revision):
            while self._shared.away or not self.reached:  # noqa: ASYNC110  # one of several things may end it
                await asyncio.sleep(0.1)
            await self._process.gate()
            yield news

    async def grant(self, ttl_seconds: float) -> Lease:
        """Create a lease."""
        await self._pass()
        if self._shared.full:
            raise StoreUnavailable(NO_SPACE)
        return await super().grant(ttl_seconds)

    async def keep_alive(self, lease: Lease, *, for_seconds: float = 0.0) -> None:
        """Renew a lease."""
        await self._pass()
        await super().keep_alive(lease, for_seconds=for_seconds)

    async def revoke(self, lease: Lease) -> None:
        """Revoke a lease."""
        await self._pass()
        await super().revoke(lease)
