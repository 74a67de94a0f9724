"""`gpu-type=NAME`: the type of GPU that the trace was taken on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from cotenant.core.model.job import JobKind
from cotenant.core.model.validation import bad_name
from cotenant.simulator.overlays.port import Setting
from cotenant.simulator.traces import TraceJob


@dataclass(frozen=True, slots=True)
class GpuType:
    """Tells the reference type of all jobs with GPUs: `work_seconds` holds on it. Nothing is drawn.

    It is no demand: a job may run on any type, at whatever speed the simulation gives it there.
    """

    key: ClassVar[str] = "gpu-type"
    form: ClassVar[str] = "NAME"
    name: str

    @classmethod
    def parse(cls, value: str) -> GpuType:
        """Read a type's name."""
        if wrong := bad_name(value):
            raise ValueError(wrong)
        return cls(value)

    def apply(self, jobs: Sequence[TraceJob], setting: Setting, rng: np.random.Generator) -> list[TraceJob]:
        """Name the type."""
        return [job if job.kind is JobKind.CPU else replace(job, gpu_type=self.name) for job in jobs]
