"""The node's memory bandwidth: current and peak, from whatever counters the hardware has."""

from __future__ import annotations

import time
from collections.abc import Callable

from cotenant.node_agent.enforcement.resctrl import Resctrl
from cotenant.node_agent.probes.uncore import Uncore


class NodeBandwidth:
    """Bytes per second over consecutive windows. Values without a counter are None."""

    def __init__(
        self,
        resctrl: Resctrl | None = None,
        uncore: Uncore | None = None,
        peak_bytes_per_second: float = 0.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the first window. With a peak of 0, the highest observed rate is used."""
        self._resctrl, self._uncore, self._now = resctrl, uncore, now
        self._configured_peak, self._observed_peak = peak_bytes_per_second, 0.0
        self._before = self._read()

    @classmethod
    def open(cls, peak_bytes_per_second: float = 0.0) -> NodeBandwidth:
        """Open the counters that the hardware has."""
        resctrl = Resctrl.open()
        return cls(resctrl, None if resctrl and resctrl.measures_bandwidth else Uncore.open(), peak_bytes_per_second)

    @property
    def enforced(self) -> bool:
        """Whether attempts can be limited to a share of it."""
        return self._resctrl is not None and self._resctrl.enforces

    @property
    def peak_bytes_per_second(self) -> float:
        """The node's peak; 0 if unknown."""
        return self._configured_peak or self._observed_peak

    def window(self) -> float | None:
        """End the window; return its bytes per second."""
        before, self._before = self._before, self._read()
        rate = rate_between(before, self._before)
        self._observed_peak = max(self._observed_peak, rate or 0.0)
        return rate

    def _read(self) -> tuple[float, int | None]:
        if self._resctrl is not None and self._resctrl.measures_bandwidth:
            return self._now(), self._resctrl.moved_bytes_of_node()
        return self._now(), self._uncore.moved_bytes() if self._uncore is not None else None

    def close(self) -> None:
        """Close the hardware's counters."""
        if self._uncore is not None:
            self._uncore.close()


def rate_between(before: tuple[float, int | None], after: tuple[float, int | None]) -> float | None:
    """Return the bytes per second between two readings of (seconds, bytes).

    None if a reading is missing or the counter went back, because it wrapped or was replaced.

    >>> rate_between((0.0, 100), (2.0, 300)), rate_between((0.0, 300), (2.0, 100))
    (100.0, None)
    """
    (start, start_bytes), (end, end_bytes) = before, after
    if start_bytes is None or end_bytes is None or end <= start or end_bytes < start_bytes:
        return None
    return (end_bytes - start_bytes) / (end - start)
