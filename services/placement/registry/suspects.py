"""Holds on suspect nodes, where launches or all launched jobs fail: `core.failures.launch_health` decides, this acts.

A hold is stored in the node's record, so that the next leader knows it; the number of failed launches before a hold is
not stored. Holds never change an operator's cordon or drain.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator

import structlog

from cotenant import telemetry
from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.codec import specs
from cotenant.core.failures import launch_health
from cotenant.core.failures.launch_health import (
    HoldRules,
    LaunchFailure,
    NodeLaunches,
    Outcomes,
    QuickFailure,
    Suspicion,
)
from cotenant.core.model.lifecycle import AttemptState, LaunchCause
from cotenant.core.model.node import HealthAction, HealthProblem, HeldNode
from cotenant.rpc.task_group import BackgroundTasks
from cotenant.services.placement.attempts.attempt_events import AttemptEvents
from cotenant.services.placement.cluster.cluster_state import Cluster
from cotenant.services.placement.cluster.committer import Committer, Fenced, Halted, Write
from cotenant.services.placement.cluster.live_records import NODES, LiveAttempt, Node
from cotenant.storage.v1 import records_pb2
from cotenant.store.port import StoreUnavailable

log = structlog.get_logger()

TICK_SECONDS = 1.0
SUSPECTED = "the node is suspected: "  # failure rules match this prefix
REMEDIES = {
    Suspicion.CANNOT_LAUNCH: "repair the node; one job at a time is tried there, and the first successful launch ends "
    "the hold, or run `cotenant uncordon`",
    Suspicion.FAILS_JOBS: "check the jobs' output and the node; one job at a time is tried there, and the first that "
    "runs well ends the hold, or run `cotenant uncordon`",
}
FAILED_LAUNCHES = telemetry.counter(
    "cotenant.placement.launch_failures", "{launch}", "Launches that failed before the program was executed, by cause."
)
HELD = telemetry.gauge("cotenant.placement.nodes_held", "{node}", "Nodes held for failed launches, by reason.")
CANARIES = telemetry.counter("cotenant.placement.canaries", "{attempt}", "Jobs started as canaries on held nodes.")

Key = tuple[str, int]


class SuspectNodes:
    """Tracks how attempts start and end on nodes, and holds nodes where launches or jobs keep failing."""

    def __init__(
        self,
        cluster: Cluster,
        committer: Committer,
        events: AttemptEvents,
        background: BackgroundTasks,
        lock: Callable[[str], asyncio.Lock],
        rules: HoldRules,
    ) -> None:
        self.rules = rules
        self._cluster, self._committer, self._events = cluster, committer, events
        self._background, self._lock = background, lock
        self._known: dict[str, NodeLaunches] = {}
        self._outcomes = Outcomes(rules.window_seconds)
        self._started: dict[tuple[Key, str], float] = {}  # launch time of running parts
        self._young: deque[tuple[float, Key, str]] = deque()  # launched parts that might still fail quickly
        self._announced: set[str] = set()  # held nodes whose due canary was announced to the queue

    async def run(self) -> None:
        """Tick periodically, until cancelled."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self.tick(time.monotonic())

    def tick(self, now: float) -> None:
        """Record attempts that ran past a quick failure, and announce held nodes that are due for a canary."""
        while self._young and now - self._young[0][0] >= self.rules.quick_seconds:
            _, key, node_id = self._young.popleft()
            if (key, node_id) in self._started and (live := self._live(key)):
                self._record_success(live, node_id, now)
        for part in [part for part in self._started if self._live(part[0]) is None]:
            del self._started[part]
        self._outcomes.forget(now)
        for node_id, known in list(self._known.items()):
            if known.hold and known.hold.canary and not self._canary_lives(known.hold.canary):
                self._put(node_id, launch_health.canary_gone(known, known.hold.canary))
        due = {node.id for node in self.due(now)}
        if due - self._announced:
            self._events.publish_capacity()
        self._announced = due
        self._update_gauge()

    def _live(self, key: Key) -> LiveAttempt | None:
        live = self._cluster.attempts.get(key[0])
        return live if live and live.key == key and not live.state.ended else None

    def _canary_lives(self, name: str) -> bool:
        job_id, _, number = name.rpartition("/")
        return self._live((job_id, int(number))) is not None

    def _update_gauge(self) -> None:
        for suspicion in Suspicion:
            held = sum(known.hold.suspicion is suspicion for known in self._known.values() if known.hold)
            HELD.set(held, reason=suspicion.value)

    # Reports -------------------------------------------------------------------------------------------------

    def mark_suspected(self, live: LiveAttempt, node: Node, report: agent_pb2.AttemptReport) -> None:
        """Add to a canary's failure report that the node was suspected, so that the job is not held responsible."""
        hold = self._known.get(node.id, NodeLaunches()).hold
        if hold is None or hold.suspicion is not Suspicion.FAILS_JOBS or hold.canary != _name(live):
            return
        if specs.ATTEMPT_STATES.names.get(report.state) == AttemptState.FAILED.value:
            report.signs.insert(0, f"{SUSPECTED}{hold.reason}")

    def record_outcome(self, live: LiveAttempt, node: Node, before: AttemptState | None) -> None:
        """Record the reported outcome of an attempt's part on a node."""
        part, now = live.parts.get(node.id), time.monotonic()
        if part is None or part is before:
            return
        known = self._known.get(node.id, NodeLaunches())
        if part is AttemptState.NOT_LAUNCHED:
            self._put(node.id, self._refused(known, live, now))
        elif part is AttemptState.RUNNING:
            self._started[live.key, node.id] = now
            self._young.append((now, live.key, node.id))
            self._put(node.id, launch_health.launched(known))
        elif part.ended:
            began = self._started.pop((live.key, node.id), now)
            if part is AttemptState.SUCCEEDED or now - began >= self.rules.quick_seconds:
                self._record_success(live, node.id, now)
            elif part is AttemptState.FAILED and not live.attempt.stop_reason and not live.attempt.exit.out_of_memory:
                self._put(node.id, self._failed(launch_health.launched(known), live, node.id, now))
            else:
                self._put(node.id, launch_health.canary_gone(known, _name(live)))

    def _refused(self, known: NodeLaunches, live: LiveAttempt, now: float) -> NodeLaunches:
        failure = live.attempt.launch_failure
        cause = specs.LAUNCH_CAUSES.from_wire(failure.cause)
        FAILED_LAUNCHES.add(cause=cause.value)
        if cause is LaunchCause.DEVICE and self._has_unhealthy_gpu(live, failure.node_id):
            return launch_health.canary_gone(known, _name(live))  # the GPU is held already, and the others are healthy
        reason = failure.reason.replace(live.key[0], "JOB")  # other tenants may read it
        subject = launch_health.subject_of(_name(live), live.record.submitter, cause)
        return launch_health.launch_failed(known, LaunchFailure(now, subject, cause, reason), _name(live), self.rules)

    def _has_unhealthy_gpu(self, live: LiveAttempt, node_id: str) -> bool:
        node = self._cluster.nodes.get(node_id)
        unhealthy = {gpu.uuid for gpu in node.inventory.gpus if gpu.unhealthy_reason} if node else set()
        tasks = (task for part in live.held if part.node_id == node_id for task in part.tasks)
        return any(share.uuid in unhealthy for task in tasks for share in task.gpus)

    def _failed(self, known: NodeLaunches, live: LiveAttempt, node_id: str, now: float) -> NodeLaunches:
        spec = live.record.spec
        job = spec.array_task.array_id if spec.HasField("array_task") else live.key[0]
        program = f"{spec.tenant} {' '.join(spec.command)}"
        self._outcomes.failed(program, node_id, now)
        tenants = {one.tenant for one in known.quick} | {spec.tenant}
        programs = {one.program for one in known.quick} | {program}
        well = self._outcomes.well_elsewhere(tenants, node_id, now) | self._running_elsewhere(tenants, node_id, now)
        return launch_health.failed_quickly(
            known,
            QuickFailure(now, spec.tenant, job, program),
            _name(live),
            self.rules,
            well_elsewhere=well,
            fail_elsewhere=self._outcomes.fail_elsewhere(programs, node_id, now),
        )

    def _running_elsewhere(self, tenants: set[str], node_id: str, now: float) -> set[str]:
        found = set()
        for (key, other), began in self._started.items():
            live = self._live(key) if other != node_id and now - began >= self.rules.quick_seconds else None
            if live and live.record.spec.tenant in tenants:
                found.add(live.record.spec.tenant)
        return found

    def _record_success(self, live: LiveAttempt, node_id: str, now: float) -> None:
        self._outcomes.well(live.record.spec.tenant, node_id, now)
        if known := self._known.get(node_id):
            self._put(node_id, launch_health.did_well(known))

    # Canaries ------------------------------------------------------------------------------------------------

    def due(self, now: float) -> list[Node]:
        """Return the held nodes that may get a canary now, ordered by id."""
        nodes = [self._cluster.nodes.get(node_id) for node_id in sorted(self._known)]
        return [
            node
            for node in nodes
            if node and node.open_without_hold and launch_health.may_try(self._known[node.id], now)
        ]

    def canary(self, live: LiveAttempt) -> None:
        """Record that an attempt starts on a held node."""
        for node_id in live.nodes:
            known = self._known.get(node_id)
            if known and known.hold:
                CANARIES.add()
                log.info("canary_started", node=node_id, job=live.key[0], attempt=live.key[1])
                self._put(node_id, launch_health.canary_started(known, _name(live)))

    def held(self, now: float) -> tuple[HeldNode, ...]:
        """Return the held nodes that would otherwise take work, to explain refusals."""
        return tuple(self._held(now))

    def _held(self, now: float) -> Iterator[HeldNode]:
        for node_id, known in sorted(self._known.items()):
            node = self._cluster.nodes.get(node_id)
            if known.hold and node and node.open_without_hold:
                wait = max(0.0, known.hold.next_canary - now)
                yield HeldNode(node_id, known.hold.reason, wait, canary=known.hold.canary)

    # Holds ---------------------------------------------------------------------------------------------------

    def release(self, node_id: str) -> bool:
        """End a node's hold on an operator's request; return False if it is not held."""
        known = self._known.get(node_id)
        if known is None or known.hold is None:
            return False
        self._put(node_id, NodeLaunches())
        return True

    def restore(self) -> None:
        """Restore the holds from reloaded records."""
        now, before = time.monotonic(), self._known
        self._known = {}
        for node_id, node in self._cluster.nodes.items():
            kept = node.record.launch_hold
            suspicion = kept.suspicion if kept.suspicion in list(Suspicion) else Suspicion.CANNOT_LAUNCH
            old = before.get(node_id)
            if not node.record.HasField("launch_hold"):
                continue
            if old and old.hold:
                self._known[node_id] = old
            else:
                self._known[node_id] = launch_health.restored(
                    Suspicion(suspicion), kept.reason, kept.failed_canaries, now, self.rules
                )
            node.hold = _problem(kept)
        self._cluster.invalidate_ledger()

    def _put(self, node_id: str, known: NodeLaunches) -> None:
        self._announced.discard(node_id)
        before = self._known.get(node_id, NodeLaunches()).hold
        if known == NodeLaunches():
            self._known.pop(node_id, None)
        else:
            self._known[node_id] = known
        after = known.hold
        shown = [(one.suspicion, one.reason, one.failed_canaries) if one else None for one in (before, after)]
        if shown[0] != shown[1] and (node := self._cluster.nodes.get(node_id)):
            self._changed(node, known)

    def _changed(self, node: Node, known: NodeLaunches) -> None:
        held_before, hold = node.hold is not None, known.hold
        kept = records_pb2.StoredLaunchHold()
        if hold:
            kept.suspicion, kept.reason, kept.failed_canaries = hold.suspicion.value, hold.reason, hold.failed_canaries
            if node.record.HasField("launch_hold"):
                kept.since.CopyFrom(node.record.launch_hold.since)
            else:
                kept.since.GetCurrentTime()
        node.hold = _problem(kept) if hold else None
        if hold and not held_before:
            log.warning("node_held", node=node.id, reason=hold.reason)
        elif not hold:
            log.info("node_released", node=node.id)
        self._cluster.invalidate_ledger()
        self._events.publish_capacity()
        self._background.start(self._save(node.id, kept if hold else None))

    async def _save(self, node_id: str, kept: records_pb2.StoredLaunchHold | None) -> None:
        """Write a hold into the node's record; if that fails, all state is reloaded."""
        async with self._lock(node_id):
            node = self._cluster.nodes.get(node_id)
            if node is None or node.hold != (_problem(kept) if kept else None):
                return  # a newer change is on its way
            record = records_pb2.StoredNode()
            record.CopyFrom(node.record)
            record.ClearField("launch_hold")
            if kept:
                record.launch_hold.CopyFrom(kept)
            try:
                written = self._committer.submit([Write(NODES + node_id, record.SerializeToString())])
                node.record = record
                await written
            except (Fenced, Halted, StoreUnavailable) as error:
                log.info("hold_not_saved", node=node_id, error=str(error))


def _problem(kept: records_pb2.StoredLaunchHold) -> HealthProblem:
    suspicion = Suspicion(kept.suspicion) if kept.suspicion in list(Suspicion) else Suspicion.CANNOT_LAUNCH
    since, remedy = specs.seconds(kept.since), REMEDIES[suspicion]
    return HealthProblem(suspicion.value, HealthAction.HOLD, f"unhealthy: {kept.reason}", since=since, remedy=remedy)


def _name(live: LiveAttempt) -> str:
    return f"{live.key[0]}/{live.key[1]}"
