"""CPU rebalancing: asks the allocator about running attempts and redistributes cores, as the simulator does.

Only an allocator that implements `Resizes` is asked. It is asked about the attempts on nodes where an attempt came,
went or changed, where a first window on new cores was measured or a new estimate arrived, and ever less often where
nothing happens. The cores to distribute are free on these nodes and not claimed by a waiting job, or are lent to one of
the attempts. Cores move from one attempt to another in two resizes: the receiver is considered again once the giver has
released them.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Mapping, Sequence

import structlog

from cotenant.codec import estimates, specs
from cotenant.core.policy.protocols import CpuAllocator
from cotenant.core.sizing.core_rebalance import CoreClaim, CoreGrant, rebalance_cores, room
from cotenant.core.sizing.resize import BadSizing, ResizableJob, Resizes, next_look_seconds, validated_cores
from cotenant.services.placement.attempts import resizes as orders
from cotenant.services.placement.attempts.attempt_tracking import AttemptTracker
from cotenant.services.placement.attempts.job_classes import JobClasses
from cotenant.services.placement.attempts.tracked_attempt import TrackedAttempt, cores_held, cores_lent, least
from cotenant.services.placement.cluster.cluster_state import Cluster
from cotenant.services.placement.cluster.live_records import LiveAttempt

log = structlog.get_logger()

TICK_SECONDS = 1.0
Participant = tuple[LiveAttempt, TrackedAttempt]


class CpuRebalancer:
    """Resizes running attempts as the allocator decides."""

    def __init__(
        self,
        cluster: Cluster,
        tracker: AttemptTracker,
        resizes: orders.Resizes,
        job_classes: JobClasses,
        allocator: CpuAllocator,
    ) -> None:
        self._cluster, self._tracker, self._resizes, self._job_classes = cluster, tracker, resizes, job_classes
        self._allocator = allocator if isinstance(allocator, Resizes) else None
        self._name = allocator.name
        self._due: list[tuple[float, str, int]] = []  # heap of due time, job id and attempt number

    async def run(self) -> None:
        """Rebalance periodically, until cancelled."""
        tick = min(TICK_SECONDS, self._allocator.interval_seconds) if self._allocator else TICK_SECONDS
        while True:
            await asyncio.sleep(tick)
            self.tick(time.monotonic())

    def tick(self, now: float) -> None:
        """Rebalance all nodes that changed or are due."""
        self._tracker.forget()
        self._resizes.retry(now)
        if self._allocator is None:
            self._cluster.changed_nodes.clear()
            return
        while self._due and self._due[0][0] <= now:
            self._revisit(*heapq.heappop(self._due), now)
        if self._cluster.changed_nodes:
            self._settle(self._allocator, now)

    def _revisit(self, due: float, job_id: str, number: int, now: float) -> None:
        """Mark the nodes of a due attempt as changed, and schedule its next turn."""
        live = self._cluster.attempts.get(job_id)
        if live is None or live.key[1] != number or live.state.ended:
            return
        tracked = self._tracker.of(live)
        if tracked.due_seconds == due and self._allocator:
            self._cluster.changed_nodes.update(live.nodes)
            self._schedule(live, tracked, next_look_seconds(tracked.gap_seconds, self._allocator.interval_seconds), now)

    def _schedule(self, live: LiveAttempt, tracked: TrackedAttempt, gap_seconds: float, now: float) -> None:
        tracked.gap_seconds, tracked.due_seconds = gap_seconds, now + gap_seconds
        heapq.heappush(self._due, (tracked.due_seconds, *live.key))

    def _settle(self, allocator: Resizes, now: float) -> None:
        """Ask the allocator about all attempts on changed nodes, and apply the grants."""
        changed_nodes = {node_id for node_id in self._cluster.changed_nodes if node_id in self._cluster.nodes}
        self._cluster.changed_nodes.clear()
        lives = {live.key: live for node_id in changed_nodes for live in self._cluster.on_node(node_id)}
        participants = [
            (live, self._tracker.of(live)) for _, live in sorted(lives.items()) if self._may_be_resized(live, now)
        ]
        if not participants:
            return
        for live, tracked in participants:
            if tracked.epoch != live.epoch:
                tracked.epoch = live.epoch
                self._schedule(live, tracked, allocator.warm_up_seconds + allocator.measure_seconds, now)
        free = self._free(participants)
        claims = [self._ask(allocator, live, tracked, free) for live, tracked in participants]
        try:
            grants = rebalance_cores(claims, free, allocator.weight, self._cluster.headroom(self._cluster.limits))
        except Exception:
            log.exception("resizing_failed", allocator=self._name)
            return
        self._apply(participants, grants)

    def _may_be_resized(self, live: LiveAttempt, now: float) -> bool:
        if live.retry_resize_after_seconds > now or not self._cluster.can_resize(live):
            return False
        tracked = self._tracker.of(live)
        return tracked.resizable and not tracked.profiled(now)

    def _free(self, participants: Sequence[Participant]) -> dict[int, int]:
        """Return the cores to distribute, by node: free and unclaimed cores, and cores lent to the participants."""
        cluster = self._cluster
        free: dict[int, int] = {}
        for node in (cluster.nodes[node_id] for _, tracked in participants for node_id in tracked.on):
            unheld = int(cluster.ledger.free_cores[node.number]) - cluster.claimed.get(node.id, 0)
            free[node.number] = max(0, unheld) if node.open else 0
        for live, tracked in participants:
            for node_id, count in tracked.on.items():
                free[cluster.nodes[node_id].number] += cores_lent(live, tracked) * count
        return free

    def _ask(
        self, allocator: Resizes, live: LiveAttempt, tracked: TrackedAttempt, free: Mapping[int, int]
    ) -> CoreClaim:
        """Ask the allocator about one attempt. If the allocator fails, the attempt keeps its previous wish."""
        now = time.time()
        running = self._running(live, tracked, free, now)
        tracked.wish = tracked.wish or running.cores[running.lead]
        try:
            sizing = allocator.resize(running, now)
            validated_cores(running, sizing)
        except BadSizing as error:
            log.error("sizing_invalid", allocator=self._name, error=str(error))
        except Exception:
            log.exception("resizing_failed", allocator=self._name, job=live.key[0])
        else:
            if sizing is not None:
                tracked.wish, tracked.reason = sizing.cores[running.lead], sizing.reason
        return CoreClaim(running, tracked.wish, self._replicas(tracked))

    def _replicas(self, tracked: TrackedAttempt) -> dict[int, int]:
        return {self._cluster.nodes[node_id].number: count for node_id, count in tracked.on.items()}

    def _running(self, live: LiveAttempt, tracked: TrackedAttempt, free: Mapping[int, int], now: float) -> ResizableJob:
        """Return an attempt as the allocator sees it."""
        if tracked.estimate is None:
            tracked.estimate = estimates.estimate_from_wire(live.record.estimate)
        lent = cores_lent(live, tracked)
        spare = max(0, room(free, self._replicas(tracked)) - lent)
        roles, held = tracked.spec.roles, least(live, lambda task: len(task.core_ids))
        leads = [role.name == tracked.role for role in roles]
        return ResizableJob(
            job_id=live.key[0],
            spec=tracked.spec,
            estimate=tracked.estimate,
            cores=tuple(held.get(role.name, 0) for role in roles),
            spare=tuple(spare * lead for lead in leads),
            points=tracked.track.points(),
            rate_per_second=tracked.rate_per_second,
            settled_seconds=_settled_seconds(live, now),
            node_share=tracked.shares,
            lent=tuple(lent * lead for lead in leads),
            known=() if tracked.track.drifted else self._job_classes.tracks.points(tracked.kind),
        )

    def _apply(self, participants: Sequence[Participant], grants: Sequence[CoreGrant]) -> None:
        """Start the resizes that are possible now: first those that release cores, then those whose cores are free."""
        dealt = [
            (live, tracked, grant, cores_held(live, tracked))
            for (live, tracked), grant in zip(participants, grants, strict=True)
        ]
        for live, tracked, grant, held in dealt:
            own = {tracked.role: grant.firm}
            if grant.cores < held:
                self._resizes.begin(live, {tracked.role: grant.cores}, tracked.reason, own)
            elif grant.cores == held and grant.firm != held - cores_lent(live, tracked):
                self._resizes.mark(live, own)
        for live, tracked, grant, held in dealt:
            if grant.cores > held and self._fits(tracked, grant.cores - held):
                own = {tracked.role: grant.firm}
                self._resizes.begin(live, {tracked.role: grant.cores}, tracked.reason, own)

    def _fits(self, tracked: TrackedAttempt, more: int) -> bool:
        """Return whether each replica can get so many more cores now; otherwise it is retried after cores are freed."""
        ledger, nodes, claimed = self._cluster.ledger, self._cluster.nodes, self._cluster.claimed
        return all(
            more * count <= int(ledger.free_cores[nodes[node_id].number]) - claimed.get(node_id, 0)
            for node_id, count in tracked.on.items()
        )


def _settled_seconds(live: LiveAttempt, now: float) -> float:
    attempt = live.attempt
    since = attempt.resize_time if attempt.HasField("resize_time") else attempt.start_time
    return max(0.0, now - specs.seconds(since))
