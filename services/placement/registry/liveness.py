"""How long others were silent, by a clock that goes only while this process could have heard them.

Theory of operation. Whoever takes silence for a loss must have listened. A process that was stopped, whose machine was
halted or has far more to do than it can, or which has lost its store and turns everybody away, hears nobody, though all
may speak: what they say waits in sockets. So silence is not measured by the time that has passed, but by the time that
was attended to: it is looked at every `look_seconds`, and what lies between two looks counts for no more than
`LOOKS_COUNTED_MAX` of them. This clock never runs ahead of the real one: a node is waited for longer, never shorter,
and whoever stops by itself after a time of silence has stopped before it is started elsewhere.
"""

from __future__ import annotations

import time

import structlog

log = structlog.get_logger()

LOOKS_WITHIN_BEAT = 4
LOOK_SECONDS_MIN = 0.1
LOOKS_COUNTED_MAX = 2
TOLD_LOOKS = 12  # three heartbeats: for so long nobody may be silent


class Attention:
    """The clock of one process. `beat_seconds` is how often those are to speak who are listened to."""

    def __init__(self, beat_seconds: float) -> None:
        self.look_seconds = max(LOOK_SECONDS_MIN, beat_seconds / LOOKS_WITHIN_BEAT)
        self._attended = 0.0
        self._looked = time.monotonic()
        self._turned = False

    def look(self) -> float:
        """Return the seconds that were attended to so far. To be called every `look_seconds`, and whenever wanted."""
        now = time.monotonic()
        gap, self._looked = now - self._looked, now
        if not self._turned:
            self._attended += min(gap, LOOKS_COUNTED_MAX * self.look_seconds)
            if gap >= TOLD_LOOKS * self.look_seconds:
                log.warning("was_absent", seconds=round(gap, 3))
        return self._attended

    def turn_away(self) -> None:
        """Listen to nobody who comes: until `turn_back` no time is counted."""
        self.look()
        self._turned = True

    def turn_back(self) -> None:
        """Listen again."""
        self.look()
        self._turned = False
