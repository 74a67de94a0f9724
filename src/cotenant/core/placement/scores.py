"""Scorers: what speaks against each node, as one number; nodes with the lowest weighed sum come first.

Theory of operation. Placement is a pipeline. Constraints and free resources say which nodes are candidates, scorers say
which of these come first, and `assembly` puts a gang there. A scorer returns one number for each node, in a unit of its
own. A policy gives each of its scorers a weight: a weight is what a unit of it costs, compared with units of the
others. Weights that lie as far apart as `FIRST`, `SECOND` and `LAST` do not trade: a scorer then decides only between
nodes that are equal by all scorers of larger weights. Of nodes with equal sums the first comes first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cotenant.core.capacity.ledger import Counts, Ledger
from cotenant.core.model.gang import Gang, Part

FIELD_BITS = 20  # no node has more GPUs or cores
FIRST, SECOND, LAST = 1 << 2 * FIELD_BITS, 1 << FIELD_BITS, 1  # marks take multiples of the first
EXCLUDED = np.int64(2**62)  # more than any sum
Marks = NDArray[np.bool_]
Scores: TypeAlias = NDArray[Any]  # booleans, integers or floats


@dataclass(slots=True)
class Candidates:
    """The nodes for replicas of a part of a gang, or for the gang as a whole.

    `room` is how many of the replicas fit on each node; for a whole gang 1 where it fits. `used` are the nodes where
    other parts of the gang are already.
    """

    gang: Gang
    ledger: Ledger
    room: Counts | Marks
    part: Part | None = None
    used: Collection[int] = ()

    @property
    def gpu_milli(self) -> int:
        """GPUs of a replica, or of the gang as a whole, in thousandths."""
        return self.gang.gpu_milli if self.part is None else self.part.demand.gpu_milli


class Scorer(Protocol):
    """A scorer: any function of this kind. It is pure, and returns one number for each node of the ledger.

    None: all nodes are equal to it. The numbers of nodes without room are ignored.
    """

    def __call__(self, candidates: Candidates, /) -> Scores | None:
        """Return what speaks against each node: the lower, the better."""


Weights: TypeAlias = Mapping[Scorer, float]


def weigh(weights: Weights, candidates: Candidates) -> Scores:
    """Return the weighed sum of some scorers for each node, in an array of its own.

    >>> from cotenant.core.model.node import NodeShape
    >>> ledger = Ledger([NodeShape(gpus=4, cores=8), NodeShape(gpus=2, cores=16)])
    >>> weigh({free_gpus: 10, free_cores: 1}, Candidates(Gang("a", ()), ledger, ledger.open)).tolist()
    [48, 36]
    """
    total: Scores | None = None
    for scorer, weight in weights.items():
        if (scores := scorer(candidates)) is not None:
            weighed = scores if weight == 1 and total is not None else scores * weight
            if total is not None and total.dtype == weighed.dtype:
                total += weighed  # in place: there may be many nodes
            else:
                total = weighed if total is None else total + weighed
    return np.zeros(len(candidates.ledger), dtype=np.int64) if total is None else total


def lowest(scores: Scores, able: Marks) -> int:
    """Return the first of the marked nodes, of which there must be any, with the lowest score."""
    return int(np.where(able, scores, EXCLUDED).argmin())


# Scorers -------------------------------------------------------------------------------------------------------------


def free_gpus(candidates: Candidates) -> Counts:
    """Fragmentation: the whole GPUs that are free, of which fewest should be broken up."""
    return candidates.ledger.free_gpus


def free_cores(candidates: Candidates) -> Counts:
    """Core balance: the free cores, so that nodes with many keep them for gangs that need many."""
    return candidates.ledger.free_cores


def has_gpus(candidates: Candidates) -> Marks | None:
    """Fragmentation: the nodes with GPUs, for a gang that could be on others."""
    return candidates.ledger.has_gpus if candidates.ledger.mixed else None


def stranded_gpus(candidates: Candidates) -> Counts:
    """Fragmentation: the GPUs that a gang without GPUs may strand; even a node whose GPUs are taken counts as one."""
    ledger = candidates.ledger
    return np.where(ledger.has_gpus, 1 + ledger.free_gpus, 0) if ledger.mixed else ledger.free_gpus


def replicas_that_fit(candidates: Candidates) -> Counts | Marks:
    """Consolidation, with a negative weight: as many replicas as fit on each node."""
    return candidates.room


def nodes_in_use(candidates: Candidates) -> Marks | None:
    """Consolidation, with a negative weight: the nodes where the gang is already."""
    if not candidates.used:
        return None
    marks = np.zeros(len(candidates.ledger), dtype=np.bool_)
    marks[list(candidates.used)] = True
    return marks


def share_taken(candidates: Candidates) -> NDArray[np.float64]:
    """Interference: the share of each node that others hold: of its GPUs, or of its cores.

    For a gang without GPUs, having GPUs counts as a whole node taken.
    """
    ledger = candidates.ledger
    if candidates.gpu_milli:
        return 1 - ledger.free_milli / 1000 / np.maximum(1, ledger.total_gpus)
    taken: NDArray[np.float64] = (ledger.total_gpus > 0) + 1 - ledger.free_cores / np.maximum(1, ledger.total_cores)
    return taken


def cores_taken(candidates: Candidates) -> NDArray[np.float64]:
    """Core balance: the share of each node's cores that others hold."""
    ledger = candidates.ledger
    taken: NDArray[np.float64] = 1 - ledger.free_cores / np.maximum(1, ledger.total_cores)
    return taken


def marked(nodes: Marks) -> Scorer:
    """Return a scorer that marks some nodes: those with neighbors that interfere, or outside of an array."""
    scores = nodes.astype(np.int64)
    return lambda candidates: scores


# Weights that several policies use -----------------------------------------------------------------------------------

# A whole gang goes to nodes without GPUs, then where the fewest GPUs are free, then the fewest cores.
BEST_FIT: Weights = MappingProxyType({has_gpus: 4 * FIRST, free_gpus: SECOND, free_cores: LAST})
# A small gang goes where the largest share of the cores is free, so that jobs that need many do not meet on one node.
BALANCED_CORES: Weights = MappingProxyType({has_gpus: 4 * FIRST, cores_taken: FIRST, free_gpus: SECOND})
CROWDED = 2 * FIRST  # beside best fit: of nodes with GPUs, those without such neighbors come first
# Neighbors cost a 2-GPU job a third of its speed, 114.8 to 75.6 images/s (Philly [P]): a logarithm of 0.42, which has
# the weight of `CROWDED`. So a logarithm of 1 has 2.4 times that.
SLOW = 4.8 * FIRST
ELSEWHERE = 8 * FIRST  # beside best fit: nodes of the gang's own array come first

# Replicas with GPUs go where most of them fit, so to the fewest nodes; others where they strand the fewest GPUs.
_TOGETHER: Weights = {nodes_in_use: -(1 << 61)}
FEWEST: Weights = MappingProxyType({**_TOGETHER, replicas_that_fit: -FIRST, free_gpus: SECOND, free_cores: LAST})
FEWEST_STRANDED: Weights = MappingProxyType(
    {**_TOGETHER, stranded_gpus: FIRST, replicas_that_fit: -SECOND, free_cores: LAST}
)
