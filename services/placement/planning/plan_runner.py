"""Plans, one at a time: decide, hold, commit, tell."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from cotenant import telemetry
from cotenant.codec import refusals
from cotenant.codec.tenants import tenant_of
from cotenant.core.model.lifecycle import StopReason
from cotenant.core.model.refusal import Code, Refusal
from cotenant.core.model.tenancy import Headroom
from cotenant.core.policy.protocols import CpuAllocator, PlacementPolicy
from cotenant.core.scheduling import cycle
from cotenant.rpc.task_group import Background
from cotenant.services.placement.attempts.attempt_store import QUEUE_LEADER, Attempts, as_known, led_by
from cotenant.services.placement.attempts.job_classes import Kinds
from cotenant.services.placement.attempts.resizes import Resizes
from cotenant.services.placement.cluster.cluster_state import Cluster
from cotenant.services.placement.cluster.committer import Outdated, TooLarge
from cotenant.services.placement.cluster.live_records import Live
from cotenant.services.placement.cluster.request_decoding import check_candidates, check_once
from cotenant.services.placement.planning import planner
from cotenant.services.placement.planning.cluster_view import Moment, StopCosts
from cotenant.services.placement.planning.tentative_reservations import Promises
from cotenant.services.placement.registry.canaries import canaries
from cotenant.services.placement.registry.suspects import Suspects
from cotenant.store.port import Compare
from cotenant.v1 import job_pb2
from cotenant.v1 import placement_service_pb2 as placement_pb2

SECONDS = telemetry.histogram("cotenant.placement.plan", "s", "Time to decide and commit one plan.")
PLACED = telemetry.counter("cotenant.placement.placed", "{attempt}", "Attempts that were committed.")
MOVED = telemetry.counter("cotenant.placement.moved", "{attempt}", "Attempts that were told to go on elsewhere.")
RECLAIMED = telemetry.counter("cotenant.placement.reclaimed", "{attempt}", "Attempts that gave back what was lent.")
REFUSED = telemetry.counter("cotenant.placement.refused", "{job}", "Jobs that were refused a place, by reason.")

LAPSE_LATE_SECONDS = 0.1  # so that no promise is looked at just before its time is over
LATE_SECONDS = 0.5  # before a job is asked about again whose attempt was over already


class Planning:
    """Answers the queue's plans from the picture of the cluster."""

    def __init__(
        self,
        cluster: Cluster,
        attempts: Attempts,
        resizes: Resizes,
        kinds: Kinds,
        policy: PlacementPolicy,
        allocator: CpuAllocator,
        costs: StopCosts,
        background: Background,
        check_trust: Callable[[], None],
        suspects: Suspects,
    ) -> None:
        self._cluster, self._attempts, self._resizes, self._background = cluster, attempts, resizes, background
        self._policy, self._allocator, self._kinds, self._costs = policy, allocator, kinds, costs
        self._promises = Promises()
        self._check_trust, self._suspects = check_trust, suspects
        self._lock = asyncio.Lock()

    async def plan(self, request: placement_pb2.PlanPlacementRequest) -> placement_pb2.PlanPlacementResponse:
        """Place what can be placed. Once it is decided it is done, even where the caller has gone meanwhile."""
        await check_candidates(request.candidates)
        check_once(request.candidates)
        return await self._background.finish(self._plan(request))

    async def _plan(self, request: placement_pb2.PlanPlacementRequest) -> placement_pb2.PlanPlacementResponse:
        async with self._lock:
            self._check_trust()
            begin = time.time()
            standing: list[placement_pb2.Placed] = []
            late: list[placement_pb2.Refused] = []
            if not request.validate_only:
                standing, late = self._standing(request), self._late(request)
                self._cluster.limits = Headroom(map(tenant_of, request.tenants))
            scene = Moment(self._cluster, self._costs, begin)
            promised = self._promised(request)
            informed = self._kinds.informed
            tried = self._canaries(request, scene, promised)
            outcome = planner.plan(
                self._cluster, request, self._policy, self._allocator, informed, scene, promised, tried
            )
            if request.validate_only:
                return planner.rehearse(self._cluster, outcome)
            decision = planner.decide(self._cluster, request, outcome, self._promises, time.monotonic())
            for live in decision.starts:
                if live.key[0] in tried:
                    self._suspects.canary(live)
            placed = time.time()
            under = led_by(request.term)
            known = {one.job_id: as_known(one.job_id, one.revision, request.term) for one in request.candidates}
            started = await self._start_all(decision, under, known, begin, placed)
            if not started and (decision.stops or decision.moves or decision.reclaimed or decision.loans):
                await self._attempts.confirm(under)
            self._attempts.order_stops(decision.stops, StopReason.PREEMPTED)
            self._send_away(decision.moves, StopReason.MIGRATED)
            self._send_away(decision.reclaimed, StopReason.RECLAIMED)
            for loan in decision.loans:
                self._resizes.begin(loan.live, loan.cores, loan.reason)
            response = planner.answer(self._cluster, decision, self._kept(started))
            response.placed.extend(standing)
            response.refused.extend(late)
        SECONDS.record(time.time() - begin)
        for refused in response.refused:
            REFUSED.add(code=refused.refusal.code)
        return response

    def _canaries(
        self, request: placement_pb2.PlanPlacementRequest, scene: Moment, promised: Mapping[str, cycle.Start]
    ) -> Mapping[str, cycle.Start]:
        """Choose the jobs that are tried on held nodes; what explains why others wait is as of now."""
        now, cluster = time.monotonic(), self._cluster
        cluster.ledger.illness = replace(cluster.ledger.illness, held=self._suspects.held(now))
        due = [] if request.validate_only else self._suspects.due(now)
        if not due:
            return {}
        informed = self._kinds.informed
        return canaries(cluster, due, request, self._policy, self._allocator, informed, scene, promised)

    def _promised(self, request: placement_pb2.PlanPlacementRequest) -> dict[str, cycle.Start]:
        """Find the places that are kept for some; those that are kept no longer are there for all."""
        asking = {candidate.job_id: candidate.number for candidate in request.candidates}
        kept = self._promises.standing(self._cluster, asking, time.monotonic())
        if not request.validate_only and self._promises.keep(kept):
            self._attempts.feed.publish_capacity()
        return kept

    def _send_away(self, lives: Sequence[Live], reason: StopReason) -> None:
        """Let attempts stop whose places are promised; others hear of it when they are kept no longer."""
        if not lives:
            return
        (MOVED if reason is StopReason.MIGRATED else RECLAIMED).add(len(lives))
        self._attempts.order_stops(lives, reason)
        seconds = max(promise.until_seconds for promise in self._promises) - time.monotonic()
        self._background.start(self._lapse(seconds))

    async def _lapse(self, seconds: float) -> None:
        await asyncio.sleep(seconds + LAPSE_LATE_SECONDS)
        if self._promises:
            self._attempts.feed.publish_capacity()  # the next plan finds that their time is over

    def _standing(self, request: placement_pb2.PlanPlacementRequest) -> list[placement_pb2.Placed]:
        """Candidates that have a live attempt already, from a call whose answer was lost: the answer again.

        Nobody is told more of it than is committed: an end that is not may never be.
        """
        standing = []
        for candidate in list(request.candidates):
            live = self._cluster.attempts.get(candidate.job_id)
            if live and (not live.state.ended or live.key[1] >= candidate.number):
                standing += self._kept([live])
                request.candidates.remove(candidate)
        return [placement_pb2.Placed(attempt=attempt) for attempt in standing]

    def _kept(self, lives: Iterable[Live]) -> list[job_pb2.Attempt]:
        """Attempts as they were committed last."""
        return [kept for live in lives if (kept := self._attempts.feed.kept(live.key[0]))]

    def _late(self, request: placement_pb2.PlanPlacementRequest) -> list[placement_pb2.Refused]:
        """Candidates that were asked for before it was known that the very attempt is over, and is forgotten even.

        Whoever asks hears of it, and may ask again once it knows more.
        """
        late = []
        for candidate in list(request.candidates):
            last = self._cluster.past.get(candidate.job_id, 0)
            if candidate.number <= last:
                why = f"attempt {candidate.number} is over already; the next cycle asks for another one"
                refusal = _ask_again(why, last=last)
                late.append(placement_pb2.Refused(job_id=candidate.job_id, refusal=refusals.to_wire(refusal)))
                request.candidates.remove(candidate)
        return late

    async def _start_all(
        self,
        decision: planner.Decision,
        under: Sequence[Compare],
        known: Mapping[str, Sequence[Compare]],
        begin: float,
        placed: float,
    ) -> list[Live]:
        """Commit all starts; one that no transaction takes, or of a job that has changed, is refused.

        Anything else fails the plan.
        """
        lined_up = [(live, self._attempts.submit(live, (*under, *known[live.key[0]]))) for live in decision.starts]
        results = await asyncio.gather(
            *(self._start(live, kept, begin, placed) for live, kept in lined_up), return_exceptions=True
        )
        for live, result in zip(decision.starts, results, strict=True):
            if isinstance(result, TooLarge):
                decision.refusals[live.key[0]] = Refusal(
                    Code.NEVER_FITS,
                    f"its {len(live.nodes)} nodes are too many to be given in one transaction: {result}",
                    "ask for more per replica, or for fewer replicas",
                )
            elif isinstance(result, Outdated) and result.key != QUEUE_LEADER:
                decision.refusals[live.key[0]] = _ask_again("it has changed since its place was asked for")
            elif isinstance(result, BaseException):
                raise result
        return [live for live, result in zip(decision.starts, results, strict=True) if result is None]

    async def _start(self, live: Live, kept: asyncio.Future[int], begin: float, placed: float) -> None:
        await self._attempts.start(live, kept)
        committed, parent, job = time.time(), live.record.trace_parent, live.key[0]
        PLACED.add()
        if parent:
            nodes = ",".join(live.nodes)
            telemetry.record("place", parent, begin, placed, job=job, nodes=nodes)
            telemetry.record("commit", parent, placed, committed, job=job, epoch=live.epoch)
            telemetry.record("assign", parent, committed, time.time(), job=job, nodes=nodes)


def _ask_again(why: str, **numbers: float) -> Refusal:
    return Refusal(Code.NOT_YET_CONSIDERED, why, numbers=numbers, holds_seconds=LATE_SECONDS)
