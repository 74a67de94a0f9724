"""Keeps a gang away from nodes on which it failed because of the node, or was in another job's way.

Policies need not know: while a policy is asked, the nodes that the gang avoids take no work. A gang must not wait
forever because of that, so avoidance yields, the longest avoided node first, if no other node could ever hold the gang.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cotenant.core.capacity.ledger import Ledger
from cotenant.core.model.gang import Gang
from cotenant.core.model.job import Locality
from cotenant.core.model.refusal import Code, Refusal, plural
from cotenant.core.placement.unschedulable import fits

SAID_OF = frozenset({Code.CAPACITY, Code.FRAGMENTED, Code.NO_NODES, Code.NODES_HELD, Code.QOS, Code.RESERVED})


@contextmanager
def avoided_nodes_closed(gang: Gang, ledger: Ledger) -> Iterator[None]:
    """Close the nodes that a gang avoids for a while; ids that the ledger does not know are ignored.

    >>> from cotenant.core.model.gang import Demand
    >>> from cotenant.core.model.node import NodeShape
    >>> ledger = Ledger([NodeShape(gpus=2, cores=2)] * 2, ids=("a", "b"))
    >>> with avoided_nodes_closed(Gang("job", (), avoided=("b",)), ledger):
    ...     ledger.room(Demand(gpu_milli=1000)).tolist()
    [2, 0]
    """
    if not gang.avoided:
        yield
        return
    with only_open(ledger, _others(gang.avoided, ledger) & ledger.open):
        yield


@contextmanager
def only_open(ledger: Ledger, nodes: NDArray[np.bool_]) -> Iterator[None]:
    """Open only the marked nodes for a while."""
    before = ledger.open.copy()
    ledger.open[:] = nodes
    try:
        yield
    finally:
        ledger.open[:] = before


def _others(node_ids: Iterable[str], ledger: Ledger) -> NDArray[np.bool_]:
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


def _could_hold(gang: Gang, ledger: Ledger, nodes: NDArray[np.bool_]) -> bool:
    with only_open(ledger, nodes):
        return fits(gang, ledger, within=gang.locality or Locality.ANYWHERE, empty=True)


def with_avoidance(refusal: Refusal, gang: Gang) -> Refusal:
    """Return a refusal with the nodes that the gang avoids, which the reason does not count, added."""
    if not (gang.avoided or gang.yielded) or refusal.code not in SAID_OF:
        return refusal
    detail, numbers = refusal.detail, dict(refusal.numbers)
    if gang.avoided:
        detail += f"; it avoids {plural(len(gang.avoided), 'server')}: {_names(gang.avoided)}"
        numbers["avoided_nodes"] = float(len(gang.avoided))
    if gang.yielded:
        detail += f"; it would avoid {_names(gang.yielded)} too, but no other server could ever hold it"
        numbers["yielded_nodes"] = float(len(gang.yielded))
    return replace(refusal, detail=detail, numbers=numbers)


def _names(node_ids: tuple[str, ...]) -> str:
    more = f" and {len(node_ids) - 3} more" if len(node_ids) > 3 else ""
    return ", ".join(node_ids[:3]) + more
