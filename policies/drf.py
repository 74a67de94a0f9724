"""Dominant resource fairness."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from cotenant.core.model.job_table import Flags, Floats, Ints, Jobs
from cotenant.core.policy.protocols import Order
from cotenant.core.scheduling.attained_service import demands_of, dominant_share
from cotenant.core.scheduling.ordering import SMALL_MAX

WEIGHT_MIN = 1e-9
ROUNDING = 1e-9  # a share this close to the fair share counts as fair


class Drf:
    """Serve the tenant with the smallest dominant share, the largest of its shares of any resource.

    Dominant resource fairness (Ghodsi et al., NSDI 2011, algorithm 1 [P]), over GPUs, cores and memory, with weights: a
    tenant's dominant share is the largest of its shares of the capacity, divided by its weight. Progressive filling
    repeatedly serves the tenant with the smallest dominant share. Here it is an order: a job's score is the share that
    its tenant has before the job starts, walking the tenant's jobs, running jobs first and then first in, first out;
    merging the tenants by score is progressive filling. Priority comes before fairness, as everywhere.

    Running jobs stay unless the policy is `preemptive`; then the last jobs of tenants with large shares make room for
    those with less.

    >>> from cotenant.core.model.job_table import Capacity, JobRow, JobTable
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
        """What a job that finds no room does, and whether running jobs make room for it.

        mode: `backfill` lets later jobs pass; `strict` holds all of them back, as in the paper.
        preemptive: running jobs of tenants with large shares make room for waiting jobs of tenants with smaller shares.
        """

        mode: Literal["strict", "backfill"] = "backfill"
        preemptive: bool = False

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()
        self.strict = self.options.mode == "strict"
        self.preemptive = self.options.preemptive

    def order(self, jobs: Jobs, now: float) -> Order:
        """Score jobs by their tenant's share before them, and mark jobs of tenants that have their fair share."""
        walk = _walk(jobs)
        tenant = jobs.tenant[walk]
        begins = np.flatnonzero(np.append(True, tenant[1:] != tenant[:-1])[: len(walk)])
        demands, capacity = demands_of(jobs)
        asked = demands[:, walk]
        before = np.cumsum(asked, axis=1) - asked
        before -= np.repeat(
            before[:, begins], np.diff(np.append(begins, len(walk))), axis=1
        )  # minus the tenants before
        score = np.empty(len(jobs))
        score[walk] = dominant_share(before, capacity) / np.maximum(jobs.tenant_weight[walk], WEIGHT_MIN)
        return Order(np.zeros(len(jobs), dtype=np.int64), score, over_share=_over_share(demands, capacity, jobs))


def _walk(jobs: Jobs) -> Ints:
    """Return rows sorted by tenant, running jobs first, then by priority, arrival and sequence."""
    rows = jobs.by_arrival
    if rows is None:
        rows = np.lexsort((jobs.sequence, jobs.arrival_seconds))
    if len(rows) and bool((jobs.priority != jobs.priority[0]).any()):
        rows = rows[np.argsort(-jobs.priority[rows], kind="stable")]
    place = 2 * jobs.tenant[rows] + ~jobs.running[rows]
    few = not len(rows) or int(place.max()) <= SMALL_MAX
    return rows[np.argsort(place.astype(np.int16) if few else place, kind="stable")]


def _over_share(demands: np.ndarray, capacity: Floats, jobs: Jobs) -> Flags:
    """Mark the jobs of tenants whose running jobs hold at least weight / sum of the weights of all tenants."""
    weight = np.zeros(int(jobs.tenant.max(initial=-1)) + 1)
    weight[jobs.tenant] = np.maximum(jobs.tenant_weight, WEIGHT_MIN)
    held = np.array([np.bincount(jobs.tenant, amounts * jobs.running, len(weight)) for amounts in demands])
    held = held.reshape(len(demands), len(weight))
    fair = weight / max(float(np.cumsum(weight)[-1]) if len(weight) else 0.0, WEIGHT_MIN)
    over: Flags = (dominant_share(held, capacity) >= fair * (1 - ROUNDING))[jobs.tenant]
    return over
