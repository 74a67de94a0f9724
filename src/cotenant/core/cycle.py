"""The scheduling cycle: snapshot → estimates → order → sizes → placement → plan with refusals.

The live mesh runs `choose` in the queue and `place` in placement, the simulator runs one after the other; both are
these functions. Nothing here knows a clock, a network or chance: time and the generator are arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cotenant.core.estimates import Estimate
from cotenant.core.jobs import Demand, Gang, JobSpec, Part
from cotenant.core.ledger import Holding, Ledger, Offer
from cotenant.core.nodes import NodeShape
from cotenant.core.policy import CpuAllocator, Order, PlacementPolicy, QueuePolicy
from cotenant.core.refusals import Code, Refusal, behind
from cotenant.core.table import Ints, Jobs


@dataclass(frozen=True, slots=True)
class Capacity:
    """Sums over the nodes that take work; what leaves soon is counted as there."""

    gpu_milli: int
    cores: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Choice:
    """What the order says: rows that should start, in order, and rows that may have to make room, last first."""

    ranked: Ints
    starts: Ints
    victims: Ints
    outranked: Ints


@dataclass(frozen=True, slots=True)
class Victim:
    """A running job that the order does not protect, and what it holds."""

    job_id: str
    holdings: tuple[Holding, ...]


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


def rank(jobs: Jobs, order: Order, *, running_first: bool) -> Ints:
    """Sort rows by priority, level, (running first,) score, arrival and sequence: the order in which jobs run."""
    keys: list[np.ndarray] = [jobs.sequence, jobs.arrival_seconds, order.score]
    if running_first:
        keys.append(~jobs.running)
    keys += [order.level, -jobs.priority]
    return np.lexsort(keys)


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
    first jobs of the order that fit together into the whole capacity should run; running jobs that are not among
    them, may be preempted and have run for `run_seconds_min` are victims, the last in the order first.
    """
    ranked = rank(jobs, order, running_first=policy.running_first)
    waiting = ranked[~jobs.running[ranked]]
    nobody = ranked[:0]
    if not policy.preemptive:
        return Choice(ranked, waiting, nobody, nobody)
    protected = jobs.running & (~jobs.preemptible | (now - jobs.running_since < run_seconds_min))
    selected = _fill(jobs, ranked, protected, capacity, strict=policy.strict)
    victims = ranked[(jobs.running & ~selected)[ranked]][::-1]
    return Choice(ranked, waiting[selected[waiting]], victims, waiting[~selected[waiting]])


def _fill(jobs: Jobs, ranked: Ints, protected: np.ndarray, capacity: Capacity, *, strict: bool) -> np.ndarray:
    """Walk the order and take what fits into what is left; what may not be preempted is taken beforehand."""
    selected = protected.copy()
    gpus = capacity.gpu_milli - int(jobs.gpu_milli[protected].sum())
    cores = capacity.cores - int(jobs.cores[protected].sum())
    memory = capacity.memory_bytes - int(jobs.memory_bytes[protected].sum())
    need_gpus, need_cores = jobs.gpu_milli[ranked].tolist(), jobs.cores[ranked].tolist()
    need_memory, taken = jobs.memory_bytes[ranked].tolist(), protected[ranked].tolist()
    least = min(need_gpus, default=0)
    for place, row in enumerate(ranked.tolist()):
        if taken[place]:
            continue
        if need_gpus[place] <= gpus and need_cores[place] <= cores and need_memory[place] <= memory:
            selected[row] = True
            gpus -= need_gpus[place]
            cores -= need_cores[place]
            memory -= need_memory[place]
        elif strict:
            break
        if gpus < least:
            break
    return selected


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
    victims: Sequence[Victim] = (),
    leaving: Sequence[Holding] = (),
    strict: bool = False,
) -> Plan:
    """Find places for gangs in their order; leaves the ledger as it was.

    1. What is `leaving` anyway, and what victims hold, counts as free.
    2. Each gang gets its places or a refusal. A refusal ends nothing, unless the queue is strict. Gangs of one shape
       are refused for the same reason, once.
    3. Victims whose room nobody used, the most deserving first, keep it.
    4. A start whose room is not free yet `needs_room`: the stops come first.
    """
    lent = [*leaving, *(holding for victim in victims for holding in victim.holdings)]
    for holding in lent:
        ledger.release(holding)
    starts, refusals, blocked = _place_all(gangs, ledger, policy, rng, strict=strict)
    stops: list[str] = []
    kept: list[Holding] = []
    for victim in reversed(victims):
        if _hold_all(ledger, victim.holdings):
            kept += victim.holdings
        else:
            stops.append(victim.job_id)
    for holding in [*kept, *(holding for start in starts for holding in start.holdings)]:
        ledger.release(holding)
    for holding in lent:
        ledger.hold(holding)
    return Plan(tuple(_mark(starts, ledger)), tuple(stops), refusals, blocked)


def _place_all(
    gangs: Iterable[Gang], ledger: Ledger, policy: PlacementPolicy, rng: np.random.Generator, *, strict: bool
) -> tuple[list[Start], dict[str, Refusal], bool]:
    starts: list[Start] = []
    refusals: dict[str, Refusal] = {}
    refused: dict[tuple[object, ...], Refusal] = {}
    head: tuple[str, Refusal] | None = None
    for gang in gangs:
        if head:
            refusals[gang.job_id] = behind(head[0], head[1].detail)
            continue
        shape = (gang.parts, gang.locality)
        answer = refused.get(shape) or policy.place(gang, ledger, rng)
        if isinstance(answer, Refusal):
            refusals[gang.job_id] = refused[shape] = answer
            if strict and answer.code is not Code.NEVER_FITS:
                head = (gang.job_id, answer)
        else:
            starts.append(Start(gang, answer, take(ledger, gang, answer), needs_room=False))
    return starts, refusals, head is not None


def take(ledger: Ledger, gang: Gang, offer: Offer) -> tuple[Holding, ...]:
    """Take what an offer names, whole or not at all.

    Raises:
        Overcommitted: the offer names what is not free.
    """
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


def _mark(starts: list[Start], ledger: Ledger) -> Iterator[Start]:
    """Take the starts in order from what is free now; those that do not fit yet need room. Undoes what it took."""
    taken: list[Holding] = []
    for start in starts:
        if _hold_all(ledger, start.holdings):
            taken += start.holdings
            yield start
        else:
            yield Start(start.gang, start.offer, start.holdings, needs_room=True)
    for holding in taken:
        ledger.release(holding)
