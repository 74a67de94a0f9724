"""Planning: runs the core's scheduling cycle over the queue's candidates and turns its starts into attempts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from types import MappingProxyType

import numpy as np
import structlog

from cotenant import telemetry
from cotenant.codec import refusals as refusals_on_the_wire
from cotenant.codec import specs
from cotenant.codec.tenants import tenant_of
from cotenant.core.model.allocation import NodeAllocation
from cotenant.core.model.gang import Gang
from cotenant.core.model.lifecycle import AttemptState
from cotenant.core.model.refusal import Code, Refusal, plural, policy_failed
from cotenant.core.model.resources import with_prefix
from cotenant.core.model.tenancy import Headroom
from cotenant.core.placement.device_assignment import Task
from cotenant.core.placement.gang_allocation import hold_all
from cotenant.core.policy.capabilities import capability_of
from cotenant.core.policy.cluster_view import EMPTY_CLUSTER, ClusterView
from cotenant.core.policy.protocols import CpuAllocator, LeavesOutScorers, PlacementPolicy
from cotenant.core.scheduling import cycle
from cotenant.core.scheduling.reservations import NO_RESERVATIONS, ReservationRules
from cotenant.internal.v1 import placement_service_pb2 as placement_pb2
from cotenant.internal.v1.attempt_pb2 import ObservedAttempt
from cotenant.services.placement.cluster.cluster_state import Cluster
from cotenant.services.placement.cluster.live_records import SCHEMA_VERSION, LiveAttempt
from cotenant.services.placement.cluster.request_decoding import Enrich, gang_of, without_avoided
from cotenant.services.placement.planning import spare_cores
from cotenant.services.placement.planning.cluster_view import STOP_COSTS, since_seconds
from cotenant.services.placement.planning.tentative_reservations import KEPT_SECONDS, TentativeReservations
from cotenant.storage.v1 import records_pb2

log = structlog.get_logger()

SCORER_FAULTS = telemetry.counter(
    "cotenant.placement.scorer_faults", "{cycle}", "Cycles that left out a scorer of the placement policy, by scorer."
)


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision of a plan: attempts to commit, attempts to stop, and refusals."""

    starts: tuple[LiveAttempt, ...]
    sizings: dict[str, str]  # by job
    stops: tuple[LiveAttempt, ...]
    moves: tuple[LiveAttempt, ...]  # stopped to migrate
    reclaimed: tuple[LiveAttempt, ...]  # stopped to give back lent resources
    loans: tuple[spare_cores.CoreReclaim, ...]  # lent cores to reclaim
    refusals: dict[str, Refusal]


