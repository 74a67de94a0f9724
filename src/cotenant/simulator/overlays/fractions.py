"""`fractions=whole|openb`: whether jobs request shares of a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from cotenant.core.model.job import WHOLE_GPU_MILLI, Role
from cotenant.simulator.overlays.port import Setting, one_of, picks
from cotenant.simulator.traces import TraceJob
from cotenant.simulator.traces.trace_job import replicas

# Number of openb's 6,989 one-GPU pods by requested thousandths; values with fewer than 20 pods are left out
# (openb_pod_list_default, ATC'23 [D]).
OPENB = {
    110: 24,
    160: 74,
    220: 62,
    230: 140,
    320: 328,
    370: 47,
    460: 128,
    470: 750,
    550: 72,
    590: 75,
    650: 253,
    810: 1078,
    1000: 3911,
}


@dataclass(frozen=True, slots=True)
class Fractions:
    """Makes one-GPU jobs request a share of a GPU as openb's pods do, or makes all shares `whole`.

    `openb` draws for jobs of one replica and one GPU, independent of everything else about the job [R]; the work stays
    that of the trace. `whole` is for clusters whose GPUs are not shared: each share becomes a GPU, and nothing is
    random.
    """

    key: ClassVar[str] = "fractions"
    form: ClassVar[str] = "whole|openb"
    how: str

    @classmethod
    def parse(cls, value: str) -> Fractions:
        """Parse the value."""
        return cls(one_of(value, ("whole", "openb")))

    def apply(self, jobs: Sequence[TraceJob], setting: Setting, rng: np.random.Generator) -> list[TraceJob]:
        """Change the requests."""
        if self.how == "whole":
            return [replace(job, roles=tuple(_whole(role) for role in job.roles)) for job in jobs]
        shares = list(OPENB)
        drawn = picks(rng, len(jobs), list(OPENB.values()))
        return [
            _with_share(job, shares[which]) if _is_one_gpu(job) else job for job, which in zip(jobs, drawn, strict=True)
        ]


def _whole(role: Role) -> Role:
    if not 0 < role.request.gpu_milli < WHOLE_GPU_MILLI:
        return role
    return replace(role, request=replace(role.request, gpu_milli=WHOLE_GPU_MILLI))


def _is_one_gpu(job: TraceJob) -> bool:
    return len(job.roles) == 1 and job.roles[0].replicas == 1 and job.roles[0].request.gpu_milli == WHOLE_GPU_MILLI


def _with_share(job: TraceJob, milli: int) -> TraceJob:
    return replace(job, roles=replicas(1, replace(job.roles[0].request, gpu_milli=milli)))
