"""Keeps a job with an image on nodes that can run containers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cotenant.core.capacity.ledger import Ledger, Offer
from cotenant.core.model.gang import Gang
from cotenant.core.model.job import JobSpec
from cotenant.core.model.refusal import Refusal, plural
from cotenant.core.placement.constraint import Constraint, Lacking, Marks

NUMBER = "servers_without_containers"
REMEDY = "a container runtime is installed on a server, and its agent is restarted"


@dataclass(frozen=True)
class RunsContainers(Constraint):
    """Keeps a gang on the nodes that have a container runtime.

    >>> import numpy as np
    >>> from cotenant.core.model.node import NodeShape
    >>> ledger = Ledger([NodeShape(gpus=8, cores=8), NodeShape(gpus=8, cores=8, containers=False)])
    >>> RunsContainers().usable(ledger).tolist()
    [True, False]
    >>> RunsContainers().lacking(np.array([False, True]), ledger).detail
    'runs in a container; 1 server with room has no container runtime'
    """

    @classmethod
    def of(cls, spec: JobSpec) -> RunsContainers | None:
        """Return the constraint of a job; None if it has no image."""
        return cls() if spec.container.image else None

    def usable(self, ledger: Ledger) -> Marks | None:
        """Return the nodes with a container runtime; None: all."""
        return None if ledger.runs_containers.all() else ledger.runs_containers

    def is_met(self, offer: Offer, ledger: Ledger) -> bool:
        """Return whether all places are on nodes with a container runtime."""
        return all(ledger.runs_containers[share.node] for share in offer)

    @property
    def in_words(self) -> str:
        """The constraint, after what a gang needs."""
        return "on servers with a container runtime"

    def lacking(self, able: Marks, ledger: Ledger, *, empty: bool = False) -> Lacking | None:
        """Return how many nodes could hold a replica but for their runtime, if no other could."""
        if (able & ledger.runs_containers).any() or not able.any():
            return None
        count = int(able.sum())
        has = "has" if count == 1 else "have"
        detail = f"runs in a container; {plural(count, 'server')} with room {has} no container runtime"
        return Lacking(detail, REMEDY, {NUMBER: float(count)})

    def explain(self, refusal: Refusal, gang: Gang, ledger: Ledger) -> Refusal:
        """Return a refusal that says how many nodes cannot run containers."""
        without = int((~ledger.runs_containers).sum())
        if not without or NUMBER in refusal.numbers:
            return refusal
        numbers = {**refusal.numbers, NUMBER: float(without)}
        has = "has" if without == 1 else "have"
        detail = f"{refusal.detail}; {plural(without, 'server')} {has} no container runtime for its image"
        return replace(refusal, detail=detail, numbers=numbers)