def plan(
    cluster: Cluster,
    request: placement_pb2.PlanPlacementRequest,
    policy: PlacementPolicy,
    allocator: CpuAllocator,
    enrich: Enrich,
    cluster_view: ClusterView = EMPTY_CLUSTER,
    promised: Mapping[str, cycle.Start] = MappingProxyType({}),
    canaries: Mapping[str, cycle.Start] = MappingProxyType({}),
) -> cycle.Plan:
    """Return the plan of the core's `place` for the candidates; nothing is held afterwards.

    `enrich` adds the rates of its job class to a candidate's estimate. Candidates with a `promised` start get that
    start, before all others, and no other candidate gets its place. The same applies to `canaries`, on held nodes.
    Candidates behind further jobs of a class that are not among them are not decided (`Candidate.next_of_class`).
    Tenants' limits are checked here with the chosen cores; the queue counts an open number of cores as one per replica.
    """

    def broken(gang: Gang, error: Exception) -> Refusal:
        log.error("policy_failed", policy=policy.name, job=gang.job_id, error=f"{type(error).__name__}: {error}")
        return policy_failed(policy.name, error)

    ledger = cluster.ledger  # first, because rebuilding it updates which nodes are open
    promised = {**without_avoided(promised, request.candidates, cluster), **canaries}
    shapes = cluster.open_shapes()
    candidates_count = len(request.candidates)
    due_before = [0, *accumulate(candidate.job_id in promised for candidate in request.candidates)]
    followed = {
        candidate.job_id: min(candidate.next_of_class, candidates_count)
        for candidate in request.candidates
        if candidate.HasField("next_of_class")
    }
    decided = min((index for job_id, index in followed.items() if job_id in promised), default=candidates_count)
    gangs = [
        gang_of(candidate, allocator, shapes, enrich)
        for candidate in request.candidates[:decided]
        if candidate.job_id not in promised
    ]
    ahead = {
        victim.job_id: victim.ahead - due_before[max(0, min(victim.ahead, candidates_count))]
        if victim.HasField("ahead")
        else None
        for victim in request.victims
    }
    requested = {victim.job_id: victim for victim in request.victims}
    victims = cluster.victims([(victim.job_id, victim.number) for victim in request.victims])
    with ledger.rolled_back():
        due = [
            replace(promised[job_id], needs_room=not hold_all(ledger, promised[job_id].holdings))
            for job_id in (candidate.job_id for candidate in request.candidates)
            if job_id in promised
        ]
        now = {start.gang.job_id for start in due if not start.needs_room}
        headroom = cluster.headroom(Headroom(map(tenant_of, request.tenants)))
        for gang in (start.gang for start in due if not start.needs_room):
            headroom.take(gang.tenant, gang.gpu_milli, gang.cores)
        outcome = cycle.place(
            gangs,
            ledger,
            policy,
            np.random.default_rng(request.seed),
            victims=[victim_of(cluster, live, requested[live.key[0]], ahead[live.key[0]]) for live in victims],
            leaving=cluster.leaving(),
            promised=[one for job_id, start in promised.items() if job_id not in now for one in start.holdings],
            starting=promised.values(),
            strict=request.strict,
            headroom=headroom,
            cluster_view=cluster_view,
            reserving=reserving_of(request),
            staying=request.started_job_ids,
            next_of_class={job_id: index - due_before[index] for job_id, index in followed.items()},
            on_broken=broken,
        )
    report_scorer_faults(policy)
    return replace(outcome, starts=(*due, *outcome.starts))


def report_scorer_faults(policy: PlacementPolicy) -> None:
    """Log and count the scorers that a policy left out of a cycle."""
    if scored := capability_of(policy, LeavesOutScorers):
        for scorer, fault in scored.take_scorer_faults().items():
            log.error("scorer_left_out", policy=policy.name, scorer=scorer, error=fault)
            SCORER_FAULTS.add(scorer=scorer)


def victim_of(cluster: Cluster, live: LiveAttempt, victim: placement_pb2.Victim, ahead: int | None) -> cycle.Victim:
    """Return a running attempt as a victim: what its stop would free, and what it would cost if that matters."""
    return cycle.Victim(
        live.key[0],
        cluster.firm_holdings(live),
        ahead,
        live.record.spec.tenant,
        standing=victim.standing if victim.HasField("standing") else None,
        stop_cost_seconds=STOP_COSTS.of(time.time() - since_seconds(live)) if victim.HasField("standing") else 0.0,
    )


def reserving_of(request: placement_pb2.PlanPlacementRequest | placement_pb2.ForecastStartsRequest) -> ReservationRules:
    """Return the reservation settings of a request."""
    if not request.HasField("reserve_after"):
        return NO_RESERVATIONS
    return ReservationRules(specs.seconds(request.reserve_after), max(1, request.reservations))


