"""Cores by role."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cotenant.core.model.estimate import Estimate
from cotenant.core.model.job import WHOLE_GPU_MILLI, JobSpec, Role
from cotenant.core.model.node import NodeShape
from cotenant.core.model.validation import Violation
from cotenant.core.policy.protocols import Sizing
from cotenant.core.sizing.core_shares import most_on_a_node, trimmed


class RoleBased:
    """Give a parameter server 3 cores and a worker 4 for each of its GPUs, whatever they compute.

    The second baseline of Xiao et al., SoCC 2018 [P]: 3 cores per PS, 4 cores per worker with 1 GPU. A replica without
    GPUs counts as a parameter server if other replicas have GPUs; in a job without any, it gets 1 core [R]. Core counts
    requested by users are kept. If a node, or the cluster, has fewer cores, its cores are the limit [R].

    >>> from cotenant.core.model.estimate import UNKNOWN
    >>> from cotenant.core.model.job import Request
    >>> spec = JobSpec(roles=(Role("worker", request=Request(gpu_milli=1000)), Role("ps")))
    >>> RoleBased().size(spec, UNKNOWN, [NodeShape(gpus=8, cores=24)]).cores
    (4, 3)
    """

    name = "role-based"
    api_version = 1

    @dataclass(frozen=True, slots=True)
    class Options:
        """Cores by role.

        server_cores: cores of each parameter server.
        worker_cores: cores of each worker for each of its GPUs; a share of a GPU gets that share, rounded up.
        """

        server_cores: int = 3
        worker_cores: int = 4

        def check(self) -> Iterator[Violation]:
            """Yield a violation for each invalid option."""
            for name in ("server_cores", "worker_cores"):
                if getattr(self, name) < 1:
                    yield Violation(name, f"must be 1 or more, not {getattr(self, name)}")

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()

    def size(self, spec: JobSpec, estimate: Estimate, shapes: Sequence[NodeShape]) -> Sizing:
        """Give each `auto` replica the cores of its role."""
        if all(role.request.cores is not None for role in spec.roles):
            return Sizing(tuple(role.request.cores or 0 for role in spec.roles), "as requested")
        served = any(role.request.gpu_milli for role in spec.roles)
        wanted = tuple(self._cores(role, served) for role in spec.roles)
        within = tuple(
            cores if role.request.cores is not None else min(cores, most_on_a_node(role, shapes))
            for role, cores in zip(spec.roles, wanted, strict=True)
        )
        given = trimmed(spec, within, shapes)
        reason = f"{self.options.worker_cores} cores per GPU of a worker, {self.options.server_cores} per server"
        return Sizing(given, reason + (", less because there are no more" if given != wanted else ""))

    def _cores(self, role: Role, served: bool) -> int:
        if role.request.cores is not None:
            return role.request.cores
        if role.request.gpu_milli:
            return -(-role.request.gpu_milli * self.options.worker_cores // WHOLE_GPU_MILLI)
        return self.options.server_cores if served else 1
