"""The jobs of a simulation: those of the trace, with overlays, adapted to the cluster."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from cotenant.core.model.job import WHOLE_GPU_MILLI, Role
from cotenant.core.model.resources import AMOUNT_KINDS
from cotenant.simulator.clusters.cluster import Cluster
from cotenant.simulator.overlays import Overlays
from cotenant.simulator.traces import Trace, TraceJob


def workload(trace: Trace, cluster: Cluster, overlays: Overlays, *, auto_cores: bool) -> Trace:
    """Return the trace as it is simulated.

    An amount counts only if the cluster declares it: `6x8` declares no memory, and no job with a memory request could
    ever run on it. `auto_cores` lets the allocator decide if a trace has no cores.

    Raises:
        BadOption: an overlay does not match the trace or the cluster.
    """
    laid = overlays.apply(trace, cluster)
    if auto_cores:
        laid = replace(laid, jobs=tuple(replace(job, roles=_auto(job.roles)) for job in laid.jobs))
    return _noting_gpu_shares(_ignoring_undeclared(laid, cluster), cluster)


def _ignoring_undeclared(laid: Trace, cluster: Cluster) -> Trace:
    """Return the trace without requests for amounts of which the cluster declares none, with a note for each."""
    declared = cluster.resources
    for kind in AMOUNT_KINDS:
        if getattr(declared, kind.name):
            continue
        jobs = tuple(_without(job, kind.name) for job in laid.jobs)
        asked = sum(before is not after for before, after in zip(laid.jobs, jobs, strict=True))
        note = f"{asked} jobs request {kind.noun}; the cluster declares none, so the requests are ignored"
        laid = replace(laid, jobs=jobs, notes=(*laid.notes, note)) if asked else laid
    return laid


def _without(job: TraceJob, name: str) -> TraceJob:
    """Return a job without requests for an amount; the same job if there were none."""
    roles = _roles_without(job.roles, name)
    return job if roles is None else replace(job, roles=roles)


def _noting_gpu_shares(laid: Trace, cluster: Cluster) -> Trace:
    """Add a note if GPU shares are requested and no node offers them: each such job is unschedulable."""
    if any(shape.shareable for shape in cluster.shapes):
        return laid
    asked = sum(any(role.request.gpu_milli % WHOLE_GPU_MILLI for role in job.roles) for job in laid.jobs)
    note = (
        f"{asked} jobs request a share of a GPU, which no node of the cluster offers (`shareable` in a cluster file); "
        "--overlay fractions=whole turns shares into whole GPUs"
    )
    return replace(laid, notes=(*laid.notes, note)) if asked else laid


@lru_cache(maxsize=4096)
def _auto(roles: tuple[Role, ...]) -> tuple[Role, ...]:
    """Return roles whose missing core requests are left to the allocator."""
    return tuple(replace(role, request=replace(role.request, cores=role.request.cores or None)) for role in roles)


@lru_cache(maxsize=4096)
def _roles_without(roles: tuple[Role, ...], name: str) -> tuple[Role, ...] | None:
    """Return roles without requests for an amount; None if there were none."""
    if not any(getattr(role.request, name) for role in roles):
        return None
    nothing: dict[str, Any] = {name: 0}
    return tuple(replace(role, request=replace(role.request, **nothing)) for role in roles)
