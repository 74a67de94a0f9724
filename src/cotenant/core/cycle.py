"""The scheduling cycle: snapshot → estimates → order → sizes → placement → plan with refusals.

The live mesh runs `choose` in the queue and `place` in placement, the simulator runs one after the other; both are
these functions. Nothing here knows a clock, a network or chance: time and the generator are arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cotenant.core.choosing import RULES, Choice, Preemption, Rules, beyond_share, choose
from cotenant.core.estimates import Estimate
from cotenant.core.gangs import Demand, Gang, Part
from cotenant.core.jobs import WHOLE_GPU_MILLI, JobSpec
from cotenant.core.ledger import Holding, Ledger, Offer
from cotenant.core.nodes import NodeShape
from cotenant.core.policy import CpuAllocator, Discerns, PlacementPolicy, needs
from cotenant.core.refusals import Code, Refusal, behind, plural
from cotenant.core.taking import BrokenGang, take
from cotenant.core.tenancy import Headroom

__all__ = [
    "RULES",
    "BrokenGang",
    "Choice",
    "Plan",
    "Preemption",
    "Rules",
    "Start",
    "Victim",
    "beyond_share",
    "choose",
    "gang_of",
    "place",
    "take",
]

HOPELESS = frozenset({Code.NEVER_FITS, Code.NO_NODES, Code.POLICY_FAILED})  # nobody's leaving would help


@dataclass(frozen=True, slots=True)
class Victim:
    """A running job that the order does not protect, and what it holds.

    Only the first `ahead` gangs may have its room, for those after it in the order do not outrank it; None: all may.
    """

    job_id: str
    holdings: tuple[Holding, ...]
    ahead: int | None = None
    tenant: str = ""


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

    @property
    def valid_seconds(self) -> float:
        """For how long the plan holds if nothing happens but that time passes."""
        return min((refusal.holds_seconds for refusal in self.refusals.values()), default=math.inf)


def gang_of(
    job_id: str,
    spec: JobSpec,
    estimate: Estimate,
    allocator: CpuAllocator,
    shapes: Sequence[NodeShape],
    waited_seconds: float = 0.0,
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
    return Gang(
        job_id,
        parts,
        spec.locality,
        sizing.reason,
        spec.tenant,
        kind=spec.kind,
        waited_seconds=waited_seconds,
        spec=spec,
        estimate=estimate,
    )


def place(
    gangs: Iterable[Gang],
    ledger: Ledger,
    policy: PlacementPolicy,
    rng: np.random.Generator,
    *,
    victims: Iterable[Victim] = (),
    leaving: Sequence[Holding] = (),
    strict: bool = False,
    headroom: Headroom | None = None,
    on_broken: Callable[[Gang, Exception], Refusal] | None = None,
) -> Plan:
    """Find places for gangs in their order; leaves the ledger as it was.

    Victims are given the first to go first, and are asked for only where a gang finds no free room.

    1. What is `leaving` anyway counts as free.
    2. Each gang gets its places or a refusal. A refusal ends nothing, unless the queue is strict. Gangs that are alike
       are refused for the same reason, once. One that would take its tenant over a limit is refused for that, which
       holds nobody else back, unless victims of the same tenant make it room; `headroom` is counted as gangs start.
    3. Where free room does not do, as few victims as suffice make room, the first to go first. Those whose room is
       not used after all keep it, and none makes room for a gang that it outranks.
    4. A start whose room is not free yet `needs_room`: the stops come first.

    A policy that fails, or offers what is not free, ends the cycle with its error; with `on_broken` it ends nothing:
    the gang that it failed on is refused so.
    """
    room = Headroom(()) if headroom is None else headroom
    before = room.copy()
    with ledger.undone():
        for holding in leaving:
            ledger.release(holding)
        starts, stops, refusals, blocked = _place_all(
            gangs, _Floor(ledger, policy, rng, victims, room, on_broken), strict=strict
        )
    with ledger.undone():
        marked = tuple(_mark(starts, ledger, before))
    return Plan(marked, tuple(stops), refusals, blocked)


def _place_all(
    gangs: Iterable[Gang], floor: _Floor, *, strict: bool
) -> tuple[list[Start], list[str], dict[str, Refusal], bool]:
    starts: list[Start] = []
    refusals: dict[str, Refusal] = {}
    refused: dict[Hashable, tuple[Refusal, float]] = {}  # with how long the gang had waited
    alike = floor.alike
    blocked: Refusal | None = None
    for number, gang in enumerate(gangs):
        if blocked:
            refusals[gang.job_id] = blocked
            continue
        floor.turn(number)
        kind = alike(gang)
        answer = floor.over_limit(gang) or _known(refused.get(kind), gang) or floor.place(gang)
        if isinstance(answer, Start):
            starts.append(answer)
            continue
        refusals[gang.job_id] = answer
        if answer.code is Code.QUOTA:
            continue
        refused[kind] = answer, gang.waited_seconds
        if strict and answer.code is not Code.NEVER_FITS:
            blocked = behind(gang.job_id, answer.detail)
    return starts, floor.stops(), refusals, blocked is not None


def _known(refused: tuple[Refusal, float] | None, gang: Gang) -> Refusal | None:
    """Say to a gang what was said to one like it, as it is for its own wait."""
    return refused[0].after(gang.waited_seconds - refused[1]) if refused else None


class _Floor:
    """Where gangs are placed, the victims that may still have to go, and those that have gone; most deserving first."""

    def __init__(
        self,
        ledger: Ledger,
        policy: PlacementPolicy,
        rng: np.random.Generator,
        victims: Iterable[Victim],
        headroom: Headroom,
        on_broken: Callable[[Gang, Exception], Refusal] | None,
    ) -> None:
        self._on_broken = on_broken
        self._ledger, self._policy, self._rng, self._headroom = ledger, policy, rng, headroom
        self.alike: Callable[[Gang], Hashable] = policy.alike if isinstance(policy, Discerns) else needs
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
            milli, cores = milli + _gpu_milli(victim.holdings), cores + _cores(victim.holdings)
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
        offer = self._ask(gang)
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
                _release_all(self._ledger, victim.holdings)
            return self._ask(gang)

    def _ask(self, gang: Gang) -> Offer | Refusal:
        """Ask the policy for places; with `on_broken`, what it offers is tried before anybody relies on it."""
        if self._on_broken is None:
            return self._policy.place(gang, self._ledger, self._rng)
        try:
            with self._ledger.undone():
                offer = self._policy.place(gang, self._ledger, self._rng)
                if not isinstance(offer, Refusal):
                    take(self._ledger, gang, offer)
                return offer
        except Exception as error:
            return self._on_broken(gang, error)

    def _make_room(self, gang: Gang, offer: Offer, count: int) -> Start:
        """Start a gang in place of victims; those among the last `count` whose room it did not use keep it."""
        staying, lifted = self._victims[:-count], self._victims[-count:]
        for victim in lifted:
            self._lift(victim)
        start = self._start(gang, offer)
        back = [self._return(victim) for victim in lifted]
        self._victims = staying + [victim for victim, stays in zip(lifted, back, strict=True) if stays]
        self._leave([victim for victim, stays in zip(lifted, back, strict=True) if not stays])
        return start

    def _lift(self, victim: Victim) -> None:
        _release_all(self._ledger, victim.holdings)
        self._headroom.take(victim.tenant, -_gpu_milli(victim.holdings), -_cores(victim.holdings))

    def _return(self, victim: Victim) -> bool:
        """Give a victim its room back, if that is free and its tenant may hold it."""
        milli, cores = _gpu_milli(victim.holdings), _cores(victim.holdings)
        if not self._headroom.allows(victim.tenant, milli, cores) or not _hold_all(self._ledger, victim.holdings):
            return False
        self._headroom.take(victim.tenant, milli, cores)
        return True

    def _leave(self, victims: Iterable[Victim]) -> None:
        self._gone += victims
        self._gone.sort(key=lambda victim: self._merit[victim.job_id])

    def _start(self, gang: Gang, offer: Offer) -> Start:
        self._headroom.take(gang.tenant, gang.gpu_milli, gang.cores)
        return Start(gang, offer, take(self._ledger, gang, offer), needs_room=False)


def _turn_of(victim: Victim) -> float:
    return math.inf if victim.ahead is None else victim.ahead


def _gpu_milli(holdings: Iterable[Holding]) -> int:
    """Sum up GPUs in thousandths."""
    return sum(
        sum(milli for _, milli in holding.shares) if holding.shares else holding.gpus * WHOLE_GPU_MILLI
        for holding in holdings
    )


def _cores(holdings: Iterable[Holding]) -> int:
    return sum(holding.cores for holding in holdings)


def _release_all(ledger: Ledger, holdings: Iterable[Holding]) -> None:
    for holding in holdings:
        ledger.release(holding)


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


def _mark(starts: Iterable[Start], ledger: Ledger, headroom: Headroom) -> Iterator[Start]:
    """Take the starts in order from what is free now, within limits; those that do not fit yet need room."""
    for start in starts:
        gang = start.gang
        if headroom.allows(gang.tenant, gang.gpu_milli, gang.cores) and _hold_all(ledger, start.holdings):
            headroom.take(gang.tenant, gang.gpu_milli, gang.cores)
            yield start
        else:
            yield replace(start, needs_room=True)
