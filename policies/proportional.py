"""Cores in proportion to GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from cotenant.core.model.estimate import Estimate
from cotenant.core.model.job import JobSpec
from cotenant.core.model.node import NodeShape
from cotenant.core.policy.protocols import Sizing
from cotenant.core.sizing.core_shares import share_of, shares_of


class Proportional:
    """Give a replica its GPUs' share of the node's cores: node cores ÷ node GPUs for each GPU.

    The third baseline of Xiao et al., SoCC 2018 [P]. Core counts requested by users are kept; `auto` without GPUs gets
    1. If several node shapes could hold a replica, the smallest share is used, so that it fits on any of them [R]. If a
    job would ask for more cores than the whole cluster has, its GPU replicas get fewer [R].

    >>> from cotenant.core.model.estimate import UNKNOWN
    >>> from cotenant.core.model.job import Request, Role
    >>> spec = JobSpec(roles=(Role("worker", request=Request(gpu_milli=2000)), Role("ps")))
    >>> Proportional().size(spec, UNKNOWN, [NodeShape(gpus=8, cores=24)]).cores
    (6, 1)
    """

    name = "proportional"
    api_version = 1

    def size(self, spec: JobSpec, estimate: Estimate, shapes: Sequence[NodeShape]) -> Sizing:
        """Give `auto` replicas their GPUs' share."""
        if all(role.request.cores is not None for role in spec.roles):
            return Sizing(shares_of(spec, shapes), "as requested")
        wanted, given = tuple(share_of(role, shapes) for role in spec.roles), shares_of(spec, shapes)
        less = ", less because the cluster has no more" if given != wanted else ""
        return Sizing(given, f"the replicas' GPUs' share of a node's cores{less}")
