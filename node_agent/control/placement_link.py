"""The agent's stream to placement: hello, heartbeats and reports go up, orders come down. Reconnects after a loss."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from random import Random
from typing import TYPE_CHECKING, Any, cast

import grpc
import grpc.aio
import structlog

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.agent.v1 import agent_service_pb2_grpc
from cotenant.node_agent.backoff import Backoff
from cotenant.node_agent.control.leader_check import LeaderCheck
from cotenant.node_agent.control.node_description import NodeDescription
from cotenant.node_agent.control.output_upload import NotConnected
from cotenant.node_agent.control.placement_orders import PlacementOrders
from cotenant.node_agent.control.placement_outbox import PlacementOutbox
from cotenant.node_agent.supervisor.lease import boot_seconds
from cotenant.rpc import channel
from cotenant.rpc.task_cancellation import cancel_and_wait
from cotenant.security.validity import Validity
from cotenant.v1 import folder_service_pb2_grpc, secret_service_pb2_grpc

if TYPE_CHECKING:
    from cotenant.v1.folder_service_pb2_grpc import FolderServiceAsyncStub
    from cotenant.v1.secret_service_pb2_grpc import SecretServiceAsyncStub

log = structlog.get_logger()

WELCOME_SECONDS_MAX = 15.0
HEARTBEAT_SECONDS_DEFAULT = 5.0
HEARTBEAT_SECONDS_MIN = 0.05
HEARTBEATS_PER_DISCONNECT = 4
FLUSH_SECONDS_MAX = 1.0


class NotWelcomed(Exception):
    """Placement did not accept this agent, or must not be obeyed."""


class PlacementLink:
    """One stream at a time. What waits while there is none is dropped but for answers: the next hello reports the rest.

    A heartbeat is sent at least as often as placement wants, and several times within the shortest time that a job may
    run without the control plane.
    """

    def __init__(
        self,
        endpoint: str,
        token: str,
        outbox: PlacementOutbox,
        node: NodeDescription,
        leader: LeaderCheck,
        orders: PlacementOrders,
        rng: Random,
    ) -> None:
        self._endpoint, self._token, self._outbox = endpoint, token, outbox
        self._node, self._leader, self._orders = node, leader, orders
        self._heartbeat_sent_seconds = 0.0
        self._backoff = Backoff(first_seconds=0.2, longest_seconds=5.0, rng=rng)
        self._writing = False
        self._sent = asyncio.Event()  # set after each message
        self._target = ""  # of the last connection: names that cannot be resolved now had these addresses
        self._reported_certificate: Validity | None = None  # last reported to placement
        self._stub: agent_service_pb2_grpc.AgentServiceAsyncStub | None = None
        self._folders: FolderServiceAsyncStub | None = None
        self._secrets: SecretServiceAsyncStub | None = None

    async def upload(self, pieces: AsyncIterator[agent_pb2.UploadOutputRequest]) -> None:
        """Send output over the current connection. Raises `NotConnected` without a connection, or a gRPC error."""
        if self._stub is None:
            raise NotConnected("not connected to placement")
        await self._stub.UploadOutput(pieces)

    def folders(self) -> FolderServiceAsyncStub:
        """Return a stub of the queue's folders over the current connection. Raises `NotConnected` without one."""
        if self._folders is None:
            raise NotConnected("not connected to placement")
        return self._folders

    def secrets(self) -> SecretServiceAsyncStub:
        """Return a stub of the queue's secrets over the current connection. Raises `NotConnected` without one."""
        if self._secrets is None:
            raise NotConnected("not connected to placement")
        return self._secrets

    async def serve_session(
        self, requests: AsyncIterator[agent_pb2.ServeSessionRequest]
    ) -> AsyncGenerator[agent_pb2.ServeSessionResponse, None]:
        """Carry a session over the current connection; yield what its caller sends.

        Raises `NotConnected` without a connection, or a gRPC error.
        """
        if self._stub is None:
            raise NotConnected("not connected to placement")
        call = self._stub.ServeSession(requests)
        try:
            async for response in call:
                yield response
        finally:
            call.cancel()

    async def flush_outbox(self) -> None:
        """Wait until queued reports are sent, for `FLUSH_SECONDS_MAX` at most; a goodbye ends the stream."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_SECONDS_MAX):
                while self._stub is not None and (self._writing or self._outbox or self._outbox.said_goodbye):
                    self._sent.clear()
                    await self._sent.wait()

    async def run(self) -> None:
        """Keep a stream open until cancelled, or until a goodbye was said."""
        while True:
            try:
                await self._hold_stream()
                reason = "placement ended the stream"
            except (NotWelcomed, channel.UnresolvedNames) as error:
                reason = str(error)
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name}: {error.details()}"
            if self._outbox.said_goodbye:
                await asyncio.Event().wait()  # until cancelled: another hello would bring the node back
            wait_seconds = self._backoff.next_seconds()
            log.warning(
                "placement_disconnected", endpoint=self._endpoint, why=reason, retry_seconds=round(wait_seconds, 2)
            )
            await asyncio.sleep(wait_seconds)

    async def _hold_stream(self) -> None:
        resolved = await channel.resolve(self._endpoint, self._target)
        self._target = resolved.target
        async with channel.connect(self._endpoint, self._token, resolved=resolved) as connection:
            stub: Any = agent_service_pb2_grpc.AgentServiceStub(connection)
            call = stub.Connect()
            try:
                heartbeat_seconds = await self._handshake(call)
                self._stub = stub
                self._folders, self._secrets = _folder_stub(connection), _secret_stub(connection)
                sender = asyncio.create_task(self._send(call, heartbeat_seconds))
                try:
                    await self._receive(call)
                finally:
                    await cancel_and_wait(sender)
            finally:
                self._stub = self._folders = self._secrets = None
                self._sent.set()
                call.cancel()

    async def _handshake(self, call: Any) -> float:
        """Send a hello and wait for the welcome; return the heartbeat interval in seconds."""
        self._outbox.keep_answers()
        try:
            async with asyncio.timeout(WELCOME_SECONDS_MAX):
                sent = self._heartbeat()
                first = agent_pb2.ConnectRequest(hello=self._node.hello(), beat=sent, condition=self._node.condition())
                self._reported_certificate = None
                self._add_certificate(first)
                await call.write(first)
                response = await call.read()
        except TimeoutError:
            raise NotWelcomed(f"no welcome within {WELCOME_SECONDS_MAX:.0f} s") from None
        if response is grpc.aio.EOF:
            raise NotWelcomed(await call.details() or "placement ended the stream at once")
        if not response.HasField("welcome"):
            raise NotWelcomed("placement's first message is not a welcome")
        if not self._leader.accepts(response.welcome):
            raise NotWelcomed(f"its term {response.welcome.term} or its store is older than one already seen")
        self._backoff.reset()
        self._leader.acknowledged(sent / 1000)
        log.info("placement_connected", endpoint=self._endpoint, term=response.welcome.term)
        self._apply(response)
        interval = response.welcome.heartbeat_interval.ToMicroseconds() / 1e6
        return max(HEARTBEAT_SECONDS_MIN, interval) if interval > 0 else HEARTBEAT_SECONDS_DEFAULT

    async def _receive(self, call: Any) -> None:
        while (response := await call.read()) is not grpc.aio.EOF:
            if response.HasField("welcome") and not self._leader.accepts(response.welcome):
                raise NotWelcomed(f"its term {response.welcome.term} or its store is older than one already seen")
            if response.heard:
                self._leader.acknowledged(response.heard / 1000)
            self._apply(response)
        if await call.code() is not grpc.StatusCode.OK:
            raise NotWelcomed(f"{(await call.code()).name}: {await call.details()}")

    async def _send(self, call: Any, heartbeat_seconds: float) -> None:
        """Send everything queued in one message; after a quiet interval, a heartbeat alone."""
        try:
            while True:
                within_disconnect = self._node.min_disconnect_seconds() / HEARTBEATS_PER_DISCONNECT
                beat_seconds = max(HEARTBEAT_SECONDS_MIN, min(heartbeat_seconds, within_disconnect))
                try:
                    async with asyncio.timeout(beat_seconds):
                        await self._outbox.filled.wait()
                except TimeoutError:
                    pass  # nothing queued: send a heartbeat
                self._outbox.filled.clear()
                self._writing = True
                await call.write(self._take_outbox(beat_seconds))
                self._writing = False
                self._sent.set()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            log.info("placement_stream_broken", error=type(error).__name__)
            call.cancel()

    def _apply(self, response: agent_pb2.ConnectResponse) -> None:
        self._leader.note(response)
        self._orders.apply(response, self.upload, self.serve_session)

    def _heartbeat(self) -> int:
        """Return the timestamp that placement is to acknowledge: when it was sent, in milliseconds since boot."""
        self._heartbeat_sent_seconds = boot_seconds()
        return int(self._heartbeat_sent_seconds * 1000)

    def _add_certificate(self, message: agent_pb2.ConnectRequest) -> None:
        """Add the validity of the certificate in use to a message unless placement knows it."""
        watched = channel.shown()
        shown = watched.material.validity if watched else None
        if shown and shown != self._reported_certificate:
            message.certificate.CopyFrom(shown.to_wire())
        self._reported_certificate = shown

    def _take_outbox(self, beat_seconds: float) -> agent_pb2.ConnectRequest:
        message = self._outbox.take()
        self._add_certificate(message)
        if boot_seconds() - self._heartbeat_sent_seconds >= beat_seconds / 2 or not message.ByteSize():
            message.beat = self._heartbeat()
            message.condition.CopyFrom(self._node.condition())
        return message


def _secret_stub(connection: Any) -> SecretServiceAsyncStub:
    return cast("SecretServiceAsyncStub", secret_service_pb2_grpc.SecretServiceStub(connection))


def _folder_stub(connection: Any) -> FolderServiceAsyncStub:
    return cast("FolderServiceAsyncStub", folder_service_pb2_grpc.FolderServiceStub(connection))
