"""The scheduling cycle: snapshot → estimates → order → sizes → placement → plan with refusals.

The live mesh runs `choose` in the queue and `place` in placement, the simulator runs one after the other; both are
these functions. Nothing here knows a clock, a network or chance: time and the generator are arguments.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cotenant.core.estimates import Estimate
from cotenant.core.jobs import Demand, Gang, JobSpec, Part
from cotenant.core.ledger import Holding, Ledger, Offer
from cotenant.core.nodes import NodeShape
from cotenant.core.policy import CpuAllocator, Order, PlacementPolicy, QueuePolicy
from cotenant.core.ranking import rank, select
from cotenant.core.refusals import Code, Refusal, behind, plural
from cotenant.core.table import Capacity, Ints, Jobs

HOPELESS = frozenset({Code.NEVER_FITS, Code.NO_NODES})  # nobody's leaving would help


IN_THE_WAY_MAX = 1_000  # victims that the count would let run; more make plans slow and large, and help little


class BrokenGang(Exception):
    """A policy offered places for a part of a gang, or for more than all of it: a bug in the policy."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What the order says: rows that should start, in order; rows that may have to make room, the first to go first.

    `ranked` holds all rows in order; the waiting ones alone where nobody is stopped for others.
    """

    ranked: Ints
    starts: Ints
    victims: Ints
    outranked: Ints

    def ahead(self) -> Ints:
        """Count for each victim the starts that come before it in the order: those for which it may have to go."""
        if not len(self.victims):
            return self.victims
        place_of = np.empty_like(self.ranked)
        place_of[self.ranked] = np.arange(len(self.ranked))
        return np.searchsorted(place_of[self.starts], place_of[self.victims])


@dataclass(frozen=True, slots=True)
class Victim:
    """A running job that the order does not protect, and what it holds.

    Only the first `ahead` gangs may have its room, for those after it in the order do not outrank it; None: all may.
    """

    job_id: str
    holdings: tuple[Holding, ...]
    ahead: int | None = None


@dataclass(frozen=True, slots=True)
class Start:
    """A gang, its places, and what it will hold; `needs_room` where a stop has to come first."""

    gang: Gang
    offer: Offer
    holdings: tuple[Holding, ...]
    needs_room: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do: stops before the starts that need room, and one reason for each job left waiting."""

    starts: tuple[Start, ...]
    stops: tuple[str, ...]
    refusals: dict[str, Refusal]
    blocked: bool = False  # a strict queue stopped at a job that did not fit


def choose(
    jobs: Jobs,
    policy: QueuePolicy,
    order: Order,
    capacity: Capacity,
    *,
    now: float,
    run_seconds_min: float = 0.0,
) -> Choice:
    """Say who should run, by counting alone.

    Without preemption that is every waiting job, in order, as long as there is room; running jobs stay. With it, the
    first jobs of the order that fit together into the whole capacity should run. Victims are running jobs that may be
    preempted and have run for `run_seconds_min`: first those that should not run, the last in the order first; then
    those that should, but come after one that starts, for a gang may find the room that it was counted in fragments.
    """
    if not policy.preemptive:
        waiting = rank(jobs, order, running_first=False, among=~jobs.running)
        return Choice(waiting, waiting, waiting[:0], waiting[:0])
    ranked = rank(jobs, order, running_first=policy.running_first)
    waiting = ranked[~jobs.running[ranked]]
    protected = jobs.running & (~jobs.preemptible | (now - jobs.running_since < run_seconds_min))
    selected = select(jobs, ranked, protected, capacity, strict=policy.strict)
    starts = waiting[selected[waiting]]
    if not len(starts):
        return Choice(ranked, starts, starts, waiting)
    unwanted = ranked[(jobs.running & ~selected)[ranked]][::-1]
    after = ranked[int(np.argmax(ranked == starts[0])) :]
    in_the_way = after[(jobs.running & selected & ~protected)[after]][::-1]
    victims = np.concatenate([unwanted, in_the_way[:IN_THE_WAY_MAX]])
    return Choice(ranked, starts, victims, waiting[~selected[waiting]])


def gang_of(
    job_id: str, spec: JobSpec, estimate: Estimate, allocator: CpuAllocator, shapes: Sequence[NodeShape]
) -> Gang:
    """Decide a job's cores and so make a gang of it."""
    sizing = allocator.size(spec, estimate, shapes)
    parts = tuple(
        Part(
            role.name,
            role.replicas,
            Demand(role.request.gpu_milli, cores, role.request.memory_bytes, role.request.gpu_type),
        )
        for role, cores in zip(spec.roles, sizing.cores, strict=True)
    )
    return Gang(job_id, parts, spec.locality, sizing.reason)


