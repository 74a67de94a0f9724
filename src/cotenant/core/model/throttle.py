"""How an attempt is throttled; a module of its own, so that agents need not load what policies work on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Throttle:
    """How an attempt is throttled. The fields are independent; all of them apply together."""

    bandwidth_percent: int = 100  # of the node's memory bandwidth
    cores: int = 0  # of those it holds, usable by each of its tasks; 0: all
    idle: bool = False  # it gets only idle CPU time; best-effort jobs only
    suspended: bool = False  # its processes are frozen

    @property
    def free(self) -> bool:
        """Whether it is not throttled at all."""
        return self == Throttle()


FREE = Throttle()
