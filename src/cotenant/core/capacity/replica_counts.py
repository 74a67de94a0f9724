"""How many replicas of a demand fit into given resources, in columns: one entry per node, or per node class."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from cotenant.core.model.gang import Demand
from cotenant.core.model.resources import WHOLE_GPU_MILLI, numbers_of

Counts = NDArray[np.int64]
UNLIMITED_COUNT = 2**40
UNLIMITED = np.int64(UNLIMITED_COUNT)


def count_room(demand: Demand, have: Iterable[Counts], shares: Counts | None = None) -> Counts:
    """Return the replicas that fit by GPUs, cores and amounts; without `shares` the caller counts GPU shares."""
    gpus, *counted = have
    room: Counts | None = None
    if demand.gpu_milli >= WHOLE_GPU_MILLI:
        room = _times(gpus, demand.gpu_milli // WHOLE_GPU_MILLI)
    elif demand.gpu_milli and shares is not None:
        room = shares
    for there, need in zip(counted, numbers_of(demand)[1:], strict=True):
        if need:
            room = _times(there, need) if room is None else np.minimum(room, _times(there, need))
    return np.full(len(gpus), UNLIMITED) if room is None else room


def count_in_each(demand: Demand, kinds: Sequence[tuple[tuple[int, ...], int]]) -> tuple[int, ...]:
    """Return the same for a few entries, each with its shareable GPUs: for few, this is faster than columns.

    >>> count_in_each(Demand(gpu_milli=2000, cores=3), [((8, 24, 0, 0), 0), ((2, 24, 0, 0), 0)])
    (4, 1)
    """
    milli, whole, needs = demand.gpu_milli, demand.gpu_milli // WHOLE_GPU_MILLI, numbers_of(demand)[1:]
    rooms: list[int] = []
    for there, shared in kinds:
        room = UNLIMITED_COUNT
        if whole:
            room = there[0] // whole
        elif milli:
            room = shared * (WHOLE_GPU_MILLI // milli)
        for at, need in enumerate(needs, 1):
            if need and there[at] // need < room:
                room = there[at] // need
        rooms.append(room)
    return tuple(rooms)


def _times(have: Counts, need: int) -> Counts:
    """Return how many times `need` fits; the division is the most expensive step."""
    return have // need if need > 1 else have.copy()
