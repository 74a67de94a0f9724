"""Anti-affinity: keeps a job's replicas on a minimum number of different nodes or racks.

A job with one role, of R replicas on N nodes or racks at least, gets R - N + 1 places as the policy wants them, then
single ones in nodes or racks where it is not yet, while those are too few, and the rest anywhere. That finds places if
there are any: the first step uses some of the nodes with room, each of the others still has room for one replica, and
it does not matter for the total where equal replicas go. With several roles, a role with larger replicas may take the
only room of another in a node or rack that it does not need.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from cotenant.core.capacity.ledger import Counts, Ledger, Offer
from cotenant.core.model.job import JobSpec, SpreadBy
from cotenant.core.model.refusal import plural
from cotenant.core.placement.constraint import Constraint, Lacking, Marks

NOUNS = {SpreadBy.NODE: "server", SpreadBy.RACK: "rack"}


@dataclass(frozen=True)
class SpreadOut(Constraint):
    """Keeps a gang on at least this many different nodes or racks.

    >>> from cotenant.core.model.node import NodeShape
    >>> ledger = Ledger([NodeShape(gpus=8, cores=8)] * 3, ["a", "a", "b"])
    >>> SpreadOut(SpreadBy.RACK, 2).lacking(np.array([True, True, False]), ledger).detail
    'must be on at least 2 racks; 1 has room'
    >>> SpreadOut(SpreadBy.RACK, 2).apart([0], ledger)
    (1, array([False, False,  True]))
    """

    by: SpreadBy
    least: int

    @classmethod
    def of(cls, spec: JobSpec) -> SpreadOut | None:
        """Return the constraint of a job; None if one node would do."""
        return cls(spec.spread.by or SpreadBy.NODE, spec.spread.least) if spec.spread.least > 1 else None

    def _domains(self, ledger: Ledger) -> Counts:
        return ledger.rack_numbers if self.by is SpreadBy.RACK else np.arange(len(ledger))

    @property
    def in_words(self) -> str:
        """The constraint, after what a gang needs."""
        return f"on at least {plural(self.least, NOUNS[self.by])}"

    @property
    def nodes_min(self) -> int:
        """The fewest nodes that meet the constraint: a node is in one rack."""
        return self.least

    def is_met(self, offer: Offer, ledger: Ledger) -> bool:
        """Return whether the places are on enough nodes or racks."""
        return len(np.unique(self._domains(ledger)[[share.node for share in offer]])) >= self.least

    def lacking(self, able: Marks, ledger: Ledger, *, empty: bool = False) -> Lacking | None:
        """Return on how many nodes or racks a replica has room, if those are too few."""
        there = len(np.unique(self._domains(ledger)[able]))
        if there >= self.least:
            return None
        could = "could hold a replica even if empty" if empty else "has room" if there == 1 else "have room"
        detail, remedy = f"must be {self.in_words}; {there} {could}", f"the job accepts fewer {NOUNS[self.by]}s"
        return Lacking(detail, remedy, {"spread_min": self.least, f"{NOUNS[self.by]}s_with_room": there})

    def apart(self, used: Collection[int], ledger: Ledger) -> tuple[int, Marks] | None:
        """Return how many nodes or racks are missing, and the nodes in those that the gang is not on yet."""
        domains = self._domains(ledger)
        taken = np.unique(domains[list(used)])
        return (self.least - len(taken), ~np.isin(domains, taken)) if len(taken) < self.least else None
