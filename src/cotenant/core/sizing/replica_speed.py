"""The speed of a distributed job by its number of replicas, where it is not measured.

A step on n replicas takes t_c + t_o·log₂ n seconds (GENIE, Chen et al., TPDS 2020 [D]), so n of them do
n / (1 + s·log₂ n) times the work of one, with s = t_o / t_c. Batches are assumed to be per replica or large enough, so
that strong and weak scaling have one form.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from cotenant.core.model.job import ReplicaRange

SYNCHRONISATION = 0.05  # s: two replicas do 1.9 times the work of one, sixteen 13.3 times [R]


def replica_speed(replicas: int, synchronisation: float = SYNCHRONISATION) -> float:
    """Return the work that replicas do, relative to one.

    >>> [round(replica_speed(count), 2) for count in (1, 2, 16)]
    [1.0, 1.9, 13.33]
    """
    return replicas / (1 + synchronisation * math.log2(replicas))


def completed_rates(known: Mapping[int, float], span: ReplicaRange, base: int) -> tuple[float, ...]:
    """Return the rate with each number of replicas in a range: the known ones, and between them the model's.

    An unknown rate is that of the nearest known number, the smaller of two, scaled by the model; if none is known,
    rates are relative to that with `base` replicas.

    >>> [round(rate, 2) for rate in completed_rates({}, ReplicaRange(1, 3), 1)]
    [1.0, 1.9, 2.78]
    >>> [round(rate, 2) for rate in completed_rates({2: 10.0}, ReplicaRange(1, 3), 1)]
    [5.25, 10.0, 14.59]
    """
    rates = {count: rate for count, rate in known.items() if rate > 0} or {base: 1.0}
    counts = range(span.least, span.most + 1)
    nearest = {count: min(rates, key=lambda other: (abs(other - count), other)) for count in counts}
    return tuple(rates[near] * replica_speed(count) / replica_speed(near) for count, near in nearest.items())
