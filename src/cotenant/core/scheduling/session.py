"""The placement session: places the gangs of one cycle, on free resources and on those of jobs that move or stop.

Its parts, each with an invariant of its own, are the tentative cluster (`TentativeCluster`), the jobs that may be
stopped (`Victims`), the reservations (`ReservationBook`), and the calls of the policy (`PolicyCalls`). The session
keeps one more: a gang that is refused leaves all of them as they were, except for a reservation made for it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cotenant.core.capacity.ledger import Holding, Ledger, Offer
from cotenant.core.model.gang import Gang
from cotenant.core.model.refusal import Code, Refusal, plural
from cotenant.core.model.tenancy import Headroom
from cotenant.core.placement.gang_allocation import Victim, cores_of, gpu_milli_of
from cotenant.core.policy.capabilities import capability_of
from cotenant.core.policy.cluster_view import (
    EMPTY_CLUSTER,
    ChecksNeighbors,
    ClusterView,
    Rearrangement,
    Reclaim,
    UsesClusterView,
)
from cotenant.core.policy.protocols import PlacementPolicy, equivalence_key_by
from cotenant.core.scheduling.equivalence import UNAFFECTED_BY_ROOM
from cotenant.core.scheduling.policy_calls import OnBroken, PolicyCalls
from cotenant.core.scheduling.preemption import fewest
from cotenant.core.scheduling.reservation_book import ReservationBook
from cotenant.core.scheduling.reservations import NO_RESERVATIONS, Reservation, ReservationRules, held_back
from cotenant.core.scheduling.tentative_cluster import TentativeCluster
from cotenant.core.scheduling.victims import Victims


@dataclass(frozen=True, slots=True)
class Start:
    """A gang, its places, and what it will hold; `needs_room` if a stop must come first.

    `stops` are running jobs that it outranks and that go for it unless they can stay in the end, `moves` jobs that go
    elsewhere for it, `reclaims` jobs that give back borrowed resources. A `reclaimable` start borrows until the jobs
    that its resources are reserved for need them.
    """

    gang: Gang
    offer: Offer
    holdings: tuple[Holding, ...]
    needs_room: bool
    stops: tuple[str, ...] = ()
    moves: tuple[str, ...] = ()
    reclaims: tuple[str, ...] = ()
    reclaimable: bool = False


class PlacementSession:
    """Places gangs one after the other. `moves` and `reclaimed` are the jobs that move, or stop for what they borrowed.

    The caller rolls the ledger back at the end.
    """

    def __init__(
        self,
        ledger: Ledger,
        policy: PlacementPolicy,
        rng: np.random.Generator,
        victims: Iterable[Victim],
        headroom: Headroom,
        on_broken: OnBroken | None,
        cluster_view: ClusterView = EMPTY_CLUSTER,
        reserving: ReservationRules = NO_RESERVATIONS,
    ) -> None:
        self.equivalence_key = equivalence_key_by(policy)
        self.moves: list[Start] = []
        self.reclaimed: list[str] = []  # ids
        self.staying: frozenset[str] = frozenset()  # running jobs that neither move nor give anything back
        self._policy, self._calls = policy, PolicyCalls(policy, ledger, rng, on_broken)
        self._cluster = TentativeCluster(ledger, headroom, cluster_view, capability_of(policy, ChecksNeighbors))
        self._victims = Victims(victims)
        self._book = ReservationBook(reserving, self._cluster, cluster_view)
        if view_user := capability_of(policy, UsesClusterView):
            view_user.begin_cycle(self._cluster.view)

    @property
    def reservations(self) -> list[Reservation]:
        """The reservations of gangs that have waited long."""
        return self._book.reservations

    def note_starting(self, starts: Iterable[Start]) -> None:
        """Note jobs that an earlier plan starts as soon as others have left: they do not run yet, but will end."""
        for start in starts:
            self._book.note_start(start.gang, start.holdings)

    def advance_to(self, number: float) -> None:
        """Advance to the gang of this number: victims before it in the order stay, or return to free resources."""
        self._victims.advance_to(number, self._cluster.restore)

    def stops(self) -> list[str]:
        """Return the jobs that must stop, after all gangs have been placed."""
        self._victims.advance_to(math.inf, self._cluster.restore)
        return [victim.job_id for victim in self._victims.evicted]

    def over_limit(self, gang: Gang) -> Refusal | None:
        """Return how a gang would exceed its tenant's limit even if all victims of that tenant stopped; else None."""
        headroom = self._cluster.headroom
        if not headroom or not (over := headroom.refuse(gang.tenant, gang.gpu_milli, gang.cores)):
            return None
        return over if self._own_victims(gang) is None else None

    def _own_victims(self, gang: Gang) -> list[Victim] | None:
        """Return victims of the gang's own tenant that must stop because of its limit; None: all are too few."""
        headroom = self._cluster.headroom
        if headroom.allows(gang.tenant, gang.gpu_milli, gang.cores):
            return []
        self._victims.load()
        milli = cores = 0
        own: list[Victim] = []
        mine = self._victims.of_tenant(gang.tenant)
        while not headroom.allows(gang.tenant, gang.gpu_milli - milli, gang.cores - cores):
            if (victim := next(mine, None)) is None:
                return None
            own.append(victim)
            milli, cores = milli + gpu_milli_of(victim.holdings), cores + cores_of(victim.holdings)
        return own

    def place(self, gang: Gang) -> Start | Refusal:
        """Place a gang, or return why it has no place; then nothing has changed.

        1. If its tenant's limit requires it, victims of that tenant stop.
        2. It gets free resources, if the policy offers some.
        3. Or running jobs move away, if the policy moves jobs.
        4. Or borrowers give back what they borrowed, if the policy lends.
        5. Or as few victims as possible stop.
        6. If there is room but for the reservations, the refusal says so.
        """
        own = self._own_victims(gang) if self._cluster.headroom else []
        if not own:
            return self._place(gang)
        left = self._victims.left
        self._victims.remove({victim.job_id for victim in own})
        for victim in own:
            self._cluster.displace(victim.job_id, victim.tenant, victim.holdings)
        answer = self._place(gang)
        if isinstance(answer, Start):
            self._victims.evict(own)
            return replace(answer, stops=(*(victim.job_id for victim in own), *answer.stops))
        self._victims.left = left
        for victim in own:
            self._cluster.put_back(victim)
        return answer

    def _place(self, gang: Gang) -> Start | Refusal:
        offer = self._ask(gang)
        if not isinstance(offer, Refusal):
            return self._start(gang, offer)
        if offer.code in UNAFFECTED_BY_ROOM:
            return offer
        answer = self._with_moves(gang, offer) or self._with_reclaims(gang) or self._with_stops(gang, offer)
        binding = self._book.binding(gang)
        if isinstance(answer, Start) or not binding or answer.code in UNAFFECTED_BY_ROOM:
            return answer
        unreserved = self._without_reservations(gang)
        return unreserved if isinstance(unreserved, Refusal) else held_back(gang, answer, binding)

    @property
    def _fixed(self) -> Collection[str]:
        """The running jobs that can make no room: they make some already, or stay."""
        return self._cluster.displaced | self.staying if self.staying else self._cluster.displaced

    # Room that other jobs make -----------------------------------------------------------------------------------

    def _with_moves(self, gang: Gang, refusal: Refusal) -> Start | Refusal | None:
        """Place a gang where running jobs can move away, if the policy finds the moves worth it."""
        if refusal.code is not Code.FRAGMENTED or self.reservations:
            return None
        return self._apply_moves(gang, self._calls.rearrangement(gang, refusal, fixed=self._fixed))

    def _with_reclaims(self, gang: Gang) -> Start | Refusal | None:
        """Place a gang on resources that are reserved for it and lent to other jobs, regardless of the order."""
        if self._book.binding(gang):
            return None
        return self._apply_moves(gang, self._calls.reclaim(gang, fixed=self._fixed))

    def _apply_moves(self, gang: Gang, found: Rearrangement | Reclaim | Refusal | None) -> Start | Refusal | None:
        """Start a gang where other jobs make room: some move, some stop."""
        if found is None or isinstance(found, Refusal):
            return found
        offer, moves, stops = found.offer, found.moves, found.stops if isinstance(found, Reclaim) else ()
        for running_job in (*stops, *(running_job for running_job, _ in moves)):
            self._cluster.displace(running_job.gang.job_id, running_job.gang.tenant, running_job.holdings)
        start = self._start(gang, offer)
        for running_job, there in moves:
            lent = self._calls.lends(running_job.gang, there)
            holdings = self._cluster.place(running_job.gang, there)
            self._book.note_move(running_job.gang, holdings)
            self.moves.append(Start(running_job.gang, there, holdings, needs_room=True, reclaimable=lent))
        stopped = tuple(running_job.gang.job_id for running_job in stops)
        moved = tuple(running_job.gang.job_id for running_job, _ in moves)
        self.reclaimed += stopped
        self._victims.load()
        self._victims.remove({*stopped, *moved})
        return replace(start, moves=moved, reclaims=stopped)

    def _with_stops(self, gang: Gang, refusal: Refusal) -> Start | Refusal:
        """Start a gang in place of victims; victims whose resources it did not use stay.

        No job with more GPUs stops for a gang that would only borrow its room: that would be reclaimed at once.
        """
        self._victims.load()
        if not self._victims.left:
            return refusal
        found = fewest(gang, self._victims.left, self._cluster.ledger, lambda some: self._ask_without(gang, some))
        if isinstance(found, Refusal):
            count = plural(len(self._victims.left), "job")
            return replace(found, detail=f"{found.detail}; the room of {count} that it outranks is counted as free")
        offer, going = found
        lent = self._calls.lends(gang, offer)
        if lent and any(gpu_milli_of(victim.holdings) > gang.gpu_milli for victim in going):
            count = plural(len(going), "job")
            return replace(
                refusal, detail=f"{refusal.detail}; it would only borrow the room of {count} that it outranks"
            )
        for victim in going:
            self._cluster.displace(victim.job_id, victim.tenant, victim.holdings)
        start = self._start(gang, offer, lent=lent)
        gone = [victim for victim in going if not self._cluster.restore(victim)]
        self._victims.evict(gone)
        return replace(start, stops=tuple(victim.job_id for victim in gone))

    # Questions to the policy -------------------------------------------------------------------------------------

    def _ask(
        self, gang: Gang, gone: Collection[str] = (), kept: Sequence[Reservation] | None = None
    ) -> Offer | Refusal:
        """Ask for places that respect the reservations `kept`, by default all that bind it, once `gone` have left."""
        reservations = self._book.binding(gang) if kept is None else kept
        if not (gone or reservations):
            return self._calls.offer(gang)
        with self._cluster.view.without(gone), self._book.kept(reservations, gone):
            return self._calls.offer(gang)

    def _ask_without(
        self, gang: Gang, victims: Sequence[Victim], kept: Sequence[Reservation] | None = None
    ) -> Offer | Refusal:
        """Ask for places as if some victims had stopped."""
        with self._cluster.without(victims):
            return self._ask(gang, {victim.job_id for victim in victims}, kept)

    def _without_reservations(self, gang: Gang) -> Offer | Refusal:
        """Ask for places as if nothing were reserved, also on the resources of all victims."""
        offer = self._ask(gang, kept=())
        more = isinstance(offer, Refusal) and bool(self._victims.left)
        return self._ask_without(gang, self._victims.left, kept=()) if more else offer

    def _start(self, gang: Gang, offer: Offer, *, lent: bool | None = None) -> Start:
        if lent is None:
            lent = self._calls.lends(gang, offer)
        with self._book.kept(self._book.binding(gang)):
            holdings = self._cluster.place(gang, offer)
        self._book.note_start(gang, holdings)
        return Start(gang, offer, holdings, needs_room=False, reclaimable=lent)

    # Reservations ------------------------------------------------------------------------------------------------

    def binding_jobs(self, gang: Gang) -> tuple[str, ...]:
        """Return the jobs whose reservations a gang must respect."""
        return tuple(one.gang.job_id for one in self._book.binding(gang))

    def adapt_refusal(self, gang: Gang, refusal: Refusal) -> Refusal:
        """Return an equivalent gang's refusal, adjusted to this gang."""
        return held_back(gang, refusal, self._book.binding(gang)) if refusal.code is Code.RESERVED else refusal

    def reserve(self, gang: Gang, refusal: Refusal) -> Refusal:
        """Reserve places for a refused gang that has waited long, if that helps; returns the refusal to report."""
        return self._book.reserve(gang, refusal, self._policy, self._ask)
