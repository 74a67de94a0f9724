"""What becomes known of running attempts, and what follows for their cores: the allocator is asked again and again.

Only an allocator that `Resizes` is asked: about each running attempt that left cores to it, at most every so often, and
at once when something new is known of the job. What it may grow by is free on all of the attempt's nodes and promised
to nobody; it is lent, and a waiting job gets it back by a resize (see `lending`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from cotenant.core.curves import Point
from cotenant.core.jobs import JobSpec
from cotenant.core.ledger import Share
from cotenant.core.lifecycle import AttemptState
from cotenant.core.nodes import shape_of
from cotenant.core.policy import CpuAllocator
from cotenant.core.resizing import BadSizing, Resizes, Running, agreed, lent_of, node_share_of, resizable, spare_of
from cotenant.core.tracks import Tracks, kind_of
from cotenant.rpc import estimates, translate
from cotenant.services.placement import agents
from cotenant.services.placement import resizes as orders
from cotenant.services.placement.attempts import Attempts
from cotenant.services.placement.cluster import Cluster
from cotenant.services.placement.records import Live
from cotenant.v1 import node_service_pb2 as node_pb2
from cotenant.v1 import placement_service_pb2 as placement_pb2
from cotenant.v1 import predictor_service_pb2 as predictor_pb2

log = structlog.get_logger()

TICK_SECONDS = 5.0
LOOK_BACK_SECONDS = 30.0  # of what a node tells as the present rate; before that has passed it is of other cores
PROFILE_LATE_SECONDS = 30.0  # after its budget, a profile of which nobody hears is taken as over
POINTS_MAX = 64


@dataclass(slots=True)
class Followed:
    """What was measured of an attempt, and when the allocator was last asked about it."""

    number: int
    points: dict[int, Point] = field(default_factory=dict)
    rate_per_second: float | None = None
    asked_seconds: float = float("-inf")
    news: bool = False
    profile_until_seconds: float = float("-inf")


class Following:
    """Takes in advice, progress and profiles, and lets the allocator resize what runs."""

    def __init__(
        self,
        cluster: Cluster,
        attempts: Attempts,
        sessions: agents.Sessions,
        resizes: orders.Resizes,
        allocator: CpuAllocator,
    ) -> None:
        self._cluster, self._attempts, self._sessions, self._resizes = cluster, attempts, sessions, resizes
        self._allocator = allocator if isinstance(allocator, Resizes) else None
        self._name = allocator.name
        self._tracks = Tracks()
        self._followed: dict[str, Followed] = {}
        self._wake = asyncio.Event()

    # What becomes known --------------------------------------------------------------------------------------

    def advise(self, advice: Iterable[placement_pb2.Advice]) -> list[str]:
        """Follow advice; say of what could not be followed why not, a sentence each."""
        refused: list[str] = []
        changed: list[Live] = []
        for one in advice:
            live = self._cluster.attempts.get(one.job_id)
            if live is None or live.key[1] != one.number or live.state.ended:
                refused.append(f"{one.job_id}/{one.number}: there is no such attempt, or it has ended")
                continue
            if one.HasField("estimate") and self._take_estimate(live, one.estimate):
                changed.append(live)
            if one.HasField("profile") and (why := self._profile(live, one.profile)):
                refused.append(f"{one.job_id}/{one.number}: {why}")
        self._attempts.keep(changed)
        return refused

    def _take_estimate(self, live: Live, estimate: predictor_pb2.Estimate) -> bool:
        """Note an estimate; True where sizes may follow from what is new in it, so that it is worth a commit."""
        worth = _sizes(estimate) != _sizes(live.record.estimate)
        live.record.estimate.CopyFrom(estimate)
        live.told_seconds = time.time()
        if worth:
            self._of(live).news = True
            self._wake.set()
        return worth and bool(live.epoch)  # else it is being committed, and this is kept with its next change

    def _profile(self, live: Live, plan: placement_pb2.ProfilePlan) -> str:
        """Let an attempt be measured; why not, where that cannot be."""
        if len(live.nodes) > 1:
            return f"it runs on {len(live.nodes)} nodes, and only what runs on one is profiled"
        if live.state is not AttemptState.RUNNING:
            return f"it is {live.state.value}, and only what runs is profiled"
        if live.target:
            return "its cores are being changed"
        followed = self._of(live)
        if not self._sessions.send(live.nodes[0], agents.profile_order(live, plan)):
            return f"the agent of {live.nodes[0]} is away"
        until = time.monotonic() + translate.seconds(plan.budget) + PROFILE_LATE_SECONDS
        followed.profile_until_seconds = until if plan.cores else float("-inf")
        return ""

    def take_progress(self, told: node_pb2.ProgressReport) -> None:
        """Note the rate that a job told, once it has settled on its cores."""
        live = self._cluster.attempts.get(told.job_id)
        rate = told.progress.rate_per_second
        if self._allocator is None or live is None or live.key[1] != told.number or rate <= 0 or told.progress.phase:
            return  # rates of validation, say, are others than those of training
        followed = self._of(live)
        settled = self._allocator.warm_up_seconds + LOOK_BACK_SECONDS
        if live.target or _settled_seconds(live, time.time()) < settled or self._profiled(followed):
            return
        followed.rate_per_second = rate
        self._point(live, followed, _cores_of_trainers(live), rate)

    def take_profiled(self, report: node_pb2.ProfileReport) -> None:
        """Note a rate that was measured for a profile, or its end."""
        live = self._cluster.attempts.get(report.job_id)
        if live is None or live.key[1] != report.number:
            return
        followed = self._of(live)
        if report.cores > 0 and report.rate_per_second > 0:
            self._point(live, followed, report.cores, report.rate_per_second)
        if report.done:
            followed.profile_until_seconds = float("-inf")
            followed.news = True
            self._wake.set()

    def _point(self, live: Live, followed: Followed, cores: int, rate: float) -> None:
        followed.points.pop(cores, None)
        followed.points[cores] = Point(cores, rate)
        self._tracks.add(kind_of(translate.spec_from_wire(live.record.spec)), cores, rate)
        if len(followed.points) > POINTS_MAX:
            del followed.points[next(iter(followed.points))]

    def _of(self, live: Live) -> Followed:
        followed = self._followed.get(live.key[0])
        if followed is None or followed.number != live.key[1]:
            followed = self._followed[live.key[0]] = Followed(live.key[1])
        return followed

    def _profiled(self, followed: Followed) -> bool:
        return time.monotonic() < followed.profile_until_seconds

    # What follows --------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Ask for ever."""
        seconds = min(TICK_SECONDS, self._allocator.interval_seconds) if self._allocator else TICK_SECONDS
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), seconds)
            self._wake.clear()
            self.look()

    def look(self) -> None:
        """Ask about every attempt whose turn it is, those first that have waited longest."""
        now = time.monotonic()
        self._resizes.insist(now)
        self._resizes.pardon(now)
        for job_id in self._followed.keys() - self._cluster.attempts.keys():
            del self._followed[job_id]
        if self._allocator is None:
            return
        due = [(live, self._of(live)) for live in self._cluster.attempts.values() if self._may_ask(live, now)]
        for live, followed in sorted(due, key=lambda one: (one[1].asked_seconds, one[0].key)):
            if followed.news or now - followed.asked_seconds >= self._allocator.interval_seconds:
                followed.asked_seconds, followed.news = now, False
                self._ask(self._allocator, live, followed)

    def _may_ask(self, live: Live, now: float) -> bool:
        if live.state is not AttemptState.RUNNING or live.resize_after_seconds > now:
            return False
        followed = self._followed.get(live.key[0])
        return not (followed and self._profiled(followed)) and self._cluster.can_resize(live)

    def _ask(self, allocator: Resizes, live: Live, followed: Followed) -> None:
        """Ask about one attempt. An allocator's bug concerns that attempt alone."""
        spec = translate.spec_from_wire(live.record.spec)
        if not resizable(spec):
            return
        now = time.time()
        try:
            running = self.running(live, spec, followed, now)
            sizing = allocator.resize(running, now)
            cores = agreed(running, sizing)
        except BadSizing as error:
            log.error("bad_sizing", allocator=self._name, error=str(error))
        except Exception:
            log.exception("resizing_failed", allocator=self._name, job=live.key[0])
        else:
            if cores and sizing:
                self._resizes.begin(live, cores, sizing.reason, running.node_share)

    def running(self, live: Live, spec: JobSpec, followed: Followed, now: float) -> Running:
        """What the allocator is shown of an attempt."""
        cluster = self._cluster
        places = places_of(cluster, live, spec)
        ledger = cluster.ledger
        nodes = {cluster.nodes[node_id].number: cluster.nodes[node_id] for node_id in live.nodes}
        free = {
            number: max(0, int(ledger.free_cores[number]) - cluster.claimed.get(node.id, 0)) if node.open else 0
            for number, node in nodes.items()
        }
        cores = cores_of(live, spec)
        return Running(
            job_id=live.key[0],
            spec=spec,
            estimate=estimates.estimate_from_wire(live.record.estimate),
            cores=cores,
            spare=spare_of(spec, places, free),
            points=tuple(followed.points[count] for count in sorted(followed.points)),
            rate_per_second=followed.rate_per_second,
            settled_seconds=_settled_seconds(live, now),
            node_share=node_share_of(spec, places, {n: shape_of(node.inventory) for n, node in nodes.items()}),
            known=self._tracks.points(kind_of(spec)),
            lent=lent_of(cores, own_cores_of(live, spec)),
        )


