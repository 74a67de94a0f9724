"""Taking what a policy offered, whole or not at all."""

from __future__ import annotations

from cotenant.core.gangs import Gang
from cotenant.core.ledger import Holding, Ledger, Offer


class BrokenGang(Exception):
    """A policy offered places for a part of a gang, or for more than all of it: a bug in the policy."""


def take(ledger: Ledger, gang: Gang, offer: Offer) -> tuple[Holding, ...]:
    """Take what an offer names, whole or not at all.

    Raises:
        Overcommitted: the offer names what is not free.
        BrokenGang: the offer has not a place for each replica, or more than one.
    """
    offered = [0] * len(gang.parts)
    for share in offer:
        offered[share.part] += share.replicas
    if offered != [part.replicas for part in gang.parts]:
        raise BrokenGang(f"{gang} was offered places for {offered} replicas: {offer}")
    with ledger.attempt() as attempt:
        for share in offer:
            attempt.take(share.node, gang.parts[share.part].demand, share.replicas, share.gpus)
        return attempt.commit()
