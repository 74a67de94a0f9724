"""A CPU allocator that never leaves well alone, so that a mesh in trouble always resizes something."""

from __future__ import annotations

from collections.abc import Sequence

from cotenant.core.model.estimate import Estimate
from cotenant.core.model.job import JobSpec
from cotenant.core.model.node import NodeShape
from cotenant.core.policy.protocols import Sizing
from cotenant.core.sizing.resize import ResizableJob


class Restless:
    """Wish for all that is spare and for a single core by turns, every second.

    No paper: nothing is gained by it, and each change is one that has to survive whatever happens meanwhile.
    """

    name = "restless"
    api_version = 1
    interval_seconds, warm_up_seconds, measure_seconds = 1.0, 0.0, 0.5

    def size(self, spec: JobSpec, estimate: Estimate, shapes: Sequence[NodeShape]) -> Sizing:
        """Begin with one core, unless the user says how many."""
        return Sizing(tuple(1 if role.request.cores is None else role.request.cores for role in spec.roles), "to begin")

    def resize(self, running: ResizableJob, now: float) -> Sizing | None:
        """Change it."""
        return running.wish(running.most if int(now) % 2 else 1, "it is another second")

    def weight(self, running: ResizableJob) -> float:
        """All are equal."""
        return 1.0
