"""Agents' streams: one session per connected node, with its queue of outgoing messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.codec import errors, node_capabilities, specs
from cotenant.codec.errors import Violation
from cotenant.core.model.lifecycle import StopReason
from cotenant.core.model.node_capabilities import EVERYTHING, Capability, CoreControl, NodeCapabilities
from cotenant.core.model.resources import AMOUNT_MAX, amounts_of
from cotenant.internal.v1 import placement_service_pb2 as placement_pb2
from cotenant.services.placement.agents.expected_rate import expected_rate_per_second
from cotenant.services.placement.cluster.live_records import LiveAttempt
from cotenant.v1 import resources_pb2

_CANNOT = {
    Capability.LOGS: "keeps no output",
    Capability.FILES: "gives no access to files",
    Capability.SESSIONS: "carries no sessions",
}


def check_message(message: agent_pb2.ConnectRequest) -> None:
    """Reject a message with invalid fields before any part of it is applied.

    Raises:
        Problem: INVALID_ARGUMENT, naming every invalid field.
    """
    wrong: list[Violation] = []
    wrong += _state_violations("reports", message.reports)
    if message.HasField("hello"):
        wrong += _state_violations("hello.attempts", message.hello.attempts)
        wrong += inventory_violations("hello.inventory", message.hello.inventory)
        wrong += node_capabilities.violations(message.hello.capabilities, "hello.capabilities")
    if message.HasField("inventory"):
        wrong += inventory_violations("inventory", message.inventory)
    if wrong:
        raise errors.invalid(wrong)


def _state_violations(path: str, reports: Iterable[agent_pb2.AttemptReport]) -> Iterator[Violation]:
    for at, report in enumerate(reports):
        if report.state not in specs.ATTEMPT_STATES.names:
            yield Violation(f"{path}[{at}].state", f"is {report.state}, which is not an attempt state")


def inventory_violations(path: str, inventory: resources_pb2.Inventory) -> Iterator[Violation]:
    """Yield what is invalid in an inventory, which would otherwise be stored and counted as capacity."""
    for name, amount in amounts_of(inventory).items():
        if not 0 <= amount <= AMOUNT_MAX:  # amounts of all nodes are summed
            yield Violation(f"{path}.{name}", f"must be from 0 to 1 PiB, not {amount}")
    for name, ids in (
        ("cores", [core.id for core in inventory.cores]),
        ("gpus", [gpu.uuid for gpu in inventory.gpus]),
    ):
        if len(set(ids)) != len(ids):
            yield Violation(f"{path}.{name}", "lists an entry twice")


class Session:
    """One agent's stream. Messages queued before the stream's next write are sent together."""

    def __init__(
        self,
        node_id: str,
        incarnation: str,
        mark: Callable[[], agent_pb2.StoreMark | None] = lambda: None,
        capabilities: NodeCapabilities = EVERYTHING,
    ) -> None:
        """`mark` returns the store mark that the agent is to remember; `capabilities` are what it has declared."""
        self.node_id, self.incarnation, self.capabilities = node_id, incarnation, capabilities
        self._mark, self._marked = mark, 0  # the last revision sent to the agent
        self._pending = agent_pb2.ConnectResponse()
        self._wake = asyncio.Event()
        self._closed = False

    def put(self, message: agent_pb2.ConnectResponse) -> None:
        """Queue a message without what the agent cannot carry out; the stream sends it with its next write."""
        self._pending.MergeFrom(within_capabilities(message, self.capabilities))
        self._wake.set()

    def close(self) -> None:
        """Close the stream after its queued messages have been sent."""
        self._closed = True
        self._wake.set()

    async def messages(self) -> AsyncIterator[agent_pb2.ConnectResponse]:
        """Yield the messages to write to the stream until the session is closed."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._pending.ByteSize():
                message, self._pending = self._pending, agent_pb2.ConnectResponse()
                self._put_mark(message)
                yield message
            if self._closed:
                return

    def _put_mark(self, message: agent_pb2.ConnectResponse) -> None:
        """Add the store mark to a message if the store's revision has changed."""
        mark = self._mark()
        if mark is None or mark.revision == self._marked:
            return
        self._marked = mark.revision
        if not message.HasField("welcome"):  # a welcome carries its own mark
            message.store.CopyFrom(mark)


def within_capabilities(
    message: agent_pb2.ConnectResponse, capabilities: NodeCapabilities
) -> agent_pb2.ConnectResponse:
    """Return a message without the orders that an executor cannot carry out.

    Their senders know that, and act accordingly: what is left out here is not waited for.
    """
    if capabilities == EVERYTHING:
        return message
    able = agent_pb2.ConnectResponse()
    able.CopyFrom(message)
    if capabilities.cores is not CoreControl.RESIZE:
        able.ClearField("resizes")
    if not capabilities.can(Capability.PROFILES):
        able.ClearField("profiles")
    if not capabilities.can(Capability.SESSIONS):
        able.ClearField("sessions")
    kept = [read for read in able.reads if capabilities.can(_needed_for(read))]
    if len(kept) < len(able.reads):
        del able.reads[:]
        able.reads.extend(kept)
    if not capabilities.can(Capability.SIGNALS):
        for stop in able.stops:
            stop.ClearField("grace")
    return able


def _needed_for(read: agent_pb2.ReadOutput) -> Capability:
    return Capability.FILES if read.HasField("files") else Capability.LOGS


