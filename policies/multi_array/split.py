"""Splits a cluster into arrays by class of job: which nodes each gets, and which of their cores.

CODA (Zhao et al., ICDCS 2020) keeps CPU jobs, jobs of one GPU and jobs of several apart [P], so that each finds what it
needs: an array of cores, and arrays of GPUs with the cores that keep them busy. Sizes follow from what jobs held
recently. The paper does not say how; all parameters here are our reconstruction [R].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from cotenant.core.capacity.ledger import Counts, Ledger
from cotenant.core.model.job import WHOLE_GPU_MILLI


class Array(StrEnum):
    """The arrays of a cluster."""

    CPU = "cpu"
    SMALL = "small"
    LARGE = "large"


def array_of(gpu_milli: int, large_gpus: int) -> Array:
    """Return the array of a gang with this many thousandths of GPUs; `large_gpus` or more are large.

    >>> [array_of(milli, 4).value for milli in (0, 1000, 2000, 4000)]
    ['cpu', 'small', 'small', 'large']
    """
    if not gpu_milli:
        return Array.CPU
    return Array.LARGE if gpu_milli >= large_gpus * WHOLE_GPU_MILLI else Array.SMALL


@dataclass(frozen=True, slots=True)
class Held:
    """What jobs with GPUs hold now: GPUs by array, (cores, GPUs) by GPU type, and the share of all GPUs."""

    gpus: Mapping[Array, float] = field(default_factory=dict)
    by_type: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    busy: float = 0.0


class Demand:
    """What jobs held, summed over time; amounts older by `memory_seconds` count a third (1/e) of new ones.

    Arrays lend to each other, so jobs can also hold what they request: held resources represent demand.

    >>> demand = Demand(memory_seconds=3600)
    >>> demand.add(60, Held({Array.SMALL: 1, Array.LARGE: 3}, {"T4": (8, 4)}))
    >>> demand.large_share, demand.cores_per_gpu("T4"), demand.cores_per_gpu("V100")
    (0.75, 2.0, None)
    """

    def __init__(self, memory_seconds: float) -> None:
        self._memory_seconds = memory_seconds
        self._gpu_seconds: dict[Array, float] = {}
        self._by_type: dict[str, tuple[float, float]] = {}
        self._busy = np.zeros(3)  # seconds, and the integrals of the held share of all GPUs and of its square

    def add(self, seconds: float, held: Held) -> None:
        """Add what was held for some seconds up to now."""
        kept = math.exp(-seconds / self._memory_seconds)
        self._busy = kept * self._busy + seconds * np.array([1.0, held.busy, held.busy**2])
        for array in (Array.SMALL, Array.LARGE):
            before = self._gpu_seconds.get(array, 0.0)
            self._gpu_seconds[array] = kept * before + seconds * held.gpus.get(array, 0.0)
        for gpu_type in self._by_type.keys() | held.by_type.keys():
            (cores, gpus), (more, wider) = (which.get(gpu_type, (0.0, 0.0)) for which in (self._by_type, held.by_type))
            self._by_type[gpu_type] = kept * cores + seconds * more, kept * gpus + seconds * wider

    @property
    def large_share(self) -> float | None:
        """The share of GPU time that large gangs had; None if nothing was held yet."""
        both = sum(self._gpu_seconds.values())
        return self._gpu_seconds[Array.LARGE] / both if both else None

    @property
    def busy_share(self) -> float:
        """A share of all GPUs that is rarely exceeded: the mean plus two standard deviations, at most 1."""
        seconds, first, second = self._busy.tolist()
        if not seconds:
            return 1.0
        mean = first / seconds
        return min(1.0, mean + 2 * math.sqrt(max(0.0, second / seconds - mean**2)))

    def cores_per_gpu(self, gpu_type: str) -> float | None:
        """Return the mean cores per GPU of a type, the expected N* of its jobs; None if no GPU was held."""
        cores, gpus = self._by_type.get(gpu_type, (0.0, 0.0))
        return cores / gpus if gpus else None


@dataclass(frozen=True, slots=True)
class Split:
    """By node: cores reserved for its GPUs, and whether it belongs to the array of large gangs."""

    reserved: Counts
    large: NDArray[np.bool_]
    small: NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "small", ~self.large)


def split(ledger: Ledger, demand: Demand, large_gpus: int) -> Split:
    """Split a cluster by demand.

    Each GPU reserves the mean number of cores of its type; without data, its share of the node, so that CPU jobs only
    borrow there. If some GPUs are never held, proportionally fewer cores are reserved. The array of large gangs has the
    nodes with the most GPUs, the number that comes nearest to its share of the GPUs; without data, half of them. Nodes
    with fewer GPUs than a large gang needs belong to it only if there are no others.

    >>> from cotenant.core.model.node import NodeShape
    >>> demand = Demand(3600)
    >>> demand.add(60, Held({Array.SMALL: 1, Array.LARGE: 1}, {"": (4, 2)}, busy=1.0))
    >>> parts = split(Ledger([NodeShape(2, 8), NodeShape(8, 24), NodeShape(8, 24), NodeShape(0, 24)]), demand, 4)
    >>> parts.reserved.tolist(), parts.large.tolist()
    ([4, 16, 16, 0], [False, True, False, False])
    """
    gpus, cores = ledger.total_gpus, ledger.total_cores
    per_gpu = {shape.gpu_type: demand.cores_per_gpu(shape.gpu_type) for shape in ledger.shapes if shape.gpus}
    each = {kind: math.inf if cores_per_gpu is None else cores_per_gpu for kind, cores_per_gpu in per_gpu.items()}
    by_node = np.array([each.get(shape.gpu_type, 0.0) for shape in ledger.shapes])
    wanted = np.ceil(
        np.where(np.isinf(by_node), cores, demand.busy_share * np.nan_to_num(by_node, posinf=0) * gpus) - 1e-6
    )
    wanted[gpus == 0] = 0
    reserved = np.minimum(wanted, cores).astype(np.int64)
    share = 0.5 if demand.large_share is None else demand.large_share
    return Split(reserved, _largest(gpus, share, large_gpus))


def _largest(gpus: Counts, share: float, large_gpus: int) -> NDArray[np.bool_]:
    """Mark the nodes with the most GPUs whose sum comes nearest to a share of all."""
    able = np.flatnonzero(gpus >= large_gpus)
    able = able if len(able) else np.flatnonzero(gpus)
    order = able[np.lexsort((able, -gpus[able]))]
    reach = np.concatenate(([0], np.cumsum(gpus[order])))
    count = int(np.argmin(np.abs(reach - share * gpus.sum())))
    large = np.zeros(len(gpus), dtype=np.bool_)
    large[order[:count]] = True
    return large
