"""Orders by what jobs need still, and three ways to treat those of which that is not known.

Predictions come for some jobs only, so each order by length has to say where the others go. To expect about as much
again as a job has had makes shortest-first of the predictable and least-attained-first of the others one order, in one
unit (AITurbo's problem; Zhao et al., HPDC 2021, and our measurements of it [C]).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import numpy as np

from cotenant.core.model.job_table import Flags, Floats, Jobs
from cotenant.core.model.validation import Violation
from cotenant.core.policy.protocols import Order
from cotenant.core.scheduling.attained_service import as_much_again, soonest, unpredictable

Unknown = Literal["attained", "first", "last"]


def bad_quantum(quantum_seconds: float) -> Iterator[Violation]:
    """Say what is wrong with a quantum, if anything is."""
    if not 1 <= quantum_seconds < math.inf:
        yield Violation("quantum_seconds", f"must be 1 or more, not {quantum_seconds:g}")


def shortest_first(jobs: Jobs, weight: Floats | float, unknown: Unknown, quantum_seconds: float) -> Order:
    """Order jobs by weight × what remains.

    Predictable jobs that run only come nearer to their end, so nothing changes before an unpredictable one that runs
    has had so much that more is expected of it.
    """
    again, until = as_much_again(jobs.attained_seconds, quantum_seconds)
    unknowns = unpredictable(jobs)
    rest = np.where(unknowns, again, jobs.remaining_seconds)
    valid_seconds = soonest(until[unknowns & jobs.running]) if unknown == "attained" else math.inf
    return scored(jobs, rest * weight, unknowns, unknown, valid_seconds)


def scored(jobs: Jobs, score: Floats, unknowns: Flags, unknown: Unknown, valid_seconds: float) -> Order:
    """Order jobs by a score; where unknown jobs come first or last, those have a level of their own, by arrival."""
    if unknown == "attained":
        return Order(np.zeros(len(jobs), dtype=np.int64), score, valid_seconds)
    level = unknowns if unknown == "last" else ~unknowns
    return Order(level.astype(np.int64), np.where(unknowns, jobs.arrival_seconds, score), valid_seconds)
