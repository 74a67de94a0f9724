"""Stores decayed usage: one record for each tenant, written at most once a minute.

A record counts everything until its time. What came later follows from the jobs that are kept, so a queue that is
killed loses nothing, and the next one counts nothing twice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import structlog

from cotenant import fail_points
from cotenant.services.queue.jobs.queue_state import State
from cotenant.storage.v1 import records_pb2
from cotenant.store import schema
from cotenant.store.port import Put, Store, StoreUnavailable

log = structlog.get_logger()

USAGE = "queue/usage/"
WRITE_SECONDS = 60.0
ENDING_SECONDS, ENDING_TRIES = 0.05, 100
AT_ONCE_MAX = 50  # records in one transaction


async def load_usage(store: Store, state: State) -> None:
    """Read the usage of all tenants, before any job is loaded.

    Raises:
        StoreUnavailable: it cannot be read.
        NewerSchema: a newer version wrote a record.
        BadRecord: a record is damaged.
    """
    for entry in (await store.list(USAGE)).entries:
        stored = schema.read(records_pb2.StoredTenantUsage, entry)
        with schema.reading(entry):
            if entry.key != USAGE + stored.tenant_id:
                raise ValueError(f"its tenant is {stored.tenant_id!r}")
            state.usage.restore(stored)


class UsageStore:
    """Writes the usage of tenants whose jobs have ended since the last write."""

    def __init__(self, store: Store, state: State) -> None:
        self._store, self._state = store, state

    async def run(self, synced: asyncio.Event, ending: Mapping[str, int]) -> None:
        """Write at once, for the jobs that were loaded, and then forever.

        `synced` is set while all attempts are known, and `ending` are the jobs whose end is being committed: a record
        counts everything until its time, so it is written when nothing of that is still unknown.
        """
        while True:
            await synced.wait()
            for _ in range(ENDING_TRIES):  # in a busy cluster, there may always be some
                if not ending:
                    break
                await asyncio.sleep(ENDING_SECONDS)
            try:
                await self.write()
            except StoreUnavailable as error:
                log.info("usage_write_delayed", error=str(error))
            await asyncio.sleep(WRITE_SECONDS)

    async def write(self) -> None:
        """Write the usage that is not stored yet. Only a leader writes, so a record is replaced as it is.

        Raises:
            StoreUnavailable: it may not have been written; the next write repeats it.
        """
        usage = self._state.usage
        while usage.changed:
            tenants = sorted(usage.changed)[:AT_ONCE_MAX]
            now = time.time()
            puts = [Put(USAGE + tenant, usage.stored(tenant, now).SerializeToString()) for tenant in tenants]
            usage.changed.difference_update(tenants)
            try:
                await fail_points.reach("queue.usage")
                await self._store.transact([], puts)
            except (StoreUnavailable, asyncio.CancelledError):
                usage.changed.update(tenants)
                raise
