"""Calls of the placement policy during a cycle."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeVar

import numpy as np

from cotenant.core.capacity.ledger import Ledger, Offer
from cotenant.core.model.gang import Gang
from cotenant.core.model.refusal import Refusal
from cotenant.core.placement import constraints
from cotenant.core.placement.gang_allocation import take
from cotenant.core.policy.capabilities import capability_of
from cotenant.core.policy.cluster_view import Rearrangement, Rearranges, Reclaim, Reclaims
from cotenant.core.policy.protocols import PlacementPolicy

Answer = TypeVar("Answer")
Moving = TypeVar("Moving", Rearrangement, Reclaim)
OnBroken = Callable[[Gang, Exception], Refusal]


class PolicyCalls:
    """A placement policy, called under the constraints of the gang in question.

    Invariant: no call changes the ledger. With `on_broken`, an error of the policy is a refusal of the gang it was
    called for, and so is an offer that cannot be taken.
    """

    def __init__(
        self, policy: PlacementPolicy, ledger: Ledger, rng: np.random.Generator, on_broken: OnBroken | None
    ) -> None:
        self._policy, self._ledger, self._rng, self._on_broken = policy, ledger, rng, on_broken
        self._rearranges, self._reclaims = capability_of(policy, Rearranges), capability_of(policy, Reclaims)

    def offer(self, gang: Gang) -> Offer | Refusal:
        """Return places for a gang, or why there are none."""
        return self._guarded(gang, lambda: self._offer(gang))

    def _offer(self, gang: Gang) -> Offer | Refusal:
        if self._on_broken is None:
            return constraints.place(self._policy, gang, self._ledger, self._rng)
        with self._ledger.rolled_back():
            offer = constraints.place(self._policy, gang, self._ledger, self._rng)
            if not isinstance(offer, Refusal):
                take(self._ledger, gang, offer)
            return offer

    def rearrangement(self, gang: Gang, refusal: Refusal, fixed: Collection[str]) -> Rearrangement | Refusal | None:
        """Return moves that make room for a refused gang, if the policy moves jobs; those in `fixed` cannot move."""
        if (moves := self._rearranges) is None:
            return None
        return self._constrained(gang, lambda: moves.rearrange(gang, refusal, self._ledger, self._rng, fixed))

    def reclaim(self, gang: Gang, fixed: Collection[str]) -> Reclaim | Refusal | None:
        """Return how borrowers make room for a gang, if the policy lends; those in `fixed` cannot."""
        if (lends := self._reclaims) is None:
            return None
        return self._constrained(gang, lambda: lends.reclaim(gang, self._ledger, self._rng, fixed))

    def lends(self, gang: Gang, offer: Offer) -> bool:
        """Return whether a gang would borrow what it is offered."""
        return self._reclaims is not None and self._reclaims.lends(gang, offer, self._ledger)

    def _constrained(self, gang: Gang, ask: Callable[[], Moving | None]) -> Moving | Refusal | None:
        """Ask for places where other jobs make room; None if they, or the places of jobs that move, are not allowed."""
        with constraints.usable_nodes_open(gang, self._ledger):
            found = self._guarded(gang, ask)
        if found is None or isinstance(found, Refusal):
            return found
        placed = [(gang, found.offer)]
        for one, there in found.moves:
            placed.append((one.gang, there))
        return found if all(constraints.are_met(one, offer, self._ledger) for one, offer in placed) else None

    def _guarded(self, gang: Gang, ask: Callable[[], Answer]) -> Answer | Refusal:
        try:
            return ask()
        except Exception as error:
            if self._on_broken is None:
                raise
            return self._on_broken(gang, error)
