"""How long jobs wait, by kind of wait (Philly, section 3.1 [P]).

A meter runs like a clock, one hand for each kind, and only one hand moves at a time. A waiting job notes the hands
when it comes to a meter and again when it leaves; so a thousand jobs that wait for the same reason cost nothing when
that reason changes for all of them.
"""

from __future__ import annotations

from cotenant.core.refusals import Wait

WAITS = (Wait.FAIR_SHARE, Wait.FRAGMENTATION, Wait.CAPACITY, Wait.DEPENDENCY)
Seconds = tuple[float, float, float, float]  # in that order
NONE: Seconds = (0.0, 0.0, 0.0, 0.0)
_HAND = {wait: number for number, wait in enumerate(WAITS)}


class Meter:
    """Seconds of waiting by kind, since the meter was made.

    >>> meter = Meter(now=10.0)
    >>> meter.turn(Wait.FRAGMENTATION, now=15.0)
    >>> meter.read(now=18.0)
    (0.0, 3.0, 5.0, 0.0)
    """

    __slots__ = ("_hand", "_seconds", "_since")

    def __init__(self, now: float = 0.0, wait: Wait = Wait.CAPACITY) -> None:
        self._seconds = [0.0] * len(WAITS)
        self._since = now
        self._hand = _hand(wait)

    def turn(self, wait: Wait, now: float) -> None:
        """Let another hand move from now on."""
        if (hand := _hand(wait)) != self._hand:
            self._seconds[self._hand] += now - self._since
            self._since, self._hand = now, hand

    def read(self, now: float) -> Seconds:
        """Read all hands."""
        seconds = self._seconds.copy()
        seconds[self._hand] += now - self._since
        return seconds[0], seconds[1], seconds[2], seconds[3]


def _hand(wait: Wait) -> int:
    """Find the hand of a kind."""
    return _HAND[wait]


def dominant(seconds: Seconds) -> Wait | None:
    """Tell which kind of wait cost most; None where there was none. Of equals the first counts."""
    most = max(seconds)
    return WAITS[seconds.index(most)] if most > 0 else None
