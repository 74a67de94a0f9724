"""Pacing of group commits: transactions that are committed together cost about as much as a single one."""

from __future__ import annotations

import asyncio

PACE_SECONDS = 0.02


class CommitPacing:
    """Delays the transaction after a group of writes until `seconds` after that group began.

    A fast etcd would otherwise get hundreds of transactions per second with a few writes each. On a busy machine a
    transaction of one write took its three members 4 ms of CPU time, and one of twelve writes 6 ms. A single write is
    not delayed.
    """

    def __init__(self, seconds: float = PACE_SECONDS) -> None:
        self._seconds = seconds
        self._next = 0.0  # on the loop's clock: the earliest next transaction

    async def wait(self) -> None:
        """Wait until the next group may be collected."""
        left_seconds = self._next - asyncio.get_running_loop().time()
        if left_seconds > 0:
            await asyncio.sleep(left_seconds)

    def begin(self, together: int) -> None:
        """Record that this many writes begin to be committed together."""
        self._next = asyncio.get_running_loop().time() + self._seconds if together > 1 else 0.0
