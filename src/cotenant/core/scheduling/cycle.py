"""The scheduling cycle, in two halves: `Admission` counts, `place` finds places.

1. Snapshot: all active jobs at one moment, with their estimates.
2. Order: the queue policy ranks them; some may be given up.
3. Admission: by counting, which jobs should start, in order, and which running jobs may be stopped for them.
4. Sizes: each job that should start becomes a gang, with its cores decided.
5. Placement: each gang in turn gets places, room by stopping or moving others, a reservation, or a refusal.
6. Plan: starts, stops, moves, reservations, and one reason for each job left waiting.

The live mesh runs the first half in the queue and the second in placement, page after page, which changes no decision
(ADR 90). The simulator runs one after the other, and a start forecast the second half alone. No clock, no network, no
chance: time and the random generator are arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from types import MappingProxyType

import numpy as np

from cotenant.core.capacity.ledger import Holding, Ledger
from cotenant.core.model.estimate import Estimate
from cotenant.core.model.gang import Demand, Gang, Part
from cotenant.core.model.job import JobSpec
from cotenant.core.model.job_table import Capacity, Flags, Ints, Jobs
from cotenant.core.model.node import NodeShape
from cotenant.core.model.refusal import Code, Refusal, behind
from cotenant.core.model.resources import amounts_of
from cotenant.core.model.tenancy import NO_TENANTS, Headroom, Tenancy
from cotenant.core.placement.gang_allocation import InvalidOffer, Victim, hold_all, take
from cotenant.core.placement.job_constraints import constraints_by
from cotenant.core.placement.node_avoidance import relax_avoidance
from cotenant.core.policy.cluster_view import EMPTY_CLUSTER, ClusterView
from cotenant.core.policy.protocols import CpuAllocator, Order, PlacementPolicy, QueuePolicy
from cotenant.core.scheduling.admission import RULES, Choice, Preemption, Rules, beyond_share, choose, stoppable
from cotenant.core.scheduling.equivalence import ClassRefusals, answers_for_class
from cotenant.core.scheduling.reservations import NO_RESERVATIONS, Reservation, ReservationRules
from cotenant.core.scheduling.session import PlacementSession, Start
from cotenant.core.sizing import replica_sizing

NO_MORE: Mapping[str, int] = MappingProxyType({})

__all__ = [
    "RULES",
    "Admission",
    "Choice",
    "InvalidOffer",
    "Plan",
    "Preemption",
    "Rules",
    "Start",
    "Victim",
    "choose",
    "gang_of",
    "gang_with",
    "place",
    "take",
]


@dataclass(frozen=True)
class Admission:
    """The first half of a cycle: the order of all jobs, and what follows from it by counting, when it is asked for."""

    jobs: Jobs
    order: Order
    policy: QueuePolicy
    capacity: Capacity
    now: float
    rules: Rules = RULES
    tenancy: Tenancy = NO_TENANTS

    @property
    def given_up(self) -> Ints:
        """The waiting rows that the order gives up."""
        marked = self.order.given_up
        return np.zeros(0, dtype=np.int64) if marked is None else np.flatnonzero(marked & ~self.jobs.running)

    @cached_property
    def choice(self) -> Choice:
        """Which rows should start, and which may be stopped."""
        return choose(
            self.jobs, self.policy, self.order, self.capacity, now=self.now, rules=self.rules, tenancy=self.tenancy
        )

    @cached_property
    def beyond_share(self) -> Flags | None:
        """Which rows wait, if they do, because of their tenant's share or limit; None if there are no shares."""
        counted = self.__dict__.get("choice")  # it is not counted for this alone
        return beyond_share(
            self.jobs, self.policy, self.order, now=self.now, rules=self.rules, tenancy=self.tenancy, choice=counted
        )

    @property
    def stoppable(self) -> list[tuple[int, int]]:
        """The running rows that later starts may stop, each with the number of waiting jobs that it yields to."""
        return stoppable(self.jobs, self.choice, self.rules, self.policy, self.now)

    @property
    def valid_seconds(self) -> float:
        """How long it holds if nothing happens."""
        if self.rules.enforces(self.policy) or self.rules.claims(self.policy, self.tenancy):
            return self.rules.valid_seconds(self.jobs, self.order, self.now)
        return self.order.valid_seconds


