"""The agent's stream to contention: samples go up, directives come down, and others see to both."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import grpc
import grpc.aio
import structlog

from cotenant.node_agent.backoff import Backoff
from cotenant.rpc import channel
from cotenant.rpc.ending import end
from cotenant.rpc.endpoints import addresses_of
from cotenant.rpc.shards import ranked
from cotenant.v1 import contention_service_pb2, contention_service_pb2_grpc

log = structlog.get_logger()


LASTED_SECONDS = 30.0  # a replica that held a stream so long is asked first again


class ContentionLink:
    """One stream at a time. A sample that nobody takes is dropped: it would be old news.

    Of several replicas (`a:1|b:1`) each node has its own: the first that is there of those that its name prefers.
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
        interval_seconds: float,
        rng: Random,
    ) -> None:
        self._addresses = ranked(node_id, addresses_of(endpoint))
        self._place = 0  # of the address that is asked next
        self._token, self._node_id = token, node_id
        self._sample, self._obey, self._away = sample, obey, away
        self._interval_seconds = interval_seconds
        self._backoff = Backoff(first_seconds=0.5, longest_seconds=10.0, rng=rng)

    async def run(self) -> None:
        """Keep a stream open until cancelled."""
        while True:
            address, since = self._addresses[self._place], time.monotonic()
            try:
                await self._hold_stream(address)
                reason = "contention ended the stream"
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name}: {error.details()}"
            self._away()
            wait_seconds = self._backoff.next_seconds()
            lasted = time.monotonic() - since >= LASTED_SECONDS
            self._place = 0 if lasted else (self._place + 1) % len(self._addresses)
            log.info("contention_away", endpoint=address, why=reason, retry_seconds=round(wait_seconds, 2))
            await asyncio.sleep(wait_seconds)

    async def _hold_stream(self, address: str) -> None:
        async with channel.connect(address, self._token) as connection:
            stub: Any = contention_service_pb2_grpc.ContentionServiceStub(connection)
            call = stub.StreamSamples()
            sender = asyncio.create_task(self._send(call))
            try:
                while (response := await call.read()) is not grpc.aio.EOF:
                    for directive in response.directives:
                        self._obey(directive)
                if await call.code() is not grpc.StatusCode.OK:
                    log.info("contention_refuses", code=(await call.code()).name, details=await call.details())
            finally:
                await end(sender)
                call.cancel()

    async def _send(self, call: Any) -> None:
        request = contention_service_pb2.StreamSamplesRequest(node_id=self._node_id)
        try:
            while True:
                await call.write(request)
                self._backoff.reset()
                await asyncio.sleep(self._interval_seconds)
                request = contention_service_pb2.StreamSamplesRequest(samples=[await self._sample()])
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            log.info("contention_stream_broken", error=type(error).__name__)
            call.cancel()
