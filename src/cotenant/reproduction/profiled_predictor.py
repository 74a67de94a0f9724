"""Predictions as in GENIE: each job class is profiled on a few placements, and a step time fitted to them.

A profile is a few windows, each with noise, of one job class (a model on a number of GPUs) on the fewest nodes that
hold it and on twice as many, about fifty steps each (Chen et al., TPDS 2020 [D]). The number of steps of a job is given
by its user; nothing else is known of it.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from cotenant import simulator
from cotenant.core.model.estimate import Estimate, Observation, Query
from cotenant.core.placement.candidate_allocations import standard_candidates
from cotenant.core.placement.unschedulable import shapes_of
from cotenant.core.prediction.chain import with_allocations
from cotenant.policies.scaling import Scaling
from cotenant.simulator.physics.settings import Settings
from cotenant.simulator.physics.speeds import Speeds

WINDOWS = 5  # of ten steps each: fifty in all
NOISE = 0.05  # standard deviation of a window's rate, relative to it [R]
PLACEMENTS = 2  # the fewest nodes, and twice as many


class Profiled:
    """Queries `scaling`, which learned the profile of each job class; the number of steps comes from the job's name."""

    name = "profiled"
    api_version = 1

    def __init__(self, trace: simulator.Trace, cluster: simulator.Cluster, seed: int, noise: float = NOISE) -> None:
        """Profile all job classes of a trace; a job has one step for each second of undisturbed work."""
        self._scaling = Scaling()
        self._steps: Mapping[str, int] = {job.name: max(1, round(job.work_seconds)) for job in trace.jobs}
        speeds, shapes = Speeds(cluster, Settings(speed=("locality",))), shapes_of(cluster.ledger())
        kinds = {(job.model, job.roles): job for job in trace.jobs}
        for job in kinds.values():
            spec = job.spec()
            kind = _kind(job.model, spec.gpu_milli)
            rng = np.random.default_rng([seed, zlib.crc32(kind.encode())])
            for placement in standard_candidates(spec, shapes)[:PLACEMENTS]:
                for error in rng.normal(0.0, noise, WINDOWS):
                    rate = speeds.rate_under(job, placement) * float(np.exp(error))
                    self._scaling.observe(
                        Observation("", kind, "", spec.gpu_milli, spec.replicas, placement, rate_per_second=rate)
                    )

    def observe(self, observation: Observation) -> None:
        """Ignore it: the profile was taken in advance."""

    def estimate(self, query: Query) -> Estimate:
        """Return a job's rate in each placement by the profile of its class, and its remaining time."""
        kind = _kind(query.model, query.gpu_milli)
        asked = replace(query, user="", model=kind, name="", steps_total=self._steps.get(query.name, 0))
        return with_allocations(self._scaling.estimate(asked), asked)

    def dump(self) -> Mapping[str, bytes]:
        """Return the profiles as records."""
        return self._scaling.dump()

    def restore(self, records: Mapping[str, bytes]) -> Sequence[str]:
        """Restore profiles."""
        return self._scaling.restore(records)


def _kind(model: str, gpu_milli: int) -> str:
    return f"{model} on {gpu_milli} mGPU"
