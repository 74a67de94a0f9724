"""Agents' streams: one session per connected node, and the messages that wait to be sent to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator

from cotenant.codec import errors, specs
from cotenant.codec.errors import Violation
from cotenant.core.model.lifecycle import StopReason
from cotenant.core.model.validation import MEMORY_BYTES_MAX
from cotenant.services.placement.agents.expected_rate import expected_rate_per_second
from cotenant.services.placement.cluster.live_records import Live
from cotenant.v1 import node_service_pb2 as node_pb2
from cotenant.v1 import placement_service_pb2 as placement_pb2
from cotenant.v1 import resources_pb2


def check_message(message: node_pb2.ConnectRequest) -> None:
    """Refuse what no agent of ours says, before any of it is taken in.

    Raises:
        Problem: INVALID_ARGUMENT, naming every field that is wrong.
    """
    wrong: list[Violation] = []
    wrong += _wrong_states("reports", message.reports)
    if message.HasField("hello"):
        wrong += _wrong_states("hello.attempts", message.hello.attempts)
        wrong += wrong_inventory("hello.inventory", message.hello.inventory)
    if message.HasField("inventory"):
        wrong += wrong_inventory("inventory", message.inventory)
    if wrong:
        raise errors.invalid(wrong)


def _wrong_states(path: str, reports: Iterable[node_pb2.AttemptReport]) -> Iterator[Violation]:
    for at, told in enumerate(reports):
        if told.state not in specs.ATTEMPT_STATES.names:
            yield Violation(f"{path}[{at}].state", f"is {told.state}, which is no state of an attempt")


def wrong_inventory(path: str, inventory: resources_pb2.Inventory) -> Iterator[Violation]:
    """Name what a node cannot be made of: it would be written down, and counted with from then on."""
    if not 0 <= inventory.memory_bytes <= MEMORY_BYTES_MAX:  # those of all nodes are summed up
        yield Violation(f"{path}.memory_bytes", f"must be from 0 to 1 PiB, not {inventory.memory_bytes}")
    for name, ids in (
        ("cores", [core.id for core in inventory.cores]),
        ("gpus", [gpu.uuid for gpu in inventory.gpus]),
    ):
        if len(set(ids)) != len(ids):
            yield Violation(f"{path}.{name}", "names one of them twice")


class Session:
    """One agent's stream. Messages put in before the stream next writes go out together."""

    def __init__(
        self, node_id: str, incarnation: str, mark: Callable[[], node_pb2.StoreMark | None] = lambda: None
    ) -> None:
        """`mark` returns what the agent is to remember of the store."""
        self.node_id, self.incarnation = node_id, incarnation
        self._mark, self._marked = mark, 0  # the revision that the agent was shown last
        self._pending = node_pb2.ConnectResponse()
        self._wake = asyncio.Event()
        self._closed = False

    def put(self, message: node_pb2.ConnectResponse) -> None:
        """Send something as soon as the stream takes it."""
        self._pending.MergeFrom(message)
        self._wake.set()

    def close(self) -> None:
        """End the stream once what waits has been sent."""
        self._closed = True
        self._wake.set()

    async def messages(self) -> AsyncIterator[node_pb2.ConnectResponse]:
        """What is to be written to the stream, until the session is closed."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._pending.ByteSize():
                message, self._pending = self._pending, node_pb2.ConnectResponse()
                self._put_mark(message)
                yield message
            if self._closed:
                return

    def _put_mark(self, message: node_pb2.ConnectResponse) -> None:
        """Have the agent remember how far the store is, where that has changed."""
        mark = self._mark()
        if mark is None or mark.revision == self._marked:
            return
        self._marked = mark.revision
        if not message.HasField("welcome"):  # which has its own
            message.store.CopyFrom(mark)


class Sessions:
    """All connected agents."""

    def __init__(self) -> None:
        self._by_node: dict[str, Session] = {}

    def get(self, node_id: str) -> Session | None:
        """The session of a node, if its agent is connected."""
        return self._by_node.get(node_id)

    def open(self, session: Session) -> None:
        """Take a session as its node's; one that was there before ends."""
        if old := self._by_node.get(session.node_id):
            old.close()
        self._by_node[session.node_id] = session

    def close(self, session: Session) -> bool:
        """Let a session go; False where another one had taken its place."""
        session.close()
        if self._by_node.get(session.node_id) is not session:
            return False
        del self._by_node[session.node_id]
        return True

    def close_all(self) -> None:
        """End all streams, and know of none."""
        for session in self._by_node.values():
            session.close()
        self._by_node.clear()

    def send(self, node_id: str, message: node_pb2.ConnectResponse) -> bool:
        """Send to a node; False where its agent is away (it hears of everything when it returns)."""
        session = self._by_node.get(node_id)
        if session:
            session.put(message)
        return session is not None

    def assign(self, live: Live) -> None:
        """Tell the agents of an attempt's nodes to run their parts."""
        for node_rank in range(len(live.allocation)):
            self.send(live.allocation[node_rank].node_id, assignment(live, node_rank))

    def stop(self, live: Live, nodes: Iterable[str]) -> None:
        """Tell the agents of some of an attempt's nodes to stop their parts."""
        order = stop_order(live)
        for node_id in nodes:
            self.send(node_id, order)

    def ack(self, live: Live) -> None:
        """Tell the agents of an attempt's nodes that they may forget it."""
        message = ack(*live.key)
        for node_id in live.nodes:
            self.send(node_id, message)


