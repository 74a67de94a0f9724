"""Who wants to hear of changed jobs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator


class Watcher:
    """Someone who wants to hear of changes: the ids of changed jobs, each at most once until it is heard of."""

    def __init__(self, only: str = "") -> None:
        self.only = only  # this job; empty means all
        self.changed: dict[str, None] = {}
        self.wake = asyncio.Event()

    def tell(self, job_id: str) -> None:
        """Note a change."""
        self.changed[job_id] = None
        self.wake.set()

    async def changes(self) -> AsyncIterator[str]:
        """Yield ids of changed jobs as they come; a job that changes twice before it is heard of comes once."""
        while True:
            while self.changed:
                job_id = next(iter(self.changed))
                del self.changed[job_id]
                yield job_id
            self.wake.clear()
            await self.wake.wait()
