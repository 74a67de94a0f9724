"""How neighbors and distance slow a gang, if the gang itself has not been measured.

Measured: ResNet-50 on 2 GPUs, images/s, on one server 114.8 alone and 75.6 beside other gangs; on two servers 98.0
alone and 74.1 beside others (Jeon et al., ATC 2019, section 3.2 [P]). The measured neighbors are assumed to have filled
the server; if other gangs hold fewer of its other GPUs, the loss is proportional [R]. Jobs with one GPU neither suffer
nor disturb [R]. A simulated cluster can behave this way; a policy may assume that a real one does.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cotenant.core.model.job import WHOLE_GPU_MILLI

SAME_SERVER = 75.6 / 114.8
ACROSS_SERVERS = 74.1 / 98.0
TWO_SERVERS = (
    98.0 / 114.8
)  # alone on two servers, relative to one; there are no published figures for crossing racks [R]
SHARED_GPU = (
    0.54  # of a GPU's speed beside one other job on it: the median of Gavel's pairs on the type that minds most
)
GANG_MILLI_MIN = 2 * WHOLE_GPU_MILLI

Speeds = NDArray[np.float64]


def speed(other_gangs_gpus: float, other_gpus: float, *, servers: int) -> float:
    """Return the relative speed of a gang on a server, some of whose other GPUs other gangs hold.

    >>> speed(0, 6, servers=1), round(speed(6, 6, servers=1), 4), round(speed(3, 6, servers=2), 4)
    (1.0, 0.6585, 0.8781)
    """
    crowded = min(1.0, other_gangs_gpus / other_gpus) if other_gpus > 0 else 0.0
    return 1 - (1 - worst(servers)) * crowded


def speeds(others: NDArray[np.int64], rest: NDArray[np.int64], *, servers: int) -> Speeds:
    """Return the same for many servers at once."""
    crowded = np.minimum(1.0, others / np.maximum(rest, 1)) * (rest > 0)
    left: Speeds = 1 - (1 - worst(servers)) * crowded
    return left


def worst(servers: int) -> float:
    """Return the relative speed of a gang on this many servers if other gangs fill them."""
    return SAME_SERVER if servers == 1 else ACROSS_SERVERS
