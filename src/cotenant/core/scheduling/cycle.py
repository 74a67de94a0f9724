"""The scheduling cycle: snapshot → estimates → order → sizes → placement → plan with refusals.

The live mesh runs `choose` in the queue and `place` in placement, the simulator runs one after the other; both are
these functions. Nothing here knows a clock, a network or chance: time and the generator are arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from cotenant.core.capacity.ledger import Holding, Ledger
from cotenant.core.model.estimate import Estimate
from cotenant.core.model.gang import Demand, Gang, Part
from cotenant.core.model.job import JobSpec
from cotenant.core.model.node import NodeShape
from cotenant.core.model.refusal import Code, Refusal, behind
from cotenant.core.model.tenancy import Headroom
from cotenant.core.placement.gang_allocation import BrokenGang, Victim, hold_all, take
from cotenant.core.placement.node_avoidance import yielding
from cotenant.core.policy.cluster_view import NOBODY, Scene
from cotenant.core.policy.protocols import CpuAllocator, PlacementPolicy
from cotenant.core.scheduling.admission import RULES, Choice, Preemption, Rules, beyond_share, choose
from cotenant.core.scheduling.reservations import NO_RESERVING, Reservation, Reserving
from cotenant.core.scheduling.session import Floor, Start
from cotenant.core.sizing import replica_sizing

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
    "gang_with",
    "place",
    "take",
]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do: stops before the starts that need room, and one reason for each job left waiting."""

    starts: tuple[Start, ...]
    stops: tuple[str, ...]
    refusals: dict[str, Refusal]
    blocked: bool = False  # a strict queue stopped at a job that did not fit
    moves: tuple[Start, ...] = ()  # of running jobs, which stop and start again there
    reservations: tuple[Reservation, ...] = ()  # of those that starve
    reclaimed: tuple[str, ...] = ()  # stops of jobs that gave back what was lent to them

    @property
    def valid_seconds(self) -> float:
        """For how long the plan holds if nothing happens but that time passes."""
        return min((refusal.holds_seconds for refusal in self.refusals.values()), default=math.inf)

    @property
    def keeps_seconds(self) -> float:
        """For how long places are kept for gangs of which nobody knows when they can start; infinity: for none."""
        kept = (one.holds_seconds for one in self.reservations if math.isinf(one.start_seconds))
        return min(kept, default=math.inf)


def gang_of(
    job_id: str,
    spec: JobSpec,
    estimate: Estimate,
    allocator: CpuAllocator,
    shapes: Sequence[NodeShape],
    waited_seconds: float = 0.0,
    fragmented_seconds: float = 0.0,
    avoided: Iterable[str] = (),
) -> Gang:
    """Decide a job's cores, and its replicas where it leaves them open, and so make a gang of it."""
    spec = replica_sizing.decided(spec, estimate)
    sizing = allocator.size(spec, estimate, shapes)
    reason = "; ".join(filter(None, (sizing.reason, replica_sizing.in_words(spec, estimate))))
    gang = gang_with(job_id, spec, estimate, sizing.cores, reason, waited_seconds, fragmented_seconds)
    return replace(gang, avoided=tuple(avoided))


