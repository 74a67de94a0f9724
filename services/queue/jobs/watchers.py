"""Watchers of changed jobs. They hold ids and tenants only, however slowly they are read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

from cotenant.services.queue.jobs.job_record import Record


class Watcher:
    """A queue of changed job ids; each id is in it at most once.

    A removed job has its tenant beside its id, and is queued only if the watcher is `concerned` by it.
    """

    def __init__(self, only: str = "", concerned: Callable[[Record], bool] = lambda record: True) -> None:
        self.only = only  # the watched job; empty: all
        self.changed: dict[str, str | None] = {}
        self.wake = asyncio.Event()
        self._concerned = concerned

    def notify(self, job_id: str) -> None:
        """Add a changed job."""
        self.changed[job_id] = None
        self.wake.set()

    def notify_removed(self, record: Record) -> None:
        """Add a removed job."""
        if self._concerned(record):
            self.changed[record.id] = record.spec.tenant
            self.wake.set()

    async def take(self) -> Mapping[str, str | None]:
        """Wait for changes; return all ids so far, with the tenants of removed jobs, and begin anew."""
        while not self.changed:
            self.wake.clear()
            await self.wake.wait()
        taken, self.changed = self.changed, {}
        return taken

    async def changes(self) -> AsyncIterator[str]:
        """Yield ids of changed jobs; a job that changes twice before it is read comes once."""
        while True:
            while self.changed:
                job_id = next(iter(self.changed))
                del self.changed[job_id]
                yield job_id
            self.wake.clear()
            await self.wake.wait()
