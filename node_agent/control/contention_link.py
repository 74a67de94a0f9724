"""The agent's stream to contention: samples go up, directives come down, and others see to both."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any, NamedTuple

import grpc
import grpc.aio
import structlog

from cotenant.node_agent.backoff import Backoff
from cotenant.rpc import channel
from cotenant.rpc.rendezvous_hash import ranked
from cotenant.rpc.task_cancellation import end
from cotenant.v1 import contention_service_pb2, contention_service_pb2_grpc

log = structlog.get_logger()


LASTED_SECONDS = 30.0  # a replica that held a stream so long is asked first again
HOME_SECONDS = 60.0  # between two looks at whether the node's own replica is there, while another one has its stream
REACHED_SECONDS_MAX = 3.0
REFUSED_SECONDS_MAX = 60.0  # between two tries where another agent has the node's id


class Replica(NamedTuple):
    """Where a replica is, and for which name its certificate is where that is another one."""

    address: str
    called: str = ""


class ContentionLink:
    """One stream at a time. A sample that nobody takes is dropped: it would be old news.

    Of several replicas (`a:1|b:1`, or a name with several addresses) each node has its own: the first that is there of
    those that its name prefers. What names stand for is looked up before each stream. While another replica than the
    first has the stream, the node goes to one that it prefers as soon as that can be reached, unless something is held
    back just then: who comes to know of a node begins with no baselines of it.
    """

    def __init__(
        self,
        endpoint: str,
        token: str,
        node_id: str,
        *,
        sample: Callable[[], Awaitable[contention_service_pb2.NodeSample]],
        obey: Callable[[contention_service_pb2.Directive], None],
        away: Callable[[], None],
        holding: Callable[[], bool],
        interval_seconds: float,
        rng: Random,
        incarnation: str = "",
    ) -> None:
        self._endpoint, self._token, self._node_id, self._incarnation = endpoint, token, node_id, incarnation
        self._replicas: list[Replica] = []
        self._place = 0  # of the replica that is asked next
        self._sample, self._obey, self._away, self._holding = sample, obey, away, holding
        self._interval_seconds, self._rng = interval_seconds, rng
        self._backoff = Backoff(first_seconds=0.5, longest_seconds=10.0, rng=rng)
        self._refused_backoff = Backoff(first_seconds=1.0, longest_seconds=REFUSED_SECONDS_MAX, rng=rng)

    async def run(self) -> None:
        """Keep a stream open until cancelled."""
        while True:
            if (replicas := await self._in_order()) != self._replicas:
                self._replicas, self._place = replicas, 0
            replica, since, refused = self._replicas[self._place], time.monotonic(), False
            try:
                nearer = await self._stay(replica)
                reason = f"{nearer.address} is there" if nearer else "contention ended the stream"
            except grpc.aio.AioRpcError as error:
                nearer, reason = None, f"{error.code().name}: {error.details()}"
                refused = error.code() is grpc.StatusCode.ALREADY_EXISTS
            self._away()
            if lasted := time.monotonic() - since >= LASTED_SECONDS:
                self._backoff.reset()
                self._refused_backoff.reset()
            backoff = self._refused_backoff if refused else self._backoff
            wait_seconds = 0.0 if nearer else backoff.next_seconds()
            self._place = 0 if lasted or nearer else (self._place + 1) % len(self._replicas)
            log.info("contention_away", endpoint=replica.address, why=reason, retry_seconds=round(wait_seconds, 2))
            await asyncio.sleep(wait_seconds)

    async def _in_order(self) -> list[Replica]:
        """All replicas that there are now, those that this node prefers first."""
        called = dict(await channel.look_up(self._endpoint))
        return [Replica(address, called[address]) for address in ranked(self._node_id, list(called))]

    async def _stay(self, replica: Replica) -> Replica | None:
        """Hold a stream until it ends (None), or until a replica that the node prefers can be reached: that one."""
        stream = asyncio.create_task(self._hold_stream(replica))
        nearer = asyncio.create_task(self._nearer(replica))
        try:
            await asyncio.wait([stream, nearer], return_when=asyncio.FIRST_COMPLETED)
            if not stream.done():
                return nearer.result()
            await stream
            return None
        finally:
            await end(stream, nearer)

    async def _nearer(self, current: Replica) -> Replica:
        """Return a replica that the node prefers to the current one, once there is one that can be reached."""
        while True:
            await asyncio.sleep(HOME_SECONDS * self._rng.uniform(0.5, 1.5))
            if self._holding():
                continue
            for replica in await self._in_order():
                if replica == current:
                    break
                if await self._reaches(replica):
                    return replica

    async def _reaches(self, replica: Replica) -> bool:
        async with channel.connect(replica.address, self._token, called=replica.called) as connection:
            try:
                await asyncio.wait_for(connection.channel_ready(), REACHED_SECONDS_MAX)
            except TimeoutError:
                return False
        return True

    async def _hold_stream(self, replica: Replica) -> None:
        async with channel.connect(replica.address, self._token, called=replica.called) as connection:
            stub: Any = contention_service_pb2_grpc.ContentionServiceStub(connection)
            call = stub.StreamSamples()
            sender = asyncio.create_task(self._send(call))
            try:
                while (response := await call.read()) is not grpc.aio.EOF:
                    for directive in response.directives:
                        self._obey(directive)
                if (code := await call.code()) is not grpc.StatusCode.OK:
                    nothing = grpc.aio.Metadata()
                    raise grpc.aio.AioRpcError(code, nothing, nothing, await call.details())
            finally:
                await end(sender)
                call.cancel()

    async def _send(self, call: Any) -> None:
        request = contention_service_pb2.StreamSamplesRequest(node_id=self._node_id, incarnation=self._incarnation)
        try:
            while True:
                await call.write(request)
                await asyncio.sleep(self._interval_seconds)
                request = contention_service_pb2.StreamSamplesRequest(samples=[await self._sample()])
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            log.info("contention_stream_broken", error=type(error).__name__)
            call.cancel()
