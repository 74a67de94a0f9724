"""Runs the queue's plans one at a time: decide, hold, commit, inform."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from cotenant import telemetry
from cotenant.codec import refusals
from cotenant.codec.tenants import tenant_of
from cotenant.core.model.lifecycle import StopReason
from cotenant.core.model.refusal import Code, Refusal
from cotenant.core.model.tenancy import Headroom
from cotenant.core.policy.protocols import CpuAllocator, PlacementPolicy
from cotenant.core.scheduling import cycle
from cotenant.internal.v1 import placement_service_pb2 as placement_pb2
from cotenant.internal.v1.attempt_pb2 import ObservedAttempt
from cotenant.rpc.task_group import BackgroundTasks
from cotenant.services.placement.attempts.attempt_store import (
    QUEUE_LEADER,
    AttemptStore,
    job_condition,
    leader_condition,
)
from cotenant.services.placement.attempts.job_classes import JobClasses
from cotenant.services.placement.attempts.resizes import Resizes
from cotenant.services.placement.cluster.attempt_reports import MESSAGE_LENGTH_MAX
from cotenant.services.placement.cluster.cluster_state import Cluster
from cotenant.services.placement.cluster.committer import Outdated, TooLarge
from cotenant.services.placement.cluster.live_records import LiveAttempt
from cotenant.services.placement.cluster.request_decoding import (
    check_candidates,
    check_order,
    check_resizes,
    remove_candidate,
)
from cotenant.services.placement.planning import planner
from cotenant.services.placement.planning.cluster_view import LiveClusterView, StopCosts
from cotenant.services.placement.planning.replica_resizes import Resized, Unreserved, decide_resizes
from cotenant.services.placement.planning.tentative_reservations import KEPT_SECONDS, TentativeReservations
from cotenant.services.placement.registry.canaries import canaries
from cotenant.services.placement.registry.suspects import SuspectNodes
from cotenant.store.port import Compare

SECONDS = telemetry.histogram("cotenant.placement.plan", "s", "Time to decide and commit one plan.")
PLACED = telemetry.counter("cotenant.placement.placed", "{attempt}", "Attempts placed.")
MOVED = telemetry.counter("cotenant.placement.moved", "{attempt}", "Attempts stopped to migrate to other nodes.")
RECLAIMED = telemetry.counter(
    "cotenant.placement.reclaimed", "{attempt}", "Attempts stopped to give back lent resources."
)
RESIZED = telemetry.counter(
    "cotenant.placement.generations", "{attempt}", "Attempts stopped to go on with another number of replicas."
)
REFUSED = telemetry.counter("cotenant.placement.refused", "{job}", "Jobs refused, by reason.")

EXPIRY_MARGIN_SECONDS = 0.1  # so that a reservation is checked after it expired, not just before
RETRY_PLAN_SECONDS = 0.5  # before a job is planned again whose attempt was already over


class PlanRunner:
    """Answers the queue's plan requests from the cluster state."""

    def __init__(
        self,
        cluster: Cluster,
        attempts: AttemptStore,
        resizes: Resizes,
        job_classes: JobClasses,
        policy: PlacementPolicy,
        allocator: CpuAllocator,
        costs: StopCosts,
        background: BackgroundTasks,
        check_leadership: Callable[[], None],
        suspects: SuspectNodes,
    ) -> None:
        self._cluster, self._attempts, self._resizes, self._background = cluster, attempts, resizes, background
        self._policy, self._allocator, self._job_classes, self._costs = policy, allocator, job_classes, costs
        self._reservations = TentativeReservations()
        self._unreserved = Unreserved(cluster)
        self._check_leadership, self._suspects = check_leadership, suspects
        self._lock = asyncio.Lock()

    async def plan(self, request: placement_pb2.PlanPlacementRequest) -> placement_pb2.PlanPlacementResponse:
        """Place what can be placed. A decision is carried out even if the caller is gone by then."""
        await check_candidates(request.candidates)
        check_order(request.candidates)
        return await self._background.finish(self._plan(request))

    async def _plan(self, request: placement_pb2.PlanPlacementRequest) -> placement_pb2.PlanPlacementResponse:
        async with self._lock:
            self._check_leadership()
            begin = time.time()
            standing: list[placement_pb2.Placed] = []
            already_over: list[placement_pb2.Refused] = []
            if not request.validate_only:
                standing, already_over = self._already_placed(request), self._already_over(request)
                self._cluster.limits = Headroom(map(tenant_of, request.tenants))
                self._restore_reservations(request.seed)
            self._cluster.set_time(begin)
            cluster_view = LiveClusterView(self._cluster, self._costs, begin)
            promised = self._promised(request)
            enrich = self._job_classes.enrich
            tried = self._canaries(request, cluster_view, promised)
            outcome = planner.plan(
                self._cluster, request, self._policy, self._allocator, enrich, cluster_view, promised, tried
            )
            if request.validate_only:
                return planner.dry_run(self._cluster, outcome)
            decision = planner.decide(self._cluster, request, outcome, self._reservations, time.monotonic())
            for live in decision.starts:
                if live.key[0] in tried:
                    self._suspects.canary(live)
            placed = time.time()
            under = leader_condition(request.term)
            known = {one.job_id: job_condition(one.job_id, one.revision, request.term) for one in request.candidates}
            started = await self._start_all(decision, under, known, begin, placed)
            if not started and (decision.stops or decision.moves or decision.reclaimed or decision.loans):
                await self._attempts.confirm(under)
            self._attempts.order_stops(decision.stops, StopReason.PREEMPTED)
            self._stop_and_announce(decision.moves, StopReason.MIGRATED)
            self._stop_and_announce(decision.reclaimed, StopReason.RECLAIMED)
            for loan in decision.loans:
                self._resizes.begin(loan.live, loan.cores, loan.reason)
            response = planner.answer(self._cluster, decision, self._kept(started))
            response.placed.extend(standing)
            response.refused.extend(already_over)
        SECONDS.record(time.time() - begin)
        for refused in response.refused:
            REFUSED.add(code=refused.refusal.code)
        return response

    async def resize(self, request: placement_pb2.ResizeReplicasRequest) -> placement_pb2.ResizeReplicasResponse:
        """Give elastic jobs another number of replicas, even if the caller is gone by then."""
        check_resizes(request.resizes)
        return await self._background.finish(self._resize(request))

    async def _resize(self, request: placement_pb2.ResizeReplicasRequest) -> placement_pb2.ResizeReplicasResponse:
        async with self._lock:
            self._check_leadership()
            self._restore_reservations(request.seed)
            cluster_view = LiveClusterView(self._cluster, self._costs, time.time())
            promised = self._reservations.valid(self._cluster, {}, time.monotonic()).values()
            enrich = self._job_classes.enrich
            found, refusals_by_job = decide_resizes(
                self._cluster, request, self._policy, self._allocator, enrich, cluster_view, promised
            )
            self._reserve(found)
            try:
                await self._attempts.confirm(leader_condition(request.term))
            except BaseException:
                self._drop_reservations(found)
                raise
            resized = [one for one in found if self._cluster.can_resize(one.live)]
            self._drop_reservations([one for one in found if one not in resized])
            for one in resized:
                one.live.attempt.next_replicas = one.replicas
                one.live.attempt.stop_detail = one.reason[:MESSAGE_LENGTH_MAX]
            RESIZED.add(len(resized))
            self._attempts.order_stops([one.live for one in resized], StopReason.RESIZED)
        response = placement_pb2.ResizeReplicasResponse(attempts=[one.live.attempt for one in resized])
        for job_id, refusal in refusals_by_job.items():
            response.refused.add(job_id=job_id, refusal=refusals.to_wire(refusal))
        return response

    def _reserve(self, resized: Sequence[Resized]) -> None:
        """Reserve the places of next generations until what they need is released, and announce when that expires."""
        if not resized:
            return
        seconds = planner.longest_grace_seconds(self._cluster, [one.live for one in resized]) + KEPT_SECONDS
        until = time.monotonic() + seconds
        for one in resized:
            self._reservations.make(self._cluster, one.start, one.live.key[1] + 1, until)
        self._background.start(self._announce_expiry(seconds))

    def _restore_reservations(self, seed: int) -> None:
        """Reserve the places of next generations anew after the state was loaded."""
        promised = self._reservations.valid(self._cluster, {}, time.monotonic()).values()
        rng, enrich = np.random.default_rng(seed), self._job_classes.enrich
        self._reserve(self._unreserved.take(self._policy, self._allocator, enrich, rng, promised))

    def _drop_reservations(self, resized: Iterable[Resized]) -> None:
        for one in resized:
            self._reservations.drop(one.live.key[0])

    def _canaries(
        self,
        request: placement_pb2.PlanPlacementRequest,
        cluster_view: LiveClusterView,
        promised: Mapping[str, cycle.Start],
    ) -> Mapping[str, cycle.Start]:
        """Return the canaries to start on held nodes, after refreshing the held nodes that explain refusals."""
        now, cluster = time.monotonic(), self._cluster
        cluster.ledger.unhealthy = replace(cluster.ledger.unhealthy, held=self._suspects.held(now))
        due = [] if request.validate_only else self._suspects.due(now)
        if not due:
            return {}
        enrich = self._job_classes.enrich
        return canaries(cluster, due, request, self._policy, self._allocator, enrich, cluster_view, promised)

    def _promised(self, request: placement_pb2.PlanPlacementRequest) -> dict[str, cycle.Start]:
        """Return the reserved starts that are still valid, and drop the others."""
        asking = {candidate.job_id: candidate.number for candidate in request.candidates}
        kept = self._reservations.valid(self._cluster, asking, time.monotonic())
        if not request.validate_only and self._reservations.retain(kept):
            self._attempts.events.publish_capacity()
        return kept

    def _stop_and_announce(self, lives: Sequence[LiveAttempt], reason: StopReason) -> None:
        """Stop attempts for which reservations were made, and announce when these expire.

        There may be none, if the gang that they make room for needs no place that is still held.
        """
        if not lives:
            return
        (MOVED if reason is StopReason.MIGRATED else RECLAIMED).add(len(lives))
        self._attempts.order_stops(lives, reason)
        if ends := [reservation.until_seconds for reservation in self._reservations]:
            self._background.start(self._announce_expiry(max(ends) - time.monotonic()))

    async def _announce_expiry(self, seconds: float) -> None:
        await asyncio.sleep(seconds + EXPIRY_MARGIN_SECONDS)
        if self._reservations:
            self._attempts.events.publish_capacity()  # the next plan drops the expired reservations

    def _already_placed(self, request: placement_pb2.PlanPlacementRequest) -> list[placement_pb2.Placed]:
        """Return the attempts of candidates that were placed by an earlier call whose answer was lost.

        The answer contains committed state only: an uncommitted end may never be committed.
        """
        standing: list[ObservedAttempt] = []
        for candidate in list(request.candidates):
            live = self._cluster.attempts.get(candidate.job_id)
            if live and (not live.state.ended or live.key[1] >= candidate.number):
                standing += self._kept([live])
                remove_candidate(request, candidate)
        return [placement_pb2.Placed(attempt=kept.attempt, evidence=kept.evidence) for kept in standing]

    def _kept(self, lives: Iterable[LiveAttempt]) -> list[ObservedAttempt]:
        """Return attempts as last committed."""
        return [kept for live in lives if (kept := self._attempts.events.committed(live.key[0]))]

    def _already_over(self, request: placement_pb2.PlanPlacementRequest) -> list[placement_pb2.Refused]:
        """Return refusals for candidates whose requested attempt is already over and forgotten.

        The queue asks again once it knows of that attempt's end.
        """
        already_over = []
        for candidate in list(request.candidates):
            forgotten = self._cluster.forgotten_attempts.get(candidate.job_id)
            if forgotten and candidate.number <= forgotten.number:
                why = f"attempt {candidate.number} is already over; the next cycle plans a new one"
                refusal = _plan_again(why, last=forgotten.number)
                already_over.append(placement_pb2.Refused(job_id=candidate.job_id, refusal=refusals.to_wire(refusal)))
                remove_candidate(request, candidate)
        return already_over

    async def _start_all(
        self,
        decision: planner.Decision,
        under: Sequence[Compare],
        known: Mapping[str, Sequence[Compare]],
        begin: float,
        placed: float,
    ) -> list[LiveAttempt]:
        """Commit all starts; refuse those that are too large for a transaction or whose job has changed.

        Any other error fails the plan.
        """
        lined_up = [
            (live, self._attempts.submit(live, (*under, *known[live.key[0]])), live.observed())
            for live in decision.starts
        ]
        results = await asyncio.gather(*(self._start(*one, begin, placed) for one in lined_up), return_exceptions=True)
        for live, result in zip(decision.starts, results, strict=True):
            if isinstance(result, TooLarge):
                decision.refusals[live.key[0]] = Refusal(
                    Code.NEVER_FITS,
                    f"its {len(live.nodes)} nodes are too many for one transaction: {result}",
                    "request more per replica, or fewer replicas",
                )
            elif isinstance(result, Outdated) and result.key != QUEUE_LEADER:
                decision.refusals[live.key[0]] = _plan_again("the job has changed since the plan was requested")
            elif isinstance(result, BaseException):
                raise result
        return [live for live, result in zip(decision.starts, results, strict=True) if result is None]

    async def _start(
        self, live: LiveAttempt, kept: asyncio.Future[int], copy: ObservedAttempt, begin: float, placed: float
    ) -> None:
        await self._attempts.start(live, kept, copy)
        committed, parent, job = time.time(), live.record.trace_parent, live.key[0]
        PLACED.add()
        if parent:
            nodes = ",".join(live.nodes)
            telemetry.record("place", parent, begin, placed, job=job, nodes=nodes)
            telemetry.record("commit", parent, placed, committed, job=job, epoch=live.epoch)
            telemetry.record("assign", parent, committed, time.time(), job=job, nodes=nodes)


def _plan_again(why: str, **numbers: float) -> Refusal:
    return Refusal(Code.NOT_YET_CONSIDERED, why, numbers=numbers, holds_seconds=RETRY_PLAN_SECONDS)