class Sessions:
    """All connected agents."""

    def __init__(self, address_of: Callable[[str], str] = str) -> None:
        """`address_of` returns the address of a node's host by the node's id."""
        self._by_node: dict[str, Session] = {}
        self._address_of = address_of

    def get(self, node_id: str) -> Session | None:
        """Return the session of a node, or None if its agent is not connected."""
        return self._by_node.get(node_id)

    def require(self, node_id: str, capability: Capability) -> None:
        """Check that the agent of a node, if it is connected, can do something.

        Raises:
            Problem: FAILED_PRECONDITION, if it has declared that it cannot.
        """
        session = self._by_node.get(node_id)
        if session and not session.capabilities.can(capability):
            what = f"the executor of {node_id} {_CANNOT[capability]}"
            raise errors.failed_precondition("NOT_CAPABLE", f"{what}: it declares no {capability.value}")

    def open(self, session: Session) -> None:
        """Register a node's session, closing an earlier one."""
        if old := self._by_node.get(session.node_id):
            old.close()
        self._by_node[session.node_id] = session

    def close(self, session: Session) -> bool:
        """Close a session; return False if another one has replaced it."""
        session.close()
        if self._by_node.get(session.node_id) is not session:
            return False
        del self._by_node[session.node_id]
        return True

    def close_all(self) -> None:
        """Close and drop all sessions."""
        for session in self._by_node.values():
            session.close()
        self._by_node.clear()

    def send(self, node_id: str, message: agent_pb2.ConnectResponse) -> bool:
        """Send a message to a node; False if its agent is disconnected (it is reconciled when it reconnects)."""
        session = self._by_node.get(node_id)
        if session:
            session.put(message)
        return session is not None

    def assign(self, live: LiveAttempt) -> None:
        """Send the agents of an attempt's nodes their assignments."""
        for node_rank in range(len(live.allocation)):
            self.send(live.allocation[node_rank].node_id, assignment(live, node_rank, self._address_of))

    def stop(self, live: LiveAttempt, nodes: Iterable[str]) -> None:
        """Send stop orders to the agents of some of an attempt's nodes."""
        order = stop_order(live)
        for node_id in nodes:
            self.send(node_id, order)

    def ack(self, live: LiveAttempt) -> None:
        """Acknowledge an attempt's end to the agents of its nodes, which may then forget it."""
        message = ack(*live.key)
        for node_id in live.nodes:
            self.send(node_id, message)


def assignment(live: LiveAttempt, node_rank: int, address_of: Callable[[str], str]) -> agent_pb2.ConnectResponse:
    """Return the message that assigns an attempt's part to one of its nodes."""
    attempt, allocation = live.attempt, live.allocation[node_rank]
    by_rank = sorted((task.rank, task.role, part.node_id) for part in live.allocation for task in part.tasks)
    message = agent_pb2.ConnectResponse()
    order = message.assignments.add(
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
        order.replica_roles.extend(role for _, role, _ in by_rank)
        order.replica_addresses.extend(address_of(node_id) for _, _, node_id in by_rank)
    assert order.allocation.node_id == allocation.node_id
    return message


def resize_order(live: LiveAttempt, node_id: str) -> agent_pb2.ConnectResponse:
    """Return the order to resize an attempt's part on one of its nodes to its target allocation."""
    message = agent_pb2.ConnectResponse()
    message.resizes.add(
        job_id=live.attempt.job_id,
        number=live.attempt.number,
        epoch=live.epoch,
        allocation=live.record.resizing[live.nodes.index(node_id)],
        expected_rate_per_second=expected_rate_per_second(live.record.estimate, live.record.resizing),
    )
    return message


def profile_order(live: LiveAttempt, plan: placement_pb2.ProfilePlan) -> agent_pb2.ConnectResponse:
    """Return the order to measure an attempt at the plan's core counts; without any, a running profile ends."""
    message = agent_pb2.ConnectResponse()
    order = message.profiles.add(
        job_id=live.attempt.job_id,
        number=live.attempt.number,
        epoch=live.epoch,
        cores=plan.cores,
        steps=plan.steps,
    )
    order.budget.CopyFrom(plan.budget)
    return message


def time_limit_order(live: LiveAttempt) -> agent_pb2.ConnectResponse:
    """Return the order to hold an attempt to the time limit in its record."""
    message = agent_pb2.ConnectResponse()
    order = message.time_limits.add(job_id=live.attempt.job_id, number=live.attempt.number, epoch=live.epoch)
    if live.record.spec.HasField("time_limit"):
        order.time_limit.CopyFrom(live.record.spec.time_limit)
    return message


def stop_order(live: LiveAttempt) -> agent_pb2.ConnectResponse:
    """Return the order to stop an attempt, with the reason in its record."""
    message = agent_pb2.ConnectResponse()
    order = message.stops.add(
        job_id=live.attempt.job_id,
        number=live.attempt.number,
        epoch=live.epoch,
        reason=live.attempt.stop_reason,
    )
    order.grace.CopyFrom(live.record.spec.grace)
    return message


def heartbeat_ack(beat: int) -> agent_pb2.ConnectResponse:
    """Return the acknowledgment of an agent's heartbeat."""
    return agent_pb2.ConnectResponse(heard=beat)


def supersede(report: agent_pb2.AttemptReport) -> agent_pb2.ConnectResponse:
    """Return the order to stop a reported attempt that placement does not have."""
    message = agent_pb2.ConnectResponse()
    message.stops.add(
        job_id=report.job_id,
        number=report.number,
        epoch=report.epoch,
        reason=specs.STOP_REASONS.to_wire(StopReason.SUPERSEDED),
    )
    return message


def release(gpu_uuid: str) -> agent_pb2.ConnectResponse:
    """Return the order to clear a GPU's health hold."""
    return agent_pb2.ConnectResponse(released_gpus=[gpu_uuid])


def ack(job_id: str, number: int) -> agent_pb2.ConnectResponse:
    """Return the acknowledgment of an attempt's end: it is committed, or the attempt is unknown."""
    message = agent_pb2.ConnectResponse()
    message.acks.add(job_id=job_id, number=number)
    return message
