"""The agent's stream to contention: samples go up, directives come down; callbacks produce and apply them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any, NamedTuple

import grpc
import grpc.aio
import structlog

from cotenant.agent.v1 import sample_service_pb2, sample_service_pb2_grpc
from cotenant.node_agent.backoff import Backoff
from cotenant.rpc import channel
from cotenant.rpc.rendezvous_hash import ranked
from cotenant.rpc.task_cancellation import cancel_and_wait
from cotenant.v1 import contention_service_pb2

log = structlog.get_logger()


STABLE_SECONDS = 30.0  # a replica whose stream lasted this long is tried first again
PREFERRED_CHECK_SECONDS = 60.0  # between checks for a preferred replica while another one has the stream
REACHED_SECONDS_MAX = 3.0
REFUSED_SECONDS_MAX = 60.0  # between tries while another agent uses the node's id


class Replica(NamedTuple):
    """The address of a replica, and the host name in its certificate if that differs."""

    address: str
    called: str = ""


class ContentionLink:
    """One stream at a time. A sample that cannot be sent is dropped: samples age quickly.

    Each node prefers the replicas (`a:1|b:1`, or a name with several addresses) in an order of its own, by rendezvous
    hashing, and connects to the first that is reachable. Names are resolved again before each stream. While a less
    preferred replica has the stream, the node switches as soon as a preferred one is reachable, unless an attempt is
    throttled at the time: a replica that is new to a node has no baselines for it.
    """

    def __init__(
        self,
        endpoint: str,
        token: str,
        node_id: str,
        *,
        sample: Callable[[], Awaitable[contention_service_pb2.NodeSample]],
        apply_directive: Callable[[sample_service_pb2.Directive], None],
        disconnected: Callable[[], None],
        any_throttled: Callable[[], bool],
        interval_seconds: float,
        rng: Random,
        incarnation: str = "",
    ) -> None:
        self._endpoint, self._token, self._node_id, self._incarnation = endpoint, token, node_id, incarnation
        self._replicas: list[Replica] = []
        self._position = 0  # of the replica to try next
        self._sample, self._apply_directive, self._disconnected, self._any_throttled = (
            sample,
            apply_directive,
            disconnected,
            any_throttled,
        )
        self._interval_seconds, self._rng = interval_seconds, rng
        self._backoff = Backoff(first_seconds=0.5, longest_seconds=10.0, rng=rng)
        self._refused_backoff = Backoff(first_seconds=1.0, longest_seconds=REFUSED_SECONDS_MAX, rng=rng)

    async def run(self) -> None:
        """Keep a stream open until cancelled."""
        while True:
            if (replicas := await self._in_order()) != self._replicas:
                self._replicas, self._position = replicas, 0
            replica, since, refused = self._replicas[self._position], time.monotonic(), False
            try:
                preferred = await self._stream_until_closer(replica)
                reason = f"{preferred.address} is reachable" if preferred else "contention ended the stream"
            except grpc.aio.AioRpcError as error:
                preferred, reason = None, f"{error.code().name}: {error.details()}"
                refused = error.code() is grpc.StatusCode.ALREADY_EXISTS
            self._disconnected()
            if lasted := time.monotonic() - since >= STABLE_SECONDS:
                self._backoff.reset()
                self._refused_backoff.reset()
            backoff = self._refused_backoff if refused else self._backoff
            wait_seconds = 0.0 if preferred else backoff.next_seconds()
            self._position = 0 if lasted or preferred else (self._position + 1) % len(self._replicas)
            log.info(
                "contention_disconnected", endpoint=replica.address, why=reason, retry_seconds=round(wait_seconds, 2)
            )
            await asyncio.sleep(wait_seconds)

    async def _in_order(self) -> list[Replica]:
        """Return all current replicas, the most preferred first."""
        called = dict(await channel.look_up(self._endpoint))
        return [Replica(address, called[address]) for address in ranked(self._node_id, list(called))]

    async def _stream_until_closer(self, replica: Replica) -> Replica | None:
        """Keep a stream open until it ends (None) or until a preferred replica is reachable; return that one."""
        stream = asyncio.create_task(self._hold_stream(replica))
        preferred = asyncio.create_task(self._wait_for_preferred(replica))
        try:
            await asyncio.wait([stream, preferred], return_when=asyncio.FIRST_COMPLETED)
            if not stream.done():
                return preferred.result()
            await stream
            return None
        finally:
            await cancel_and_wait(stream, preferred)

    async def _wait_for_preferred(self, current: Replica) -> Replica:
        """Wait for a reachable replica that this node prefers to the current one, and return it."""
        while True:
            await asyncio.sleep(PREFERRED_CHECK_SECONDS * self._rng.uniform(0.5, 1.5))
            if self._any_throttled():
                continue
            for replica in await self._in_order():
                if replica == current:
                    break
                if await self._is_reachable(replica):
                    return replica

    async def _is_reachable(self, replica: Replica) -> bool:
        async with channel.connect(replica.address, self._token, called=replica.called) as connection:
            try:
                await asyncio.wait_for(connection.channel_ready(), REACHED_SECONDS_MAX)
            except TimeoutError:
                return False
        return True

    async def _hold_stream(self, replica: Replica) -> None:
        async with channel.connect(replica.address, self._token, called=replica.called) as connection:
            stub: Any = sample_service_pb2_grpc.SampleServiceStub(connection)
            call = stub.StreamSamples()
            sender = asyncio.create_task(self._send(call))
            try:
                while (response := await call.read()) is not grpc.aio.EOF:
                    for directive in response.directives:
                        self._apply_directive(directive)
                if (code := await call.code()) is not grpc.StatusCode.OK:
                    nothing = grpc.aio.Metadata()
                    raise grpc.aio.AioRpcError(code, nothing, nothing, await call.details())
            finally:
                await cancel_and_wait(sender)
                call.cancel()

    async def _send(self, call: Any) -> None:
        request = sample_service_pb2.StreamSamplesRequest(node_id=self._node_id, incarnation=self._incarnation)
        try:
            while True:
                await call.write(request)
                await asyncio.sleep(self._interval_seconds)
                request = sample_service_pb2.StreamSamplesRequest(samples=[await self._sample()])
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            log.info("contention_stream_broken", error=type(error).__name__)
            call.cancel()
