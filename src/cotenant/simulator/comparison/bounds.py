"""A lower bound for the average JCT of any schedule, and an order that comes close to it.

Let job j be submitted at r_j, run for p_j seconds on g_j GPUs, and G be the GPUs of the cluster. Its work is W_j = g_j
p_j. Take any schedule, preemptive or not. At each moment it uses at most G GPUs, so the same moments are a feasible
preemptive schedule of work W_j on one fluid machine of speed G, with the same finishes C_j: a bound for all schedules
of that machine holds for the cluster. Three bounds hold:

1. C_j - r_j ≥ p_j, hence the mean of p_j.
2. Among schedules of one machine, shortest remaining work first has the least sum of C_j (Schrage 1968 [P]).
3. Let M_j be the mean time at which j's work is done. A job that runs for p_j seconds at a constant rate before C_j has
   M_j ≤ C_j - p_j / 2. And the sum of M_j is least if the machine always does the available work of the job with the
   least W_j, whether partly done or not: one unit of work of j at time t adds t / W_j, so it is best to do those with
   the largest 1 / W_j first (Goemans et al. 2002 [P]). Hence the mean of M_j - r_j + p_j / 2.

The largest of the three is a lower bound for the mean of C_j - r_j. Work repeated after a preemption, rates below
reference speed, fragmentation and missing knowledge only make a schedule worse. Jobs without GPUs share nothing here
and count with p_j. On GPUs faster than those of the trace p_j may be smaller, and the bound does not apply.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from cotenant.core.model.job import NO_SPREAD, Request, Role
from cotenant.core.model.node import NodeShape
from cotenant.simulator.clusters.cluster import Cluster
from cotenant.simulator.traces import Trace, TraceJob


@dataclass(frozen=True, slots=True)
class Work:
    """A job on the fluid machine."""

    submitted_seconds: float
    seconds: float
    gpus: float


def avg_jct_seconds_min(jobs: Iterable[Work], gpus: int) -> float | None:
    """Return a lower bound for the average JCT of these jobs on this many GPUs; None if there are no jobs.

    >>> avg_jct_seconds_min([Work(0, 10, 1), Work(0, 10, 1)], gpus=1)
    15.0
    """
    every = list(jobs)
    sharing = [job for job in every if job.gpus > 0]
    alone = math.fsum(job.seconds for job in every if not job.gpus > 0)
    if not every or (sharing and not gpus):
        return None
    runs = math.fsum(job.seconds for job in sharing)
    released = math.fsum(job.submitted_seconds for job in sharing)
    bounds = (
        runs,
        _fluid(sharing, gpus, by_rest=True).finishes - released,
        _fluid(sharing, gpus, by_rest=False).means - released + runs / 2,
    )
    return (max(bounds) + alone) / len(every)


@dataclass(frozen=True, slots=True)
class _Sums:
    """Sums over the jobs of a fluid schedule: of their finishes, and of the mean times of their work."""

    finishes: float
    means: float


def _fluid(jobs: list[Work], gpus: int, *, by_rest: bool) -> _Sums:
    """Run jobs on one machine in order of their remaining work, or of their total work."""
    order = sorted(range(len(jobs)), key=lambda number: (jobs[number].submitted_seconds, number))
    rest = [job.gpus * job.seconds / gpus for job in jobs]  # in seconds of the machine
    total = rest.copy()
    ready: list[tuple[float, int]] = []
    finishes: list[float] = []
    means: list[float] = []
    now, coming = 0.0, 0
    while coming < len(order) or ready:
        if not ready:
            now = max(now, jobs[order[coming]].submitted_seconds)
        while coming < len(order) and jobs[order[coming]].submitted_seconds <= now:
            heapq.heappush(ready, (rest[order[coming]], order[coming]))
            coming += 1
        key, number = heapq.heappop(ready)
        until = jobs[order[coming]].submitted_seconds if coming < len(order) else math.inf
        ran = min(rest[number], until - now)
        means.append((now + ran / 2) * ran / total[number])
        now += ran
        rest[number] = 0.0 if ran == rest[number] else rest[number] - ran
        if rest[number] > 0:
            heapq.heappush(ready, (rest[number] if by_rest else key, number))
        else:
            finishes.append(now)
    return _Sums(math.fsum(finishes), math.fsum(means))


def pooled(cluster: Cluster) -> Cluster:
    """Return a cluster with all GPUs in one node, in which nothing else is short."""
    shareable = any(shape.shareable for shape in cluster.shapes)
    shape = NodeShape(gpus=cluster.gpus, cores=0, memory_bytes=0, gpu_type="", shareable=shareable)
    return Cluster(f"1x{cluster.gpus}", (shape,), ("",))


def gpus_only(trace: Trace, left_out: frozenset[str]) -> Trace:
    """Return jobs that request only GPUs, of any type; without the jobs that some arm can never run."""
    return replace(trace, jobs=tuple(_plain(job) for job in trace.jobs if job.id not in left_out))


def _plain(job: TraceJob) -> TraceJob:
    roles = tuple(
        Role(role.name, role.replicas, Request(gpu_milli=role.request.gpu_milli, cores=0)) for role in job.roles
    )
    return replace(job, roles=roles, locality=None, spread=NO_SPREAD, preemptible=True, priority=0)
