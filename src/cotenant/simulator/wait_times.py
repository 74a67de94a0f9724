"""How long jobs wait, by cause (Philly, section 3.1 [P]): the kind of wait, and the level of a wait for locality.

A meter runs like a clock with one hand for each cause, of which only one moves at a time. A waiting job notes the hands
when it joins a meter and again when it leaves; so a thousand jobs that wait for the same reason cost nothing when that
reason changes for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from cotenant.core.model.job import Locality
from cotenant.core.model.refusal import Refusal, Wait

WAITS = (Wait.FAIR_SHARE, Wait.FRAGMENTATION, Wait.CAPACITY, Wait.DEPENDENCY)
LEVELS = (Locality.SERVER, Locality.RACK, Locality.ANYWHERE)
Cause = tuple[Wait, Locality | None]
CAUSE_OF: Mapping[Wait, Cause] = MappingProxyType(
    {wait: (wait, Locality.ANYWHERE if wait is Wait.FRAGMENTATION else None) for wait in WAITS}
)  # used if there is no level
CAUSES: tuple[Cause, ...] = (
    CAUSE_OF[Wait.FAIR_SHARE],
    *((Wait.FRAGMENTATION, level) for level in LEVELS),
    CAUSE_OF[Wait.CAPACITY],
    CAUSE_OF[Wait.DEPENDENCY],
)
Seconds = tuple[float, float, float, float, float, float]  # by cause, in that order
NONE: Seconds = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
_HAND = {cause: number for number, cause in enumerate(CAUSES)}


def cause_of(refusal: Refusal) -> Cause:
    """Return the cause of a refused job's wait."""
    wait = refusal.wait
    return (wait, refusal.locality or Locality.ANYWHERE) if wait is Wait.FRAGMENTATION else CAUSE_OF[wait]


class Meter:
    """Seconds of waiting by cause, since the meter was created.

    >>> meter = Meter(now=10.0)
    >>> meter.switch((Wait.FRAGMENTATION, Locality.SERVER), now=15.0)
    >>> meter.read(now=18.0)
    (0.0, 3.0, 0.0, 0.0, 5.0, 0.0)
    """

    __slots__ = ("_hand", "_seconds", "_since")

    def __init__(self, now: float = 0.0, cause: Cause = CAUSE_OF[Wait.CAPACITY]) -> None:
        self._seconds = [0.0] * len(CAUSES)
        self._since = now
        self._hand = _HAND[cause]

    def switch(self, cause: Cause, now: float) -> None:
        """Switch to another hand."""
        if (hand := _HAND[cause]) != self._hand:
            self._seconds[self._hand] += now - self._since
            self._since, self._hand = now, hand

    def read(self, now: float) -> Seconds:
        """Read all hands."""
        seconds = self._seconds.copy()
        seconds[self._hand] += now - self._since
        return seconds[0], seconds[1], seconds[2], seconds[3], seconds[4], seconds[5]


class Stopwatch:
    """Seconds during which a condition held.

    >>> watch = Stopwatch()
    >>> watch.switch(now=2.0, on=True)
    >>> watch.switch(now=5.0, on=False)
    >>> watch.read(now=9.0)
    3.0
    """

    __slots__ = ("_seconds", "_since")

    def __init__(self) -> None:
        self._seconds = 0.0
        self._since: float | None = None

    @property
    def runs(self) -> bool:
        """Whether the condition holds now."""
        return self._since is not None

    def switch(self, now: float, *, on: bool) -> None:
        """Note whether the condition holds from now on."""
        if on != self.runs:
            self._seconds, self._since = self.read(now), now if on else None

    def read(self, now: float) -> float:
        """Return for how long the condition held."""
        return self._seconds + (0.0 if self._since is None else now - self._since)


def by_wait(seconds: Seconds) -> tuple[float, ...]:
    """Return sums by kind of wait, in the order of `WAITS`.

    >>> by_wait((1.0, 2.0, 3.0, 4.0, 5.0, 6.0))
    (1.0, 9.0, 5.0, 6.0)
    """
    return seconds[0], sum(by_level(seconds)), seconds[4], seconds[5]


def by_level(seconds: Seconds) -> tuple[float, ...]:
    """Return the waits for an unfragmented place, in the order of `LEVELS`."""
    return seconds[1:4]


def dominant(by_kind: tuple[float, ...]) -> Wait | None:
    """Return the kind of wait with the most seconds, the first of equals; None if there was none."""
    most = max(by_kind)
    return WAITS[by_kind.index(most)] if most > 0 else None
