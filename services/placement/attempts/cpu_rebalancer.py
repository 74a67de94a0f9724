"""Asks the allocator about running attempts and deals their cores, by the same functions as the simulator.

Only an allocator that `Resizes` is asked: about the attempts on nodes where somebody came, went or changed, where a
first window on new cores was measured, where something new is known, and ever less often where nothing happens. What
they may share is free on their nodes and promised to nobody, or lent to one of them. Cores go from one to another in
two resizes: who gets them is dealt to once more when they have been given back.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Mapping, Sequence

import structlog

from cotenant.codec import estimates, specs
from cotenant.core.policy.protocols import CpuAllocator
from cotenant.core.sizing.core_rebalance import Hand, Party, deal, room
from cotenant.core.sizing.resize import BadSizing, Resizes, Running, agreed, later_seconds
from cotenant.services.placement.attempts import resizes as orders
from cotenant.services.placement.attempts.attempt_tracking import Following
from cotenant.services.placement.attempts.job_classes import Kinds
from cotenant.services.placement.attempts.tracked_attempt import Followed, cores_of, least, lent_of
from cotenant.services.placement.cluster.cluster_state import Cluster
from cotenant.services.placement.cluster.live_records import Live

log = structlog.get_logger()

TICK_SECONDS = 1.0
Seat = tuple[Live, Followed]


class Dealing:
    """Lets the allocator resize what runs."""

    def __init__(
        self, cluster: Cluster, following: Following, resizes: orders.Resizes, kinds: Kinds, allocator: CpuAllocator
    ) -> None:
        self._cluster, self._following, self._resizes, self._kinds = cluster, following, resizes, kinds
        self._allocator = allocator if isinstance(allocator, Resizes) else None
        self._name = allocator.name
        self._due: list[tuple[float, str, int]] = []  # when whom to look at, and which attempt of it

    async def run(self) -> None:
        """Look for ever."""
        tick = min(TICK_SECONDS, self._allocator.interval_seconds) if self._allocator else TICK_SECONDS
        while True:
            await asyncio.sleep(tick)
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Deal on all nodes where there is a reason to."""
        self._following.forget()
        self._resizes.try_again(now)
        if self._allocator is None:
            self._cluster.stirred.clear()
            return
        while self._due and self._due[0][0] <= now:
            self._look_again(*heapq.heappop(self._due), now)
        if self._cluster.stirred:
            self._settle(self._allocator, now)

    def _look_again(self, due: float, job_id: str, number: int, now: float) -> None:
        """Stir an attempt whose turn it is, and say when it is again."""
        live = self._cluster.attempts.get(job_id)
        if live is None or live.key[1] != number or live.state.ended:
            return
        followed = self._following.of(live)
        if followed.due_seconds == due and self._allocator:
            self._cluster.stirred.update(live.nodes)
            self._expect(live, followed, later_seconds(followed.gap_seconds, self._allocator.interval_seconds), now)

    def _expect(self, live: Live, followed: Followed, gap_seconds: float, now: float) -> None:
        followed.gap_seconds, followed.due_seconds = gap_seconds, now + gap_seconds
        heapq.heappush(self._due, (followed.due_seconds, *live.key))

    def _settle(self, allocator: Resizes, now: float) -> None:
        """Ask about all attempts on the nodes that were stirred, and deal."""
        stirred = {node_id for node_id in self._cluster.stirred if node_id in self._cluster.nodes}
        self._cluster.stirred.clear()
        lives = {live.key: live for node_id in stirred for live in self._cluster.on_node(node_id)}
        seats = [
            (live, self._following.of(live)) for _, live in sorted(lives.items()) if self._may_be_dealt_to(live, now)
        ]
        if not seats:
            return
        for live, followed in seats:
            if followed.epoch != live.epoch:
                followed.epoch = live.epoch
                self._expect(live, followed, allocator.warm_up_seconds + allocator.measure_seconds, now)
        free = self._free(seats)
        parties = [self._ask(allocator, live, followed, free) for live, followed in seats]
        try:
            hands = deal(parties, free, allocator.weight, self._cluster.headroom(self._cluster.limits))
        except Exception:
            log.exception("resizing_failed", allocator=self._name)
            return
        self._apply(seats, hands)

    def _may_be_dealt_to(self, live: Live, now: float) -> bool:
        if live.resize_after_seconds > now or not self._cluster.can_resize(live):
            return False
        followed = self._following.of(live)
        return followed.resizable and not followed.profiled(now)

    def _free(self, seats: Sequence[Seat]) -> dict[int, int]:
        """Count by node what nobody has for good: what is free, and what is lent to those at the table."""
        cluster = self._cluster
        free: dict[int, int] = {}
        for node in (cluster.nodes[node_id] for _, followed in seats for node_id in followed.on):
            unheld = int(cluster.ledger.free_cores[node.number]) - cluster.claimed.get(node.id, 0)
            free[node.number] = max(0, unheld) if node.open else 0
        for live, followed in seats:
            for node_id, count in followed.on.items():
                free[cluster.nodes[node_id].number] += lent_of(live, followed) * count
        return free

    def _ask(self, allocator: Resizes, live: Live, followed: Followed, free: Mapping[int, int]) -> Party:
        """Ask about one attempt. An allocator's bug concerns that attempt alone: it wishes for what it did before."""
        now = time.time()
        running = self._running(live, followed, free, now)
        followed.wish = followed.wish or running.cores[running.lead]
        try:
            sizing = allocator.resize(running, now)
            agreed(running, sizing)
        except BadSizing as error:
            log.error("bad_sizing", allocator=self._name, error=str(error))
        except Exception:
            log.exception("resizing_failed", allocator=self._name, job=live.key[0])
        else:
            if sizing is not None:
                followed.wish, followed.reason = sizing.cores[running.lead], sizing.reason
        return Party(running, followed.wish, self._replicas(followed))

    def _replicas(self, followed: Followed) -> dict[int, int]:
        return {self._cluster.nodes[node_id].number: count for node_id, count in followed.on.items()}

    def _running(self, live: Live, followed: Followed, free: Mapping[int, int], now: float) -> Running:
        """What the allocator is shown of an attempt."""
        if followed.estimate is None:
            followed.estimate = estimates.estimate_from_wire(live.record.estimate)
        lent = lent_of(live, followed)
        spare = max(0, room(free, self._replicas(followed)) - lent)
        roles, held = followed.spec.roles, least(live, lambda task: len(task.core_ids))
        leads = [role.name == followed.role for role in roles]
        return Running(
            job_id=live.key[0],
            spec=followed.spec,
            estimate=followed.estimate,
            cores=tuple(held.get(role.name, 0) for role in roles),
            spare=tuple(spare * lead for lead in leads),
            points=followed.track.points(),
            rate_per_second=followed.rate_per_second,
            settled_seconds=_settled_seconds(live, now),
            node_share=followed.shares,
            lent=tuple(lent * lead for lead in leads),
            known=() if followed.track.drifted else self._kinds.tracks.points(followed.kind),
        )

    def _apply(self, seats: Sequence[Seat], hands: Sequence[Hand]) -> None:
        """Begin the resizes that can be: first who gives, then who gets, as far as that is free already."""
        dealt = [
            (live, followed, hand, cores_of(live, followed))
            for (live, followed), hand in zip(seats, hands, strict=True)
        ]
        for live, followed, hand, held in dealt:
            own = {followed.role: hand.firm}
            if hand.cores < held:
                self._resizes.begin(live, {followed.role: hand.cores}, followed.reason, own)
            elif hand.cores == held and hand.firm != held - lent_of(live, followed):
                self._resizes.mark(live, own)
        for live, followed, hand, held in dealt:
            if hand.cores > held and self._fits(followed, hand.cores - held):
                own = {followed.role: hand.firm}
                self._resizes.begin(live, {followed.role: hand.cores}, followed.reason, own)

    def _fits(self, followed: Followed, more: int) -> bool:
        """Whether each replica can have so many more at once; else it is dealt to again when others have given."""
        ledger, nodes, claimed = self._cluster.ledger, self._cluster.nodes, self._cluster.claimed
        return all(
            more * count <= int(ledger.free_cores[nodes[node_id].number]) - claimed.get(node_id, 0)
            for node_id, count in followed.on.items()
        )


def _settled_seconds(live: Live, now: float) -> float:
    attempt = live.attempt
    since = attempt.resize_time if attempt.HasField("resize_time") else attempt.start_time
    return max(0.0, now - specs.seconds(since))
