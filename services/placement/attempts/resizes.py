"""Resizes of running attempts in two phases: old and new cores are both held until all nodes have applied the change.

Theory of operation. A resize is committed before any agent is informed. The attempt's record names its present
allocation and its target, and from then on it holds both, so that no core has two owners at any revision. The agents of
all its nodes receive the order with the commit's revision, which becomes the attempt's epoch; each answers once its
kernel has applied the change. When all have, the target becomes the allocation, and the other cores are free. If an
agent could not apply it, the whole gang is rolled back: a resize in the other direction, with a commit and an epoch of
its own. The record holds all the state that is needed: after a restart, or when an agent reconnects, every agent that
has not answered gets the order again, and answers again.

An attempt that is being stopped is not rolled back; everything it holds is freed when it ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import structlog

from cotenant import telemetry
from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.codec import specs
from cotenant.core.capacity.ledger import Overcommitted
from cotenant.core.model.allocation import Allocation, NodeAllocation
from cotenant.core.model.lifecycle import AttemptState
from cotenant.internal.v1.attempt_pb2 import ObservedAttempt
from cotenant.rpc.task_group import BackgroundTasks
from cotenant.services.placement.agents import agent_sessions
from cotenant.services.placement.attempts.attempt_store import NOT_COMMITTED, AttemptStore
from cotenant.services.placement.cluster.cluster_state import Cluster
from cotenant.services.placement.cluster.committer import Committer, Halted, TooLarge, Write
from cotenant.services.placement.cluster.live_records import GUARDS, LiveAttempt
from cotenant.v1 import job_pb2

log = structlog.get_logger()

NOTHING: Mapping[str, int] = MappingProxyType({})
RETRY_RESIZE_SECONDS = 60.0  # after a resize that could not be applied
MESSAGE_LENGTH_MAX = 300

RESIZES = telemetry.counter("cotenant.placement.resizes", "{attempt}", "Resizes of running attempts, by outcome.")


class Resizes:
    """Carries out resizes that others decide and start with `begin`."""

    def __init__(
        self,
        cluster: Cluster,
        committer: Committer,
        sessions: agent_sessions.Sessions,
        attempts: AttemptStore,
        background: BackgroundTasks,
    ) -> None:
        self._cluster, self._committer, self._sessions = cluster, committer, sessions
        self._attempts, self._background = attempts, background
        self._failed: set[str] = set()  # jobs that are not resized for a while

    def begin(self, live: LiveAttempt, cores: Mapping[str, int], why: str, own: Mapping[str, int] = NOTHING) -> bool:
        """Start to resize an attempt to other numbers of cores per replica, by role; False if that is impossible now.

        New cores are held at once; this does not wait. Cores beyond its `own`, by role, are lent; a role that `own`
        does not name owns as many as before.
        """
        if not self._cluster.can_resize(live):
            return False
        try:
            target = tuple(self._target(part, cores, own) for part in live.allocation)
        except Overcommitted as error:  # the decision was made from an older state
            log.warning("resize_refused", job=live.key[0], error=str(error))
            return False
        if [_cores(part) for part in target] == [_cores(part) for part in live.allocation]:
            return False
        self._begin(live, target, why)
        return True

    def replace_cores(self, live: LiveAttempt, target: Allocation, why: str) -> bool:
        """Start to move an attempt to exactly these cores of its nodes; False if that is impossible now."""
        if not self._cluster.can_resize(live) and not self.stuck(live):
            return False
        self._begin(live, target, why)
        return True

    @staticmethod
    def stuck(live: LiveAttempt) -> bool:
        """Return whether a resize could neither be applied nor rolled back; its `target` is what it held before."""
        return live.rolling_back and not live.committing_resize and any(live.applied.values())

    def _begin(self, live: LiveAttempt, target: Allocation, why: str) -> None:
        live.attempt.sizing = why
        self._cluster.set_allocation(live, live.allocation, target)
        log.info("resize_started", job=live.key[0], cores=[_cores(part) for part in target], why=why)
        self._order(live)

    def mark(self, live: LiveAttempt, own: Mapping[str, int]) -> None:
        """Record how many of an attempt's cores are its own, by role, without changing its cores."""
        self._cluster.set_allocation(live, tuple(_marked(part, own) for part in live.allocation))
        self._attempts.save([live])

    def _target(self, part: NodeAllocation, cores: Mapping[str, int], own: Mapping[str, int]) -> NodeAllocation:
        wanted = {task.rank: cores[task.role] for task in part.tasks if task.role in cores}
        return self._cluster.nodes[part.node_id].book.resize(_marked(part, own), wanted)

    def _order(self, live: LiveAttempt) -> None:
        """Commit a resize's target, then send the order to the agents."""
        live.applied.clear()
        live.committing_resize = True
        try:
            revision = self._committer.submit([live.write(), *(Write(GUARDS + node, b"") for node in live.nodes)])
        except Halted:
            return  # the state is being reloaded
        self._background.start(self._send_orders(live, revision, live.observed()))

    async def _send_orders(self, live: LiveAttempt, committed: asyncio.Future[int], copy: ObservedAttempt) -> None:
        try:
            epoch = await committed
        except TooLarge as error:  # nothing was committed or sent
            live.committing_resize = False
            self._undo(live, f"its cores stay as they are: {error}")
            return
        except NOT_COMMITTED:
            return  # the state is being reloaded
        live.committing_resize = False
        live.epoch = live.attempt.epoch = copy.attempt.epoch = epoch
        self._attempts.events.publish(epoch, [copy])
        for node_id in live.nodes:
            if live.target and not live.ended_on(node_id):
                self._sessions.send(node_id, agent_sessions.resize_order(live, node_id))
        self.settle(live)

    def resend(self, live: LiveAttempt, node_id: str, session: agent_sessions.Session) -> None:
        """Send a reconnected agent the resize order that it has not answered."""
        if live.target and not live.committing_resize and node_id not in live.applied:
            session.put(agent_sessions.resize_order(live, node_id))

    def take_report(self, node_id: str, report: agent_pb2.ResizeReport) -> None:
        """Apply an agent's answer to a resize; answers to older resizes are ignored."""
        live = self._cluster.attempts.get(report.job_id)
        if live is None or live.key[1] != report.number or node_id not in live.nodes or not live.target:
            return
        if live.committing_resize or report.epoch != live.epoch or node_id in live.applied:
            return
        live.applied[node_id] = report.error[:MESSAGE_LENGTH_MAX]
        self.settle(live)

    def settle(self, live: LiveAttempt) -> None:
        """Finish a resize that all nodes have answered; a part that has ended needs no answer."""
        if not live.target or live.committing_resize or live.state.ended:
            return
        if any(node_id not in live.applied and not live.ended_on(node_id) for node_id in live.nodes):
            return
        refused = {node_id: why for node_id, why in live.applied.items() if why and not live.ended_on(node_id)}
        if not refused:
            self._finish(live)
        elif live.state is not AttemptState.STOPPING:
            self._roll_back(live, refused)

    def _finish(self, live: LiveAttempt) -> None:
        """Make the target the allocation."""
        RESIZES.add(outcome="turned back" if live.rolling_back else "done")
        log.info("resize_completed", job=live.key[0], epoch=live.epoch, cores=[_cores(part) for part in live.target])
        if not live.rolling_back:
            account_core_seconds(live.attempt, time.time())
        live.rolling_back = False
        live.applied.clear()
        self._cluster.set_allocation(live, live.target)
        self._attempts.save([live])
        self._attempts.events.publish_capacity()

    def _roll_back(self, live: LiveAttempt, refused: dict[str, str]) -> None:
        """Resize back to the previous cores on all nodes; if that fails too, both are held until it succeeds."""
        why = "; ".join(f"{node_id}: {error}" for node_id, error in sorted(refused.items()))
        self._delay_retry(live)
        if live.rolling_back:
            log.error("resize_stuck", job=live.key[0], error=why)
            return
        log.warning("resize_failed", job=live.key[0], error=why)
        live.rolling_back = True
        live.attempt.sizing = f"its cores stay as they are: they could not be changed on {why}"
        self._cluster.set_allocation(live, live.target, live.allocation)
        self._order(live)

    def retry(self, now: float) -> None:
        """Allow resizes again for attempts whose last one failed a while ago, and retry stuck rollbacks."""
        for job_id in list(self._failed):
            live = self._cluster.attempts.get(job_id)
            if live is None or live.state is not AttemptState.RUNNING or not live.retry_resize_after_seconds:
                self._failed.discard(job_id)
            elif now < live.retry_resize_after_seconds:
                continue
            elif not live.target:
                live.retry_resize_after_seconds = 0.0
                self._cluster.changed_nodes.update(live.nodes)
            elif any(live.applied.values()) and not live.committing_resize:
                live.retry_resize_after_seconds = now + RETRY_RESIZE_SECONDS
                self._order(live)  # with a new epoch: an agent repeats its answer to an old one

    def _delay_retry(self, live: LiveAttempt) -> None:
        live.retry_resize_after_seconds = time.monotonic() + RETRY_RESIZE_SECONDS
        self._failed.add(live.key[0])

    def _undo(self, live: LiveAttempt, why: str) -> None:
        if live.target and self._cluster.attempts.get(live.key[0]) is live:
            live.attempt.sizing = why
            self._delay_retry(live)
            self._cluster.set_allocation(live, live.allocation)
            self._attempts.save([live])


def account_core_seconds(attempt: job_pb2.Attempt, now: float) -> None:
    """Add the core seconds held until now, and record that the cores change now."""
    since = attempt.resize_time if attempt.HasField("resize_time") else attempt.start_time
    cores = sum(len(task.core_ids) for part in attempt.allocations for task in part.tasks)
    attempt.core_seconds += cores * max(0.0, now - specs.seconds(since))
    attempt.resize_time.CopyFrom(specs.timestamp(now))


def _marked(part: NodeAllocation, own: Mapping[str, int]) -> NodeAllocation:
    """Set how many cores each task owns; for roles that `own` does not name, as before, or else all that it holds."""
    tasks = (replace(task, own_cores=own.get(task.role) or task.own_cores or len(task.core_ids)) for task in part.tasks)
    return replace(part, tasks=tuple(tasks))


def _cores(part: NodeAllocation) -> list[int]:
    return [len(task.core_ids) for task in part.tasks]
