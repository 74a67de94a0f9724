"""The order of Slurm's pending jobs by a queue policy of ours, as SiteFactors. Pure.

Slurm adds a job's SiteFactor to its priority. A factor from 1 (last) to `weight` (first) makes our order one of Slurm's
weighted factors: with a weight above all others it decides, with a smaller one age, fair share and QOS count as well.
Jobs that no order covers keep 0.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise

from cotenant.core.model.estimate import Estimate
from cotenant.core.model.job_table import Capacity, JobRow, JobTable
from cotenant.core.policy.protocols import QueuePolicy
from cotenant.core.scheduling import ordering
from cotenant.services.slurm.placement_view import WHOLE_GPU, cores_of
from cotenant.services.slurm.records import Picture, SlurmJob
from cotenant.services.slurm.wait_reasons import RESOURCES

ORDERED_MAX = 10_000  # pending jobs and arrays; those that Slurm would consider later are left out
ORDERED_REASONS = RESOURCES | {"JobArrayTaskLimit"}


def update_id(job: SlurmJob) -> str:
    """Return the id by which Slurm changes a pending job: an array is changed as a whole."""
    return str(job.array) if job.task is not None else job.id


def orderable(job: SlurmJob) -> bool:
    """Return whether a job's order is ours to choose: it waits for its places only, and is no part of another job."""
    return job.waits and not job.held and not job.het and job.reason in ORDERED_REASONS and not job.reservation


def planned_order(picture: Picture, estimates: Mapping[str, Estimate], policy: QueuePolicy, now: float) -> list[str]:
    """Return the pending jobs and arrays that may be ordered, in the order of a queue policy: first those to start."""
    waiting: dict[str, SlurmJob] = {}
    for job in picture.jobs.values():
        if orderable(job):
            waiting.setdefault(update_id(job), job)
    table, tenants = JobTable(len(waiting) + 1), dict[str, int]()
    first = sorted(waiting.items(), key=lambda one: (one[1].submitted_seconds, one[1].number))[:ORDERED_MAX]
    running = [(f"running {job.id}", job) for job in picture.jobs.values() if job.runs]
    nodes = [node for node in picture.nodes.values() if node.open]
    cores, gpus = sum(node.cores for node in nodes), sum(node.gpus for node in nodes)
    for sequence, (name, job) in enumerate((*first, *running)):
        tenant = tenants.setdefault(job.account or job.user, len(tenants))
        table.add(_row(name, job, picture, sequence, tenant, gpus / cores if cores else 0.0))
        if job.runs:
            table.start(name, job.started_seconds or now)
        estimate = estimates.get(job.id)
        if estimate and estimate.predictable and estimate.remaining_seconds is not None:
            total = job.ran_seconds(now) + estimate.remaining_seconds
            table.update(name, predicted_seconds=total, confidence=estimate.confidence)
    memory = sum(node.memory_bytes for node in nodes)
    table.capacity = Capacity(gpus * WHOLE_GPU, cores, memory)
    jobs = table.jobs(now)
    ranked = ordering.rank(jobs, policy.order(jobs, now), running_first=policy.running_first, among=~jobs.running)
    return [table.ids[row] for row in ranked.tolist()]


def _row(name: str, job: SlurmJob, picture: Picture, sequence: int, tenant: int, gpus_per_core: float) -> JobRow:
    """Return a job as policies see it; its GPUs are its dominant share of the cluster, in GPUs.

    A job with one GPU and half of a node's cores keeps half of the node from others: charged by its GPU alone, it would
    come before jobs without GPUs that take fewer cores.
    """
    by_cores = cores_of(job.cpus, picture) * gpus_per_core
    return JobRow(
        name,
        arrival_seconds=job.submitted_seconds,
        sequence=sequence,
        gpu_milli=round(max(job.gpus_total, by_cores) * WHOLE_GPU),
        cores=cores_of(job.cpus, picture),
        memory_bytes=job.memory_bytes if picture.memory_counts else 0,
        replicas=job.nodes_min,
        tenant=tenant,
        preemptible=False,
    )


def site_factors(order: Sequence[str], current: Mapping[str, int], weight: int) -> dict[str, int]:
    """Return the SiteFactors to change, in the order of the jobs, so that factors fall along it from `weight` to 1.

    The longest part of the order that is right already keeps its factors; the others get factors between them. If there
    is no room between them, all are spaced evenly.

    >>> site_factors(["a", "b", "c"], {"a": 0, "b": 600, "c": 400}, 1000)
    {'a': 800}
    >>> site_factors(["a", "b", "c"], {}, 1000)
    {'a': 750, 'b': 500, 'c': 250}
    """
    kept = _longest_falling([current.get(job, 0) for job in order], weight)
    wanted: dict[str, int] = {}
    borders = [-1, *kept, len(order)]
    for before, after in pairwise(borders):
        missing = after - before - 1
        high = current[order[before]] if before >= 0 else weight
        low = current[order[after]] if after < len(order) else 0
        if missing and high - low <= missing:
            return _even(order, current, weight)
        for place in range(1, missing + 1):
            wanted[order[before + place]] = high - (high - low) * place // (missing + 1)
    return wanted


def _even(order: Sequence[str], current: Mapping[str, int], weight: int) -> dict[str, int]:
    """Return the changes for evenly spaced factors."""
    factors = {job: max(1, weight - weight * place // (len(order) + 1)) for place, job in enumerate(order, 1)}
    return {job: factor for job, factor in factors.items() if current.get(job, 0) != factor}


def _longest_falling(values: Sequence[int], highest: int) -> list[int]:
    """Return the places of the longest strictly falling subsequence of values from 1 to `highest`.

    >>> _longest_falling([5, 9, 4, 0, 3, 8], 10)
    [1, 2, 4]
    """
    ends, places, before = list[int](), list[int](), dict[int, int]()
    for place, value in enumerate(values):
        if not 1 <= value <= highest:
            continue
        length = bisect_right(ends, -value)
        if length and ends[length - 1] == -value:
            continue
        if length:
            before[place] = places[length - 1]
        ends[length : length + 1], places[length : length + 1] = [-value], [place]
    found, at = list[int](), places[-1] if places else -1
    while at >= 0:
        found.append(at)
        at = before.get(at, -1)
    return found[::-1]
