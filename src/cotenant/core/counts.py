"""How many replicas of a demand go into what there is, in columns: one entry a node, or a kind of node."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cotenant.core.gangs import Demand
from cotenant.core.jobs import WHOLE_GPU_MILLI

Counts = NDArray[np.int64]
UNLIMITED = np.int64(2**40)


def count_room(demand: Demand, have: Counts, shares: Counts | None = None) -> Counts:
    """Count replicas by GPUs, cores and memory, and take the least; without `shares` somebody else counts those."""
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


def _times(have: Counts, need: int) -> Counts:
    """Say how many times there is what is needed; dividing is what costs most."""
    return have // need if need > 1 else have.copy()
