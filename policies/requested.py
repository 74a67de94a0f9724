"""Cores as requested."""

from __future__ import annotations

from collections.abc import Sequence

from cotenant.core.model.estimate import Estimate
from cotenant.core.model.job import JobSpec
from cotenant.core.model.node import NodeShape
from cotenant.core.policy.protocols import Sizing


class Requested:
    """Give each replica the cores that its user requested, or 1 without a request.

    No paper: a baseline, what most schedulers do, and how GPU jobs come to starve on one core.

    >>> from cotenant.core.model.estimate import UNKNOWN
    >>> from cotenant.core.model.job import Request, Role
    >>> spec = JobSpec(roles=(Role("worker", request=Request(gpu_milli=1000)), Role("ps", request=Request(cores=3))))
    >>> Requested().size(spec, UNKNOWN, []).cores
    (1, 3)
    """

    name = "requested"
    api_version = 1

    def size(self, spec: JobSpec, estimate: Estimate, shapes: Sequence[NodeShape]) -> Sizing:
        """Return the requested cores; 0 only where 0 was requested."""
        cores = tuple(1 if role.request.cores is None else role.request.cores for role in spec.roles)
        auto = any(role.request.cores is None for role in spec.roles)
        return Sizing(cores, "1 core per replica without a request" if auto else "as requested")
