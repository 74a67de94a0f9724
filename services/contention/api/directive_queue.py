"""Queue of directives to one agent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence

from cotenant.agent.v1 import sample_service_pb2 as pb


class DirectiveQueue:
    """Holds the newest unsent directive for each attempt.

    A slow agent delays no other: its queue does not grow, since a newer directive replaces an older one.
    """

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, int], pb.Directive] = {}
        self._wake = asyncio.Event()
        self._closed = False
        self._error: Exception | None = None

    def put(self, directives: Iterable[pb.Directive]) -> None:
        """Queue directives; they are sent as soon as the agent reads."""
        for directive in directives:
            attempt = directive.job_id, directive.number
            self._waiting.pop(attempt, None)  # keeps the order of the newest directives
            self._waiting[attempt] = directive
            self._wake.set()

    def close(self, error: Exception | None = None) -> None:
        """End the stream after the queued directives are sent, or at once with an error; the first close counts."""
        if not self._closed:
            self._closed, self._error = True, error
            self._wake.set()

    async def read(self) -> AsyncIterator[Sequence[pb.Directive]]:
        """Yield queued directives as they come, until the queue is closed."""
        while True:
            await self._wake.wait()
            if self._error:
                raise self._error
            if not self._closed:
                self._wake.clear()
            if self._waiting:
                directives = tuple(self._waiting.values())
                self._waiting.clear()
                yield directives
            elif self._closed:
                return
