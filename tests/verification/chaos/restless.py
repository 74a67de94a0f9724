"""A CPU allocator that resizes all the time, so that faults always hit a resize in progress."""

from __future__ import annotations

from collections.abc import Sequence

from cotenant.core.model.estimate import Estimate
from cotenant.core.model.job import JobSpec
from cotenant.core.model.node import NodeShape
from cotenant.core.policy.protocols import Sizing
from cotenant.core.sizing.resize import ResizableJob


class Restless:
    """Alternates between all spare cores and a single core, every second.

    There is no paper: it gains nothing, but every resize has to survive concurrent faults.
    """

    name = "restless"
    api_version = 1
    interval_seconds, warm_up_seconds, measure_seconds = 1.0, 0.0, 0.5

    def size(self, spec: JobSpec, estimate: Estimate, shapes: Sequence[NodeShape]) -> Sizing:
        """Start with one core, unless the user requests a number."""
        return Sizing(tuple(1 if role.request.cores is None else role.request.cores for role in spec.roles), "initial")

    def resize(self, running: ResizableJob, now: float) -> Sizing | None:
        """Request another number of cores."""
        return running.wish(running.most if int(now) % 2 else 1, "alternates every second")

    def weight(self, running: ResizableJob) -> float:
        """Return the same weight for all."""
        return 1.0
