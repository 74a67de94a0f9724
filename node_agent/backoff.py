"""Exponential backoff with jitter."""

from __future__ import annotations

from random import Random


class Backoff:
    """Delays that double from a first to a longest one, with jitter so that nodes do not all reconnect at once.

    >>> waits = Backoff(first_seconds=1, longest_seconds=8, rng=Random(1))
    >>> [round(waits.next_seconds()) <= most for most in (1, 2, 4, 8, 8)]
    [True, True, True, True, True]
    """

    def __init__(self, *, first_seconds: float, longest_seconds: float, rng: Random) -> None:
        self._first_seconds, self._longest_seconds, self._rng = first_seconds, longest_seconds, rng
        self._bound_seconds = first_seconds

    def next_seconds(self) -> float:
        """Return a delay between half of the current bound and the whole of it; then double the bound."""
        bound = self._bound_seconds
        self._bound_seconds = min(self._longest_seconds, bound * 2)
        return bound * self._rng.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Start over with the first delay, after a success."""
        self._bound_seconds = self._first_seconds
