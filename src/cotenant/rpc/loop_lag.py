"""The event loop's lag: while one step runs long, all calls and the leader's lease wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cotenant import telemetry
from cotenant.security.metering import LONGEST
from cotenant.telemetry.plain_structlog import structlog
from cotenant.telemetry.recent_durations import RecentDurations
from cotenant.v1.condition_pb2 import LoopLag

log = structlog.get_logger()

LOOK_SECONDS = 0.1
STALL_SECONDS = 0.5  # stalls this long are logged: three of them could cost a leader its lease of 2 s
BEHIND_SECONDS = 1.0  # a delay this long makes a 10 s window count as behind

DELAY = telemetry.histogram("cotenant.loop.delay", "s", "Delay of a service's event loop, ten times a second.")


class LoopLagMonitor:
    """Measures ten times a second how late the event loop runs.

    `longest_seconds` is the longest delay so far, `told` the number of logged stalls, and `recent` holds the delays of
    the last 30 s.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self.longest_seconds = 0.0
        self.told = 0
        self.recent = RecentDurations(clock)

    async def run(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LOOK_SECONDS
            await asyncio.sleep(LOOK_SECONDS)
            self.take(max(0.0, loop.time() - due))

    def take(self, late_seconds: float) -> None:
        """Record a delay."""
        DELAY.record(late_seconds)
        self.recent.add(late_seconds)
        self.longest_seconds = max(self.longest_seconds, late_seconds)
        if late_seconds >= STALL_SECONDS:
            self.told += 1
            method, seconds = LONGEST.take()
            log.warning("loop_stalled", seconds=round(late_seconds, 3), longest_step=round(seconds, 3), method=method)
        else:
            LONGEST.take()

    def lag(self) -> LoopLag:
        """Return the delays of the last 30 s as a message."""
        lag = LoopLag(behind_share=self.recent.share, windows_behind=self.recent.windows_above(BEHIND_SECONDS))
        lag.longest.FromMicroseconds(round(self.recent.longest_seconds * 1e6))
        lag.median.FromMicroseconds(round(self.recent.median_seconds * 1e6))
        return lag
