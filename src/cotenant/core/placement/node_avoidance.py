"""Keeps a gang away from nodes on which it failed because of the node, or was in another job's way.

A gang must not wait forever because of that, so avoidance yields, the longest avoided node first, if no other node
could ever hold the gang.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from cotenant.core.capacity.ledger import Ledger
from cotenant.core.model.gang import Gang
from cotenant.core.model.job import Locality
from cotenant.core.model.refusal import Code, Refusal, plural
from cotenant.core.placement.constraint import Constraint, Marks, only_open
from cotenant.core.placement.unschedulable import fits

SAID_OF = frozenset({Code.CAPACITY, Code.FRAGMENTED, Code.NO_NODES, Code.NODES_HELD, Code.QOS, Code.RESERVED})
NUMBERS = frozenset({"avoided_nodes", "yielded_nodes"})


class AvoidedNodes(Constraint):
    """Closes the nodes that a gang avoids; ids that the ledger does not know are ignored.

    >>> from cotenant.core.model.node import NodeShape
    >>> ledger = Ledger([NodeShape(gpus=2, cores=2)] * 2, ids=("a", "b"))
    >>> AvoidedNodes(Gang("job", (), avoided=("b",))).usable(ledger).tolist()
    [True, False]
    """

    def __init__(self, gang: Gang) -> None:
        self._gang = gang

    @classmethod
    def of(cls, gang: Gang) -> AvoidedNodes | None:
        """Return the constraint of a gang that avoids nodes, or would if other nodes could hold it."""
        return cls(gang) if gang.avoided or gang.yielded else None

    def usable(self, ledger: Ledger) -> Marks | None:
        """Return all nodes but those to avoid."""
        return _others(self._gang.avoided, ledger) if self._gang.avoided else None

    def explain(self, refusal: Refusal, gang: Gang, ledger: Ledger) -> Refusal:
        """Return a refusal with the nodes that the gang avoids, which the reason does not count, added."""
        if refusal.code not in SAID_OF or not NUMBERS.isdisjoint(refusal.numbers):
            return refusal
        detail, numbers = refusal.detail, dict(refusal.numbers)
        if gang.avoided:
            detail += f"; it avoids {plural(len(gang.avoided), 'server')}: {_names(gang.avoided)}"
            numbers["avoided_nodes"] = float(len(gang.avoided))
        if gang.yielded:
            detail += f"; it would avoid {_names(gang.yielded)} too, but no other server could ever hold it"
            numbers["yielded_nodes"] = float(len(gang.yielded))
        return replace(refusal, detail=detail, numbers=numbers)


def _others(node_ids: Iterable[str], ledger: Ledger) -> Marks:
    """Return all nodes but some."""
    marked = np.ones(len(ledger), dtype=np.bool_)
    marked[[ledger.numbers[node_id] for node_id in node_ids if node_id in ledger.numbers]] = False
    return marked


def relax_avoidance(gang: Gang, ledger: Ledger) -> Gang:
    """Return the gang with as many nodes to avoid as leave others that could ever hold it, even if closed now."""
    if not gang.avoided:
        return gang
    known = tuple(node_id for node_id in gang.avoided if node_id in ledger.numbers)
    kept = known
    while kept and not _could_hold(gang, ledger, _others(kept, ledger)):
        kept = kept[1:]
    if not kept and not _could_hold(gang, ledger, _others((), ledger)):
        kept = known  # no node could hold it even without avoidance
    return replace(gang, avoided=kept, yielded=known[: len(known) - len(kept)])


def _could_hold(gang: Gang, ledger: Ledger, nodes: Marks) -> bool:
    with only_open(ledger, nodes):
        return fits(gang, ledger, within=gang.locality or Locality.ANYWHERE, empty=True)


def _names(node_ids: tuple[str, ...]) -> str:
    more = f" and {len(node_ids) - 3} more" if len(node_ids) > 3 else ""
    return ", ".join(node_ids[:3]) + more
