"""Takes what a policy offered, whole or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cotenant.core.capacity.ledger import Holding, Ledger, Offer
from cotenant.core.model.gang import Gang
from cotenant.core.model.job import WHOLE_GPU_MILLI


class InvalidOffer(Exception):
    """A policy offered places for only a part of a gang, or for more than all of it: a bug in the policy."""


@dataclass(frozen=True, slots=True)
class Victim:
    """A running job that the order does not protect, and what it holds.

    Only the first `ahead` gangs may have its resources, because it outranks later ones; None: all may. Among jobs of
    equal `standing`, those with the smallest `stop_cost_seconds` are stopped, and lower standings before higher ones;
    None: the order alone decides.
    """

    job_id: str
    holdings: tuple[Holding, ...]
    ahead: int | None = None
    tenant: str = ""
    standing: int | None = None
    stop_cost_seconds: float = 0.0


def take(ledger: Ledger, gang: Gang, offer: Offer) -> tuple[Holding, ...]:
    """Take what an offer names, whole or not at all.

    Raises:
        Overcommitted: the offer includes resources that are not free.
        BrokenGang: the offer does not have exactly one place for each replica.
    """
    offered = [0] * len(gang.parts)
    for share in offer:
        offered[share.part] += share.replicas
    if offered != [part.replicas for part in gang.parts]:
        raise InvalidOffer(f"{gang} was offered places for {offered} replicas: {offer}")
    with ledger.transaction() as transaction:
        for share in offer:
            transaction.take(share.node, gang.parts[share.part].demand, share.replicas, share.gpus)
        return transaction.commit()


def gpu_milli_of(holdings: Iterable[Holding]) -> int:
    """Return the sum of GPUs in thousandths."""
    return sum(
        sum(milli for _, milli in holding.shares) if holding.shares else holding.gpus * WHOLE_GPU_MILLI
        for holding in holdings
    )


def cores_of(holdings: Iterable[Holding]) -> int:
    """Return the sum of cores."""
    return sum(holding.cores for holding in holdings)


def release_all(ledger: Ledger, holdings: Iterable[Holding]) -> None:
    """Release all of some holdings."""
    for holding in holdings:
        ledger.release(holding)


def hold_all(ledger: Ledger, holdings: Sequence[Holding]) -> bool:
    """Hold all of some holdings, or nothing if some are not free; returns whether it held them."""
    held: list[Holding] = []
    for holding in holdings:
        if not ledger.hold_if_free(holding):
            for done in held:
                ledger.release(done)
            return False
        held.append(holding)
    return True
