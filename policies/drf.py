"""Dominant resource fairness."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from cotenant.core.policy import Order
from cotenant.core.table import Flags, Floats, Jobs

WEIGHT_MIN = 1e-9
ROUNDING = 1e-9  # a share this near to the fair one is fair


class Drf:
    """Give the next room to the tenant that has least, each measured by the resource of which it has the largest share.

    Dominant resource fairness (Ghodsi et al., NSDI 2011, algorithm 1 [P]), over GPUs, cores and memory, with weights: a
    tenant's dominant share is the largest of its shares of the capacity, divided by its weight. Progressive filling
    gives again and again to the tenant with the smallest. Here it is an order: a job's score is the share that its
    tenant has before that job is given, walking the tenant's jobs, running ones first and then first in, first out; to
    merge the tenants by score is to fill progressively. Priority comes before fairness, as everywhere.

    Running jobs stay unless it is `preemptive`; then the last jobs of tenants with much make room for those with less.

    >>> from cotenant.core.table import Capacity, JobRow, JobTable
    >>> table = JobTable()
    >>> table.capacity = Capacity(gpu_milli=10_000, cores=100)
    >>> for number, (tenant, gpus, cores) in enumerate([(0, 3, 3), (0, 3, 3), (1, 0, 40), (1, 0, 40)]):
    ...     table.add(JobRow(f"{number}", 0, number, gpu_milli=1000 * gpus, cores=cores, tenant=tenant))
    >>> Drf().order(table.jobs(now=0), now=0).score.tolist()
    [0.0, 0.3, 0.0, 0.4]
    """

    name = "drf"
    api_version = 1
    running_first = False

    @dataclass(frozen=True, slots=True)
    class Options:
        """What a job does that finds no room, and whether others make room for it.

        mode: `backfill` lets later jobs pass; `strict` holds back all of them, as the paper has it.
        preemptive: running jobs of tenants that have much make room for waiting ones of tenants that have less.
        """

        mode: Literal["strict", "backfill"] = "backfill"
        preemptive: bool = False

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()
        self.strict = self.options.mode == "strict"
        self.preemptive = self.options.preemptive

    def order(self, jobs: Jobs, now: float) -> Order:
        """Score jobs by what their tenant has before them, and mark those of tenants that have their fair share."""
        walk = np.lexsort((jobs.sequence, jobs.arrival_seconds, -jobs.priority, ~jobs.running, jobs.tenant))
        tenant = jobs.tenant[walk]
        demands = np.stack([jobs.gpu_milli, jobs.cores, jobs.memory_bytes])
        summed = np.cumsum(demands[:, walk], axis=1) - demands[:, walk]
        before = summed - summed[:, np.searchsorted(tenant, tenant)]  # less what the tenants ahead have
        score = np.empty(len(jobs))
        score[walk] = _dominant_share(before, jobs) / np.maximum(jobs.tenant_weight[walk], WEIGHT_MIN)
        return Order(np.zeros(len(jobs), dtype=np.int64), score, over_share=_over_share(demands, jobs))


def _dominant_share(amounts: np.ndarray, jobs: Jobs) -> Floats:
    """Say for each column of amounts which share of the capacity it is, of the resource of which it is the most."""
    capacity = np.array([jobs.capacity.gpu_milli, jobs.capacity.cores, jobs.capacity.memory_bytes], dtype=np.float64)
    capacity[capacity <= 0] = np.inf  # of what there is not, nobody has a share
    share: Floats = (amounts / capacity[:, None]).max(axis=0)
    return share


def _over_share(demands: np.ndarray, jobs: Jobs) -> Flags:
    """Mark the jobs of tenants whose running jobs have at least weight / sum of the weights of all tenants here."""
    held = np.array([np.bincount(jobs.tenant, amounts * jobs.running) for amounts in demands])
    weight = np.zeros(held.shape[1])
    weight[jobs.tenant] = np.maximum(jobs.tenant_weight, WEIGHT_MIN)
    fair = weight / max(float(np.cumsum(weight)[-1]) if len(weight) else 0.0, WEIGHT_MIN)
    over: Flags = (_dominant_share(held, jobs) >= fair * (1 - ROUNDING))[jobs.tenant]
    return over