def gang_with(
    job_id: str,
    spec: JobSpec,
    estimate: Estimate,
    cores: Sequence[int],
    sizing: str,
    waited_seconds: float = 0.0,
    fragmented_seconds: float = 0.0,
) -> Gang:
    """Make a gang of a job whose replicas have so many cores, by role."""
    parts = tuple(
        Part(
            role.name,
            role.replicas,
            Demand(role.request.gpu_milli, count, role.request.memory_bytes, role.request.gpu_type),
        )
        for role, count in zip(spec.roles, cores, strict=True)
    )
    return Gang(
        job_id,
        parts,
        spec.locality,
        sizing,
        spec.tenant,
        kind=spec.kind,
        waited_seconds=waited_seconds,
        fragmented_seconds=fragmented_seconds,
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
    promised: Sequence[Holding] = (),
    strict: bool = False,
    headroom: Headroom | None = None,
    scene: Scene = NOBODY,
    reserving: Reserving = NO_RESERVING,
    on_broken: Callable[[Gang, Exception], Refusal] | None = None,
) -> Plan:
    """Find places for gangs in their order; leaves the ledger as it was. Where there are none, nobody is asked.

    Victims are given the first to go first, and are asked for only where a gang finds no free room.

    1. What is `leaving` anyway counts as free, but for what of it, and of what is free, was `promised` to others.
    2. Each gang gets its places or a refusal. A refusal ends nothing, unless the queue is strict. Gangs that are alike
       are refused for the same reason, once. One that would take its tenant over a limit is refused for that, which
       holds nobody else back, unless victims of the same tenant make it room; `headroom` is counted as gangs start. A
       service that leaves the number of its replicas open gets more where fewer are too slow beside their neighbours.
    3. Where free room does not do, as few victims as suffice make room, the first to go first; of those that stand
       alike, those whose stop costs least (`core.queueing.victims`). Those whose room is not used after all keep it,
       and none makes room for a gang that it outranks. Before that, a policy that moves jobs (`scenes.Rearranges`) is
       asked whether that would do; then one that lends (`scenes.Reclaims`), whether those would who borrow what is
       reserved for the gang.
    4. A gang that is refused although it has waited for long gets a reservation, as `reserving` says; those after it
       are placed so that they do not break it (`core.queueing.reservations`).
    5. A start whose room is not free yet `needs_room`: the stops and moves come first.

    `scene` is what a policy sees that looks at more than what is free; reservations count on when its residents are
    expected to end. A policy that fails, or offers what is not free, ends the cycle with its error; with `on_broken` it
    ends nothing: the gang that it failed on is refused so.
    """
    coming = iter(gangs)
    if (first := next(coming, None)) is None:
        return Plan((), (), {})
    room = Headroom(()) if headroom is None else headroom
    before = room.copy()
    with ledger.undone():
        for holding in leaving:
            ledger.release(holding)
        for holding in promised:
            ledger.hold(holding)
        floor = Floor(ledger, policy, rng, victims, room, on_broken, scene, reserving)
        heeding = (yielding(gang, ledger) for gang in chain((first,), coming))
        starts, refusals, blocked = _place_all(heeding, floor, strict=strict)
        stops = tuple(floor.stops())
    with ledger.undone():
        marked = tuple(_mark(starts, ledger, before))
    return Plan(marked, stops, refusals, blocked, tuple(floor.moves), tuple(floor.reservations), tuple(floor.reclaimed))


def _place_all(gangs: Iterable[Gang], floor: Floor, *, strict: bool) -> tuple[list[Start], dict[str, Refusal], bool]:
    starts: list[Start] = []
    refusals: dict[str, Refusal] = {}
    refused: dict[Hashable, tuple[Refusal, float]] = {}  # with for how long places had been in fragments
    held_back: dict[Hashable, tuple[Refusal, float]] = {}  # those for whom there would be room that is reserved
    alike = floor.alike
    blocked: Refusal | None = None
    for number, gang in enumerate(gangs):
        if blocked:
            refusals[gang.job_id] = blocked
            continue
        floor.turn(number)
        if hopeless := gang.spec and replica_sizing.too_few(gang.spec, gang.estimate):
            refusals[gang.job_id] = hopeless  # of its own making: no gang like it is refused for that, nor held back
            continue
        like, bound = alike(gang), floor.bound(gang) if floor.reservations else ()
        known = _known(refused.get(like) or (held_back.get((like, bound)) if held_back else None), gang)
        answer = floor.over_limit(gang) or (floor.again(gang, known) if known else _place(gang, floor))
        if isinstance(answer, Start):
            starts.append(answer)
            held_back.clear()  # the room that they would have had may be taken now
            continue
        refusals[gang.job_id] = answer
        if answer.code is Code.QUOTA:
            continue
        if answer.code is Code.RESERVED:
            held_back[like, bound] = answer, gang.fragmented_seconds
        else:
            refused[like] = answer, gang.fragmented_seconds
        refusals[gang.job_id] = told = floor.reserve(gang, answer)
        if strict and answer.code is not Code.NEVER_FITS:
            blocked = behind(gang.job_id, told.detail)
    return starts, refusals, blocked is not None


def _place(gang: Gang, floor: Floor) -> Start | Refusal:
    """Place a gang; a service that leaves its replicas open with more of them, where so many are too slow there."""
    answer = floor.place(gang)
    if isinstance(answer, Start) or answer.code is not Code.QOS:
        return answer
    for more in replica_sizing.larger(gang):
        tried = floor.over_limit(more) or floor.place(more)
        if isinstance(tried, Start):
            return tried
        if tried.code is not Code.QOS:
            break  # there is no room for so many, nor for more
    return answer


def _known(refused: tuple[Refusal, float] | None, gang: Gang) -> Refusal | None:
    """Say to a gang what was said to one like it, as it is for its own wait."""
    return refused[0].after(gang.fragmented_seconds - refused[1]) if refused else None


def _mark(starts: Iterable[Start], ledger: Ledger, headroom: Headroom) -> Iterator[Start]:
    """Take the starts in order from what is free now, within limits; those that do not fit yet need room."""
    for start in starts:
        gang = start.gang
        if headroom.allows(gang.tenant, gang.gpu_milli, gang.cores) and hold_all(ledger, start.holdings):
            headroom.take(gang.tenant, gang.gpu_milli, gang.cores)
            yield start
        else:
            yield replace(start, needs_room=True)