def assignment(live: Live, node_rank: int) -> node_pb2.ConnectResponse:
    """An attempt's part on one of its nodes, as the agent hears it."""
    attempt, allocation = live.attempt, live.allocation[node_rank]
    by_rank = sorted((task.rank, task.role, part.node_id) for part in live.allocation for task in part.tasks)
    message = node_pb2.ConnectResponse()
    told = message.assignments.add(
        job_id=attempt.job_id,
        number=attempt.number,
        epoch=live.epoch,
        spec=live.record.spec,
        allocation=attempt.allocations[node_rank],
        world_size=len(by_rank),
        master_address=attempt.master_address,
        master_port=attempt.master_port,
        node_rank=node_rank,
        trace_parent=live.record.trace_parent,
        submitter=live.record.submitter,
        expected_rate_per_second=expected_rate_per_second(live.record.estimate, attempt.allocations),
        pre_run=attempt.pre_run,
    )
    if len(by_rank) > 1:
        told.replica_roles.extend(role for _, role, _ in by_rank)
        told.replica_addresses.extend(node_id for _, _, node_id in by_rank)
    assert told.allocation.node_id == allocation.node_id
    return message


def resize_order(live: Live, node_id: str) -> node_pb2.ConnectResponse:
    """What an attempt is to hold on one of its nodes from now on."""
    message = node_pb2.ConnectResponse()
    message.resizes.add(
        job_id=live.attempt.job_id,
        number=live.attempt.number,
        epoch=live.epoch,
        allocation=live.record.resizing[live.nodes.index(node_id)],
        expected_rate_per_second=expected_rate_per_second(live.record.estimate, live.record.resizing),
    )
    return message


def profile_order(live: Live, plan: placement_pb2.ProfilePlan) -> node_pb2.ConnectResponse:
    """Which core counts of an attempt are to be measured; without any, a profile that is under way ends."""
    message = node_pb2.ConnectResponse()
    order = message.profiles.add(
        job_id=live.attempt.job_id,
        number=live.attempt.number,
        epoch=live.epoch,
        cores=plan.cores,
        steps=plan.steps,
    )
    order.budget.CopyFrom(plan.budget)
    return message


def stop_order(live: Live) -> node_pb2.ConnectResponse:
    """An order to stop an attempt, with the reason that its record gives."""
    message = node_pb2.ConnectResponse()
    order = message.stops.add(
        job_id=live.attempt.job_id,
        number=live.attempt.number,
        epoch=live.epoch,
        reason=live.attempt.stop_reason,
    )
    order.grace.CopyFrom(live.record.spec.grace)
    return message


def heard(beat: int) -> node_pb2.ConnectResponse:
    """Tell an agent which of its messages has come."""
    return node_pb2.ConnectResponse(heard=beat)


def supersede(report: node_pb2.AttemptReport) -> node_pb2.ConnectResponse:
    """An order to stop what placement does not believe in."""
    message = node_pb2.ConnectResponse()
    message.stops.add(
        job_id=report.job_id,
        number=report.number,
        epoch=report.epoch,
        reason=specs.STOP_REASONS.to_wire(StopReason.SUPERSEDED),
    )
    return message


def release(gpu_uuid: str) -> node_pb2.ConnectResponse:
    """An operator has ended what holds a GPU back from work."""
    return node_pb2.ConnectResponse(released_gpus=[gpu_uuid])


def ack(job_id: str, number: int) -> node_pb2.ConnectResponse:
    """The end of an attempt has been committed, or concerns nobody any more."""
    message = node_pb2.ConnectResponse()
    message.acks.add(job_id=job_id, number=number)
    return message
