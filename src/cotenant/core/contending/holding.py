"""What is remembered of an attempt that is held back, and of what that brings to the victim."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cotenant.core.contending.ladder import Rung
from cotenant.core.contending.suspects import Attempt
from cotenant.core.policy import Throttle


@dataclass(slots=True)
class Hold:
    """An attempt that is held back; rung -1: it is free again, but known."""

    ladder: tuple[Rung, ...]
    cores: int
    rung: int
    throttle: Throttle
    wait: float
    since: float  # when it came to this rung
    victim: Attempt | None = None
    proven: bool = False
    before: int = -1  # the rung that was given back last
    returned: float = -math.inf  # when that was
    asked: int = 0  # times that the agent was told and did not do it
    moving: float = -math.inf  # when it was asked to move away
    told: str = ""  # what its directives say

    @property
    def gentlest(self) -> int:
        """The lowest rung at which it still runs; -1: there is none."""
        return len(self.ladder) - 2


@dataclass(slots=True)
class Look:
    """What a change brought to a victim: how far below its baseline it was, and is."""

    victim: Attempt
    suspect: Attempt
    loss: float
    loss_windows: int
    began: float
    windows: int = 0
    below: float = 0.0  # summed up

    @property
    def left(self) -> float:
        """What is still lost, on average."""
        return self.below / self.windows if self.windows else self.loss
