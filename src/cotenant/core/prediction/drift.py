"""Whether the rates measured for a job class still hold.

A profile is trusted until the job's own windows contradict it: Xiao et al. (SoCC 2018) keep watching the rate and
profile again when it departs from the prediction [P]; we take three consecutive windows outside ±15 % for that [R].
Each window is compared with the rate measured first at its core count, not with the latest ones: those would follow a
slow change, and leave what is known at other counts behind it. Windows at counts that were never measured contradict
nothing.

A window outside is held until it is clear what it was. If the next windows agree with the profile again, it was noise,
and is learned as such; three in a row are the truth, and replace everything measured before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from cotenant.core.prediction.core_curve import Windows

Sight = TypeVar("Sight")

RATES_MAX = 8  # per core count
REFERENCE_WINDOWS = 4  # the first ones at a core count; their mean is the reference for later ones


@dataclass(frozen=True, slots=True)
class Bounds:
    """When rates no longer hold: this many windows in a row off by more than a share of the rate [R]."""

    deviation: float = 0.15
    windows: int = 3


BOUNDS = Bounds()
NOTHING: Mapping[int, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Seen(Generic[Sight]):
    """The result of a window: what to learn now, in order, and whether everything known before is void."""

    learnt: tuple[Sight, ...] = ()
    void: bool = False


@dataclass(frozen=True, slots=True)
class Outlier(Generic[Sight]):
    """A window that is held: its cores, its rate, and that rate relative to the expected one."""

    cores: int
    rate: float
    ratio: float
    sight: Sight


class Profile(Generic[Sight]):
    """The rates of one job class in one setting, and whether they hold. `Sight` is the caller's type of a window.

    >>> profile: Profile[str] = Profile()
    >>> [profile.add_window(8, rate, name).learnt for rate, name in ((10.0, "a"), (9.5, "b"), (5.0, "c"), (11.0, "d"))]
    [('a',), ('b',), (), ('c', 'd')]
    >>> [profile.add_window(8, 5.0, name).void for name in "efg"]
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
        self.stale = stale  # why the profile is stale, in a sentence; empty if it is not
        self._references = dict(references)
        self._outside: list[Outlier[Sight]] = []

    @property
    def references(self) -> Mapping[int, tuple[float, int]]:
        """By cores, the mean of the first rates and their number."""
        return MappingProxyType(self._references)

    def measure(self, cores: int, rate_per_second: float, sight: Sight) -> Seen[Sight]:
        """Add a rate that was measured for a profile: it is not checked against what was known.

        Raises:
            ValueError: the rate or the cores are invalid; nothing is kept.
        """
        self._learn(cores, rate_per_second)
        return Seen((sight,))

    def add_window(self, cores: int, rate_per_second: float, sight: Sight, bounds: Bounds = BOUNDS) -> Seen[Sight]:
        """Add a window of a job that runs normally.

        Raises:
            ValueError: the rate or the cores are invalid; nothing is kept.
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
        self._outside.append(Outlier(cores, rate_per_second, ratio, sight))
        return Seen() if len(self._outside) < bounds.windows else self._give_way()

    def _give_way(self) -> Seen[Sight]:
        """Discard all earlier measurements; the profile is stale if they were more than the last windows replace."""
        held, self._outside = self._outside, []
        ratio = math.fsum(one.ratio for one in held) / len(held)
        if self.stale or len(self.windows.rates) > 1:
            self.stale = f"its last {len(held)} windows ran at {ratio:.2f} of the measured rate"
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
