"""Who gets the spare cores of a node: those whose rate grows most by them, and only until somebody else comes.

Spare cores are handed out step by step, each to the job whose rate gains most for each core, as water fills a vessel:
with curves that bend downwards that is the best there is. Where a curve rises in a later step more than in the next,
the steps count together, for else nobody would ever climb over a sill. A gang grows in lock-step on all its nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

GAIN_MIN = 1e-9  # less is no gain
KEEP = 1.1  # who has a core keeps it unless another gains so much more: cores do not wander for noise's sake [R]


@dataclass(frozen=True, slots=True)
class Borrower:
    """A job that could use more cores than it has for good.

    `worth[k]` is what k cores more for each of its replicas are worth, never falling; `worth[0]` is without any.
    `replicas` counts those on each node that would get them, `held` the cores that each of them has on loan now.
    """

    job_id: str
    worth: Sequence[float]
    replicas: Mapping[int, int]
    held: int = 0


def lend(spare: Mapping[int, int], borrowers: Iterable[Borrower], keep: float = KEEP) -> dict[str, int]:
    """Say how many cores each replica of each borrower gets, of those spare on each node. Cores without gain stay free.

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
    """Find the steepest step that fits: its gain for each core, and its cores for each replica; 0 where none gains."""
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
