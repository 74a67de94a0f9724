"""Constraint on the places of a gang: what each kind of constraint may define; everything else is neutral.

Theory of operation. A placement policy need not know any constraint, because `constraints.place` applies them around
it: nodes that a constraint excludes take no work while the policy is asked; an offer that violates one is discarded,
and the constraint assembles another by asking the policy for less; and a refusal is explained in its light. Constraints
that a job sets are part of its gang's requirements (`job_constraints`). The shared steps respect those too: counting,
by which reasons are found (`unschedulable`), and packing, which most policies use.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from cotenant.core.capacity.ledger import Ledger, Offer, Share
from cotenant.core.model.gang import Gang, Part
from cotenant.core.model.refusal import Refusal

Marks = NDArray[np.bool_]
Ask = Callable[[Gang], Offer | Refusal]


@dataclass(frozen=True, slots=True)
class Lacking:
    """What is missing for a constraint, what would change it, and the numbers."""

    detail: str
    remedy: str
    numbers: Mapping[str, float]


class Constraint:
    """A constraint on the places of one gang. Constraints that a job sets are frozen values: they are compared."""

    def usable(self, ledger: Ledger) -> Marks | None:
        """Return the nodes that the gang may use; None: all."""
        return None

    def is_met(self, offer: Offer, ledger: Ledger) -> bool:
        """Return whether an offer meets the constraint."""
        return True

    def assemble(self, ask: Ask, gang: Gang, ledger: Ledger) -> Offer | None:
        """Return places that meet the constraint, from a policy whose own offer did not; None if there are none.

        Leaves the ledger unchanged.
        """
        return place_piecewise(ask, gang, ledger)

    def explain(self, refusal: Refusal, gang: Gang, ledger: Ledger) -> Refusal:
        """Return a policy's refusal in the light of the constraint. Explaining it twice changes nothing."""
        return refusal

    # Of constraints that a job sets ------------------------------------------------------------------------------

    @property
    def in_words(self) -> str:
        """The constraint, after what a gang needs: `on at least 3 servers`."""
        return ""

    @property
    def nodes_min(self) -> int:
        """The fewest nodes that meet the constraint."""
        return 1

    def lacking(self, able: Marks, ledger: Ledger, *, empty: bool = False) -> Lacking | None:
        """Return what is missing if a replica fits only on some nodes, now or if they were `empty`; None if nothing."""
        return None

    def apart(self, used: Collection[int], ledger: Ledger) -> tuple[int, Marks] | None:
        """Return how many more replicas must not be where the gang is already, and where the next one may be.

        None: there is no need.
        """
        return None


def constraints_of(gang: Gang) -> tuple[Constraint, ...]:
    """Return the constraints that a gang's job sets."""
    return cast(tuple[Constraint, ...], gang.constraints)


def nodes_min(constraints: Iterable[Constraint]) -> int:
    """Return the fewest nodes that meet some constraints."""
    return max((constraint.nodes_min for constraint in constraints), default=1)


def may_be_on_one_node(gang: Gang) -> bool:
    """Return whether no constraint that a gang's job sets forbids it to be on one node."""
    return not gang.constraints or nodes_min(constraints_of(gang)) <= 1


def first_lacking(gang: Gang, able: Marks, ledger: Ledger, *, empty: bool = False) -> Lacking | None:
    """Return what is missing for a gang's constraints if a replica fits only on some nodes; None if nothing is."""
    found = (constraint.lacking(able, ledger, empty=empty) for constraint in constraints_of(gang))
    return next(filter(None, found), None)


def apart(gang: Gang, used: Collection[int], ledger: Ledger) -> tuple[int, Marks] | None:
    """Return how many more replicas must not be where a gang is already, and where the next one may be."""
    found = [bound for constraint in constraints_of(gang) if (bound := constraint.apart(used, ledger))]
    return (max(count for count, _ in found), np.logical_and.reduce([where for _, where in found])) if found else None


def replicas_together(gang: Gang, part: Part, used: Collection[int], ledger: Ledger) -> int:
    """Return how many replicas of a part may go anywhere before any has to be apart; the first one is by itself."""
    count, _ = apart(gang, used, ledger) or (0, None)
    return max(0, part.replicas - (count if used else max(0, count - 1)))


def place_piecewise(ask: Ask, gang: Gang, ledger: Ledger) -> Offer | None:
    """Place a gang by asking for as many replicas as may be together, for single ones apart, and for the rest.

    None if the policy refuses that.
    """
    shares: dict[tuple[int, int], Share] = {}
    left = [part.replicas for part in gang.parts]
    with ledger.rolled_back():

        def taken(parts: dict[int, Part]) -> bool:
            """Return whether the policy offered places for these parts, which are then taken."""
            numbers = list(parts)
            answer = ask(replace(gang, parts=tuple(parts.values()), constraints=()))
            if isinstance(answer, Refusal):
                return False
            for share in answer:
                number = numbers[share.part]
                ledger.take(share.node, gang.parts[number].demand, share.replicas, share.gpus)
                before = shares.get((share.node, number), Share(share.node, number, 0))
                replicas, chosen = before.replicas + share.replicas, before.gpus + share.gpus
                shares[share.node, number] = Share(share.node, number, replicas, chosen)
                left[number] -= share.replicas
            return True

        for number, part in sorted(enumerate(gang.parts), key=lambda one: -one[1].demand.gpu_milli):
            together = replicas_together(gang, part, _nodes(shares), ledger)
            if together and not taken({number: replace(part, replicas=together)}):
                return None
            while left[number] and (bound := apart(gang, _nodes(shares), ledger)):
                with only_open(ledger, ledger.open & bound[1]):
                    if not taken({number: replace(part, replicas=1)}):
                        break
        rest = {number: replace(part, replicas=left[number]) for number, part in enumerate(gang.parts) if left[number]}
        if rest and not taken(rest):
            return None
    offer = tuple(shares.values())
    return offer if all(constraint.is_met(offer, ledger) for constraint in constraints_of(gang)) else None


def _nodes(shares: Iterable[tuple[int, int]]) -> set[int]:
    return {node for node, _ in shares}


@contextmanager
def only_open(ledger: Ledger, nodes: Marks) -> Iterator[None]:
    """Open only the marked nodes for a while."""
    before = ledger.open.copy()
    ledger.open[:] = nodes
    try:
        yield
    finally:
        ledger.open[:] = before
