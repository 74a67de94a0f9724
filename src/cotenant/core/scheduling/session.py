"""Where one cycle places its gangs: on free room, on that of those who move, and on that of those who have to go."""

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
from cotenant.core.placement.node_avoidance import kept_away, with_avoidance
from cotenant.core.placement.topology import place_in_one
from cotenant.core.policy.capabilities import able
from cotenant.core.policy.cluster_view import (
    NOBODY,
    Heeds,
    Rearrangement,
    Rearranges,
    Reclaim,
    Reclaims,
    Scene,
    Sees,
    Unfolding,
)
from cotenant.core.policy.protocols import PlacementPolicy, alike_by
from cotenant.core.scheduling.earliest_start import Departure, departure_of, departures_of
from cotenant.core.scheduling.preemption import cheapest
from cotenant.core.scheduling.reservations import (
    NO_RESERVING,
    Reservation,
    Reserving,
    groups,
    held_back,
    relaxations,
    reserve,
)

Answer = TypeVar("Answer")
HOPELESS = frozenset({Code.NEVER_FITS, Code.NO_NODES, Code.NODES_HELD, Code.POLICY_FAILED})  # no leaving would help
RESERVABLE = frozenset({Code.CAPACITY, Code.FRAGMENTED, Code.QOS, Code.RESERVED})


@dataclass(frozen=True, slots=True)
class Start:
    """A gang, its places, and what it will hold; `needs_room` where a stop has to come first.

    `moves` are running jobs that go elsewhere for its sake, `reclaims` those that give back what was lent to them. What
    is `reclaimable` is lent, until those want it for whom it is reserved.
    """

    gang: Gang
    offer: Offer
    holdings: tuple[Holding, ...]
    needs_room: bool
    moves: tuple[str, ...] = ()
    reclaims: tuple[str, ...] = ()
    reclaimable: bool = False


