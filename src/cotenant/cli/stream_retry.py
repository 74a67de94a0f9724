"""How a stream that was cut is taken up again: for as long as a restart may take, and wherever the mesh is then."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio

from cotenant.cli.connection import Mesh
from cotenant.cli.outcome import note

PAUSES_SECONDS = (0.2, 0.5, 1.0, 2.0, 4.0, *[5.0] * 11)  # a minute: enough for a restart, or for another leader
CUT = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED})


class Patience:
    """Waits ever longer between attempts, and gives up in the end."""

    def __init__(self, mesh: Mesh, words: str) -> None:
        self._mesh = mesh
        self._words = words
        self._failed = 0

    def renew(self) -> None:
        """The line works; the next cut is a new one."""
        self._failed = 0

    async def wait(self, error: grpc.aio.AioRpcError) -> None:
        """Return when it is time for another attempt.

        Raises:
            AioRpcError: the given one, which no attempt will mend, or none has.
        """
        if error.code() not in CUT or self._failed >= len(PAUSES_SECONDS):
            raise error
        if not self._failed:
            note(f"{self._words}; trying again")
        await asyncio.sleep(PAUSES_SECONDS[self._failed])
        self._failed += 1
        await self._mesh.find_again()
