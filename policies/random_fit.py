"""Random placement."""

from __future__ import annotations

import numpy as np

from cotenant.core.capacity.ledger import Counts, Ledger, Offer
from cotenant.core.model.gang import Gang, Part
from cotenant.core.model.job import Locality
from cotenant.core.model.refusal import Refusal
from cotenant.core.placement.assembly import Places, assemble
from cotenant.core.placement.scores import Candidates, Scorer


class RandomFit:
    """Place each replica on a node drawn uniformly from the nodes with room.

    No paper: a baseline, because a rule that does no better than chance has learned nothing. A gang with locality
    `server` gets a server drawn from those with room for all of it; other gangs never wait for a better place.

    >>> from cotenant.core.model.gang import Demand
    >>> from cotenant.core.model.node import NodeShape
    >>> ledger = Ledger([NodeShape(gpus=0, cores=8), NodeShape(gpus=2, cores=8)])
    >>> gang = Gang("a", (Part("worker", 2, Demand(gpu_milli=1000)),))
    >>> [(share.node, share.replicas) for share in RandomFit().place(gang, ledger, np.random.default_rng(0))]
    [(1, 2)]
    """

    name = "random"
    api_version = 1

    def place(self, gang: Gang, ledger: Ledger, rng: np.random.Generator) -> Offer | Refusal:
        """Offer random places; refuse only if there is no room."""
        whole = {_shuffled(rng): 1} if gang.locality is Locality.SERVER else None
        return assemble(gang, ledger, lambda part, room: _random_nodes(part, room, rng), whole)


def _shuffled(rng: np.random.Generator) -> Scorer:
    """Return a scorer that puts the nodes with room in a random order."""

    def score(candidates: Candidates) -> Counts:
        scores = np.zeros(len(candidates.ledger), dtype=np.int64)
        nodes = rng.permutation(np.flatnonzero(candidates.room))
        scores[nodes] = np.arange(len(nodes))
        return scores

    return score


def _random_nodes(part: Part, room: Counts, rng: np.random.Generator) -> Places | None:
    """Return nodes drawn for one replica after another; full nodes are drawn no longer."""
    nodes = np.flatnonzero(room)
    left = np.minimum(room[nodes], part.replicas)
    if int(left.sum()) < part.replicas:
        return None
    placed = np.zeros_like(left)
    able = np.arange(len(nodes))
    for _ in range(part.replicas):
        drawn = able[rng.integers(len(able))]
        placed[drawn] += 1
        if placed[drawn] == left[drawn]:
            able = able[able != drawn]
    return [(int(nodes[at]), int(placed[at])) for at in np.flatnonzero(placed)]
