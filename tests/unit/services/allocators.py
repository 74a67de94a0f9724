"""An allocator for tests with predefined answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from cotenant import plugins
from cotenant.core.policy.protocols import Sizing
from cotenant.core.sizing import resize as resize_module
from cotenant.core.sizing.resize import ResizableJob
from cotenant.policies.proportional import Proportional
from cotenant.services.placement.api.server import ALLOCATORS

Wish = tuple[int, ...] | Callable[[ResizableJob], tuple[int, ...] | None]


class ScriptedAllocator(Proportional):
    """Sizes as `proportional` does, and resizes as the test demands: by job, or all jobs alike."""

    name = "obedient"
    interval_seconds = 0.02
    warm_up_seconds = measure_seconds = 0.0

    def __init__(self) -> None:
        self.wishes: dict[str, Wish] = {}
        self.asked: dict[str, list[ResizableJob]] = {}
        self.otherwise: Callable[[ResizableJob], tuple[int, ...] | None] = lambda running: None

    def resize(self, running: ResizableJob, now: float) -> Sizing | None:
        """Return the size that the test demands for this job."""
        self.asked.setdefault(running.job_id, []).append(running)
        wish = self.wishes.get(running.job_id, self.otherwise)
        cores = wish if isinstance(wish, tuple) else wish(running)
        return None if cores is None else Sizing(cores, f"{cores} were wished for")

    def weight(self, running: ResizableJob) -> float:
        """Return every gain unchanged."""
        return 1.0

    def use(self, patch: pytest.MonkeyPatch) -> None:
        """Make every started placement use this allocator."""
        load = plugins.load

        def loaded(group: str, name: str, options: Mapping[str, str]) -> Any:
            return self if group == ALLOCATORS else load(group, name, options)

        patch.setattr(plugins, "load", loaded)
        patch.setattr(resize_module, "PATIENCE_SECONDS", self.interval_seconds)  # and ask again soon
