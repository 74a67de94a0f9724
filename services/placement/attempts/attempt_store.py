"""Changes of attempts: committed in order, then sent to the queue and to the agents."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence

import structlog

from cotenant import fail_points
from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.core.model import health
from cotenant.core.model.health_rules import OUTER_JOB
from cotenant.core.model.lifecycle import AttemptState, StopReason
from cotenant.core.model.node import HealthAction, Inventory
from cotenant.internal.v1.attempt_pb2 import ObservedAttempt
from cotenant.rpc.task_group import BackgroundTasks
from cotenant.services.placement.agents import agent_sessions
from cotenant.services.placement.attempts.attempt_events import AttemptEvents
from cotenant.services.placement.cluster.cluster_state import Cluster
from cotenant.services.placement.cluster.committer import OPERATIONS_MAX, Committer, Fenced, Halted, TooLarge, Write
from cotenant.services.placement.cluster.live_records import ATTEMPTS, GUARDS, LiveAttempt, Node
from cotenant.store.port import Compare, StoreUnavailable

log = structlog.get_logger()

QUEUE_LEADER, QUEUE_JOBS = "queue/leader", "queue/jobs/"  # both services share one store
NOT_COMMITTED = (Fenced, Halted, StoreUnavailable)


class AttemptStore:
    """Changes attempts. The cluster state changes at once; the queue and agents are informed after the commit."""

    def __init__(
        self,
        cluster: Cluster,
        committer: Committer,
        sessions: agent_sessions.Sessions,
        events: AttemptEvents,
        background: BackgroundTasks,
    ) -> None:
        self.cluster, self.committer, self.sessions, self.events = cluster, committer, sessions, events
        self._background = background

    def submit(self, live: LiveAttempt, under: Sequence[Compare] = ()) -> asyncio.Future[int]:
        """Submit an attempt with the guards of its nodes for commit, ahead of all later decisions."""
        try:
            return self.committer.submit(
                [live.write(), *(Write(GUARDS + node_id, b"") for node_id in live.nodes)], under
            )
        except (Halted, TooLarge) as error:
            refused: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            refused.set_exception(error)
            return refused

    async def start(self, live: LiveAttempt, committed: asyncio.Future[int], copy: ObservedAttempt) -> None:
        """Wait for the commit of a submitted attempt, then publish and assign it; undo it if the commit fails.

        `copy` is the attempt as it was submitted: if one of its nodes is given up meanwhile, nobody may learn of that
        before it is committed, too.

        Raises:
            Fenced, Halted, StoreUnavailable, TooLarge, Outdated: see `Committer.submit`.
        """
        try:
            live.epoch = await committed
        except BaseException:
            self.cluster.undo(live)
            raise
        live.attempt.epoch, live.before = live.epoch, None
        copy.attempt.epoch = live.epoch
        await fail_points.reach("placement.started")
        self.events.publish(live.epoch, [copy])
        self.sessions.assign(live)
        if live.pending_stop:
            self.order_stops([live], live.pending_stop)

    async def confirm(self, under: Sequence[Compare]) -> None:
        """Check that the calling queue still leads, when nothing else is committed for it.

        Raises:
            Fenced, Halted, StoreUnavailable, Outdated: see `Committer.submit`.
        """
        if under:
            await self.committer.commit([], under)

    def take_report(self, live: LiveAttempt, node_id: str, report: agent_pb2.AttemptReport) -> None:
        """Apply an agent's report on its part of an attempt."""
        before = live.state
        if self.cluster.report(live, node_id, report):
            self._changed(live, before)

    def give_up(self, live: LiveAttempt, node_id: str, state: AttemptState, why: str) -> None:
        """End a part of an attempt without a report from its agent."""
        before = live.state
        if self.cluster.give_up(live, node_id, state, why, time.time()):
            log.warning("attempt_part_given_up", job=live.key[0], attempt=live.key[1], state=state.value, why=why)
            self._changed(live, before)

    def _changed(self, live: LiveAttempt, before: AttemptState) -> None:
        if live.state is AttemptState.STOPPING and before is not AttemptState.STOPPING:  # the gang is broken
            self.sessions.stop(live, [node_id for node_id in live.nodes if not live.ended_on(node_id)])
        self.save([live])

    def order_stops(self, lives: Iterable[LiveAttempt], reason: StopReason) -> None:
        """Stop attempts with their grace: commit the stop and send it to the agents.

        An attempt whose start is being committed is stopped after that commit: its agents must not receive the stop
        before the start.
        """
        stopped = []
        for live in lives:
            if not live.epoch:
                live.pending_stop = live.pending_stop or reason
            elif self.cluster.stop(live, reason):
                stopped.append(live)
        self.save(stopped)
        for live in stopped:
            self.sessions.stop(live, [node_id for node_id in live.nodes if not live.ended_on(node_id)])

    def order_health_stops(self, node: Node, before: Inventory | None) -> None:
        """Stop attempts on failing hardware, to be restarted; `before` is the node's previous inventory."""
        bad = health.gpus_to_restart(before, node.inventory)
        drain = (
            node.health_problem if node.health_problem and node.health_problem.action is HealthAction.DRAIN else None
        )
        if not bad and not drain:
            return
        why = {problem.gpu_uuid: problem.reason for problem in node.inventory.problems if problem.gpu_uuid in bad}
        hit = []
        for live in self.cluster.on_node(node.id):
            held = bad & {
                share.uuid
                for part in live.held
                if part.node_id == node.id
                for task in part.tasks
                for share in task.gpus
            }
            if (held or drain) and self.cluster.can_stop(live):
                reasons = [f"{uuid} of {node.id}: {why[uuid]}" for uuid in sorted(held)]
                reasons += [f"{node.id}: {drain.reason}"] if drain else []
                live.attempt.stop_detail = f"was on {reasons[0]}"
                hit.append(live)
        given_back = drain is not None and drain.check == OUTER_JOB and not bad
        self.order_stops(hit, StopReason.DRAINED if given_back else StopReason.UNHEALTHY)

    def save(self, lives: Sequence[LiveAttempt]) -> None:
        """Commit changed attempts in the background, in order; then publish them and acknowledge ends to the agents.

        They are submitted at once: what was decided from one state must never be written under the next term.
        """
        for begin in range(0, len(lives), OPERATIONS_MAX):
            some = lives[begin : begin + OPERATIONS_MAX]
            try:
                revision = self.committer.submit([live.write() for live in some])
            except Halted:
                return  # the state is being reloaded, and agents report again when they reconnect
            ended = [live for live in some if live.state.ended]
            self._background.start(self._publish(revision, ended, [live.observed() for live in some]))

    async def _publish(
        self, committed: asyncio.Future[int], ended: list[LiveAttempt], copies: list[ObservedAttempt]
    ) -> None:
        try:
            revision = await committed
        except NOT_COMMITTED:
            return  # the state is being reloaded
        self.events.publish(revision, copies)
        for live in ended:
            live.end_committed = True
            self.sessions.ack(live)

    async def forget(self, keys: Sequence[tuple[str, int]], under: Sequence[Compare] = ()) -> None:
        """Delete the records of ended attempts that the queue has archived.

        Leadership is confirmed before answering that a record does not exist or its attempt has not ended: a queue that
        learned of the end from another placement would otherwise never retry.

        Raises:
            Fenced, Halted, StoreUnavailable, Outdated: see `Committer.submit`.
            Halted: the next attempt of one of the jobs is being committed, and replaces its record if that succeeds.
        """
        known = [(self.cluster.attempts.get(job_id), number) for job_id, number in dict(keys).items()]
        for live, number in known:
            if live and live.before and live.before.key[1] == number:
                raise Halted(f"the next attempt of {live.key[0]} is being committed")
        gone = [live for live, number in known if live and live.key[1] == number and live.end_committed]
        for begin in range(0, len(gone), OPERATIONS_MAX):
            some = gone[begin : begin + OPERATIONS_MAX]
            for live in some:
                self.cluster.remember_forgotten(live)  # first, because the commit's outcome may be unknown
            await self.committer.commit([Write(ATTEMPTS + live.key[0], None) for live in some], under)
            await fail_points.reach("placement.forgotten")
            for live in some:
                standing = self.cluster.attempts.get(live.key[0])
                if standing is live:
                    self.cluster.forget(live.key[0])
                elif standing:  # the next attempt has replaced it
                    standing.before = None
                self.events.forget(*live.key)
        if len(gone) < len(dict(keys)):
            await self.committer.commit([], under)


def leader_condition(term: int) -> tuple[Compare, ...]:
    """Return the condition that a queue still leads in its term; a queue without replicas (term 0) always does."""
    return (Compare(QUEUE_LEADER, term),) if term else ()


def job_condition(job_id: str, revision: int, term: int) -> tuple[Compare, ...]:
    """Return the condition that a job's record is unchanged since the queue asked for its start.

    So no cancelled job is started, and no attempt is started twice however late the queue's call arrives: the queue
    stores an attempt's end in the job's record before the attempt is forgotten.
    """
    return (Compare(QUEUE_JOBS + job_id, revision),) if term and revision else ()
