"""Changing what running attempts hold, in two phases: the cores of before and after are held until the nodes did it.

Theory of operation. A resize is committed before anybody is told: the attempt's record names what it holds and what it
is to hold, and from then on both are its own, so that no core has two owners at any revision. The agents of all its
nodes are told under the commit's revision, which is the attempt's epoch from then on; each answers once its kernel has
it. When all have, the new cores become what it holds, and the others are free. Where one could not, the gang goes back
in lock-step: a resize the other way round, with a commit and an epoch of its own. The record says all that has to be
known: after a restart, or when an agent returns, whoever has not answered is asked again, and answers again.

An attempt that is being stopped is not taken back any more; all that it holds is freed when it ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import structlog

from cotenant import telemetry
from cotenant.codec import specs
from cotenant.core.capacity.ledger import Overcommitted
from cotenant.core.model.allocation import Allocation, NodeAllocation
from cotenant.core.model.lifecycle import AttemptState
from cotenant.rpc.task_group import Background
from cotenant.services.placement.agents import agent_sessions
from cotenant.services.placement.attempts.attempt_store import NOT_COMMITTED, Attempts, copy_of
from cotenant.services.placement.cluster.cluster_state import Cluster
from cotenant.services.placement.cluster.committer import Committer, Halted, TooLarge, Write
from cotenant.services.placement.cluster.live_records import GUARDS, Live
from cotenant.v1 import job_pb2
from cotenant.v1 import node_service_pb2 as node_pb2

log = structlog.get_logger()

NOTHING: Mapping[str, int] = MappingProxyType({})
AGAIN_SECONDS = 60.0  # after a resize that could not be applied
MESSAGE_LENGTH_MAX = 300

RESIZES = telemetry.counter("cotenant.placement.resizes", "{attempt}", "Resizes of running attempts, by outcome.")


class Resizes:
    """Carries resizes through; whoever decides on them calls `begin`."""

    def __init__(
        self,
        cluster: Cluster,
        committer: Committer,
        sessions: agent_sessions.Sessions,
        attempts: Attempts,
        background: Background,
    ) -> None:
        self._cluster, self._committer, self._sessions = cluster, committer, sessions
        self._attempts, self._background = attempts, background
        self._failed: set[str] = set()  # jobs that are left alone for a while

    def begin(self, live: Live, cores: Mapping[str, int], why: str, own: Mapping[str, int] = NOTHING) -> bool:
        """Let an attempt hold other numbers of cores per replica, by role; False where that cannot be now.

        New cores are held at once. Nothing is waited for. Those beyond its `own`, by role, are lent; a role that is not
        named has as many of its own as before.
        """
        if not self._cluster.can_resize(live):
            return False
        try:
            target = tuple(self._target(part, cores, own) for part in live.allocation)
        except Overcommitted as error:  # whoever decided had an older picture
            log.warning("resize_refused", job=live.key[0], error=str(error))
            return False
        if [_cores(part) for part in target] == [_cores(part) for part in live.allocation]:
            return False
        self._begin(live, target, why)
        return True

    def replace_cores(self, live: Live, target: Allocation, why: str) -> bool:
        """Let an attempt hold exactly these cores, for its node has no others; False where that cannot be now."""
        if not self._cluster.can_resize(live) and not self.stuck(live):
            return False
        self._begin(live, target, why)
        return True

    @staticmethod
    def stuck(live: Live) -> bool:
        """Whether a resize could neither be applied nor taken back: what it held before is its `target`."""
        return live.turned_back and not live.ordering and any(live.applied.values())

    def _begin(self, live: Live, target: Allocation, why: str) -> None:
        live.attempt.sizing = why
        self._cluster.reshape(live, live.allocation, target)
        log.info("resize_begun", job=live.key[0], cores=[_cores(part) for part in target], why=why)
        self._order(live)

    def mark(self, live: Live, own: Mapping[str, int]) -> None:
        """Note how many of the cores that an attempt holds are its own, by role, where none of them changes."""
        self._cluster.reshape(live, tuple(_marked(part, own) for part in live.allocation))
        self._attempts.keep([live])

    def _target(self, part: NodeAllocation, cores: Mapping[str, int], own: Mapping[str, int]) -> NodeAllocation:
        wanted = {task.rank: cores[task.role] for task in part.tasks if task.role in cores}
        return self._cluster.nodes[part.node_id].book.resize(_marked(part, own), wanted)

    def _order(self, live: Live) -> None:
        """Commit where a resize goes; then tell the agents."""
        live.applied.clear()
        live.ordering = True
        try:
            revision = self._committer.submit([live.write(), *(Write(GUARDS + node, b"") for node in live.nodes)])
        except Halted:
            return  # everything is being read anew
        self._background.start(self._tell(live, revision, copy_of(live.attempt)))

    async def _tell(self, live: Live, kept: asyncio.Future[int], copy: job_pb2.Attempt) -> None:
        try:
            epoch = await kept
        except TooLarge as error:  # nothing was done, and nobody was told
            live.ordering = False
            self._undo(live, f"its cores stay as they are: {error}")
            return
        except NOT_COMMITTED:
            return  # the same
        live.ordering = False
        live.epoch = live.attempt.epoch = copy.epoch = epoch
        self._attempts.feed.publish(epoch, [copy])
        for node_id in live.nodes:
            if live.target and not live.ended_on(node_id):
                self._sessions.send(node_id, agent_sessions.resize_order(live, node_id))
        self.settle(live)

    def remind(self, live: Live, node_id: str, session: agent_sessions.Session) -> None:
        """Tell an agent that has come back of a resize that it has not answered."""
        if live.target and not live.ordering and node_id not in live.applied:
            session.put(agent_sessions.resize_order(live, node_id))

    def take_report(self, node_id: str, report: node_pb2.ResizeReport) -> None:
        """Take in what an agent says of a resize; what is said of an older one is passed over."""
        live = self._cluster.attempts.get(report.job_id)
        if live is None or live.key[1] != report.number or node_id not in live.nodes or not live.target:
            return
        if live.ordering or report.epoch != live.epoch or node_id in live.applied:
            return
        live.applied[node_id] = report.error[:MESSAGE_LENGTH_MAX]
        self.settle(live)

    def settle(self, live: Live) -> None:
        """End a resize whose nodes have all answered; a part that has ended needs no answer."""
        if not live.target or live.ordering or live.state.ended:
            return
        if any(node_id not in live.applied and not live.ended_on(node_id) for node_id in live.nodes):
            return
        refused = {node_id: why for node_id, why in live.applied.items() if why and not live.ended_on(node_id)}
        if not refused:
            self._finish(live)
        elif live.state is not AttemptState.STOPPING:
            self._turn_back(live, refused)

    def _finish(self, live: Live) -> None:
        """What it was to hold is what it holds."""
        RESIZES.add(outcome="turned back" if live.turned_back else "done")
        log.info("resize_done", job=live.key[0], epoch=live.epoch, cores=[_cores(part) for part in live.target])
        if not live.turned_back:
            account(live.attempt, time.time())
        live.turned_back = False
        live.applied.clear()
        self._cluster.reshape(live, live.target)
        self._attempts.keep([live])
        self._attempts.feed.publish_capacity()

    def _turn_back(self, live: Live, refused: dict[str, str]) -> None:
        """Go back to what was held before, on all nodes; where that fails too, all is held until it does not."""
        told = "; ".join(f"{node_id}: {why}" for node_id, why in sorted(refused.items()))
        self._leave_alone(live)
        if live.turned_back:
            log.error("resize_stuck", job=live.key[0], error=told)
            return
        log.warning("resize_failed", job=live.key[0], error=told)
        live.turned_back = True
        live.attempt.sizing = f"its cores stay as they are, for they could not be changed on {told}"
        self._cluster.reshape(live, live.target, live.allocation)
        self._order(live)

    def try_again(self, now: float) -> None:
        """Count again on those whose cores could not be changed a while ago; ask the stuck to go back once more."""
        for job_id in list(self._failed):
            live = self._cluster.attempts.get(job_id)
            if live is None or live.state is not AttemptState.RUNNING or not live.resize_after_seconds:
                self._failed.discard(job_id)
            elif now < live.resize_after_seconds:
                continue
            elif not live.target:
                live.resize_after_seconds = 0.0
                self._cluster.stirred.update(live.nodes)
            elif any(live.applied.values()) and not live.ordering:
                live.resize_after_seconds = now + AGAIN_SECONDS
                self._order(live)  # under a new epoch: an agent answers an old one as it did before

    def _leave_alone(self, live: Live) -> None:
        live.resize_after_seconds = time.monotonic() + AGAIN_SECONDS
        self._failed.add(live.key[0])

    def _undo(self, live: Live, why: str) -> None:
        if live.target and self._cluster.attempts.get(live.key[0]) is live:
            live.attempt.sizing = why
            self._leave_alone(live)
            self._cluster.reshape(live, live.allocation)
            self._attempts.keep([live])


def account(attempt: job_pb2.Attempt, now: float) -> None:
    """Note that cores change now, and what was held up to now."""
    since = attempt.resize_time if attempt.HasField("resize_time") else attempt.start_time
    cores = sum(len(task.core_ids) for part in attempt.allocations for task in part.tasks)
    attempt.core_seconds += cores * max(0.0, now - specs.seconds(since))
    attempt.resize_time.CopyFrom(specs.timestamp(now))


def _marked(part: NodeAllocation, own: Mapping[str, int]) -> NodeAllocation:
    """Note how many cores are each task's own; of roles that are not named, what was, or else what it holds."""
    tasks = (replace(task, own_cores=own.get(task.role) or task.own_cores or len(task.core_ids)) for task in part.tasks)
    return replace(part, tasks=tuple(tasks))


def _cores(part: NodeAllocation) -> list[int]:
    return [len(task.core_ids) for task in part.tasks]
