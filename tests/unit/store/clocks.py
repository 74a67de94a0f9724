"""A clock that a test moves."""

from __future__ import annotations


class ManualClock:
    """Returns the time in seconds when called."""

    def __init__(self) -> None:
        self.seconds = 1_000.0

    def __call__(self) -> float:
        return self.seconds

    def advance(self, seconds: float) -> None:
        """Advance the time."""
        self.seconds += seconds