def decide(
    cluster: Cluster,
    request: placement_pb2.PlanPlacementRequest,
    outcome: cycle.Plan,
    reservations: TentativeReservations,
    now: float,
) -> Decision:
    """Assign devices to the starts that are possible now and hold them; starts that need room wait for the stops.

    Migrating jobs, and the jobs that they make room for, get reservations; `now` is on the monotonic clock.
    """
    candidates = {candidate.job_id: candidate for candidate in request.candidates}
    starts: list[LiveAttempt] = []
    refusals = dict(outcome.refusals)
    ready = [start for start in outcome.starts if not start.needs_room]
    try:
        for start in ready:
            starts.append(assign(cluster, start, candidates[start.gang.job_id]))  # noqa: PERF401  # a failure undoes the earlier ones
    except BaseException:
        for live in starts:
            cluster.undo(live)
        raise
    stops = tuple(cluster.attempts[job_id] for job_id in outcome.stops)
    moves = tuple(cluster.attempts[move.gang.job_id] for move in outcome.moves)
    reclaimed = tuple(cluster.attempts[job_id] for job_id in outcome.reclaimed)
    for start in ready:
        reservations.drop(start.gang.job_id)
    with_required_replicas = {start.gang.job_id for start in outcome.starts}
    older = (kept for reservation in reservations if (kept := reservation.start_in(cluster)))
    waiting = [*(kept for kept in older if kept.gang.job_id not in with_required_replicas), *_waiting(outcome)]
    loans, cluster.claimed = spare_cores.reclaim_lent_cores(cluster, waiting, (*stops, *moves, *reclaimed))
    _reserve(cluster, request, outcome, reservations, now)
    for start in outcome.starts:
        _set_preemption_details(cluster, start)
        if start.needs_room:
            refusals[start.gang.job_id] = making_room_refusal(
                len(stops), len(loans), len(start.moves), len(start.reclaims)
            )
    sizings = {start.gang.job_id: start.gang.sizing for start in ready}
    return Decision(tuple(starts), sizings, stops, moves, reclaimed, loans, refusals)


def _stopped_job_ids(outcome: cycle.Plan) -> list[str]:
    return [*outcome.stops, *outcome.reclaimed, *(move.gang.job_id for move in outcome.moves)]


def _waiting(outcome: cycle.Plan) -> list[cycle.Start]:
    return [start for start in (*outcome.starts, *outcome.moves) if start.needs_room]


def _reserve(
    cluster: Cluster,
    request: placement_pb2.PlanPlacementRequest,
    outcome: cycle.Plan,
    reservations: TentativeReservations,
    now: float,
) -> None:
    """Reserve the places of migrating jobs, and of the jobs that they make room for, until the stops are done."""
    if not (outcome.moves or outcome.reclaimed):
        return
    numbers = {candidate.job_id: candidate.number for candidate in request.candidates}
    numbers |= {move.gang.job_id: cluster.attempts[move.gang.job_id].key[1] + 1 for move in outcome.moves}
    for_whom = [start for start in outcome.starts if (start.moves or start.reclaims) and start.needs_room]
    leaving = {live.key for live in cluster.attempts.values() if live.state is AttemptState.STOPPING}
    leaving |= {cluster.attempts[job_id].key for job_id in _stopped_job_ids(outcome)}
    graces = [specs.seconds(cluster.attempts[job_id].record.spec.grace) for job_id, _ in leaving]
    for start in (*for_whom, *outcome.moves):
        reservations.make(cluster, start, numbers[start.gang.job_id], now + max(graces) + KEPT_SECONDS)
        _set_move_detail(cluster, start, outcome)
    for start in for_whom:
        for job_id in start.reclaims:
            cluster.attempts[job_id].attempt.stop_detail = f"ran on reserved resources, which {start.gang.job_id} needs"


def longest_grace_seconds(cluster: Cluster, more: Sequence[LiveAttempt]) -> float:
    """Return the longest grace of all stopping attempts, and of `more` that are to stop."""
    stopping = (live for live in cluster.attempts.values() if live.state is AttemptState.STOPPING)
    return max((specs.seconds(live.record.spec.grace) for live in (*stopping, *more)), default=0.0)


