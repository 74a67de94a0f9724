"""Whether the rates that were measured of a kind of job still hold.

A profile is trusted until the job's own windows contradict it: Xiao et al. (SoCC 2018) watch the rate on and profile
anew when it leaves the prediction [P]; three consecutive windows outside ±15 % are what we take for that [R]. Each
window is compared with the rate that was measured first at its core count, not with the latest ones: those would
follow a slow change, and leave what is known at other counts behind it. Windows at counts that were never measured
contradict nothing.

A window outside is held back until it is clear what it was. Where the next ones agree with the profile again, it was
noise, and is learnt as such; three in a row are the truth, and everything that was measured before gives way to them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from cotenant.core.prediction.core_curve import Windows

Sight = TypeVar("Sight")

RATES_MAX = 8  # of one core count
REFERENCE_WINDOWS = 4  # the first ones at a core count, whose mean is what later ones are compared with


@dataclass(frozen=True, slots=True)
class Bounds:
    """From when on rates no longer hold: so many windows in a row off by more than a share of the rate [R]."""

    deviation: float = 0.15
    windows: int = 3


BOUNDS = Bounds()
NOTHING: Mapping[int, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Seen(Generic[Sight]):
    """What came of a window: what is to be learnt now, in order, and whether all that was known before is void."""

    learnt: tuple[Sight, ...] = ()
    void: bool = False


@dataclass(frozen=True, slots=True)
class Outside(Generic[Sight]):
    """A window that is held back: its cores, its rate, and that relative to what was expected."""

    cores: int
    rate: float
    ratio: float
    sight: Sight


class Profile(Generic[Sight]):
    """The rates of one kind of job in one setting, and whether they hold. `Sight` is whatever a window came as.

    >>> profile: Profile[str] = Profile()
    >>> [profile.see(8, rate, name).learnt for rate, name in ((10.0, "a"), (9.5, "b"), (5.0, "c"), (11.0, "d"))]
    [('a',), ('b',), (), ('c', 'd')]
    >>> [profile.see(8, 5.0, name).void for name in "efg"]
    [False, False, True]
    """

    __slots__ = ("_outside", "_references", "stale", "windows")

    def __init__(
        self,
        rates: Mapping[int, Sequence[float]] = NOTHING,
        references: Mapping[int, tuple[float, int]] = NOTHING,
        stale: str = "",
    ) -> None:
        self.windows = Windows(rates, rates_max=RATES_MAX)
        self.stale = stale  # why it is, in a sentence; empty where it is not
        self._references = dict(references)
        self._outside: list[Outside[Sight]] = []

    @property
    def references(self) -> Mapping[int, tuple[float, int]]:
        """By cores, the mean of the first rates and of how many."""
        return MappingProxyType(self._references)

    def measure(self, cores: int, rate_per_second: float, sight: Sight) -> Seen[Sight]:
        """Take in a rate that was measured for a profile: nothing that was known argues against it.

        Raises:
            ValueError: a figure that cannot be; nothing is kept of it.
        """
        self._learn(cores, rate_per_second)
        return Seen((sight,))

    def see(self, cores: int, rate_per_second: float, sight: Sight, bounds: Bounds = BOUNDS) -> Seen[Sight]:
        """Take in a window of a job that runs as it does.

        Raises:
            ValueError: a figure that cannot be; nothing is kept of it.
        """
        expected, _ = self._references.get(cores, (0.0, 0))
        if not expected:
            return self.measure(cores, rate_per_second, sight)
        ratio = rate_per_second / expected
        if abs(ratio - 1) <= bounds.deviation:
            held, self._outside = self._outside, []
            for one in held:
                self.windows.add(one.cores, one.rate)
            self._learn(cores, rate_per_second)
            return Seen((*(one.sight for one in held), sight))
        if not 0 < rate_per_second < math.inf:
            raise ValueError(f"a rate must be positive and finite, not {rate_per_second:g}")
        self._outside.append(Outside(cores, rate_per_second, ratio, sight))
        return Seen() if len(self._outside) < bounds.windows else self._give_way()

    def _give_way(self) -> Seen[Sight]:
        """Let all that was measured go; it is stale where it was more than what the last windows tell anew."""
        held, self._outside = self._outside, []
        ratio = math.fsum(one.ratio for one in held) / len(held)
        if self.stale or len(self.windows.rates) > 1:
            self.stale = f"its last {len(held)} windows ran at {ratio:.2f} of the rate that was measured"
        self.windows, self._references = Windows(rates_max=RATES_MAX), {}
        for one in held:
            self._learn(one.cores, one.rate)
        return Seen(tuple(one.sight for one in held), void=True)

    def _learn(self, cores: int, rate_per_second: float) -> None:
        self.windows.add(cores, rate_per_second)
        mean, count = self._references.get(cores, (0.0, 0))
        if count < REFERENCE_WINDOWS:
            self._references[cores] = mean + (rate_per_second - mean) / (count + 1), count + 1
        for forgotten in self._references.keys() - self.windows.rates.keys():
            del self._references[forgotten]
