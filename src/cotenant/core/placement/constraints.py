"""Applies constraints around a placement policy, which need not know them: `constraint` has the theory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import numpy as np

from cotenant.core.capacity.ledger import Ledger, Offer
from cotenant.core.model.gang import Gang
from cotenant.core.model.job import Locality
from cotenant.core.model.refusal import Refusal
from cotenant.core.placement.constraint import Ask, Constraint, constraints_of, only_open
from cotenant.core.placement.node_avoidance import AvoidedNodes
from cotenant.core.placement.topology import OneRack
from cotenant.core.placement.unschedulable import no_place
from cotenant.core.policy.protocols import PlacementPolicy

# From the outside in, before those that jobs set (`job_constraints`).
CONSTRAINTS: tuple[Callable[[Gang], Constraint | None], ...] = (AvoidedNodes.of, OneRack.of)


def place(policy: PlacementPolicy, gang: Gang, ledger: Ledger, rng: np.random.Generator) -> Offer | Refusal:
    """Return a policy's offer for a gang that meets all constraints of the gang, or why there is none.

    >>> from cotenant.core.model.gang import Demand, Part
    >>> from cotenant.core.model.job import Locality
    >>> from cotenant.core.model.node import NodeShape
    >>> from cotenant.policies.count import Count
    >>> ledger = Ledger([NodeShape(gpus=1, cores=2)] * 3, ["r0", "r1", "r1"])
    >>> gang = Gang("a", (Part("worker", 2, Demand(gpu_milli=1000)),), Locality.RACK)
    >>> [(share.node, share.replicas) for share in place(Count(), gang, ledger, np.random.default_rng(0))]
    [(1, 1), (2, 1)]
    """
    if not (constraints := on(gang)):
        return policy.place(gang, ledger, rng)
    return _place_under(constraints, lambda some: policy.place(some, ledger, rng), gang, ledger)


def on(gang: Gang) -> list[Constraint]:
    """Return the constraints on a gang's places."""
    found = [constraint for of in CONSTRAINTS if (constraint := of(gang))]
    return [*found, *constraints_of(gang)] if gang.constraints else found


def are_met(gang: Gang, offer: Offer, ledger: Ledger) -> bool:
    """Return whether an offer meets all constraints on a gang's places."""
    return all(constraint.is_met(offer, ledger) for constraint in on(gang))


@contextmanager
def usable_nodes_open(gang: Gang, ledger: Ledger) -> Iterator[None]:
    """Close the nodes that a gang may not use for a while."""
    usable = [marks for constraint in on(gang) if (marks := constraint.usable(ledger)) is not None]
    if not usable:  # most gangs: closing nodes costs more than most answers
        yield
        return
    with only_open(ledger, np.logical_and.reduce([ledger.open, *usable])):
        yield


def _place_under(constraints: Sequence[Constraint], ask: Ask, gang: Gang, ledger: Ledger) -> Offer | Refusal:
    """Return an offer that meets some constraints, each of which sees the answer under those after it."""
    if not constraints:
        return ask(gang)
    first, others = constraints[0], constraints[1:]

    def ask_under_others(gang: Gang) -> Offer | Refusal:
        return _place_under(others, ask, gang, ledger)

    usable = first.usable(ledger)
    with nullcontext() if usable is None else only_open(ledger, ledger.open & usable):
        answer = ask_under_others(gang)
        if not isinstance(answer, Refusal) and not first.is_met(answer, ledger):
            within = gang.locality or Locality.ANYWHERE
            answer = first.assemble(ask_under_others, gang, ledger) or no_place(gang, ledger, within=within)
        return first.explain(answer, gang, ledger) if isinstance(answer, Refusal) else answer
