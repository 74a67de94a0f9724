"""How late a process's event loop is: whatever is done in one piece, all calls and the leader's lease wait for it."""

from __future__ import annotations

import asyncio

import structlog

from cotenant import telemetry
from cotenant.rpc.metering import LONGEST

log = structlog.get_logger()

LOOK_SECONDS = 0.1
TOLD_SECONDS = 0.5  # a stall of so long is told: three of them could cost a leader its lease of 2 s

DELAY = telemetry.histogram("cotenant.loop.delay", "s", "Delay of a service's event loop, ten times a second.")


class Stalls:
    """Looks ten times a second whether the event loop comes to it in time.

    `longest_seconds` is the longest delay so far, `told` how many were long enough to be told of.
    """

    def __init__(self) -> None:
        self.longest_seconds = 0.0
        self.told = 0

    async def run(self) -> None:
        """Look until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LOOK_SECONDS
            await asyncio.sleep(LOOK_SECONDS)
            self.take(max(0.0, loop.time() - due))

    def take(self, late_seconds: float) -> None:
        """Note a delay."""
        DELAY.record(late_seconds)
        self.longest_seconds = max(self.longest_seconds, late_seconds)
        if late_seconds >= TOLD_SECONDS:
            self.told += 1
            method, seconds = LONGEST.take()
            log.warning("loop_stalled", seconds=round(late_seconds, 3), longest_step=round(seconds, 3), method=method)
        else:
            LONGEST.take()
