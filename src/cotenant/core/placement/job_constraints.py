"""The constraints that a job sets on the places of its replicas."""

from __future__ import annotations

from collections.abc import Callable

from cotenant.core.model.job import JobSpec
from cotenant.core.placement.anti_affinity import SpreadOut
from cotenant.core.placement.capable_nodes import HasCapabilities
from cotenant.core.placement.constraint import Constraint
from cotenant.core.placement.container_nodes import RunsContainers
from cotenant.core.placement.node_availability import AvailableLongEnough

JOB_CONSTRAINTS: tuple[Callable[[JobSpec], Constraint | None], ...] = (
    SpreadOut.of,
    RunsContainers.of,
    HasCapabilities.of,
    AvailableLongEnough.of,
)


def constraints_by(spec: JobSpec) -> tuple[Constraint, ...]:
    """Return the constraints that a job sets."""
    return tuple([found for of in JOB_CONSTRAINTS if (found := of(spec))])
