"""A member of etcd and the connection to it, which gives way to another one where certificates have changed.

Theory of operation. A channel of gRPC's shows for ever the certificate that it was made with. So where the files have
changed, each member gets a second connection, and what goes on over the first one does so until the member has answered
over the second. A certificate that etcd does not take, because its own files are to change later, therefore costs
nobody the connection that stands. Once it has answered, new calls go over the new connection, watches are begun there
from where they stand, calls under way come to their end over the old one, and then it is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc.aio
import structlog
from aetcd import rpc  # type: ignore[import-untyped]  # ships no types; only its stubs and messages are used
from grpc import ChannelConnectivity

from cotenant.security.tls_files import Material, Watched

log = structlog.get_logger()

RECEIVED_BYTES_MAX = 64 * 1024 * 1024
LOOK_SECONDS = 1.0  # between two looks at the files, and at what has become of new connections
ANSWER_SECONDS = 1.5  # in which a member answers over a new connection
TRIES = 2  # before a connection that does not stand is given up for one that does not either
DRAIN_SECONDS_MAX = 60.0  # no call takes longer


def channel_options(silence_seconds_max: float) -> list[tuple[str, int]]:
    """Say how a channel reconnects, and after how long without an answer to a ping it counts as dead."""
    answer_ms = round(silence_seconds_max * 1_000 / 3)
    return [
        ("grpc.initial_reconnect_backoff_ms", 50),
        ("grpc.min_reconnect_backoff_ms", 2_000),  # how long one attempt to connect may take
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.keepalive_time_ms", 2 * answer_ms),
        ("grpc.keepalive_timeout_ms", answer_ms),
        ("grpc.http2.ping_timeout_ms", answer_ms),  # the same once more, for else it is a minute
        ("grpc.http2.max_pings_without_data", 0),  # an idle watch goes on asking whether the other side still lives
        ("grpc.max_receive_message_length", RECEIVED_BYTES_MAX),
        ("grpc.use_local_subchannel_pool", 1),  # two stores do not share one's wait to reconnect
    ]


def credentials_of(material: Material) -> grpc.ChannelCredentials:
    """Make what a channel shows, and believes."""
    return grpc.ssl_channel_credentials(material.ca, material.key, material.cert)


class Link:
    """One connection to a member, and the stubs to call it by; without `material` it is not by TLS."""

    def __init__(self, endpoint: str, options: Sequence[tuple[str, int]], material: Material | None) -> None:
        if material is None:
            self.channel: Any = grpc.aio.insecure_channel(endpoint, options=options)
        else:
            self.channel = grpc.aio.secure_channel(endpoint, credentials_of(material), options=options)
        self.kv = rpc.KVStub(self.channel)
        self.lease = rpc.LeaseStub(self.channel)
        self.watch = rpc.WatchStub(self.channel)
        self.maintenance = rpc.MaintenanceStub(self.channel)
        self.left = False  # another one has taken its place
        self.watches: set[Any] = set()  # calls
        self.busy = 0  # with so many other calls

    def leave(self) -> None:
        """Have watches begun anew elsewhere; other calls go on to their end."""
        self.left = True
        for call in list(self.watches):
            call.cancel()


class Member:
    """One member, called over the newest connection that it has answered over."""

    def __init__(self, endpoint: str, silence_seconds_max: float, material: Material | None) -> None:
        self.endpoint = endpoint
        self._options = channel_options(silence_seconds_max)
        self.link = Link(endpoint, self._options, material)
        self.following: Link | None = None  # over which it has not answered yet
        self._tries, self._told = 0, False  # how often it did not, and whether that was told

    @property
    def kv(self) -> Any:
        """Keys and transactions."""
        return self.link.kv

    @property
    def lease(self) -> Any:
        """Leases."""
        return self.link.lease

    @property
    def maintenance(self) -> Any:
        """How it stands."""
        return self.link.maintenance

    @contextmanager
    def called(self) -> Iterator[None]:
        """Keep the connection there is for the length of a call."""
        link = self.link
        link.busy += 1
        try:
            yield
        finally:
            link.busy -= 1

    @property
    def is_ready(self) -> bool:
        """Tell whether the connection stands, and have it made if not."""
        return bool(self.link.channel.get_state(try_to_connect=True) == ChannelConnectivity.READY)

    async def renew(self, material: Material) -> None:
        """Begin another connection."""
        before, self.following = self.following, Link(self.endpoint, self._options, material)
        self._tries, self._told = 0, False
        if before:
            await before.channel.close()

    async def move(self) -> Link | None:
        """Go over to the connection that was begun, if it is of more use than the one there is; returns the latter."""
        if not (following := self.following):
            return None
        try:
            await following.maintenance.Status(rpc.StatusRequest(), timeout=ANSWER_SECONDS)
        except rpc.AioRpcError as error:
            self._tries += 1
            stands = self.is_ready  # one that was idle is made meanwhile
            if stands and not self._told:
                log.warning("store_renewed_files_refused", endpoint=self.endpoint, error=error.details())
                self._told = True
            if stands or self._tries < TRIES:
                return None
        if self.following is not following:
            return None
        before, self.link, self.following = self.link, following, None
        before.leave()
        log.info("store_connection_renewed", endpoint=self.endpoint)
        return before

    async def close(self) -> None:
        """Let go of the connections."""
        for link in (self.link, self.following):
            if link:
                await link.channel.close()


class Renewal:
    """Moves all members to new connections where files have changed, until `closing`."""

    def __init__(
        self, tls: Watched, members: Sequence[Member], closing: asyncio.Event, on_moved: Callable[[str], None]
    ) -> None:
        """`on_moved` is told of each member, by its endpoint, that was moved."""
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

    async def _drain(self, link: Link) -> None:
        """Close a connection once the calls under way on it are over."""
        loop = asyncio.get_running_loop()
        until = loop.time() + DRAIN_SECONDS_MAX
        while link.busy and loop.time() < until and await self._pause():
            pass
        await link.channel.close()

    async def _pause(self) -> bool:
        """Let some time pass; False where the store is closed meanwhile."""
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                await self._closing.wait()
        except TimeoutError:
            return True
        return False

    async def close(self) -> None:
        """Let go of old connections, once `closing` is set."""
        await asyncio.gather(*self._tasks)
