"""Connections to etcd members, which are replaced when certificates change.

Theory of operation. A gRPC channel always uses the certificate that it was created with. So when the files change, each
member gets a second connection, and work continues over the first one until the member has answered over the second. If
etcd does not accept a certificate, because its own files are to change later, nobody loses the working connection. Once
the member has answered, new calls use the new connection, watches resume there from their positions, calls in progress
finish over the old connection, and then it is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc.aio
from aetcd import rpc  # type: ignore[import-untyped]  # ships no types; only its stubs and messages are used
from grpc import ChannelConnectivity

from cotenant.security.tls_files import Material, WatchedTlsFiles
from cotenant.telemetry.plain_structlog import structlog

log = structlog.get_logger()

RECEIVED_BYTES_MAX = 64 * 1024 * 1024
LOOK_SECONDS = 1.0  # between two checks of the files and of new connections
ANSWER_SECONDS = 1.5  # for a member's answer over a new connection
TRIES = 2  # before a broken connection is replaced by one that is not ready either
DRAIN_SECONDS_MAX = 60.0  # no call takes longer


def channel_options(silence_seconds_max: float) -> list[tuple[str, int]]:
    """Return how a channel reconnects, and after how long without an answer to a ping it counts as dead."""
    answer_ms = round(silence_seconds_max * 1_000 / 3)
    return [
        ("grpc.initial_reconnect_backoff_ms", 50),
        ("grpc.min_reconnect_backoff_ms", 2_000),  # the time-out of one connection attempt
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.keepalive_time_ms", 2 * answer_ms),
        ("grpc.keepalive_timeout_ms", answer_ms),
        ("grpc.http2.ping_timeout_ms", answer_ms),  # current gRPC uses this one; default 1 min
        ("grpc.http2.max_pings_without_data", 0),  # an idle watch keeps pinging
        ("grpc.max_receive_message_length", RECEIVED_BYTES_MAX),
        ("grpc.use_local_subchannel_pool", 1),  # two stores do not share their reconnect backoff
    ]


def credentials_of(material: Material) -> grpc.ChannelCredentials:
    """Return a channel's credentials."""
    return grpc.ssl_channel_credentials(material.ca, material.key, material.cert)


class MemberConnection:
    """One connection to a member, with its stubs; without `material` it has no TLS."""

    def __init__(self, endpoint: str, options: Sequence[tuple[str, int]], material: Material | None) -> None:
        if material is None:
            self.channel: Any = grpc.aio.insecure_channel(endpoint, options=options)
        else:
            self.channel = grpc.aio.secure_channel(endpoint, credentials_of(material), options=options)
        self.kv = rpc.KVStub(self.channel)
        self.lease = rpc.LeaseStub(self.channel)
        self.watch = rpc.WatchStub(self.channel)
        self.maintenance = rpc.MaintenanceStub(self.channel)
        self.left = False  # it was replaced
        self.watches: set[Any] = set()  # calls
        self.busy = 0  # number of other calls

    def leave(self) -> None:
        """Make watches resume elsewhere; other calls finish."""
        self.left = True
        for call in list(self.watches):
            call.cancel()


class Member:
    """One member, called over the newest connection that it has answered over."""

    def __init__(self, endpoint: str, silence_seconds_max: float, material: Material | None) -> None:
        self.endpoint = endpoint
        self._options = channel_options(silence_seconds_max)
        self.link = MemberConnection(endpoint, self._options, material)
        self.following: MemberConnection | None = None  # the next one, not answered yet
        self._tries, self._told = 0, False  # failed attempts, and whether they were logged

    @property
    def kv(self) -> Any:
        """The stub for keys and transactions."""
        return self.link.kv

    @property
    def lease(self) -> Any:
        """The stub for leases."""
        return self.link.lease

    @property
    def maintenance(self) -> Any:
        """The stub for status and maintenance."""
        return self.link.maintenance

    @contextmanager
    def called(self) -> Iterator[None]:
        """Keep the current connection open for the duration of a call."""
        link = self.link
        link.busy += 1
        try:
            yield
        finally:
            link.busy -= 1

    @property
    def is_ready(self) -> bool:
        """Whether the connection is ready; if not, it starts to connect."""
        return bool(self.link.channel.get_state(try_to_connect=True) == ChannelConnectivity.READY)

    async def renew(self, material: Material) -> None:
        """Open another connection."""
        before, self.following = self.following, MemberConnection(self.endpoint, self._options, material)
        self._tries, self._told = 0, False
        if before:
            await before.channel.close()

    async def move(self) -> MemberConnection | None:
        """Switch to the next connection if it is better than the current one; return the replaced connection."""
        if not (following := self.following):
            return None
        try:
            await following.maintenance.Status(rpc.StatusRequest(), timeout=ANSWER_SECONDS)
        except rpc.AioRpcError as error:
            self._tries += 1
            stands = self.is_ready  # an idle connection connects meanwhile
            if stands and not self._told:
                log.warning("store_tls_files_rejected", endpoint=self.endpoint, error=error.details())
                self._told = True
            if stands or self._tries < TRIES:
                return None
        if self.following is not following:
            return None
        before, self.link, self.following = self.link, following, None
        before.leave()
        log.info("store_connection_replaced", endpoint=self.endpoint)
        return before

    async def close(self) -> None:
        """Close the connections."""
        for link in (self.link, self.following):
            if link:
                await link.channel.close()


class CertificateRotation:
    """Moves all members to new connections when the files change, until `closing`."""

    def __init__(
        self, tls: WatchedTlsFiles, members: Sequence[Member], closing: asyncio.Event, on_moved: Callable[[str], None]
    ) -> None:
        """`on_moved` is called with the endpoint of each member that was moved."""
        self._tls, self._members, self._closing, self._on_moved = tls, members, closing, on_moved
        self._generation = tls.generation
        self._tasks = {asyncio.create_task(self._run(), name="etcd-renewal")}

    async def _run(self) -> None:
        while await self._pause():
            if (generation := self._tls.look()) != self._generation:
                self._generation = generation
                for member in self._members:
                    await member.renew(self._tls.material)
            moved = await asyncio.gather(*(member.move() for member in self._members))
            for member, link in zip(self._members, moved, strict=True):
                if link:
                    self._on_moved(member.endpoint)
                    self._tasks.add(task := asyncio.create_task(self._drain(link)))
                    task.add_done_callback(self._tasks.discard)

    async def _drain(self, link: MemberConnection) -> None:
        """Close a connection once its calls are finished."""
        loop = asyncio.get_running_loop()
        until = loop.time() + DRAIN_SECONDS_MAX
        while link.busy and loop.time() < until and await self._pause():
            pass
        await link.channel.close()

    async def _pause(self) -> bool:
        """Wait a moment; return False if the store was closed."""
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                await self._closing.wait()
        except TimeoutError:
            return True
        return False

    async def close(self) -> None:
        """Close the old connections, once `closing` is set."""
        await asyncio.gather(*self._tasks)
