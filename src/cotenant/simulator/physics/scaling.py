"""The speed of a distributed job by its number of replicas, equal on every machine."""

from __future__ import annotations

from functools import lru_cache

from cotenant.core.sizing.replica_speed import SYNCHRONISATION, replica_speed
from cotenant.simulator.physics.rounding import steady


@lru_cache(maxsize=4096)
def speed(replicas: int, synchronisation: float = SYNCHRONISATION) -> float:
    """Return the work that replicas do, relative to one.

    >>> [round(speed(count), 2) for count in (1, 2, 16)]
    [1.0, 1.9, 13.33]
    """
    return steady(replica_speed(replicas, synchronisation))
