"""The rate of a run."""

from __future__ import annotations

from typing import NamedTuple


class Rate(NamedTuple):
    """The rate of a run: work relative to its trace, and relative to an undisturbed run on the same GPU type."""

    work: float
    pace: float


FULL = Rate(1.0, 1.0)
