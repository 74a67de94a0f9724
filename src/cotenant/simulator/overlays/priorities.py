"""`priorities=N`: the priority of each job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from cotenant.simulator.overlays.port import Setting, picks, whole
from cotenant.simulator.traces import TraceJob

LEVELS_MAX = 50


@dataclass(frozen=True, slots=True)
class Priorities:
    """Gives each job a priority from 0 to N - 1; each level has half as many jobs as the level below [R]."""

    key: ClassVar[str] = "priorities"
    form: ClassVar[str] = "N"
    levels: int

    @classmethod
    def parse(cls, value: str) -> Priorities:
        """Parse the number of levels."""
        return cls(whole(value, 2, LEVELS_MAX))

    def apply(self, jobs: Sequence[TraceJob], setting: Setting, rng: np.random.Generator) -> list[TraceJob]:
        """Draw the priorities."""
        drawn = picks(rng, len(jobs), [2.0**-level for level in range(self.levels)])
        return [replace(job, priority=level) for job, level in zip(jobs, drawn, strict=True)]