def _set_move_detail(cluster: Cluster, start: cycle.Start, outcome: cycle.Plan) -> None:
    """Set a migrating attempt's stop detail: where the job goes, and for which job."""
    live = cluster.attempts.get(start.gang.job_id)
    if start.moves or live is None:
        return
    nodes = ", ".join(dict.fromkeys(cluster.node_at(share.node).id for share in start.offer))
    by = next((one.gang.job_id for one in outcome.starts if start.gang.job_id in one.moves), "another job")
    live.attempt.stop_detail = f"continues on {nodes}, so that {by} can start"


def _set_preemption_details(cluster: Cluster, start: cycle.Start) -> None:
    """Set the stop detail of attempts that are stopped for a start: for which job, by name within the tenant."""
    gang = start.gang
    for job_id in start.stops:
        live = cluster.attempts[job_id]
        own_name = gang.spec.name if gang.spec else ""
        whom = own_name if live.record.spec.tenant == gang.tenant else "of another tenant"
        live.attempt.stop_detail = f"made room for {gang.job_id}" + (f" ({whom})" if whom else "")


def dry_run(cluster: Cluster, outcome: cycle.Plan) -> placement_pb2.PlanPlacementResponse:
    """Return what would be decided, with device names; nothing stays held, and no agent is informed."""
    response = placement_pb2.PlanPlacementResponse()
    refusals = dict(outcome.refusals)
    named: list[tuple[cycle.Start, list[NodeAllocation]]] = []
    leaving = [cluster.attempts[job_id] for job_id in _stopped_job_ids(outcome)]
    loans, _ = spare_cores.reclaim_lent_cores(cluster, _waiting(outcome), leaving)
    for start in outcome.starts:
        if start.needs_room:
            refusals[start.gang.job_id] = making_room_refusal(
                len(outcome.stops), len(loans), len(start.moves), len(start.reclaims)
            )
            continue
        allocation = name_tasks(cluster, start)
        named.append((start, allocation))
        placed = response.placed.add(sizing=start.gang.sizing)
        placed.attempt.job_id = start.gang.job_id
        placed.attempt.allocations.extend(specs.allocation_to_wire(part) for part in allocation)
    for _, allocation in named:
        for part in allocation:
            cluster.nodes[part.node_id].book.release(part)
    for live in (cluster.attempts[job_id] for job_id in (*outcome.stops, *outcome.reclaimed)):
        response.preempted.add(job_id=live.key[0], number=live.key[1])
    _refuse(response, refusals)
    response.capacity.CopyFrom(capacity(cluster))
    return response


def making_room_refusal(stops: int, loans: int = 0, moves: int = 0, reclaims: int = 0) -> Refusal:
    """Return the refusal of a job whose place is chosen but has to be freed first."""
    if moves:
        awaited, remedy = f"{plural(moves, 'job')} to move elsewhere", "they stop there, within their grace"
    elif reclaims:
        awaited = f"{plural(reclaims, 'job')} to give back what is reserved for it"
        remedy = "they stop, within their grace"
    elif stops:
        awaited, remedy = f"{plural(stops, 'job')} with a lower rank now to stop", "they stop, within their grace"
    elif loans:
        awaited, remedy = f"{plural(loans, 'job')} to give back lent cores", "they give them back, at once"
    else:
        awaited, remedy = "jobs that are already stopping or giving cores back", "they finish, within their grace"
    return Refusal(Code.MAKING_ROOM, f"its place is chosen; it waits for {awaited}", remedy)


