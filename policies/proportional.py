"""Cores in proportion to GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from cotenant.core.estimates import Estimate
from cotenant.core.jobs import WHOLE_GPU_MILLI, JobSpec, Role
from cotenant.core.nodes import NodeShape
from cotenant.core.obstacles import room_on
from cotenant.core.policy import Sizing


class Proportional:
    """Give a replica its GPUs' share of the node's cores: node cores ÷ node GPUs for each GPU.

    The third baseline of Xiao et al., SoCC 2018 [P]. Numbers that users gave are honoured; `auto` without GPUs gets 1.
    Where several shapes could hold a replica the least generous share counts, so that it fits on any of them [R].
    Where a job would so ask for more cores than the whole cluster has, its GPU replicas give way [R].

    >>> from cotenant.core.estimates import UNKNOWN
    >>> from cotenant.core.jobs import Request
    >>> spec = JobSpec(roles=(Role("worker", request=Request(gpu_milli=2000)), Role("ps")))
    >>> Proportional().size(spec, UNKNOWN, [NodeShape(gpus=8, cores=24)]).cores
    (6, 1)
    """

    name = "proportional"
    api_version = 1

    def size(self, spec: JobSpec, estimate: Estimate, shapes: Sequence[NodeShape]) -> Sizing:
        """Give `auto` replicas their GPUs' share."""
        cores = [_share(role, shapes) for role in spec.roles]
        auto = [number for number, role in enumerate(spec.roles) if role.request.cores is None]
        if not auto:
            return Sizing(tuple(cores), "as requested")
        trimmed = _trim(spec, cores, shapes)
        return Sizing(
            tuple(trimmed),
            "the replicas' GPUs' share of a node's cores"
            + (", less because the cluster has no more" if trimmed != cores else ""),
        )


def _share(role: Role, shapes: Sequence[NodeShape]) -> int:
    request = role.request
    if request.cores is not None:
        return request.cores
    able = [shape for shape in shapes if shape.gpus and room_on(shape, request)]
    if not request.gpu_milli or not able:
        return 1
    return max(1, min(shape.cores * request.gpu_milli // (shape.gpus * WHOLE_GPU_MILLI) for shape in able))


def _trim(spec: JobSpec, cores: list[int], shapes: Sequence[NodeShape]) -> list[int]:
    """Take cores beyond the first back from `auto` GPU replicas, evenly, until the cluster would have enough."""
    total = sum(shape.cores * shape.count for shape in shapes)
    gives = [role.request.cores is None and role.request.gpu_milli > 0 for role in spec.roles]
    least = [1 if give else each for each, give in zip(cores, gives, strict=True)]
    wanted, needed = _over_replicas(spec, cores), _over_replicas(spec, least)
    if wanted <= total or wanted == needed:
        return cores
    spare = max(0, total - needed)
    return [low + (each - low) * spare // (wanted - needed) for each, low in zip(cores, least, strict=True)]


def _over_replicas(spec: JobSpec, cores: list[int]) -> int:
    return sum(role.replicas * each for role, each in zip(spec.roles, cores, strict=True))
