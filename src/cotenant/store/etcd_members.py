"""The members of an etcd cluster: their connections, member selection, retries, and the meaning of their errors.

Calls go to one member as long as it answers. If it fails, the next connected member takes over: a read is retried
there until its deadline; a transaction is not, because it may have been committed before its answer was lost.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeVar

from aetcd import rpc  # type: ignore[import-untyped]  # ships no types; only its stubs and messages are used

from cotenant.name_resolution import NAMES
from cotenant.security.tls_files import WatchedTlsFiles
from cotenant.store.etcd_connections import CertificateRotation, Member
from cotenant.store.member_status import MemberStatus
from cotenant.store.port import StoreFull, StoreUnavailable, UnknownOutcome

Reply = TypeVar("Reply")

STATUS_SECONDS_MAX = 1.0  # for a member's status; a slower member is of no use
PAUSE_SECONDS_FIRST = 0.02
PAUSE_SECONDS_MAX = 1.0
CONNECTED_SECONDS = 1.0  # between two checks of the connections

NO_SPACE = "NOSPACE"  # the alarm, as a member's status names it
OUT_OF_SPACE = "database space exceeded"  # the error of a write then

REJECTION_CODES = (rpc.StatusCode.NOT_FOUND, rpc.StatusCode.OUT_OF_RANGE, rpc.StatusCode.INVALID_ARGUMENT)


class Refused(ValueError):
    """The cluster is available, and rejects this request."""

    @property
    def is_compacted(self) -> bool:
        """Whether the requested revision has been compacted."""
        return "has been compacted" in str(self)

    @property
    def is_in_future(self) -> bool:
        """Whether the requested revision is in the future, as in a store that has regressed."""
        return "future revision" in str(self)

    @property
    def is_lease_unknown(self) -> bool:
        """Whether the lease in the request is gone."""
        return "lease not found" in str(self)

    @property
    def is_message_too_large(self) -> bool:
        """Whether gRPC refused a message of this size. Broken frames are reported in similar words."""
        return "message larger than max" in str(self)


class EtcdMembers:
    """All members, the one in use first. `closing` ends every wait."""

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        timeout_seconds: float,
        silence_seconds_max: float,
        tls: WatchedTlsFiles | None = None,
        on_moved: Callable[[str], None] = lambda endpoint: None,
    ) -> None:
        """`on_moved` is called with an endpoint whose connection was replaced because the files of `tls` changed."""
        if not endpoints:
            raise ValueError("etcd needs at least one endpoint, as host:port")
        self.endpoints = ", ".join(endpoints)
        self.closing = asyncio.Event()
        NAMES.watch(self, (endpoint.rpartition(":")[0].strip("[]") for endpoint in endpoints))
        self.raft_term = 0  # the last known; 0: none yet
        self._timeout_seconds = timeout_seconds
        material = tls.material if tls else None
        self._members = deque(Member(endpoint, silence_seconds_max, material) for endpoint in endpoints)
        self._renewal = CertificateRotation(tls, tuple(self._members), self.closing, on_moved) if tls else None

    def __iter__(self) -> Iterator[Member]:
        """Iterate over all members, the current one first."""
        return iter(self._members)

    async def ready(self, timeout_seconds: float) -> Member:
        """Return a connected member; wait for one if necessary."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_seconds
        while True:
            self._require_open()
            for member in self._members:
                if member.is_ready:
                    return self._use(member)
            if (left_seconds := deadline - loop.time()) <= 0:
                raise StoreUnavailable(f"no etcd member answers at {self.endpoints} within {timeout_seconds:.1f} s")
            await self._connected(min(left_seconds, CONNECTED_SECONDS))

    async def _connected(self, seconds: float) -> None:
        """Wait until a member may be connected, or the store is closed."""
        connecting = (member.link.channel.channel_ready() for member in self._members)
        waiting: list[asyncio.Task[Any]] = [asyncio.create_task(one) for one in (self.closing.wait(), *connecting)]
        try:
            await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()

    def _require_open(self) -> None:
        if self.closing.is_set():
            raise StoreUnavailable("the store is closed")

    def _use(self, member: Member) -> Member:
        self._members.rotate(-self._members.index(member))
        return member

    def leave(self, member: Member) -> None:
        """Prefer another member for the next call, if there is one."""
        if self._members[0] is member:
            self._members.rotate(-1)

    async def call(self, ask: Callable[[Member, float], Awaitable[Reply]], *, repeat: bool) -> Reply:
        """Call a member, within the deadline. With `repeat`, other members are tried until then if one fails."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_seconds
        share = 0.5 if repeat and len(self._members) > 1 else 1.0  # leave time for another member
        pause_seconds = PAUSE_SECONDS_FIRST
        while True:
            member = await self.ready(max(0.0, deadline - loop.time()))
            try:
                with member.called():
                    reply = await ask(member, share * max(0.001, deadline - loop.time()))
                if reply is not None:
                    return reply
                failure: Exception = StoreUnavailable(f"etcd at {member.endpoint}: cannot decode its response")
                lost = True
            except rpc.AioRpcError as error:
                failure = store_error(error, member.endpoint)
                if isinstance(failure, Refused):
                    raise failure from error
                lost = error.code() is rpc.StatusCode.UNAVAILABLE
            except asyncio.CancelledError:
                self.raise_if_cut_off()
                raise
            self.leave(member)
            if not repeat and lost and self._members[0].is_ready:
                raise UnknownOutcome(str(failure))
            if not repeat or loop.time() + pause_seconds >= deadline:
                raise failure
            await self.pause(pause_seconds)
            pause_seconds = min(2 * pause_seconds, PAUSE_SECONDS_MAX)

    async def each_loose(self, is_loose: Callable[[int, int], bool]) -> list[Member]:
        """Return the members whose files are mostly unused; none if a member does not answer or is unhealthy.

        `is_loose` receives a file's size and the size in use. A member answers nothing while it defragments, so all
        others must be available.
        """
        loose = []
        for member in list(self._members):
            try:
                status = await member.maintenance.Status(rpc.StatusRequest(), timeout=self._timeout_seconds)
            except rpc.AioRpcError:
                return []
            if status.errors or not status.leader:
                return []
            if is_loose(status.dbSize, status.dbSizeInUse):
                loose.append(member)
        return loose

    async def statuses(self) -> dict[Member, Any]:
        """Return the status of each member that answers.

        Raises:
            StoreUnavailable: no member answers.
        """
        members = list(self._members)
        answers = await asyncio.gather(*map(_status, members))
        told = {member: answer for member, answer in zip(members, answers, strict=True) if answer is not None}
        if not told:
            raise StoreUnavailable(f"no etcd member answers at {self.endpoints}")
        return told

    async def member_statuses(self) -> list[MemberStatus]:
        """Return the status of each member, by endpoint."""
        found = await asyncio.gather(*(_member_status(member) for member in list(self._members)))
        return sorted(found, key=lambda one: one.endpoint)

    def raise_if_cut_off(self) -> None:
        """Raise if a call's connection was closed; do nothing if the task itself was cancelled."""
        task = asyncio.current_task()
        if not (task and task.cancelling()):
            what = "store" if self.closing.is_set() else "connection"
            raise StoreUnavailable(f"the {what} was closed before etcd answered")

    async def pause(self, seconds: float) -> None:
        """Wait for a while, or until the store is closed."""
        closing = asyncio.create_task(self.closing.wait())
        await asyncio.wait([closing], timeout=seconds)
        closing.cancel()

    async def close(self) -> None:
        """End every wait and every call."""
        NAMES.drop(self)
        self.closing.set()
        if self._renewal:
            await self._renewal.close()
        for member in self._members:
            await member.close()


