"""Placement: the speed of decisions, and the share of a cluster's GPUs that can be allocated.

Each part is also a separate benchmark: `placement_speed`, `placement_fragmentation`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import harness, placement_fragmentation, placement_speed  # noqa: E402 - the root has to be on the path

PARTS: tuple[Callable[[bool], Iterator[harness.Row]], ...] = (placement_speed.measure, placement_fragmentation.measure)


def measure(quick: bool) -> list[harness.Row]:
    """Measure all parts."""
    return [row for part in PARTS for row in part(quick)]


if __name__ == "__main__":
    harness.main(measure, __doc__ or "")
