"""How an attempt is held back: a word of its own, so that agents need not load what policies work on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Throttle:
    """How an attempt is held back. Each way stands for itself; all of them together are what holds."""

    bandwidth_percent: int = 100  # of the node's memory bandwidth
    cores: int = 0  # that each of its tasks may use of those that it holds; 0: all
    idle: bool = False  # it gets only CPU time that nobody else wants; best-effort jobs only
    suspended: bool = False  # its processes stand still

    @property
    def free(self) -> bool:
        """Whether it is not held back at all."""
        return self == Throttle()


FREE = Throttle()
