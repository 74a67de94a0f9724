"""Keeps a job with an image on nodes that can run containers, and one with GPUs on those that give them GPUs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cotenant.core.capacity.ledger import Ledger, Offer
from cotenant.core.model.gang import Gang
from cotenant.core.model.job import JobSpec
from cotenant.core.model.refusal import Refusal, plural
from cotenant.core.placement.constraint import Constraint, Lacking, Marks

NUMBER = "servers_without_containers"
NUMBER_GPUS = "servers_without_container_gpus"
REMEDY = "a container runtime is installed on a server, and its agent is restarted"
REMEDY_GPUS = (
    "a CDI spec is written on a server (`nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml`), and its agent is "
    "restarted; `cotenant nodes --json` has the reason as container_gpus_missing"
)


@dataclass(frozen=True)
class RunsContainers(Constraint):
    """Keeps a gang on the nodes that have a container runtime; `gpus`: one that gives containers their GPUs.

    >>> import numpy as np
    >>> from cotenant.core.model.node import NodeShape
    >>> ledger = Ledger([NodeShape(gpus=8, cores=8), NodeShape(gpus=8, cores=8, containers=False)])
    >>> RunsContainers().usable(ledger).tolist()
    [True, False]
    >>> RunsContainers().lacking(np.array([False, True]), ledger).detail
    'runs in a container; 1 server with room has no container runtime'
    """

    gpus: bool = False

    @classmethod
    def of(cls, spec: JobSpec) -> RunsContainers | None:
        """Return the constraint of a job; None if it has no image."""
        return cls(spec.gpu_milli > 0) if spec.container.image else None

    def _able(self, ledger: Ledger) -> Marks:
        return ledger.gives_containers_gpus if self.gpus else ledger.runs_containers

    def usable(self, ledger: Ledger) -> Marks | None:
        """Return the nodes with a container runtime; None: all."""
        able = self._able(ledger)
        return None if able.all() else able

    def is_met(self, offer: Offer, ledger: Ledger) -> bool:
        """Return whether all places are on nodes with a container runtime."""
        able = self._able(ledger)
        return all(able[share.node] for share in offer)

    @property
    def in_words(self) -> str:
        """The constraint, after what a gang needs."""
        return "on servers with a container runtime" + (" that gives containers their GPUs" if self.gpus else "")

    def lacking(self, able: Marks, ledger: Ledger, *, empty: bool = False) -> Lacking | None:
        """Return how many nodes could hold a replica but for their runtime, if no other could."""
        if (able & self._able(ledger)).any() or not able.any():
            return None
        if self.gpus and (without := able & ledger.runs_containers).any():
            count = int(without.sum())
            gives = "gives" if count == 1 else "give"
            detail = f"runs in a container; {plural(count, 'server')} with room {gives} containers no GPUs"
            return Lacking(detail, REMEDY_GPUS, {NUMBER_GPUS: float(count)})
        count = int(able.sum())
        has = "has" if count == 1 else "have"
        detail = f"runs in a container; {plural(count, 'server')} with room {has} no container runtime"
        return Lacking(detail, REMEDY, {NUMBER: float(count)})

    def explain(self, refusal: Refusal, gang: Gang, ledger: Ledger) -> Refusal:
        """Return a refusal that says how many nodes cannot run containers."""
        without = int((~ledger.runs_containers).sum())
        if self.gpus and NUMBER_GPUS not in refusal.numbers:
            refusal = _explain_gpus(refusal, ledger)
        if not without or NUMBER in refusal.numbers:
            return refusal
        numbers = {**refusal.numbers, NUMBER: float(without)}
        has = "has" if without == 1 else "have"
        detail = f"{refusal.detail}; {plural(without, 'server')} {has} no container runtime for its image"
        return replace(refusal, detail=detail, numbers=numbers)


def _explain_gpus(refusal: Refusal, ledger: Ledger) -> Refusal:
    without = int((ledger.runs_containers & ~ledger.gives_containers_gpus & ledger.has_gpus).sum())
    if not without:
        return refusal
    gives = "gives" if without == 1 else "give"
    detail = f"{refusal.detail}; {plural(without, 'server')} {gives} containers no GPUs"
    return replace(refusal, detail=detail, numbers={**refusal.numbers, NUMBER_GPUS: float(without)})
