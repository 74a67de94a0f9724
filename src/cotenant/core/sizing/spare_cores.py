"""Distributes the spare cores of a node to the jobs whose rate grows most, until another job needs them.

Spare cores are distributed step by step, each to the job whose rate gains most per core, like water-filling: for
concave curves that is optimal. If a curve rises more in a later step than in the next, the steps count together,
because otherwise no job would ever get over a plateau. A gang grows in lock-step on all its nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

GAIN_MIN = 1e-9  # less does not count as a gain
KEEP = 1.1  # a job keeps a core unless another gains this much more: cores must not move because of noise [R]


@dataclass(frozen=True, slots=True)
class Borrower:
    """A job that could use more cores than it owns.

    `worth[k]` is the worth of k more cores for each of its replicas, never falling; `worth[0]` is without any.
    `replicas` counts, by node, the replicas that would get them, `held` the cores that each has on loan now.
    """

    job_id: str
    worth: Sequence[float]
    replicas: Mapping[int, int]
    held: int = 0


def lend(spare: Mapping[int, int], borrowers: Iterable[Borrower], keep: float = KEEP) -> dict[str, int]:
    """Return how many cores each replica of each borrower gets from the spare ones. Cores without gain stay free.

    >>> steep, level = Borrower("a", [1.0, 1.5, 1.8], {0: 1}), Borrower("b", [1.0, 1.4, 1.4], {0: 1})
    >>> lend({0: 2}, [level, steep])
    {'a': 1, 'b': 1}
    """
    left = dict(spare)
    waiting = sorted(borrowers, key=lambda one: one.job_id)
    lent = {one.job_id: 0 for one in waiting}
    while waiting:
        steps = [(_step(one, lent[one.job_id], left, keep), one) for one in waiting]
        waiting = [one for (_, count), one in steps if count]
        if not waiting:
            break
        (_, count), taker = max((step for step in steps if step[0][1]), key=lambda step: step[0][0])
        lent[taker.job_id] += count
        for node, replicas in taker.replicas.items():
            left[node] -= count * replicas
    return lent


def _step(one: Borrower, lent: int, left: Mapping[int, int], keep: float) -> tuple[float, int]:
    """Return the steepest step that fits: its gain per core, and its cores per replica; 0 if no step gains."""
    room = min((left.get(node, 0) // replicas for node, replicas in one.replicas.items() if replicas), default=0)
    width = sum(one.replicas.values())
    best = (0.0, 0)
    for count in range(1, min(room, len(one.worth) - 1 - lent) + 1):
        slope = (one.worth[lent + count] - one.worth[lent]) / (count * width)
        if lent + count <= one.held:
            slope *= keep
        if slope > best[0] * (1 + GAIN_MIN) and slope > GAIN_MIN:
            best = (slope, count)
    return best
