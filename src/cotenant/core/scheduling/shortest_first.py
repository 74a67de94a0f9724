"""Orders by remaining time, and three ways to treat jobs without an estimate.

Only some jobs are predictable, so each order by length must define where the others go. Expecting an unpredictable job
to run for about as long as it has run makes shortest-first for predictable jobs and least-attained-first for the others
a single order, in one unit (AITurbo's problem; Zhao et al., HPDC 2021, and our measurements of it [C]).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import numpy as np

from cotenant.core.model.job_table import Flags, Floats, Jobs
from cotenant.core.model.validation import Violation
from cotenant.core.policy.protocols import Order
from cotenant.core.scheduling.attained_service import expected_by_attained, soonest, unpredictable

Unknown = Literal["attained", "first", "last"]


def quantum_violations(quantum_seconds: float) -> Iterator[Violation]:
    """Yield what is wrong with a quantum, if anything."""
    if not 1 <= quantum_seconds < math.inf:
        yield Violation("quantum_seconds", f"must be 1 or more, not {quantum_seconds:g}")


def shortest_first(jobs: Jobs, weight: Floats | float, unknown: Unknown, quantum_seconds: float) -> Order:
    """Return the order of jobs by weight × remaining time.

    Running predictable jobs only come closer to their end, so nothing changes until a running unpredictable job has run
    for so long that its expected remaining time grows.
    """
    again, until = expected_by_attained(jobs.attained_seconds, quantum_seconds)
    unknowns = unpredictable(jobs)
    rest = np.where(unknowns, again, jobs.remaining_seconds)
    valid_seconds = soonest(until[unknowns & jobs.running]) if unknown == "attained" else math.inf
    return scored(jobs, rest * weight, unknowns, unknown, valid_seconds)


def scored(jobs: Jobs, score: Floats, unknowns: Flags, unknown: Unknown, valid_seconds: float) -> Order:
    """Return the order of jobs by a score; unpredictable jobs first or last form a level of their own, by arrival."""
    if unknown == "attained":
        return Order(np.zeros(len(jobs), dtype=np.int64), score, valid_seconds)
    level = unknowns if unknown == "last" else ~unknowns
    return Order(level.astype(np.int64), np.where(unknowns, jobs.arrival_seconds, score), valid_seconds)