def places_of(cluster: Cluster, live: Live, spec: JobSpec) -> list[Share]:
    """Where an attempt's replicas are, role by role."""
    numbers = {role.name: number for number, role in enumerate(spec.roles)}
    counts: dict[tuple[int, int], int] = {}
    for part in live.allocation:
        for task in part.tasks:
            key = cluster.nodes[part.node_id].number, numbers[task.role]
            counts[key] = counts.get(key, 0) + 1
    return [Share(node, role, replicas) for (node, role), replicas in counts.items()]


def cores_of(live: Live, spec: JobSpec) -> tuple[int, ...]:
    """Cores that each replica holds, by role."""
    return _by_role(spec, [(task.role, len(task.core_ids)) for part in live.allocation for task in part.tasks])


def own_cores_of(live: Live, spec: JobSpec) -> tuple[int, ...]:
    """Cores that each replica was started with, by role."""
    return _by_role(
        spec, [(task.role, task.own_cores or len(task.core_ids)) for part in live.allocation for task in part.tasks]
    )


def _by_role(spec: JobSpec, counts: list[tuple[str, int]]) -> tuple[int, ...]:
    return tuple(min((count for name, count in counts if name == role.name), default=0) for role in spec.roles)


def _cores_of_trainers(live: Live) -> int:
    """Cores per replica of the first role with GPUs, else of the first role: what rates are known by."""
    tasks = sorted((task for part in live.allocation for task in part.tasks), key=lambda task: task.rank)
    return next((len(task.core_ids) for task in tasks if task.gpus), len(tasks[0].core_ids))


def _settled_seconds(live: Live, now: float) -> float:
    attempt = live.attempt
    since = attempt.resize_time if attempt.HasField("resize_time") else attempt.start_time
    return max(0.0, now - translate.seconds(since))


def _sizes(estimate: predictor_pb2.Estimate) -> tuple[object, ...]:
    """What of an estimate cores may follow from, in rough figures: remaining times change all the time, and a little
    noise is not worth a commit."""
    rates = [float(f"{candidate.rate_per_second:.2g}") for candidate in estimate.candidates]
    return estimate.predictable, estimate.cores_useful, round(estimate.cores_useful_confidence, 1), rates
