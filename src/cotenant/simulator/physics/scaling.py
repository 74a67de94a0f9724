"""The speed of a distributed job by its number of replicas.

A step on n replicas takes t_c + t_o·log₂ n seconds (GENIE, Chen et al., TPDS 2020 [D]), so n of them do
n / (1 + s·log₂ n) times the work of one, with s = t_o / t_c. Batches are assumed to be per replica or large enough, so
that strong and weak scaling have one form.
"""

from __future__ import annotations

import math
from functools import lru_cache

from cotenant.simulator.physics.rounding import steady

SYNCHRONISATION = 0.05  # s: two replicas do 1.9 times the work of one, sixteen 13.3 times [R]


@lru_cache(maxsize=4096)
def speed(replicas: int, synchronisation: float = SYNCHRONISATION) -> float:
    """Return the work that replicas do, relative to one.

    >>> [round(speed(count), 2) for count in (1, 2, 16)]
    [1.0, 1.9, 13.33]
    """
    return steady(replicas / (1 + synchronisation * math.log2(replicas)))
