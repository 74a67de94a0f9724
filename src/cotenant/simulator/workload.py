"""The jobs of a simulation: those of the trace, what overlays add, and what the cluster leaves untold."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from cotenant.core.model.job import WHOLE_GPU_MILLI, Role
from cotenant.simulator.clusters.cluster import Cluster
from cotenant.simulator.overlays import Overlays
from cotenant.simulator.traces import Trace


def workload(trace: Trace, cluster: Cluster, overlays: Overlays, *, auto_cores: bool) -> Trace:
    """Give the trace as it is simulated.

    Memory counts only where the cluster tells how much there is: of `6x8` nobody knows, and nothing with a request
    for memory could ever run on it. `auto_cores` lets the allocator decide where a trace tells no cores.

    Raises:
        BadOption: an overlay does not go with the trace or the cluster.
    """
    laid = overlays.apply(trace, cluster)
    if auto_cores:
        laid = replace(laid, jobs=tuple(replace(job, roles=_auto(job.roles)) for job in laid.jobs))
    return _sharing_told(_without_untold_memory(laid, cluster), cluster)


def _without_untold_memory(laid: Trace, cluster: Cluster) -> Trace:
    if cluster.memory_bytes:
        return laid
    jobs = tuple(replace(job, roles=roles) if (roles := _without_memory(job.roles)) else job for job in laid.jobs)
    asked = sum(before is not after for before, after in zip(laid.jobs, jobs, strict=True))
    note = f"{asked} jobs ask for memory; the cluster tells of none, so that is passed over"
    return replace(laid, jobs=jobs, notes=(*laid.notes, note)) if asked else laid


def _sharing_told(laid: Trace, cluster: Cluster) -> Trace:
    """Say where shares of GPUs are asked for and no node gives any: each such job is unschedulable, which surprises."""
    if any(shape.shareable for shape in cluster.shapes):
        return laid
    asked = sum(any(role.request.gpu_milli % WHOLE_GPU_MILLI for role in job.roles) for job in laid.jobs)
    note = (
        f"{asked} jobs ask for a part of a GPU, which no node of the cluster gives (`shareable` in a cluster file); "
        "--overlay fractions=whole makes whole ones of them"
    )
    return replace(laid, notes=(*laid.notes, note)) if asked else laid


@lru_cache(maxsize=4096)
def _auto(roles: tuple[Role, ...]) -> tuple[Role, ...]:
    """Let the allocator decide where nothing was asked for."""
    return tuple(replace(role, request=replace(role.request, cores=role.request.cores or None)) for role in roles)


@lru_cache(maxsize=4096)
def _without_memory(roles: tuple[Role, ...]) -> tuple[Role, ...] | None:
    """Ask for no memory; None where nothing did."""
    if not any(role.request.memory_bytes for role in roles):
        return None
    return tuple(replace(role, request=replace(role.request, memory_bytes=0)) for role in roles)
