"""How soon one transaction follows another where many come: those that go together cost about what one does alone."""

from __future__ import annotations

import asyncio

PACE_SECONDS = 0.02


class Pace:
    """Lets a transaction that many went into be followed by the next one `seconds` after it began, not at once.

    A quick etcd is asked hundreds of times a second for a few writes each otherwise. On a busy machine a transaction of
    one write took its three members 4 ms of processor, and one of twelve writes 6. What comes alone waits for nobody.
    """

    def __init__(self, seconds: float = PACE_SECONDS) -> None:
        self._seconds = seconds
        self._next = 0.0  # on the loop's clock: not before then

    async def wait(self) -> None:
        """Wait until the next transaction may be gathered."""
        left_seconds = self._next - asyncio.get_running_loop().time()
        if left_seconds > 0:
            await asyncio.sleep(left_seconds)

    def begin(self, together: int) -> None:
        """Note that so many begin to be committed together."""
        self._next = asyncio.get_running_loop().time() + self._seconds if together > 1 else 0.0