class Floor:
    """Where gangs are placed, the victims that may still have to go, and those that have gone; most deserving first."""

    def __init__(
        self,
        ledger: Ledger,
        policy: PlacementPolicy,
        rng: np.random.Generator,
        victims: Iterable[Victim],
        headroom: Headroom,
        on_broken: Callable[[Gang, Exception], Refusal] | None,
        scene: Scene = NOBODY,
        reserving: Reserving = NO_RESERVING,
    ) -> None:
        self._scene = Unfolding(scene)
        if sees := able(policy, Sees):
            sees.see(self._scene)
        self._heeds = able(policy, Heeds)
        self._on_broken = on_broken
        self._ledger, self._policy, self._rng, self._headroom = ledger, policy, rng, headroom
        self.alike = alike_by(policy)
        self._not_met: Iterable[Victim] | None = victims
        self._number: float = 0
        self._victims: list[Victim] = []
        self._merit: dict[str, int] = {}
        self._gone: list[Victim] = []
        self._next_turn = math.inf
        self._settled: set[str] = set()  # ids of those who have a new place, or stop for it was lent to them
        self._rearranges, self._reclaims = able(policy, Rearranges), able(policy, Reclaims)
        self.moves: list[Start] = []  # of running jobs, to their new places
        self._reserving, self._at_first = reserving, scene
        self.reservations: list[Reservation] = []
        self._tries_left = reserving.tries  # to find places to reserve
        self._begun: list[Start] = []  # in this cycle
        self._lifted: set[str] = set()  # ids of running jobs that do not hold their room at present
        self.reclaimed: list[str] = []  # ids of borrowers that have to stop

    def _meet(self) -> None:
        """Get to know the victims, of which most cycles need none."""
        if self._not_met is None:
            return
        self._victims = [victim for victim in self._not_met if _turn_of(victim) > self._number]
        self._victims.reverse()
        self._not_met = None
        self._merit = {victim.job_id: number for number, victim in enumerate(self._victims)}
        self._next_turn = min(map(_turn_of, self._victims), default=math.inf)

    def turn(self, number: float) -> None:
        """Let those have their turn that come before the gang of this number: they stay, or return to free room."""
        self._number = number
        if number < self._next_turn:
            return
        self._victims = [victim for victim in self._victims if _turn_of(victim) > number]
        due = [victim for victim in self._gone if _turn_of(victim) <= number]
        back = {victim.job_id for victim in due if self._return(victim)}
        self._gone = [victim for victim in self._gone if victim.job_id not in back]
        turns = [_turn_of(victim) for victim in [*self._victims, *self._gone]]
        self._next_turn = min((turn for turn in turns if turn > number), default=math.inf)

    def stops(self) -> list[str]:
        """Name those who had to go, once all have had their turn."""
        self.turn(math.inf)
        return [victim.job_id for victim in self._gone]

    def over_limit(self, gang: Gang) -> Refusal | None:
        """Say how a gang would take its tenant over a limit, even if all victims of that tenant were gone."""
        if not self._headroom or not (over := self._headroom.refuse(gang.tenant, gang.gpu_milli, gang.cores)):
            return None
        return over if self._own(gang) is None else None

    def _own(self, gang: Gang) -> list[Victim] | None:
        """Name victims of the gang's own tenant that have to go for its limit's sake; None: all are too few."""
        if self._headroom.allows(gang.tenant, gang.gpu_milli, gang.cores):
            return []
        self._meet()
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
        """Place a gang on free room; else on that of as few victims as suffice. Its tenant's limit comes first."""
        own = self._own(gang) if self._headroom else []
        if not own:
            return self._place(gang)
        staying = self._victims
        for victim in own:
            self._lift(victim)
        self._victims = [victim for victim in staying if victim not in own]
        answer = self._place(gang)
        if isinstance(answer, Refusal):
            self._victims = staying
            for victim in own:
                self._return(victim)
        else:
            self._leave(own)
        return answer

    def _place(self, gang: Gang) -> Start | Refusal:
        answer = self._try(gang)
        binding = self._binding(gang)
        if isinstance(answer, Start) or not binding or answer.code in HOPELESS:
            return answer
        unreserved = self._without_reservations(gang)
        return unreserved if isinstance(unreserved, Refusal) else held_back(gang, answer, binding)

    def _without_reservations(self, gang: Gang) -> Offer | Refusal:
        """Ask for places, also on the room of all victims, as if nothing were reserved."""
        offer = self._ask(gang, kept=())
        more = isinstance(offer, Refusal) and bool(self._victims)
        return self._try_without(gang, len(self._victims), kept=()) if more else offer

    def _try(self, gang: Gang) -> Start | Refusal:
        offer = self._ask(gang)
        if not isinstance(offer, Refusal):
            return self._start(gang, offer)
        if offer.code in HOPELESS:
            return offer
        if moved := self._rearranged(gang, offer):
            return moved
        if reclaimed := self._reclaimed(gang):
            return reclaimed
        self._meet()
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
            assert not isinstance(offer, Refusal), "who was chosen suffices"
        return self._make_room(gang, offer, going)

    def _rearranged(self, gang: Gang, refusal: Refusal) -> Start | Refusal | None:
        """Place a gang where running jobs make it room that have room elsewhere, if the policy finds it worth that."""
        if refusal.code is not Code.FRAGMENTED or not self._rearranges or self.reservations:
            return None
        ask, fixed = self._rearranges.rearrange, self._elsewhere()
        return self._resettle(gang, self._asked(gang, lambda: ask(gang, refusal, self._ledger, self._rng, fixed)))

    def _reclaimed(self, gang: Gang) -> Start | Refusal | None:
        """Place a gang on what was lent to others and is reserved for it, whatever the order says of them."""
        if not self._reclaims or self._binding(gang):
            return None
        ask, fixed = self._reclaims.reclaim, self._elsewhere()
        return self._resettle(gang, self._asked(gang, lambda: ask(gang, self._ledger, self._rng, fixed)))

    def _elsewhere(self) -> set[str]:
        """Name those who are not where the scene shows them any more."""
        return self._settled.union(self._lifted, (victim.job_id for victim in self._gone))

    def _resettle(self, gang: Gang, found: Rearrangement | Reclaim | Refusal | None) -> Start | Refusal | None:
        """Start a gang where others make it room: some go elsewhere, some stop."""
        if found is None or isinstance(found, Refusal):
            return found
        offer, moves, stops = found.offer, found.moves, found.stops if isinstance(found, Reclaim) else ()
        for resident in (*stops, *(resident for resident, _ in moves)):
            release_all(self._ledger, resident.holdings)
            self._scene.leave(resident.gang.job_id)
            self._lifted.add(resident.gang.job_id)
            self._settled.add(resident.gang.job_id)
        for resident in stops:
            self._headroom.take(resident.gang.tenant, -gpu_milli_of(resident.holdings), -cores_of(resident.holdings))
        self.reclaimed += [resident.gang.job_id for resident in stops]
        start = self._start(gang, offer)
        for resident, there in moves:
            lent = self._reclaims is not None and self._reclaims.lends(resident.gang, there, self._ledger)
            holdings = take(self._ledger, resident.gang, there)
            self.moves.append(Start(resident.gang, there, holdings, needs_room=True, reclaimable=lent))
            self._scene.come(resident.gang, holdings)
        self._meet()
        self._victims = [victim for victim in self._victims if victim.job_id not in self._settled]
        names = tuple(resident.gang.job_id for resident in stops)
        return replace(start, moves=tuple(resident.gang.job_id for resident, _ in moves), reclaims=names)

    def _try_without(
        self, gang: Gang, going: int | Sequence[Victim], *, kept: Sequence[Reservation] | None = None
    ) -> Offer | Refusal:
        """Ask for places as if some victims were gone, or so many of the last."""
        victims = self._victims[-going:] if isinstance(going, int) else going
        with self._ledger.undone():
            release_all(self._ledger, (holding for victim in victims for holding in victim.holdings))
            return self._ask(gang, {victim.job_id for victim in victims}, kept=kept)

    def _ask(
        self, gang: Gang, gone: Collection[str] = (), *, kept: Sequence[Reservation] | None = None
    ) -> Offer | Refusal:
        """Ask the policy for places beside those that are `kept`, where some have `gone`.

        With `on_broken`, what it offers is tried before anybody relies on it.
        """
        reservations = kept if kept is not None else self._binding(gang)
        if not (gone or reservations):
            return self._asked(gang, lambda: self._offer(gang))
        with self._scene.without(gone), self._kept(reservations, gone):
            return self._asked(gang, lambda: self._offer(gang))

    def _offer(self, gang: Gang) -> Offer | Refusal:
        if self._on_broken is None:
            offer = place_in_one(self._policy, gang, self._ledger, self._rng)
        else:
            with self._ledger.undone():
                if not isinstance(offer := place_in_one(self._policy, gang, self._ledger, self._rng), Refusal):
                    take(self._ledger, gang, offer)
        return with_avoidance(offer, gang) if isinstance(offer, Refusal) else offer

    def _asked(self, gang: Gang, ask: Callable[[], Answer]) -> Answer | Refusal:
        """Ask the policy something about a gang, while the nodes that this one avoids take no work."""
        try:
            if not gang.avoided:  # as most gangs, and most answers cost less than to say so to the ledger
                return ask()
            with kept_away(gang, self._ledger):
                return ask()
        except Exception as error:
            if self._on_broken is None:
                raise
            return self._on_broken(gang, error)

    @contextmanager
    def _kept(self, reservations: Sequence[Reservation], gone: Collection[str] = ()) -> Iterator[None]:
        """Hold what has to stay free for some reservations."""
        held: list[Holding] = []
        away = self._lifted.union(gone)
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

    def bound(self, gang: Gang) -> tuple[str, ...]:
        """Name those whose reservations a gang must not break."""
        return tuple(one.gang.job_id for one in self._binding(gang))

    def again(self, gang: Gang, refusal: Refusal) -> Refusal:
        """Say to a gang what was said to one like it, as it is for this one."""
        return held_back(gang, refusal, self._binding(gang)) if refusal.code is Code.RESERVED else refusal

    def reserve(self, gang: Gang, refusal: Refusal) -> Refusal:
        """Reserve places for a gang that was refused, if it starves and that is of use; adds it to the refusal."""
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
        return found.tell(refusal)

    def _expected(self) -> list[Departure]:
        """Say when those will have gone who run now, or start in this cycle."""
        staying = [one for one in departures_of(self._at_first) if one.job_id not in self._lifted]
        begun = [*self._begun, *self.moves]
        return staying + [departure_of(one.gang.job_id, one.holdings, one.gang.estimate, 0.0) for one in begun]

    def _make_room(self, gang: Gang, offer: Offer, lifted: Sequence[Victim]) -> Start:
        """Start a gang in place of victims; those whose room it did not use keep it."""
        for victim in lifted:
            self._lift(victim)
        start = self._start(gang, offer)
        leave = [victim for victim in lifted if not self._return(victim)]
        gone = {victim.job_id for victim in leave}
        self._victims = [victim for victim in self._victims if victim.job_id not in gone]
        self._leave(leave)
        return start

    def _lift(self, victim: Victim) -> None:
        self._lifted.add(victim.job_id)
        release_all(self._ledger, victim.holdings)
        self._scene.leave(victim.job_id)
        self._headroom.take(victim.tenant, -gpu_milli_of(victim.holdings), -cores_of(victim.holdings))

    def _return(self, victim: Victim) -> bool:
        """Give a victim its room back, if that is free and its tenant may hold it."""
        milli, cores = gpu_milli_of(victim.holdings), cores_of(victim.holdings)
        if not self._headroom.allows(victim.tenant, milli, cores) or not hold_all(self._ledger, victim.holdings):
            return False
        self._scene.stay(victim.job_id)
        if self._heeds and not self._heeds.bears([held.node for held in victim.holdings], self._ledger):
            release_all(self._ledger, victim.holdings)
            self._scene.leave(victim.job_id)
            return False
        self._headroom.take(victim.tenant, milli, cores)
        self._lifted.discard(victim.job_id)
        return True

    def _leave(self, victims: Iterable[Victim]) -> None:
        self._gone += victims
        self._gone.sort(key=lambda victim: self._merit[victim.job_id])

    def _start(self, gang: Gang, offer: Offer) -> Start:
        self._headroom.take(gang.tenant, gang.gpu_milli, gang.cores)
        lent = self._reclaims is not None and self._reclaims.lends(gang, offer, self._ledger)
        binding = self._binding(gang)
        with self._kept(binding):
            start = Start(gang, offer, take(self._ledger, gang, offer), needs_room=False, reclaimable=lent)
        self._scene.come(gang, start.holdings)
        for reservation in self.reservations:
            if reservation not in binding:  # it will have gone by then
                nodes = {holding.node for holding in reservation.holdings}
                reservation.back |= groups([Departure(gang.job_id, start.holdings)], nodes)
        if self._reserving:
            self._begun.append(start)
        return start


def _turn_of(victim: Victim) -> float:
    return math.inf if victim.ahead is None else victim.ahead