async def _status(member: Member) -> Any:
    try:
        return await member.maintenance.Status(rpc.StatusRequest(), timeout=STATUS_SECONDS_MAX)
    except rpc.AioRpcError:
        return None


async def _member_status(member: Member) -> MemberStatus:
    try:
        status = await member.maintenance.Status(rpc.StatusRequest(), timeout=STATUS_SECONDS_MAX)
    except rpc.AioRpcError as error:
        away = error.code() is rpc.StatusCode.DEADLINE_EXCEEDED
        told = (error.details() or error.code().name).rpartition(": ")[2]  # the rest is the peer's address
        return MemberStatus(member.endpoint, problem=f"no answer within {STATUS_SECONDS_MAX:.0f} s" if away else told)
    leads = status.header.member_id == status.leader
    problem = "; ".join(status.errors) if status.leader else "no leader: most members are unavailable"
    return MemberStatus(member.endpoint, leads, problem, status.version, status.dbSize)


def store_error(error: Any, endpoint: str) -> Refused | StoreUnavailable:
    """Return `Refused` for a request that etcd rejects, else `StoreUnavailable` for a member that cannot serve it."""
    details = error.details() or error.code().name
    refusal = Refused(details)
    if error.code() in REJECTION_CODES or refusal.is_message_too_large:
        return refusal
    kind = StoreFull if OUT_OF_SPACE in details else StoreUnavailable
    return kind(f"etcd at {endpoint}: {details}")