def place(
    gangs: Iterable[Gang],
    ledger: Ledger,
    policy: PlacementPolicy,
    rng: np.random.Generator,
    *,
    victims: Iterable[Victim] = (),
    leaving: Sequence[Holding] = (),
    strict: bool = False,
) -> Plan:
    """Find places for gangs in their order; leaves the ledger as it was.

    Victims are given the first to go first, and are asked for only where a gang finds no free room.

    1. What is `leaving` anyway counts as free.
    2. Each gang gets its places or a refusal. A refusal ends nothing, unless the queue is strict. Gangs of one shape
       are refused for the same reason, once.
    3. Where free room does not do, as few victims as suffice make room, the first to go first. Those whose room is
       not used after all keep it, and none makes room for a gang that it outranks.
    4. A start whose room is not free yet `needs_room`: the stops come first.
    """
    with ledger.undone():
        for holding in leaving:
            ledger.release(holding)
        starts, stops, refusals, blocked = _place_all(gangs, _Floor(ledger, policy, rng, victims), strict=strict)
    with ledger.undone():
        marked = tuple(_mark(starts, ledger))
    return Plan(marked, tuple(stops), refusals, blocked)


def _place_all(
    gangs: Iterable[Gang], floor: _Floor, *, strict: bool
) -> tuple[list[Start], list[str], dict[str, Refusal], bool]:
    starts: list[Start] = []
    refusals: dict[str, Refusal] = {}
    refused: dict[tuple[object, ...], Refusal] = {}
    blocked: Refusal | None = None
    for number, gang in enumerate(gangs):
        if blocked:
            refusals[gang.job_id] = blocked
            continue
        floor.turn(number)
        shape = (gang.parts, gang.locality)
        answer = refused.get(shape) or floor.place(gang)
        if isinstance(answer, Start):
            starts.append(answer)
            continue
        refusals[gang.job_id] = refused[shape] = answer
        if strict and answer.code is not Code.NEVER_FITS:
            blocked = behind(gang.job_id, answer.detail)
    return starts, floor.stops(), refusals, blocked is not None


class _Floor:
    """Where gangs are placed, the victims that may still have to go, and those that have gone; most deserving first."""

    def __init__(
        self, ledger: Ledger, policy: PlacementPolicy, rng: np.random.Generator, victims: Iterable[Victim]
    ) -> None:
        self._ledger, self._policy, self._rng = ledger, policy, rng
        self._not_met: Iterable[Victim] | None = victims
        self._number: float = 0
        self._victims: list[Victim] = []
        self._merit: dict[str, int] = {}
        self._gone: list[Victim] = []
        self._next_turn = math.inf

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
        back = {victim.job_id for victim in due if _hold_all(self._ledger, victim.holdings)}
        self._gone = [victim for victim in self._gone if victim.job_id not in back]
        turns = [_turn_of(victim) for victim in [*self._victims, *self._gone]]
        self._next_turn = min((turn for turn in turns if turn > number), default=math.inf)

    def stops(self) -> list[str]:
        """Name those who had to go, once all have had their turn."""
        self.turn(math.inf)
        return [victim.job_id for victim in self._gone]

    def place(self, gang: Gang) -> Start | Refusal:
        """Place a gang on free room; else on that of as few victims as suffice."""
        offer = self._policy.place(gang, self._ledger, self._rng)
        if not isinstance(offer, Refusal):
            return self._start(gang, offer)
        if offer.code in HOPELESS:
            return offer
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
        return self._make_room(gang, offer, enough)

    def _try_without(self, gang: Gang, count: int) -> Offer | Refusal:
        """Ask for places as if the last `count` victims were gone."""
        with self._ledger.undone():
            for victim in self._victims[-count:]:
                self._lift(victim)
            return self._policy.place(gang, self._ledger, self._rng)

    def _make_room(self, gang: Gang, offer: Offer, count: int) -> Start:
        """Start a gang in place of victims; those among the last `count` whose room it did not use keep it."""
        staying, lifted = self._victims[:-count], self._victims[-count:]
        for victim in lifted:
            self._lift(victim)
        start = self._start(gang, offer)
        for victim in lifted:
            if _hold_all(self._ledger, victim.holdings):
                staying.append(victim)
            else:
                self._gone.append(victim)
        self._victims = staying
        self._gone.sort(key=lambda victim: self._merit[victim.job_id])
        return start

    def _lift(self, victim: Victim) -> None:
        for holding in victim.holdings:
            self._ledger.release(holding)

    def _start(self, gang: Gang, offer: Offer) -> Start:
        return Start(gang, offer, take(self._ledger, gang, offer), needs_room=False)


def _turn_of(victim: Victim) -> float:
    return math.inf if victim.ahead is None else victim.ahead


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
            attempt.take(share.node, gang.parts[share.part].demand, share.replicas)
        return attempt.commit()


def _hold_all(ledger: Ledger, holdings: Sequence[Holding]) -> bool:
    held: list[Holding] = []
    for holding in holdings:
        if not ledger.can_hold(holding):
            for done in held:
                ledger.release(done)
            return False
        ledger.hold(holding)
        held.append(holding)
    return True


def _mark(starts: Iterable[Start], ledger: Ledger) -> Iterator[Start]:
    """Take the starts in order from what is free now; those that do not fit yet need room."""
    for start in starts:
        yield start if _hold_all(ledger, start.holdings) else replace(start, needs_room=True)