def assign(cluster: Cluster, start: cycle.Start, candidate: placement_pb2.Candidate) -> LiveAttempt:
    """Assign cores and GPUs to a start, hold them, and return the new attempt."""
    allocation = tuple(name_tasks(cluster, start))
    for holding in start.holdings:
        cluster.ledger.hold(holding)
    record = records_pb2.StoredAttempt(
        schema_version=SCHEMA_VERSION,
        spec=candidate.spec,
        trace_parent=candidate.trace_parent,
        submitter=candidate.submitter,
        estimate=candidate.estimate,
    )
    for role, part in zip(record.spec.roles, start.gang.parts, strict=True):
        role.replicas = part.replicas  # placement may have chosen more, if the number is open
    attempt = record.attempt
    attempt.job_id, attempt.number, attempt.pre_run = candidate.job_id, candidate.number, candidate.pre_run
    attempt.state = specs.ATTEMPT_STATES.to_wire(AttemptState.ASSIGNED)
    attempt.allocations.extend(specs.allocation_to_wire(part) for part in allocation)
    attempt.sizing = start.gang.sizing
    attempt.assign_time.FromNanoseconds(time.time_ns())
    attempt.master_address, attempt.master_port = cluster.rendezvous(allocation)
    live = LiveAttempt(record, allocation, holdings=start.holdings)
    cluster.add(live)
    return live


def name_tasks(cluster: Cluster, start: cycle.Start) -> list[NodeAllocation]:
    """Return a start's allocation by node: its replicas ranked over the gang, with cores and GPUs assigned."""
    by_node: dict[int, list[Task]] = {}
    shares: dict[int, list[tuple[int, int]]] = {}
    ranks = ranks_of(start.gang)
    for share, holding in zip(start.offer, start.holdings, strict=True):
        part = start.gang.parts[share.part]
        tasks = by_node.setdefault(share.node, [])
        tasks += [Task(part.role, ranks[share.part].pop(0), part.demand) for _ in range(share.replicas)]
        shares.setdefault(share.node, []).extend(holding.shares)
    named = [cluster.node_at(number).book.assign(tasks, shares[number]) for number, tasks in by_node.items()]
    if start.reclaimable:
        named = [replace(part, tasks=tuple(replace(task, reclaimable=True) for task in part.tasks)) for part in named]
    return sorted(named, key=lambda allocation: min(task.rank for task in allocation.tasks))


def ranks_of(gang: Gang) -> list[list[int]]:
    """Return the ranks of each part's replicas: from 0 over the whole gang, in the order of the parts."""
    ranks: list[list[int]] = []
    first = 0
    for part in gang.parts:
        ranks.append(list(range(first, first + part.replicas)))
        first += part.replicas
    return ranks


def answer(
    cluster: Cluster, decision: Decision, started: Sequence[ObservedAttempt]
) -> placement_pb2.PlanPlacementResponse:
    """Return the response to the queue for a decision, with the starts that were committed."""
    response = placement_pb2.PlanPlacementResponse()
    for observed in started:
        sizing = decision.sizings[observed.attempt.job_id]
        response.placed.add(attempt=observed.attempt, sizing=sizing, evidence=observed.evidence)
    for live in (*decision.stops, *decision.reclaimed):
        response.preempted.add(job_id=live.key[0], number=live.key[1])
    _refuse(response, decision.refusals)
    response.capacity.CopyFrom(capacity(cluster))
    return response


def _refuse(response: placement_pb2.PlanPlacementResponse, refusals: Mapping[str, Refusal]) -> None:
    for job_id, refusal in refusals.items():
        response.refused.add(job_id=job_id, refusal=refusals_on_the_wire.to_wire(refusal))


def capacity(cluster: Cluster) -> placement_pb2.Capacity:
    """Return what is free on open nodes, and the total of that and everything held on any node.

    The total includes nodes that are held for failed launches: a queue that saw no capacity would request no plan, and
    no canary would ever start there.
    """
    ledger = cluster.ledger
    free = may_take = free_anywhere = ledger.sums(ledger.open)
    if not ledger.open.all():
        free_anywhere = ledger.sums(np.ones_like(ledger.open))
        taking = ledger.open.copy()
        taking[[node.number for node in cluster.nodes.values() if node.hold and node.open_without_hold]] = True
        may_take = ledger.sums(taking)
    have = ledger.sums(np.ones_like(ledger.open), empty=True)
    total = may_take + have - free_anywhere
    return placement_pb2.Capacity(**with_prefix("total_", total), **with_prefix("free_", free))
