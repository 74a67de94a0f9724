"""How many replicas of a demand fit into given resources, in columns: one entry per node, or per node class."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cotenant.core.model.gang import Demand
from cotenant.core.model.job import WHOLE_GPU_MILLI

Counts = NDArray[np.int64]
UNLIMITED_COUNT = 2**40
UNLIMITED = np.int64(UNLIMITED_COUNT)


def count_room(demand: Demand, have: Counts, shares: Counts | None = None) -> Counts:
    """Return the replicas that fit by GPUs, cores and memory; without `shares` the caller counts GPU shares."""
    gpus, cores, memory = have
    room: Counts | None = None
    if demand.gpu_milli >= WHOLE_GPU_MILLI:
        room = _times(gpus, demand.gpu_milli // WHOLE_GPU_MILLI)
    elif demand.gpu_milli and shares is not None:
        room = shares
    for there, need in ((cores, demand.cores), (memory, demand.memory_bytes)):
        if need:
            room = _times(there, need) if room is None else np.minimum(room, _times(there, need))
    return np.full(len(gpus), UNLIMITED) if room is None else room


def count_in_each(demand: Demand, kinds: Sequence[tuple[int, int, int]], shares: Sequence[int]) -> tuple[int, ...]:
    """Return the same for a few entries, each GPUs, cores and memory: for few, this is faster than columns.

    >>> count_in_each(Demand(gpu_milli=2000, cores=3), [(8, 24, 0), (2, 24, 0)], [0, 0])
    (4, 1)
    """
    whole, cores, memory = demand.gpu_milli // WHOLE_GPU_MILLI, demand.cores, demand.memory_bytes
    rooms: list[int] = []
    for (gpus_there, cores_there, memory_there), shared in zip(kinds, shares, strict=True):
        room: int | None = None
        if whole:
            room = gpus_there // whole
        elif demand.gpu_milli:
            room = shared * (WHOLE_GPU_MILLI // demand.gpu_milli)
        if cores and (room is None or cores_there // cores < room):
            room = cores_there // cores
        if memory and (room is None or memory_there // memory < room):
            room = memory_there // memory
        rooms.append(UNLIMITED_COUNT if room is None else room)
    return tuple(rooms)


def _times(have: Counts, need: int) -> Counts:
    """Return how many times `need` fits; the division is the most expensive step."""
    return have // need if need > 1 else have.copy()
