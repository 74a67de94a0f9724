"""`deadlines=TIGHTNESS`: deadlines of training jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from cotenant.core.model.job import JobKind
from cotenant.simulator.overlays.port import Setting, number, rounded
from cotenant.simulator.traces import TraceJob

TIGHTNESS_MAX = 1e6


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Sets deadline = submission + factor × work for training jobs, with a mean factor of TIGHTNESS.

    GENIE sweeps the tightness of its users' QoS (TPDS 31(1) [P]); how single jobs differ is not published. The factor
    is drawn uniformly from half to one and a half times the slack: 1 + (TIGHTNESS - 1) × [0.5, 1.5) [R]. Smaller is
    tighter; at 1 a job would have no time to wait.
    """

    key: ClassVar[str] = "deadlines"
    form: ClassVar[str] = "TIGHTNESS"
    tightness: float

    @classmethod
    def parse(cls, value: str) -> Deadlines:
        """Parse the tightness."""
        return cls(number(value, 1, TIGHTNESS_MAX))

    def apply(self, jobs: Sequence[TraceJob], setting: Setting, rng: np.random.Generator) -> list[TraceJob]:
        """Draw the deadlines."""
        factors = rounded(1 + (self.tightness - 1) * (0.5 + rng.random(len(jobs))))
        return [
            replace(job, deadline_seconds=job.submitted_seconds + factor * job.work_seconds)
            if job.kind is JobKind.TRAINING
            else job
            for job, factor in zip(jobs, factors, strict=True)
        ]
