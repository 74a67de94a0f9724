"""Liveness clock: measures agents' silence, and runs only while this process could have received their messages.

Theory of operation. Silence indicates a loss only if this process was listening. A process that was stopped, whose
machine was halted or is overloaded, or that has lost its store and accepts no agents, receives nothing although all
agents may be sending: their messages wait in sockets. So silence is not measured by elapsed time but by attended time:
the clock ticks every `tick_seconds`, and the time between two ticks counts as at most `TICKS_COUNTED_MAX` intervals.
This clock never runs ahead of real time: a node is waited for longer, never shorter, and an attempt that stops after a
time of disconnection has stopped before it is started elsewhere.
"""

from __future__ import annotations

import time

import structlog

log = structlog.get_logger()

TICKS_PER_HEARTBEAT = 4
TICK_SECONDS_MIN = 0.1
TICKS_COUNTED_MAX = 2
TICKS_REPORTED = 12  # three heartbeats: a longer gap is logged


class LivenessClock:
    """The clock of one process. `beat_seconds` is the heartbeat interval of the agents."""

    def __init__(self, beat_seconds: float) -> None:
        self.tick_seconds = max(TICK_SECONDS_MIN, beat_seconds / TICKS_PER_HEARTBEAT)
        self._attended_seconds = 0.0
        self._ticked = time.monotonic()
        self._paused = False

    def tick(self) -> float:
        """Return the attended seconds so far; call this every `tick_seconds`, and whenever the time is needed."""
        now = time.monotonic()
        gap, self._ticked = now - self._ticked, now
        if not self._paused:
            self._attended_seconds += min(gap, TICKS_COUNTED_MAX * self.tick_seconds)
            if gap >= TICKS_REPORTED * self.tick_seconds:
                log.warning("process_stalled", seconds=round(gap, 3))
        return self._attended_seconds

    def pause(self) -> None:
        """Count no time until `resume`, because no agents are accepted."""
        self.tick()
        self._paused = True

    def resume(self) -> None:
        """Count time again."""
        self.tick()
        self._paused = False
