"""Free resources on nodes that take work, added up by node class, and cached while nothing changes."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np

from cotenant.core.capacity.ledger import Ledger
from cotenant.core.model.refusal import Refusal
from cotenant.core.model.resources import UNITS, Resources, added

KINDS_FEW = 4  # classes are added up one by one


@dataclass(frozen=True, slots=True)
class FreeTotals:
    """Resources on nodes that take work, added up by node class.

    Valid as long as the ledger's stamp is the same.
    """

    stamp: tuple[int, int, bytes]
    counts: tuple[int, ...]
    free: tuple[Resources, ...]
    total: tuple[Resources, ...]
    known: dict[tuple[bool, ...], tuple[Resources, Resources]] = field(default_factory=dict)
    refusals: dict[Hashable, Refusal] = field(default_factory=dict)  # refusals given so far, by what is short

    def sums(self, kinds: tuple[bool, ...]) -> tuple[Resources, Resources]:
        """Return what is free on nodes of some classes, and what these nodes have."""
        if (known := self.known.get(kinds)) is None:
            free, total = (
                [one for one, there in zip(some, kinds, strict=True) if there] for some in (self.free, self.total)
            )
            known = self.known[kinds] = added(free), added(total)
        return known


def current_totals(ledger: Ledger) -> FreeTotals:
    """Return the totals by node class, computed if they are not cached."""
    if known := cached_totals(ledger):
        return known
    taking, count = ledger.open, ledger.kinds.shape[1]
    if count <= KINDS_FEW:
        free = np.array([ledger.sums(taking & (ledger.kind_of == kind)) for kind in range(count)], dtype=np.int64)
    else:
        free = np.zeros((count, len(UNITS)), dtype=np.int64)
        for number, column in enumerate((ledger.free_milli, *ledger.rows[1:])):
            np.add.at(free[:, number], ledger.kind_of[taking], column[taking])
    counts = open_nodes_by_kind(ledger)
    nodes = np.array(counts, dtype=np.int64)
    total = (ledger.kinds * np.array(UNITS)[:, None] * nodes).T
    left, have = (tuple(Resources(*sums) for sums in some.tolist()) for some in (free, total))
    totals = ledger.totals = FreeTotals(_stamp(ledger), counts, left, have)
    return totals


def cached_totals(ledger: Ledger) -> FreeTotals | None:
    """Return the cached totals if nothing has changed since; else None."""
    totals = ledger.totals
    return totals if isinstance(totals, FreeTotals) and totals.stamp == _stamp(ledger) else None


def open_nodes_by_kind(ledger: Ledger) -> tuple[int, ...]:
    """Return the number of nodes of each class that take work."""
    taking = ledger.open.tobytes()
    if ledger.open_kinds is None or ledger.open_kinds[0] != taking:
        counts = np.bincount(ledger.kind_of[ledger.open], minlength=ledger.kinds.shape[1])
        ledger.open_kinds = taking, tuple(counts.tolist())
    return ledger.open_kinds[1]


def _stamp(ledger: Ledger) -> tuple[int, int, bytes]:
    return ledger.mark, ledger.override_version, ledger.open.tobytes()
