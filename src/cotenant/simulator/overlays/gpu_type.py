"""`gpu-type=NAME`: the GPU type on which the trace was recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from cotenant.core.model.job import JobKind
from cotenant.core.model.validation import name_error
from cotenant.simulator.overlays.port import Setting
from cotenant.simulator.traces import TraceJob


@dataclass(frozen=True, slots=True)
class GpuType:
    """Sets the reference type of all jobs with GPUs, on which `work_seconds` holds. Nothing is random.

    It is not a requirement: a job may run on any type, at the speed that the simulation gives it there.
    """

    key: ClassVar[str] = "gpu-type"
    form: ClassVar[str] = "NAME"
    name: str

    @classmethod
    def parse(cls, value: str) -> GpuType:
        """Parse the type's name."""
        if wrong := name_error(value):
            raise ValueError(wrong)
        return cls(value)

    def apply(self, jobs: Sequence[TraceJob], setting: Setting, rng: np.random.Generator) -> list[TraceJob]:
        """Set the type."""
        return [job if job.kind is JobKind.CPU else replace(job, gpu_type=self.name) for job in jobs]
