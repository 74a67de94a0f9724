"""Time that moves when a test says so."""

from __future__ import annotations


class ManualClock:
    """Call it for the time in seconds."""

    def __init__(self) -> None:
        self.seconds = 1_000.0

    def __call__(self) -> float:
        return self.seconds

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.seconds += seconds
