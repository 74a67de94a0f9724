"""What a placement policy may know beside the gang and the ledger: the time, and who holds what.

Most policies need none of it: places follow from what is free. Those that weigh neighbours, move jobs together or lend
cores for a while implement `Sees` and are shown a scene before each cycle. Whoever runs the cycle keeps the scene, the
simulator as the live mesh does; a policy only reads it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol, runtime_checkable

import numpy as np

from cotenant.core.capacity.ledger import Holding, Ledger, Offer
from cotenant.core.model.gang import Gang
from cotenant.core.model.refusal import Refusal


@dataclass(frozen=True, slots=True)
class Resident:
    """A job that holds something now.

    `since_seconds` is when its run began, on the scene's clock. `stop_cost_seconds` is what a stop would cost it: the
    run time since its last checkpoint, and its restart. `reclaimable`: what it holds was lent to it, and may be taken
    back for a job that it was reserved for. Of what was estimated of it, `remaining_seconds` is as of now; what stands
    beside candidate allocations is as it was told before it started.
    """

    gang: Gang
    holdings: tuple[Holding, ...]
    since_seconds: float
    preemptible: bool = True
    stop_cost_seconds: float = 0.0
    reclaimable: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Stay:
    """What a run holds, of how many GPUs its gang is, and since when: one object for as long as all of that is so.

    Sums over all who are there are kept up to date by those that came, went or changed: by objects that are others than
    before. What changes by itself with time, as an estimate does, is a `Resident`'s.
    """

    gpu_milli: int
    holdings: tuple[Holding, ...]
    since_seconds: float
    reclaimable: bool = False

    @classmethod
    def of(cls, resident: Resident) -> Stay:
        """Say what a resident holds."""
        return cls(resident.gang.gpu_milli, resident.holdings, resident.since_seconds, resident.reclaimable)


class Scene(Protocol):
    """Who holds what at one moment. Read within the cycle that it was shown for, not later."""

    now: float

    def residents(self) -> Mapping[str, Resident]:
        """Give all jobs that hold something, by id."""

    def on(self, node: int) -> Sequence[Resident]:
        """Give those that hold something on a node, by its number in the ledger."""

    def resident(self, job_id: str) -> Resident:
        """Give one of those who hold something."""
        return self.residents()[job_id]

    def stays(self) -> Mapping[str, Stay]:
        """Say of all what they hold; whoever keeps a scene from cycle to cycle gives the same objects again."""
        return {job_id: Stay.of(one) for job_id, one in self.residents().items()}


@runtime_checkable
class Sees(Protocol):
    """A placement policy that looks at more than what is free."""

    def see(self, scene: Scene) -> None:
        """Take note of how things stand; called before each cycle, in which the scene goes on with what is decided."""


@runtime_checkable
class Heeds(Protocol):
    """A placement policy to which it matters who is beside whom."""

    def bears(self, nodes: Sequence[int], ledger: Ledger) -> bool:
        """Tell whether all on some nodes can be beside each other, as the scene and the ledger stand.

        Asked of those who were to make room and might stay after all, for there is room for them too.
        """


@dataclass(frozen=True, slots=True)
class Rearrangement:
    """Places for a gang once some residents have made room, and the places that those are given instead."""

    offer: Offer
    moves: tuple[tuple[Resident, Offer], ...]


@runtime_checkable
class Rearranges(Protocol):
    """A placement policy that moves cheap jobs where that lets a gang start (Philly, section 5 [P])."""

    def rearrange(
        self, gang: Gang, refusal: Refusal, ledger: Ledger, rng: np.random.Generator, fixed: Collection[str]
    ) -> Rearrangement | None:
        """Find places for a gang that `place` refused; None where no moves would help, or none are worth it.

        The jobs in `fixed` have to go, or were moved already: they are not where the scene shows them any more. The
        ledger is left as it was.
        """


class Unfolding(Scene):
    """A scene as a cycle goes on: without those who were sent away since it was shown, with those who were placed."""

    def __init__(self, scene: Scene) -> None:
        self.now = scene.now
        self._scene = scene
        self._gone: set[str] = set()
        self._hidden: frozenset[str] = frozenset()
        self._came: dict[str, Resident] = {}
        self._by_node: dict[int, dict[str, Resident]] = {}

    def residents(self) -> Mapping[str, Resident]:
        """All who are there as the cycle stands."""
        stay = {job_id: one for job_id, one in self._scene.residents().items() if job_id not in self._gone}
        return {job_id: one for job_id, one in (stay | self._came).items() if job_id not in self._hidden}

    def on(self, node: int) -> Sequence[Resident]:
        """Those of them who are on a node."""
        stay = [one for one in self._scene.on(node) if one.gang.job_id not in self._gone]
        some = [*stay, *self._by_node.get(node, {}).values()]
        return [one for one in some if one.gang.job_id not in self._hidden] if self._hidden else some

    def resident(self, job_id: str) -> Resident:
        """One of them."""
        return self._came.get(job_id) or self._scene.resident(job_id)

    def stays(self) -> Mapping[str, Stay]:
        """What they hold."""
        stays = self._scene.stays()
        if not (self._gone or self._came or self._hidden):
            return stays
        stay = {job_id: one for job_id, one in stays.items() if job_id not in self._gone}
        came = {job_id: Stay.of(one) for job_id, one in self._came.items()}
        return {job_id: one for job_id, one in (stay | came).items() if job_id not in self._hidden}

    @contextmanager
    def without(self, job_ids: Collection[str]) -> Iterator[None]:
        """Show it for a while as if some were gone."""
        before, self._hidden = self._hidden, self._hidden.union(job_ids)
        try:
            yield
        finally:
            self._hidden = before

    def come(self, gang: Gang, holdings: tuple[Holding, ...]) -> None:
        """A gang was placed."""
        resident = Resident(gang, holdings, self.now)
        self._came[gang.job_id] = resident
        for holding in holdings:
            self._by_node.setdefault(holding.node, {})[gang.job_id] = resident

    def leave(self, job_id: str) -> None:
        """One who was there when the scene was shown was sent away."""
        self._gone.add(job_id)

    def stay(self, job_id: str) -> None:
        """It was not, after all."""
        self._gone.discard(job_id)


@dataclass(frozen=True, slots=True)
class Reclaim:
    """Places for a gang once borrowers have made room: those with a new place go there, the others stop and wait."""

    offer: Offer
    stops: tuple[Resident, ...]
    moves: tuple[tuple[Resident, Offer], ...] = ()


@runtime_checkable
class Reclaims(Protocol):
    """A placement policy that lends what is reserved, and takes it back for whom it was reserved (CODA [P]).

    What is lent is taken back whatever the order of the queue says: whoever borrows runs until then.
    """

    def lends(self, gang: Gang, offer: Offer, ledger: Ledger) -> bool:
        """Tell whether a gang that starts there borrows; asked once, before the ledger has it.

        The policy may take note of it until it is shown the next scene.
        """

    def reclaim(self, gang: Gang, ledger: Ledger, rng: np.random.Generator, fixed: Collection[str]) -> Reclaim | None:
        """Find places for a gang that `place` refused, at the cost of borrowers; None where that is too little.

        The jobs in `fixed` are not where the scene shows them any more. The ledger is left as it was.
        """


class Still(Scene):
    """A scene in which nobody holds anything, at time 0: for tests and for policies asked outside a cycle."""

    now = 0.0

    def residents(self) -> Mapping[str, Resident]:
        """Nobody."""
        return MappingProxyType({})

    def on(self, node: int) -> Sequence[Resident]:
        """Nobody."""
        return ()


NOBODY = Still()
