"""An allocator for tests that does as it is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from cotenant import plugins
from cotenant.core.policy.protocols import Sizing
from cotenant.core.sizing import resize as resize_module
from cotenant.core.sizing.resize import Running
from cotenant.policies.proportional import Proportional
from cotenant.services.placement.api.server import ALLOCATORS

Wish = tuple[int, ...] | Callable[[Running], tuple[int, ...] | None]


class Obedient(Proportional):
    """Sizes as `proportional` does, and resizes as the test wishes: by job, or whatever it is."""

    name = "obedient"
    interval_seconds = 0.02
    warm_up_seconds = measure_seconds = 0.0

    def __init__(self) -> None:
        self.wishes: dict[str, Wish] = {}
        self.asked: dict[str, list[Running]] = {}
        self.otherwise: Callable[[Running], tuple[int, ...] | None] = lambda running: None

    def resize(self, running: Running, now: float) -> Sizing | None:
        """Do what is wished for this job."""
        self.asked.setdefault(running.job_id, []).append(running)
        wish = self.wishes.get(running.job_id, self.otherwise)
        cores = wish if isinstance(wish, tuple) else wish(running)
        return None if cores is None else Sizing(cores, f"{cores} were wished for")

    def weight(self, running: Running) -> float:
        """A gain is a gain."""
        return 1.0

    def use(self, patch: pytest.MonkeyPatch) -> None:
        """Let every placement that is started have this allocator."""
        load = plugins.load

        def loaded(group: str, name: str, options: Mapping[str, str]) -> Any:
            return self if group == ALLOCATORS else load(group, name, options)

        patch.setattr(plugins, "load", loaded)
        patch.setattr(resize_module, "PATIENCE_SECONDS", self.interval_seconds)  # and be asked again and again
