"""A placement policy that consists of scorers with weights: the shortest way to write one of your own."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from cotenant.core.capacity.ledger import Ledger, Offer
from cotenant.core.model.gang import Gang
from cotenant.core.model.refusal import Refusal
from cotenant.core.placement.assembly import assemble, in_score_order
from cotenant.core.placement.scores import Candidates, Scorer, Scores, Weights

SUM_MAX = 2.0**58  # of one scorer: what several add up to stays below `scores.EXCLUDED`


class ScoredPolicy:
    """Place a gang on the node with the lowest sum that holds all of it, else fill nodes in the order of their sums.

    A subclass has a `name`, and passes its scorers with their weights. A scorer that raises, or returns anything but
    one finite number for each node, is left out for the rest of the cycle, and the other scorers decide. The driver of
    the cycle takes note of it: the live mesh logs and counts it, a simulation stops.

    >>> from cotenant.core.model.gang import Demand, Part
    >>> from cotenant.core.model.node import NodeShape
    >>> from cotenant.core.placement.scores import free_cores
    >>> ledger = Ledger([NodeShape(gpus=2, cores=32), NodeShape(gpus=2, cores=8)])
    >>> gang = Gang("a", (Part("worker", 2, Demand(gpu_milli=1000)),))
    >>> ScoredPolicy({free_cores: 1}).place(gang, ledger, np.random.default_rng(0))
    (Share(node=1, part=0, replicas=2, gpus=()),)
    """

    name = ""
    api_version = 1

    def __init__(self, weights: Weights) -> None:
        """Take scorers with their weights.

        Raises:
            ValueError: a weight is NaN, or too large to be summed.
        """
        if wrong := [weight for weight in weights.values() if not abs(weight) <= SUM_MAX]:
            raise ValueError(f"weights must be numbers up to {SUM_MAX:g}, not {wrong[0]}")
        self._guarded = [_Guarded(scorer, weight) for scorer, weight in weights.items()]
        self._weights: Weights = {one: one.weight for one in self._guarded}

    def place(self, gang: Gang, ledger: Ledger, rng: np.random.Generator) -> Offer | Refusal:
        """Offer one node, or the first that together hold the gang; refuse only if there is no room."""
        return assemble(gang, ledger, in_score_order(gang, ledger, self._weights), self._weights)

    def take_scorer_faults(self) -> Mapping[str, str]:
        """Return the scorers that were left out since the last call, each with its fault, and use them again."""
        faults = {one.name: one.fault for one in self._guarded if one.fault}
        for one in self._guarded:
            one.fault = ""
        return faults


class _Guarded:
    """A scorer that is left out, as if all nodes were equal to it, once it has a fault."""

    def __init__(self, scorer: Scorer, weight: float) -> None:
        self.name: str = getattr(scorer, "__qualname__", type(scorer).__qualname__)
        self.weight = weight
        self.fault = ""
        self._scorer = scorer

    def __call__(self, candidates: Candidates) -> Scores | None:
        """Return the scorer's numbers; None if it is left out."""
        if self.fault:
            return None
        try:
            if (found := self._scorer(candidates)) is None:
                return None
            scores = np.asarray(found)
            self.fault = _fault(scores, self.weight, len(candidates.ledger))
        except Exception as error:  # third-party code may raise anything
            self.fault = f"{type(error).__name__}: {str(error)[:300]}"
        return None if self.fault else scores.astype(np.float64 if scores.dtype.kind == "f" else np.int64, copy=False)


def _fault(scores: Scores, weight: float, nodes: int) -> str:
    """Return what is wrong with a scorer's answer; nothing if it is one finite number for each node."""
    if scores.shape != (nodes,):
        return f"it returned an array of shape {scores.shape} for {nodes} nodes"
    if scores.dtype.kind not in "biuf":
        return f"it returned {scores.dtype} instead of numbers"
    if nodes and not max(abs(float(scores.min())), abs(float(scores.max()))) * abs(weight) <= SUM_MAX:
        return "it returned NaN, or numbers that are too large with its weight"
    return ""
