"""How long to wait before the next try."""

from __future__ import annotations

from random import Random


class Backoff:
    """Doubles from a first wait to a longest one, spread at random so that a cluster does not return all at once.

    >>> waits = Backoff(first_seconds=1, longest_seconds=8, rng=Random(1))
    >>> [round(waits.next_seconds()) <= most for most in (1, 2, 4, 8, 8)]
    [True, True, True, True, True]
    """

    def __init__(self, *, first_seconds: float, longest_seconds: float, rng: Random) -> None:
        self._first_seconds, self._longest_seconds, self._rng = first_seconds, longest_seconds, rng
        self._bound_seconds = first_seconds

    def next_seconds(self) -> float:
        """Between half of the bound and the whole of it, which then doubles."""
        bound = self._bound_seconds
        self._bound_seconds = min(self._longest_seconds, bound * 2)
        return bound * self._rng.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Begin anew, after a success."""
        self._bound_seconds = self._first_seconds
