"""`cores=auto|proportional|N`: the cores that users of GPU jobs request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

import numpy as np

from cotenant.core.model.job import WHOLE_GPU_MILLI, JobKind, Role
from cotenant.core.model.validation import Violation
from cotenant.core.policy.options import BadOption
from cotenant.simulator.overlays.port import Setting, whole
from cotenant.simulator.traces import TraceJob

CORES_PER_GPU_MAX = 10_000


@dataclass(frozen=True, slots=True)
class Cores:
    """Sets the cores of all jobs with GPUs; nothing is random.

    `auto` leaves them to the CPU allocator. `proportional` requests a node's cores ÷ its GPUs, rounded down, of the
    node with the least, as operators advise so that no GPU is stranded. A number is cores per GPU. A share of a GPU
    requests that share of the cores, rounded up.
    """

    key: ClassVar[str] = "cores"
    form: ClassVar[str] = "auto|proportional|N"
    how: str

    @classmethod
    def parse(cls, value: str) -> Cores:
        """Parse the value."""
        if value not in ("auto", "proportional"):
            try:
                whole(value, 1, CORES_PER_GPU_MAX)
            except ValueError as error:
                raise ValueError(str(error).replace("must be", "must be auto, proportional or")) from None
        return cls(value)

    def apply(self, jobs: Sequence[TraceJob], setting: Setting, rng: np.random.Generator) -> list[TraceJob]:
        """Set the cores."""
        asking = _asking(None if self.how == "auto" else self._per_gpu(setting))
        return [job if job.kind is JobKind.CPU else replace(job, roles=asking(job.roles)) for job in jobs]

    def _per_gpu(self, setting: Setting) -> int:
        if self.how != "proportional":
            return int(self.how)
        shares = [shape.cores // shape.gpus for shape in setting.cluster.shapes if shape.gpus]
        if not shares or min(shares) < 1:
            why = f"the cluster {setting.cluster.name} has no core for each GPU"
            raise BadOption([Violation("overlay cores", why)], {self.key: self.form})
        return min(shares)


def _asking(per_gpu: int | None) -> Callable[[tuple[Role, ...]], tuple[Role, ...]]:
    """Return a function that sets cores of roles; equal roles give one object, because there are many jobs."""

    @cache
    def asking(roles: tuple[Role, ...]) -> tuple[Role, ...]:
        return tuple(replace(role, request=replace(role.request, cores=cores(role))) for role in roles)

    def cores(role: Role) -> int | None:
        if not role.request.gpu_milli:
            return role.request.cores
        return None if per_gpu is None else -(-role.request.gpu_milli * per_gpu // WHOLE_GPU_MILLI)

    return asking