@dataclass(frozen=True, slots=True)
class Plan:
    """What a cycle decides: stops come before the starts that need room; one reason for each job left waiting."""

    starts: tuple[Start, ...]
    stops: tuple[str, ...]
    refusals: dict[str, Refusal]
    blocked: bool = False  # a strict queue stopped at a job that does not fit
    moves: tuple[Start, ...] = ()  # migrations: running jobs that stop and start again there
    reservations: tuple[Reservation, ...] = ()  # of gangs that have waited long
    reclaimed: tuple[str, ...] = ()  # stops of jobs whose borrowed resources are reclaimed

    @property
    def valid_seconds(self) -> float:
        """How long the plan holds if nothing happens but time passing."""
        return min((refusal.holds_seconds for refusal in self.refusals.values()), default=math.inf)

    @property
    def keeps_seconds(self) -> float:
        """How long places stay reserved for gangs without an estimated start; infinity if there are none."""
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
    """Return a job's gang, with its cores decided, and its replicas too if they are `auto`."""
    spec = replica_sizing.with_required_replicas(spec, estimate)
    sizing = allocator.size(spec, estimate, shapes)
    words = sizing.reason, replica_sizing.in_words(spec, estimate), replica_sizing.range_in_words(spec)
    reason = "; ".join(filter(None, words))
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
    """Return a job's gang with this many cores per replica, by role."""
    parts = tuple(
        Part(
            role.name,
            role.replicas,
            Demand(role.request.gpu_milli, count, role.request.gpu_type, **amounts_of(role.request)),
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
        constraints=constraints_by(spec),
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
    starting: Iterable[Start] = (),
    strict: bool = False,
    headroom: Headroom | None = None,
    cluster_view: ClusterView = EMPTY_CLUSTER,
    reserving: ReservationRules = NO_RESERVATIONS,
    next_of_class: Mapping[str, int] = NO_MORE,
    staying: Collection[str] = (),
    on_broken: Callable[[Gang, Exception], Refusal] | None = None,
) -> Plan:
    """Return places for gangs in their order; leaves the ledger unchanged. Without gangs, no policy is called.

    Victims are given first to go first, and are read only if a gang finds no free resources.

    1. Resources that are `leaving` anyway count as free, except those, and free ones, that are `promised` to other
       jobs.
    2. Each gang gets its places or a refusal. A refusal ends nothing, unless the queue is strict. Gangs with equal
       equivalence keys get the same refusal, computed once. A gang that would take its tenant over a limit is refused
       for that, which holds back no other gang, unless victims of the same tenant make room; `headroom` is counted as
       gangs start. A service with `auto` replicas gets more of them if fewer are too slow beside their neighbors.
    3. If free resources do not suffice, as few victims as possible make room, first to go first; of victims of equal
       standing, those whose stop costs least (`core.scheduling.preemption`). Victims whose resources are not used after
       all stay, and no job makes room for a gang that it outranks. Before that, a policy that moves jobs
       (`cluster_view.Rearranges`) is asked whether moves would do; then a policy that lends (`cluster_view.Reclaims`),
       whether reclaiming from borrowers would do.
    4. A gang that is refused although it has waited long gets a reservation, by the rules in `reserving`; later gangs
       are placed so that they do not delay it (`core.scheduling.reservations`).
    5. A start whose resources are not free yet `needs_room`: the stops and moves come first.

    More gangs of a class may exist than are here: `next_of_class` tells for some jobs before which gang the next one of
    their class would come. Unless their own refusal answers for it, the plan ends there, as it depends on that gang.

    No job of `staying` moves or gives anything back: an earlier part of the same cycle started it. Reservations count
    on the ends of jobs that are `starting` on what is `promised`, as on those of jobs that start in this plan.

    `cluster_view` is for policies that need more than what is free; reservations use the expected ends of its running
    jobs. A policy that raises, or offers what is not free, ends the cycle with its error; with `on_broken` only the
    gang it failed on is refused.
    """
    coming = iter(gangs)
    if (first := next(coming, None)) is None:
        return Plan((), (), {})
    room = Headroom(()) if headroom is None else headroom
    before = room.copy()
    with ledger.rolled_back():
        for holding in leaving:
            ledger.release(holding)
        for holding in promised:
            ledger.hold(holding)
        session = PlacementSession(ledger, policy, rng, victims, room, on_broken, cluster_view, reserving)
        session.staying = frozenset(staying)
        session.note_starting(starting)
        relaxed = (relax_avoidance(gang, ledger) for gang in chain((first,), coming))
        starts, refusals, blocked = _place_all(relaxed, session, next_of_class, strict=strict)
        stops = tuple(session.stops())
    with ledger.rolled_back():
        marked = tuple(_mark(starts, ledger, before))
    return Plan(
        marked, stops, refusals, blocked, tuple(session.moves), tuple(session.reservations), tuple(session.reclaimed)
    )


def _place_all(
    gangs: Iterable[Gang], session: PlacementSession, next_of_class: Mapping[str, int], *, strict: bool
) -> tuple[list[Start], dict[str, Refusal], bool]:
    starts: list[Start] = []
    refusals: dict[str, Refusal] = {}
    of_classes = ClassRefusals[Hashable]()
    blocked: Refusal | None = None
    end = math.inf  # the gang before which one comes that is not here
    for number, gang in enumerate(gangs):
        if number >= end:
            break
        if blocked:
            refusals[gang.job_id] = blocked
            continue
        session.advance_to(number)
        answer = _answer(gang, session, of_classes)
        if isinstance(answer, Start):
            starts.append(answer)
        else:
            refusals[gang.job_id] = answer
            if strict and answer.code not in (Code.NEVER_FITS, Code.QUOTA):
                blocked = behind(gang.job_id, answer.detail)
        if gang.job_id in next_of_class and (isinstance(answer, Start) or not answers_for_class(answer)):
            end = min(end, next_of_class[gang.job_id])
    return starts, refusals, blocked is not None


def _answer(gang: Gang, session: PlacementSession, of_classes: ClassRefusals[Hashable]) -> Start | Refusal:
    """Place a gang, or return the refusal to report; those that answer for other gangs are added to the classes'."""
    if hopeless := gang.spec and replica_sizing.unreachable_target(gang.spec, gang.estimate):
        return hopeless  # specific to this job: equivalent gangs are not refused
    like, bound = session.equivalence_key(gang), session.binding_jobs(gang) if session.reservations else ()
    known = of_classes.get(like, gang.fragmented_seconds, bound)
    answer = session.over_limit(gang) or (session.adapt_refusal(gang, known) if known else _place(gang, session))
    if isinstance(answer, Start):
        of_classes.forget_reserved()  # that room may be taken now
        return answer
    if answer.code is Code.QUOTA:
        return answer
    if not known:
        of_classes.add(like, answer, gang.fragmented_seconds, bound)
    return session.reserve(gang, answer)


def _place(gang: Gang, session: PlacementSession) -> Start | Refusal:
    """Place a gang; a service with `auto` replicas is tried with more of them if fewer are too slow there."""
    answer = session.place(gang)
    if isinstance(answer, Start) or answer.code is not Code.QOS:
        return answer
    for more in replica_sizing.larger_gangs(gang):
        tried = session.over_limit(more) or session.place(more)
        if isinstance(tried, Start):
            return tried
        if tried.code is not Code.QOS:
            break  # no room for this many, nor for more
    return answer


def _mark(starts: Iterable[Start], ledger: Ledger, headroom: Headroom) -> Iterator[Start]:
    """Yield the starts in order, marked as needing room if they do not fit into what is free now and within limits."""
    for start in starts:
        gang = start.gang
        if headroom.allows(gang.tenant, gang.gpu_milli, gang.cores) and hold_all(ledger, start.holdings):
            headroom.take(gang.tenant, gang.gpu_milli, gang.cores)
            yield start
        else:
            yield replace(start, needs_room=True)
