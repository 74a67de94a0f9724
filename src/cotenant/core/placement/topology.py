"""Keeps a gang that requires one rack within one rack.

Few policies consider racks. If another policy's offer spans several racks, it is discarded, and the policy is asked
rack by rack while the other racks are closed, those with the least room first.
"""

from __future__ import annotations

import numpy as np

from cotenant.core.capacity.ledger import Ledger, Offer
from cotenant.core.model.gang import Gang
from cotenant.core.model.job import Locality
from cotenant.core.model.refusal import Refusal
from cotenant.core.placement.constraint import Ask, Constraint, only_open
from cotenant.core.placement.unschedulable import fits, no_place


class OneRack(Constraint):
    """Keeps a gang within one rack."""

    @classmethod
    def of(cls, gang: Gang) -> OneRack | None:
        """Return the constraint of a gang that requires one rack."""
        return cls() if gang.locality is Locality.RACK else None

    def is_met(self, offer: Offer, ledger: Ledger) -> bool:
        """Return whether all places are in one rack."""
        nodes = [share.node for share in offer if 0 <= share.node < len(ledger)]
        return len(set(ledger.rack_numbers[nodes].tolist())) <= 1

    def assemble(self, ask: Ask, gang: Gang, ledger: Ledger) -> Offer | None:
        """Return places in the first rack that suffices, those with the least room first."""
        racks = ledger.rack_numbers
        able, free = ledger.open.copy(), np.bincount(racks, ledger.free_milli)
        for rack in sorted(set(racks.tolist()), key=lambda rack: (free[rack], rack)):
            with only_open(ledger, able & (racks == rack)):
                if not fits(gang, ledger, within=Locality.RACK):
                    continue
                answer = ask(gang)
            if not isinstance(answer, Refusal):
                return answer
        return None

    def explain(self, refusal: Refusal, gang: Gang, ledger: Ledger) -> Refusal:
        """Return why no rack could ever hold the gang, if the whole cluster might."""
        within = Locality.RACK
        return refusal if fits(gang, ledger, within=within, empty=True) else no_place(gang, ledger, within=within)
