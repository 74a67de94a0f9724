"""Shares of a node's cores, the starting point of several CPU allocators."""

from __future__ import annotations

from collections.abc import Sequence

from cotenant.core.model.job import WHOLE_GPU_MILLI, JobSpec, Role
from cotenant.core.model.node import NodeShape
from cotenant.core.placement.unschedulable import room_on


def share_of(role: Role, shapes: Sequence[NodeShape]) -> int:
    """Return a replica's GPUs' share of a node's cores, or the number its user asked for; 1 without GPUs.

    If several shapes could hold the replica, the smallest share counts, so that it fits on any of them.

    >>> from cotenant.core.model.job import Request
    >>> share_of(Role(request=Request(gpu_milli=2000)), [NodeShape(gpus=8, cores=24)])
    6
    """
    request = role.request
    if request.cores is not None:
        return request.cores
    able = [shape for shape in shapes if shape.gpus and room_on(shape, request)]
    if not request.gpu_milli or not able:
        return 1
    return max(1, min(shape.cores * request.gpu_milli // (shape.gpus * WHOLE_GPU_MILLI) for shape in able))


def shares_of(spec: JobSpec, shapes: Sequence[NodeShape]) -> tuple[int, ...]:
    """Return each role's share, reduced if the cluster has fewer cores."""
    return trimmed(spec, [share_of(role, shapes) for role in spec.roles], shapes)


def trimmed(spec: JobSpec, cores: Sequence[int], shapes: Sequence[NodeShape]) -> tuple[int, ...]:
    """Return cores with those beyond the first taken from `auto` replicas, evenly, until the cluster has enough."""
    total = sum(shape.cores * shape.count for shape in shapes)
    least = [1 if role.request.cores is None else each for role, each in zip(spec.roles, cores, strict=True)]
    wanted, needed = _over_replicas(spec, cores), _over_replicas(spec, least)
    if wanted <= total or wanted == needed:
        return tuple(cores)
    spare = max(0, total - needed)
    return tuple(low + (each - low) * spare // (wanted - needed) for each, low in zip(cores, least, strict=True))


def most_on_a_node(role: Role, shapes: Sequence[NodeShape]) -> int:
    """Return the cores that a replica could have on any shape that could hold it; 1 if none could."""
    return max(1, min((shape.cores for shape in shapes if room_on(shape, role.request)), default=1))


def _over_replicas(spec: JobSpec, cores: Sequence[int]) -> int:
    return sum(role.replicas * each for role, each in zip(spec.roles, cores, strict=True))
