"""Keeps a job that needs something of an executor on nodes whose executor declares it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cotenant.core.capacity.ledger import Ledger, Offer
from cotenant.core.model.gang import Gang
from cotenant.core.model.job import JobSpec
from cotenant.core.model.node_capabilities import Capability
from cotenant.core.model.refusal import Refusal, plural
from cotenant.core.placement.constraint import Constraint, Lacking, Marks

NUMBER = "servers_without_capability"
REMEDY = "nodes join whose executor can do that, or the job does without it"
_NEEDS = {
    Capability.FOLDERS: "starts in an uploaded folder",
    Capability.SECRETS: "reads secrets",
    Capability.PRE_RUNS: "has a pre-run",
}


@dataclass(frozen=True)
class HasCapabilities(Constraint):
    """Keeps a gang on the nodes whose executors can do what the job needs.

    >>> import numpy as np
    >>> from cotenant.core.model.node import NodeShape
    >>> bare = NodeShape(gpus=8, cores=8, lacks=frozenset([Capability.SECRETS]))
    >>> ledger, needs = Ledger([NodeShape(gpus=8, cores=8), bare]), HasCapabilities((Capability.SECRETS,))
    >>> needs.usable(ledger).tolist()
    [True, False]
    >>> needs.lacking(np.array([False, True]), ledger).detail
    'reads secrets; the executor of 1 server with room cannot do that'
    """

    needs: tuple[Capability, ...]

    @classmethod
    def of(cls, spec: JobSpec) -> HasCapabilities | None:
        """Return the constraint of a job; None if any executor can run it."""
        needs = spec.needs
        return cls(needs) if needs else None

    def usable(self, ledger: Ledger) -> Marks | None:
        """Return the nodes that can do it; None: all."""
        able = ledger.able(self.needs)
        return None if able.all() else able

    def is_met(self, offer: Offer, ledger: Ledger) -> bool:
        """Return whether all places are on nodes that can do it."""
        able = ledger.able(self.needs)
        return all(able[share.node] for share in offer)

    @property
    def in_words(self) -> str:
        """The constraint, after what a gang needs."""
        return f"on servers that can run a job that {self._what}"

    @property
    def _what(self) -> str:
        return " and ".join(_NEEDS[need] for need in self.needs)

    def lacking(self, able: Marks, ledger: Ledger, *, empty: bool = False) -> Lacking | None:
        """Return how many nodes could hold a replica but for their executor, if no other could."""
        if (able & ledger.able(self.needs)).any() or not able.any():
            return None
        count = int(able.sum())
        detail = f"{self._what}; the executor of {plural(count, 'server')} with room cannot do that"
        return Lacking(detail, REMEDY, {NUMBER: float(count)})

    def explain(self, refusal: Refusal, gang: Gang, ledger: Ledger) -> Refusal:
        """Return a refusal that says on how many nodes the job cannot run."""
        without = int((~ledger.able(self.needs)).sum())
        if not without or NUMBER in refusal.numbers:
            return refusal
        detail = (
            f"{refusal.detail}; the job {self._what}, and the executor of {plural(without, 'server')} cannot do that"
        )
        return replace(refusal, detail=detail, numbers={**refusal.numbers, NUMBER: float(without)})
