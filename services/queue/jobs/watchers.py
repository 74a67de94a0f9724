"""Watchers of changed jobs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator


class Watcher:
    """A queue of changed job ids; each id is in it at most once."""

    def __init__(self, only: str = "") -> None:
        self.only = only  # the watched job; empty: all
        self.changed: dict[str, None] = {}
        self.wake = asyncio.Event()

    def notify(self, job_id: str) -> None:
        """Add a changed job."""
        self.changed[job_id] = None
        self.wake.set()

    async def changes(self) -> AsyncIterator[str]:
        """Yield ids of changed jobs; a job that changes twice before it is read comes once."""
        while True:
            while self.changed:
                job_id = next(iter(self.changed))
                del self.changed[job_id]
                yield job_id
            self.wake.clear()
            await self.wake.wait()
