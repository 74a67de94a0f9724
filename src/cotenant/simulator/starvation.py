"""The longest waits: how a schedule treats its large gangs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

LATE_SECONDS = 3600.0  # a job that has waited for longer is late [C]
GANG_SIZES: Mapping[str, tuple[float, float]] = MappingProxyType(
    {"0": (0, 1), "1": (1, 1_001), "2-4": (1_001, 4_001), "5-8": (4_001, 8_001), "over 8": (8_001, math.inf)}
)  # in thousandths of GPUs, from the first to below the second (Philly, table 2 [P])
Waited = tuple[int, float]  # GPUs in thousandths, seconds


def starvation_of(waits: Sequence[Waited], server_gpus: int) -> dict[str, dict[str, float | None]]:
    """Return total waits by size; gangs larger than a server also count separately, if there are any servers.

    >>> waits = [(1000, 10.0), (16_000, 7200.0), (16_000, 0.0)]
    >>> starvation_of(waits, server_gpus=8)["over a server"]
    {'jobs': 2, 'longest_wait_seconds': 7200.0, 'avg_wait_seconds': 3600.0, 'late_percent': 50.0}
    """
    ranges = {**GANG_SIZES, "over a server": (server_gpus * 1000 + 1, math.inf)}
    return {
        size: _figures([seconds for milli, seconds in waits if least <= milli < below])
        for size, (least, below) in ranges.items()
    }


def _figures(waits: Sequence[float]) -> dict[str, float | None]:
    count = len(waits)
    return {
        "jobs": count,
        "longest_wait_seconds": max(waits, default=None),
        "avg_wait_seconds": math.fsum(waits) / count if count else None,
        "late_percent": 100 * sum(one > LATE_SECONDS for one in waits) / count if count else None,
    }
