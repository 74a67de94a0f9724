"""What happens to attempts: committed in order, then told to the queue and to the agents."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence

import structlog

from cotenant import fail_points
from cotenant.core.model import health
from cotenant.core.model.lifecycle import AttemptState, StopReason
from cotenant.core.model.node import HealthAction, Inventory
from cotenant.rpc.task_group import Background
from cotenant.services.placement.agents import agent_sessions
from cotenant.services.placement.attempts.attempt_events import Feed
from cotenant.services.placement.cluster.cluster_state import Cluster
from cotenant.services.placement.cluster.committer import OPERATIONS_MAX, Committer, Fenced, Halted, TooLarge, Write
from cotenant.services.placement.cluster.live_records import ATTEMPTS, GUARDS, Live, Node
from cotenant.store.port import Compare, StoreUnavailable
from cotenant.v1 import job_pb2
from cotenant.v1 import node_service_pb2 as node_pb2

log = structlog.get_logger()

QUEUE_LEADER, QUEUE_JOBS = "queue/leader", "queue/jobs/"  # both services keep what they know in one store
NOT_COMMITTED = (Fenced, Halted, StoreUnavailable)


class Attempts:
    """Changes attempts. The picture changes at once, everyone else hears of it once it is committed."""

    def __init__(
        self,
        cluster: Cluster,
        committer: Committer,
        sessions: agent_sessions.Sessions,
        feed: Feed,
        background: Background,
    ) -> None:
        self.cluster, self.committer, self.sessions, self.feed = cluster, committer, sessions, feed
        self._background = background

    def submit(self, live: Live, under: Sequence[Compare] = ()) -> asyncio.Future[int]:
        """Put an attempt in line with the guards of its nodes, before anything that is decided after it."""
        try:
            return self.committer.submit(
                [live.write(), *(Write(GUARDS + node_id, b"") for node_id in live.nodes)], under
            )
        except (Halted, TooLarge) as error:
            refused: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            refused.set_exception(error)
            return refused

    async def start(self, live: Live, kept: asyncio.Future[int]) -> None:
        """Wait until an attempt that was put in line is committed, then tell of it. What fails is undone.

        Raises:
            Fenced, Halted, StoreUnavailable, TooLarge, Outdated: see `Committer.submit`.
        """
        try:
            live.epoch = await kept
        except BaseException:
            self.cluster.undo(live)
            raise
        live.attempt.epoch, live.before = live.epoch, None
        await fail_points.reach("placement.started")
        self.feed.publish(live.epoch, [live.attempt])
        self.sessions.assign(live)
        if live.stop_wanted:
            self.order_stops([live], live.stop_wanted)

    async def confirm(self, under: Sequence[Compare]) -> None:
        """Make sure that whoever wants something still leads, where nothing is committed at its word.

        Raises:
            Fenced, Halted, StoreUnavailable, Outdated: see `Committer.submit`.
        """
        if under:
            await self.committer.commit([], under)

    def take_report(self, live: Live, node_id: str, report: node_pb2.AttemptReport) -> None:
        """Take in what an agent says of its part of an attempt."""
        before = live.state
        if self.cluster.report(live, node_id, report):
            self._changed(live, before)

    def give_up(self, live: Live, node_id: str, state: AttemptState, why: str) -> None:
        """Take a part of an attempt as ended though its agent does not say so."""
        before = live.state
        if self.cluster.give_up(live, node_id, state, why, time.time()):
            log.warning("part_given_up", job=live.key[0], attempt=live.key[1], state=state.value, why=why)
            self._changed(live, before)

    def _changed(self, live: Live, before: AttemptState) -> None:
        if live.state is AttemptState.STOPPING and before is not AttemptState.STOPPING:  # its gang is broken
            self.sessions.stop(live, [node_id for node_id in live.nodes if not live.ended_on(node_id)])
        self.keep([live])

    def order_stops(self, lives: Iterable[Live], reason: StopReason) -> None:
        """Stop attempts with their grace: commit the order, and tell the agents.

        An attempt whose start is being committed is stopped after that: an agent must not hear of the stop first.
        """
        stopped = []
        for live in lives:
            if not live.epoch:
                live.stop_wanted = live.stop_wanted or reason
            elif self.cluster.stop(live, reason):
                stopped.append(live)
        self.keep(stopped)
        for live in stopped:
            self.sessions.stop(live, [node_id for node_id in live.nodes if not live.ended_on(node_id)])

    def order_healing(self, node: Node, before: Inventory | None) -> None:
        """Stop what is to be started anew for its node's health; `before` is what was known of the node until now."""
        bad = health.to_stop(before, node.inventory)
        drain = node.ailment if node.ailment and node.ailment.action is HealthAction.DRAIN else None
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
                words = [f"{uuid} of {node.id}: {why[uuid]}" for uuid in sorted(held)]
                words += [f"{node.id}: {drain.reason}"] if drain else []
                live.attempt.stop_detail = f"was on {words[0]}"
                hit.append(live)
        self.order_stops(hit, StopReason.UNHEALTHY)

    def keep(self, lives: Sequence[Live]) -> None:
        """Commit changed attempts in the background, in order; then tell the queue, and agents of ends.

        They are put in line at once: what was judged by one picture must never be written under the next.
        """
        for begin in range(0, len(lives), OPERATIONS_MAX):
            some = lives[begin : begin + OPERATIONS_MAX]
            try:
                revision = self.committer.submit([live.write() for live in some])
            except Halted:
                return  # everything is being read anew, and agents tell again when they reconnect
            ended = [live for live in some if live.state.ended]
            self._background.start(self._keep(revision, ended, [copy_of(live.attempt) for live in some]))

    async def _keep(self, kept: asyncio.Future[int], ended: list[Live], copies: list[job_pb2.Attempt]) -> None:
        try:
            revision = await kept
        except NOT_COMMITTED:
            return  # the same
        self.feed.publish(revision, copies)
        for live in ended:
            live.end_kept = True
            self.sessions.ack(live)

    async def forget(self, keys: Sequence[tuple[str, int]], under: Sequence[Compare] = ()) -> None:
        """Delete the records of attempts that have ended, and of which nothing more is to be told.

        That there is no such record, or that the attempt has not ended, is said only by who still leads: else a queue
        that heard of the end from another placement would never ask again.

        Raises:
            Fenced, Halted, StoreUnavailable, Outdated: see `Committer.submit`.
            Halted: one of the jobs is being started anew, so that it is not known yet whose its record will be.
        """
        known = [(self.cluster.attempts.get(job_id), number) for job_id, number in dict(keys).items()]
        for live, number in known:
            if live and live.before and live.before.key[1] == number:
                raise Halted(f"the next attempt of {live.key[0]} is being committed")
        gone = [live for live, number in known if live and live.key[1] == number and live.end_kept]
        for begin in range(0, len(gone), OPERATIONS_MAX):
            some = gone[begin : begin + OPERATIONS_MAX]
            for live in some:
                self.cluster.remember(live)  # first: it may be committed without our knowing
            await self.committer.commit([Write(ATTEMPTS + live.key[0], None) for live in some], under)
            await fail_points.reach("placement.forgotten")
            for live in some:
                standing = self.cluster.attempts.get(live.key[0])
                if standing is live:
                    self.cluster.forget(live.key[0])
                elif standing:  # the next one has taken its place
                    standing.before = None
                self.feed.forget(*live.key)
        if len(gone) < len(dict(keys)):
            await self.committer.commit([], under)


def led_by(term: int) -> tuple[Compare, ...]:
    """What has to hold for what a queue wants in its term; a queue without others beside it (0) leads always."""
    return (Compare(QUEUE_LEADER, term),) if term else ()


def as_known(job_id: str, revision: int, term: int) -> tuple[Compare, ...]:
    """What has to hold for a start that a queue wants in its term: the job is what the queue knew of it.

    So nothing starts that was cancelled meanwhile, and no attempt twice, however late the queue is heard: before an
    attempt is forgotten the queue has kept its end in the job's record.
    """
    return (Compare(QUEUE_JOBS + job_id, revision),) if term and revision else ()


def copy_of(attempt: job_pb2.Attempt) -> job_pb2.Attempt:
    """An attempt as it is now."""
    copy = job_pb2.Attempt()
    copy.CopyFrom(attempt)
    return copy
