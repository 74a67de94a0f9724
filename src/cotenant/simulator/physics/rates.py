"""How fast a run is."""

from __future__ import annotations

from typing import NamedTuple


class Rate(NamedTuple):
    """How fast a run is: in work relative to its trace, and relative to an undisturbed run on the same type of GPU."""

    work: float
    pace: float


FULL = Rate(1.0, 1.0)
