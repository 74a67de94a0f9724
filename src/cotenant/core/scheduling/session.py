"""The placement session: the tentative state of one cycle, on free resources and on those of jobs that move or stop."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from cotenant.core.capacity.ledger import Holding, Ledger, Offer
from cotenant.core.model.gang import Gang
from cotenant.core.model.refusal import Code, Refusal, plural
from cotenant.core.model.tenancy import Headroom
from cotenant.core.placement.gang_allocation import Victim, cores_of, gpu_milli_of, hold_all, release_all, take
from cotenant.core.placement.node_avoidance import avoided_nodes_closed, with_avoidance
from cotenant.core.placement.topology import place_in_one_rack
from cotenant.core.policy.capabilities import capability_of
from cotenant.core.policy.cluster_view import (
    EMPTY_CLUSTER,
    ChecksNeighbors,
    ClusterView,
    CycleView,
    Rearrangement,
    Rearranges,
    Reclaim,
    Reclaims,
    UsesClusterView,
)
from cotenant.core.policy.protocols import PlacementPolicy, equivalence_key_by
from cotenant.core.scheduling.earliest_start import Departure, departure_of, departures_of
from cotenant.core.scheduling.preemption import cheapest
from cotenant.core.scheduling.reservations import (
    NO_RESERVATIONS,
    Reservation,
    ReservationRules,
    groups,
    held_back,
    relaxations,
    reserve,
)

Answer = TypeVar("Answer")
UNAFFECTED_BY_ROOM = frozenset(
    {Code.NEVER_FITS, Code.NO_NODES, Code.NODES_HELD, Code.POLICY_FAILED}
)  # freeing resources would not help
RESERVABLE = frozenset({Code.CAPACITY, Code.FRAGMENTED, Code.QOS, Code.RESERVED})


@dataclass(frozen=True, slots=True)
class Start:
    """A gang, its places, and what it will hold; `needs_room` if a stop must come first.

    `moves` are running jobs that go elsewhere for it, `reclaims` jobs that give back borrowed resources. A
    `reclaimable` start borrows until the jobs that its resources are reserved for need them.
    """

    gang: Gang
    offer: Offer
    holdings: tuple[Holding, ...]
    needs_room: bool
    moves: tuple[str, ...] = ()
    reclaims: tuple[str, ...] = ()
    reclaimable: bool = False


class PlacementSession:
    """The tentative state of placement: ledger, victims that may still be stopped, and those stopped, best first."""

    def __init__(
        self,
        ledger: Ledger,
        policy: PlacementPolicy,
        rng: np.random.Generator,
        victims: Iterable[Victim],
        headroom: Headroom,
        on_broken: Callable[[Gang, Exception], Refusal] | None,
        cluster_view: ClusterView = EMPTY_CLUSTER,
        reserving: ReservationRules = NO_RESERVATIONS,
    ) -> None:
        self._cluster_view = CycleView(cluster_view)
        if view_user := capability_of(policy, UsesClusterView):
            view_user.begin_cycle(self._cluster_view)
        self._checks_neighbors = capability_of(policy, ChecksNeighbors)
        self._on_broken = on_broken
        self._ledger, self._policy, self._rng, self._headroom = ledger, policy, rng, headroom
        self.equivalence_key = equivalence_key_by(policy)
        self._unread_victims: Iterable[Victim] | None = victims
        self._number: float = 0
        self._victims: list[Victim] = []
        self._rank: dict[str, int] = {}
        self._evicted: list[Victim] = []
        self._next_turn = math.inf
        self._moved: set[str] = (
            set()
        )  # ids of jobs that have a new place, or stop because what they borrowed is reclaimed
        self._rearranges, self._reclaims = capability_of(policy, Rearranges), capability_of(policy, Reclaims)
        self.moves: list[Start] = []  # migrations of running jobs
        self._reserving, self._initial_view = reserving, cluster_view
        self.reservations: list[Reservation] = []
        self._tries_left = reserving.tries  # to find places to reserve
        self._started: list[Start] = []  # starts of this cycle
        self._displaced: set[str] = set()  # ids of running jobs whose holdings are released at present
        self.reclaimed: list[str] = []  # ids of borrowers that have to stop

    def _load_victims(self) -> None:
        """Load the victims, which most cycles do not need."""
        if self._unread_victims is None:
            return
        self._victims = [victim for victim in self._unread_victims if _turn_of(victim) > self._number]
        self._victims.reverse()
        self._unread_victims = None
        self._rank = {victim.job_id: number for number, victim in enumerate(self._victims)}
        self._next_turn = min(map(_turn_of, self._victims), default=math.inf)

    def advance_to(self, number: float) -> None:
        """Advance to the gang of this number: victims before it in the order stay, or return to free resources."""
        self._number = number
        if number < self._next_turn:
            return
        self._victims = [victim for victim in self._victims if _turn_of(victim) > number]
        due = [victim for victim in self._evicted if _turn_of(victim) <= number]
        back = {victim.job_id for victim in due if self._restore(victim)}
        self._evicted = [victim for victim in self._evicted if victim.job_id not in back]
        turns = [_turn_of(victim) for victim in [*self._victims, *self._evicted]]
        self._next_turn = min((turn for turn in turns if turn > number), default=math.inf)

    def stops(self) -> list[str]:
        """Return the jobs that must stop, after all gangs have been placed."""
        self.advance_to(math.inf)
        return [victim.job_id for victim in self._evicted]

    def over_limit(self, gang: Gang) -> Refusal | None:
        """Return how a gang would exceed its tenant's limit even if all victims of that tenant stopped; else None."""
        if not self._headroom or not (over := self._headroom.refuse(gang.tenant, gang.gpu_milli, gang.cores)):
            return None
        return over if self._own_victims(gang) is None else None

    def _own_victims(self, gang: Gang) -> list[Victim] | None:
        """Return victims of the gang's own tenant that must stop because of its limit; None: all are too few."""
        if self._headroom.allows(gang.tenant, gang.gpu_milli, gang.cores):
            return []
        self._load_victims()
        milli = cores = 0
        own: list[Victim] = []
        mine = (victim for victim in reversed(self._victims) if victim.tenant == gang.tenant)
        while not self._headroom.allows(gang.tenant, gang.gpu_milli - milli, gang.cores - cores):
            if (victim := next(mine, None)) is None:
                return None
            own.append(victim)
            milli, cores = milli + gpu_milli_of(victim.holdings), cores + cores_of(victim.holdings)
        return own

    def place(self, gang: Gang) -> Start | Refusal:
        """Place a gang on free resources, else on those of as few victims as suffice; tenant limits come first."""
        own = self._own_victims(gang) if self._headroom else []
        if not own:
            return self._place(gang)
        staying = self._victims
        for victim in own:
            self._displace(victim)
        self._victims = [victim for victim in staying if victim not in own]
        answer = self._place(gang)
        if isinstance(answer, Refusal):
            self._victims = staying
            for victim in own:
                self._restore(victim)
        else:
            self._evict(own)
        return answer

    def _place(self, gang: Gang) -> Start | Refusal:
        answer = self._try(gang)
        binding = self._binding(gang)
        if isinstance(answer, Start) or not binding or answer.code in UNAFFECTED_BY_ROOM:
            return answer
        unreserved = self._without_reservations(gang)
        return unreserved if isinstance(unreserved, Refusal) else held_back(gang, answer, binding)

    def _without_reservations(self, gang: Gang) -> Offer | Refusal:
        """Ask for places as if nothing were reserved, also on the resources of all victims."""
        offer = self._ask(gang, kept=())
        more = isinstance(offer, Refusal) and bool(self._victims)
        return self._try_without(gang, len(self._victims), kept=()) if more else offer

    def _try(self, gang: Gang) -> Start | Refusal:
        offer = self._ask(gang)
        if not isinstance(offer, Refusal):
            return self._start(gang, offer)
        if offer.code in UNAFFECTED_BY_ROOM:
            return offer
        if moved := self._rearranged(gang, offer):
            return moved
        if reclaimed := self._reclaimed(gang):
            return reclaimed
        self._load_victims()
        if not self._victims:
            return offer
        too_few, enough = 0, 1
        while isinstance(offer := self._try_without(gang, enough), Refusal):
            if enough == len(self._victims):
                counted = f"{offer.detail}; the room of {plural(enough, 'job')} that it outranks is counted as free"
                return replace(offer, detail=counted)
            too_few, enough = enough, min(2 * enough, len(self._victims))
        while enough - too_few > 1:
            middle = (enough + too_few) // 2
            tried = self._try_without(gang, middle)
            if isinstance(tried, Refusal):
                too_few = middle
            else:
                enough, offer = middle, tried
        going = self._victims[-enough:]
        if (standing := going[0].standing) is not None:
            pool = [one for one in reversed(self._victims) if one.standing is not None and one.standing <= standing]

            def suffices(some: Sequence[Victim]) -> bool:
                return not isinstance(self._try_without(gang, some), Refusal)

            chosen = {one.job_id for one in cheapest(gang, pool, going, self._ledger, suffices)}
            going = [one for one in self._victims if one.job_id in chosen]
            offer = self._try_without(gang, going)
            assert not isinstance(offer, Refusal), "the chosen victims suffice"
        return self._make_room(gang, offer, going)

    def _rearranged(self, gang: Gang, refusal: Refusal) -> Start | Refusal | None:
        """Place a gang where running jobs can move away, if the policy finds the moves worth it."""
        if refusal.code is not Code.FRAGMENTED or not self._rearranges or self.reservations:
            return None
        ask, fixed = self._rearranges.rearrange, self._out_of_place()
        return self._apply_moves(gang, self._guarded(gang, lambda: ask(gang, refusal, self._ledger, self._rng, fixed)))

    def _reclaimed(self, gang: Gang) -> Start | Refusal | None:
        """Place a gang on resources that are reserved for it and lent to other jobs, regardless of the order."""
        if not self._reclaims or self._binding(gang):
            return None
        ask, fixed = self._reclaims.reclaim, self._out_of_place()
        return self._apply_moves(gang, self._guarded(gang, lambda: ask(gang, self._ledger, self._rng, fixed)))

    def _out_of_place(self) -> set[str]:
        """Return the jobs that are no longer where the cluster view shows them."""
        return self._moved.union(self._displaced, (victim.job_id for victim in self._evicted))

    def _apply_moves(self, gang: Gang, found: Rearrangement | Reclaim | Refusal | None) -> Start | Refusal | None:
        """Start a gang where other jobs make room: some move, some stop."""
        if found is None or isinstance(found, Refusal):
            return found
        offer, moves, stops = found.offer, found.moves, found.stops if isinstance(found, Reclaim) else ()
        for running_job in (*stops, *(running_job for running_job, _ in moves)):
            release_all(self._ledger, running_job.holdings)
            self._cluster_view.remove_job(running_job.gang.job_id)
            self._displaced.add(running_job.gang.job_id)
            self._moved.add(running_job.gang.job_id)
        for running_job in stops:
            self._headroom.take(
                running_job.gang.tenant, -gpu_milli_of(running_job.holdings), -cores_of(running_job.holdings)
            )
        self.reclaimed += [running_job.gang.job_id for running_job in stops]
        start = self._start(gang, offer)
        for running_job, there in moves:
            lent = self._reclaims is not None and self._reclaims.lends(running_job.gang, there, self._ledger)
            holdings = take(self._ledger, running_job.gang, there)
            self.moves.append(Start(running_job.gang, there, holdings, needs_room=True, reclaimable=lent))
            self._cluster_view.add_job(running_job.gang, holdings)
        self._load_victims()
        self._victims = [victim for victim in self._victims if victim.job_id not in self._moved]
        names = tuple(running_job.gang.job_id for running_job in stops)
        return replace(start, moves=tuple(running_job.gang.job_id for running_job, _ in moves), reclaims=names)

    def _try_without(
        self, gang: Gang, going: int | Sequence[Victim], *, kept: Sequence[Reservation] | None = None
    ) -> Offer | Refusal:
        """Ask for places as if some victims, or this many of the last, had stopped."""
        victims = self._victims[-going:] if isinstance(going, int) else going
        with self._ledger.rolled_back():
            release_all(self._ledger, (holding for victim in victims for holding in victim.holdings))
            return self._ask(gang, {victim.job_id for victim in victims}, kept=kept)

    def _ask(
        self, gang: Gang, gone: Collection[str] = (), *, kept: Sequence[Reservation] | None = None
    ) -> Offer | Refusal:
        """Ask the policy for places that respect the reservations `kept`, after the jobs in `gone` have left.

        With `on_broken`, an offer is tried on the ledger before it is relied on.
        """
        reservations = kept if kept is not None else self._binding(gang)
        if not (gone or reservations):
            return self._guarded(gang, lambda: self._offer(gang))
        with self._cluster_view.without(gone), self._kept(reservations, gone):
            return self._guarded(gang, lambda: self._offer(gang))

    def _offer(self, gang: Gang) -> Offer | Refusal:
        if self._on_broken is None:
            offer = place_in_one_rack(self._policy, gang, self._ledger, self._rng)
        else:
            with self._ledger.rolled_back():
                if not isinstance(offer := place_in_one_rack(self._policy, gang, self._ledger, self._rng), Refusal):
                    take(self._ledger, gang, offer)
        return with_avoidance(offer, gang) if isinstance(offer, Refusal) else offer

    def _guarded(self, gang: Gang, ask: Callable[[], Answer]) -> Answer | Refusal:
        """Call the policy about a gang while the nodes that the gang avoids take no work."""
        try:
            if not gang.avoided:  # most gangs avoid none, and closing nodes costs more than most answers
                return ask()
            with avoided_nodes_closed(gang, self._ledger):
                return ask()
        except Exception as error:
            if self._on_broken is None:
                raise
            return self._on_broken(gang, error)

    @contextmanager
    def _kept(self, reservations: Sequence[Reservation], gone: Collection[str] = ()) -> Iterator[None]:
        """Hold what must stay free for some reservations."""
        held: list[Holding] = []
        away = self._displaced.union(gone)
        for reservation in reservations:
            for holding in reservation.kept(self._ledger, away):
                self._ledger.hold(holding)
                held.append(holding)
        try:
            yield
        finally:
            release_all(self._ledger, held)

    def _binding(self, gang: Gang) -> list[Reservation]:
        return [one for one in self.reservations if one.binds(gang)] if self.reservations else []

    def binding_jobs(self, gang: Gang) -> tuple[str, ...]:
        """Return the jobs whose reservations a gang must respect."""
        return tuple(one.gang.job_id for one in self._binding(gang))

    def adapt_refusal(self, gang: Gang, refusal: Refusal) -> Refusal:
        """Return an equivalent gang's refusal, adjusted to this gang."""
        return held_back(gang, refusal, self._binding(gang)) if refusal.code is Code.RESERVED else refusal

    def reserve(self, gang: Gang, refusal: Refusal) -> Refusal:
        """Reserve places for a refused gang that has waited long, if that helps; returns the refusal to report."""
        rule = self._reserving
        useful = bool(rule) and refusal.code in RESERVABLE and rule.starves(gang)
        if not useful or len(self.reservations) >= rule.most or not self._tries_left:
            return refusal
        self._tries_left -= 1

        def ask(gang: Gang, gone: Collection[str]) -> Offer | None:
            offer = self._ask(gang, gone, kept=self.reservations)
            return None if isinstance(offer, Refusal) else offer

        ages = relaxations(gang, self._policy) if refusal.code is Code.FRAGMENTED else ()
        found = reserve(gang, self._ledger, ask, self._expected(), rule, ages)
        if found is None:
            return refusal
        self.reservations.append(found)
        return found.annotate(refusal)

    def _expected(self) -> list[Departure]:
        """Return the expected departures of jobs that run now or start in this cycle."""
        staying = [one for one in departures_of(self._initial_view) if one.job_id not in self._displaced]
        begun = [*self._started, *self.moves]
        return staying + [departure_of(one.gang.job_id, one.holdings, one.gang.estimate, 0.0) for one in begun]

    def _make_room(self, gang: Gang, offer: Offer, lifted: Sequence[Victim]) -> Start:
        """Start a gang in place of victims; victims whose resources it did not use stay."""
        for victim in lifted:
            self._displace(victim)
        start = self._start(gang, offer)
        leave = [victim for victim in lifted if not self._restore(victim)]
        gone = {victim.job_id for victim in leave}
        self._victims = [victim for victim in self._victims if victim.job_id not in gone]
        self._evict(leave)
        return start

    def _displace(self, victim: Victim) -> None:
        self._displaced.add(victim.job_id)
        release_all(self._ledger, victim.holdings)
        self._cluster_view.remove_job(victim.job_id)
        self._headroom.take(victim.tenant, -gpu_milli_of(victim.holdings), -cores_of(victim.holdings))

    def _restore(self, victim: Victim) -> bool:
        """Return whether a victim could take its resources back: they are free, and its tenant may hold them."""
        milli, cores = gpu_milli_of(victim.holdings), cores_of(victim.holdings)
        if not self._headroom.allows(victim.tenant, milli, cores) or not hold_all(self._ledger, victim.holdings):
            return False
        self._cluster_view.restore_job(victim.job_id)
        if self._checks_neighbors and not self._checks_neighbors.can_coexist(
            [held.node for held in victim.holdings], self._ledger
        ):
            release_all(self._ledger, victim.holdings)
            self._cluster_view.remove_job(victim.job_id)
            return False
        self._headroom.take(victim.tenant, milli, cores)
        self._displaced.discard(victim.job_id)
        return True

    def _evict(self, victims: Iterable[Victim]) -> None:
        self._evicted += victims
        self._evicted.sort(key=lambda victim: self._rank[victim.job_id])

    def _start(self, gang: Gang, offer: Offer) -> Start:
        self._headroom.take(gang.tenant, gang.gpu_milli, gang.cores)
        lent = self._reclaims is not None and self._reclaims.lends(gang, offer, self._ledger)
        binding = self._binding(gang)
        with self._kept(binding):
            start = Start(gang, offer, take(self._ledger, gang, offer), needs_room=False, reclaimable=lent)
        self._cluster_view.add_job(gang, start.holdings)
        for reservation in self.reservations:
            if reservation not in binding:  # it will have ended by then
                nodes = {holding.node for holding in reservation.holdings}
                reservation.back |= groups([Departure(gang.job_id, start.holdings)], nodes)
        if self._reserving:
            self._started.append(start)
        return start


def _turn_of(victim: Victim) -> float:
    return math.inf if victim.ahead is None else victim.ahead
