"""Retries of interrupted streams, for as long as a restart may take, at the mesh's current address."""

from __future__ import annotations

from cotenant.cli.connection import Mesh
from cotenant.deferred import asyncio, grpc

RETRY_DELAYS_SECONDS = (0.2, 0.5, 1.0, 2.0, 4.0, *[5.0] * 11)  # a minute: enough for a restart or an election
CUT = frozenset({"UNAVAILABLE", "CANCELLED"})


class StreamRetry:
    """Backs off between attempts and gives up in the end."""

    def __init__(self, mesh: Mesh, words: str) -> None:
        self._mesh = mesh
        self._words = words
        self._failed = 0

    def reset(self) -> None:
        """Reset the backoff: the stream works again."""
        self._failed = 0

    async def wait(self, error: grpc.aio.AioRpcError) -> None:
        """Wait until the next attempt is due.

        Raises:
            AioRpcError: the given error, which is not retryable or has outlasted all attempts.
        """
        if error.code().name not in CUT or self._failed >= len(RETRY_DELAYS_SECONDS):
            raise error
        if not self._failed:
            self._mesh.report(f"{self._words}; retrying")
        await asyncio.sleep(RETRY_DELAYS_SECONDS[self._failed])
        self._failed += 1
        await self._mesh.find_again()
