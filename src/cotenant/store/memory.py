"""A store in memory, for tests and for disposable state: it keeps every promise but durability."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from cotenant.store.keyspace import Draft, HistoryLimit, Keyspace
from cotenant.store.local_store import LocalStore, Result

DEFAULT_LIMIT = HistoryLimit()


class MemoryStore(LocalStore):
    """The port, without a disk or a network.

    Each call lets other tasks run before it completes, as every remote store does, so that code which relies on nothing
    happening in between fails here too. Leases follow `now`; with your own clock, call `expire` after moving it.
    """

    def __init__(self, *, limit: HistoryLimit = DEFAULT_LIMIT, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(Keyspace(), limit, now)

    async def _submit(self, step: Callable[[Draft], Result]) -> Result:
        await asyncio.sleep(0)
        self._require_open()
        draft = Draft(self._keyspace)
        result = step(draft)
        draft.trim(self._limit)
        self._keep(draft)
        return result
