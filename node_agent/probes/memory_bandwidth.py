"""The memory bandwidth that the whole node uses, and the most that it has, from whatever the hardware tells."""

from __future__ import annotations

import time
from collections.abc import Callable

from cotenant.node_agent.enforcement.resctrl import Resctrl
from cotenant.node_agent.probes.uncore import Uncore


class NodeBandwidth:
    """Bytes per second over windows that follow each other. What nobody tells is None."""

    def __init__(
        self,
        resctrl: Resctrl | None = None,
        uncore: Uncore | None = None,
        peak_bytes_per_second: float = 0.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin the first window. A peak of 0 is learnt: it is the most that was ever seen."""
        self._resctrl, self._uncore, self._now = resctrl, uncore, now
        self._told_peak, self._seen_peak = peak_bytes_per_second, 0.0
        self._before = self._read()

    @classmethod
    def open(cls, peak_bytes_per_second: float = 0.0) -> NodeBandwidth:
        """Find out what the hardware tells."""
        resctrl = Resctrl.open()
        return cls(resctrl, None if resctrl and resctrl.tells_bandwidth else Uncore.open(), peak_bytes_per_second)

    @property
    def enforced(self) -> bool:
        """Whether an attempt can be held to a share of it."""
        return self._resctrl is not None and self._resctrl.enforces

    @property
    def peak_bytes_per_second(self) -> float:
        """The most that the node has; 0 where nobody knows."""
        return self._told_peak or self._seen_peak

    def window(self) -> float | None:
        """End the window; bytes per second in it."""
        before, self._before = self._before, self._read()
        rate = rate_between(before, self._before)
        self._seen_peak = max(self._seen_peak, rate or 0.0)
        return rate

    def _read(self) -> tuple[float, int | None]:
        if self._resctrl is not None and self._resctrl.tells_bandwidth:
            return self._now(), self._resctrl.moved_bytes_of_node()
        return self._now(), self._uncore.moved_bytes() if self._uncore is not None else None

    def close(self) -> None:
        """Let go of the hardware's counters."""
        if self._uncore is not None:
            self._uncore.close()


def rate_between(before: tuple[float, int | None], after: tuple[float, int | None]) -> float | None:
    """Bytes per second between two readings of (seconds, bytes).

    None where one is missing, or where the counter went back: it wrapped, or another one took its place.

    >>> rate_between((0.0, 100), (2.0, 300)), rate_between((0.0, 300), (2.0, 100))
    (100.0, None)
    """
    (first, had), (last, has) = before, after
    if had is None or has is None or last <= first or has < had:
        return None
    return (has - had) / (last - first)
