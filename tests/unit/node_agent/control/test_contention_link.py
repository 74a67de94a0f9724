"""A node streams samples to its preferred contention replica, and to the next one while that is unreachable."""

from __future__ import annotations

import asyncio
import socket
from random import Random
from typing import Any

import grpc
import grpc.aio
import pytest

from cotenant.node_agent.control import contention_link
from cotenant.node_agent.control.contention_link import STABLE_SECONDS, ContentionLink, Replica
from cotenant.rpc.rendezvous_hash import ranked

ADDRESSES = [f"127.0.0.1:{port}" for port in (1, 2, 3)]


class Link(ContentionLink):
    """Connects to addresses, each for as long as the test says, on a clock of the test's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lasted: list[float]) -> None:
        super().__init__(
            "|".join(ADDRESSES),
            "",
            "n1",
            sample=lambda: None,  # type: ignore[arg-type, return-value]  # none is taken
            apply_directive=lambda directive: None,
            disconnected=lambda: None,
            any_throttled=lambda: False,
            interval_seconds=1.0,
            rng=Random(1),
        )
        self.tried: list[str] = []
        self._lasted, self._now = lasted, 0.0
        monkeypatch.setattr("cotenant.node_agent.control.contention_link.time.monotonic", lambda: self._now)
        self._backoff.next_seconds = lambda: 0.0  # type: ignore[method-assign]  # no time passes

    async def _hold_stream(self, replica: Replica) -> None:
        self.tried.append(replica.address)
        if not self._lasted:
            await asyncio.Event().wait()
        self._now += self._lasted.pop(0)


async def tried(monkeypatch: pytest.MonkeyPatch, lasted: list[float]) -> Any:
    link = Link(monkeypatch, list(lasted))
    running = asyncio.create_task(link.run())
    while len(link.tried) <= len(lasted):  # noqa: ASYNC110  # no event to wait for
        await asyncio.sleep(0)
    running.cancel()
    return link.tried


async def test_replicas_are_tried_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = ranked("n1", ADDRESSES)
    assert await tried(monkeypatch, [0.0, 1.0, 0.0, 0.0]) == [first, second, third, first, second]


async def test_after_a_long_stream_the_preferred_replica_is_tried_first(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, _ = ranked("n1", ADDRESSES)
    assert await tried(monkeypatch, [0.0, STABLE_SECONDS, STABLE_SECONDS]) == [first, second, first, first]


class Homing(ContentionLink):
    """Keeps its stream forever, among replicas that the test declares reachable."""

    def __init__(self, endpoint: str, there: set[str]) -> None:
        self.there, self.throttling, self.looks = there, False, 0
        self.tried: asyncio.Queue[Replica] = asyncio.Queue()
        super().__init__(
            endpoint,
            "",
            "n1",
            sample=lambda: None,  # type: ignore[arg-type, return-value]  # none is taken
            apply_directive=lambda directive: None,
            disconnected=lambda: None,
            any_throttled=self._is_throttling,
            interval_seconds=1.0,
            rng=Random(1),
        )
        self._backoff.next_seconds = lambda: 0.0  # type: ignore[method-assign]  # no time passes

    def _is_throttling(self) -> bool:
        self.looks += 1
        return self.throttling

    async def _hold_stream(self, replica: Replica) -> None:
        self.tried.put_nowait(replica)
        if replica.address in self.there:
            await asyncio.Event().wait()
        nothing = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing)

    async def _is_reachable(self, replica: Replica) -> bool:
        return replica.address in self.there


async def test_a_node_returns_to_its_preferred_replica_unless_it_throttles_an_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(contention_link, "PREFERRED_CHECK_SECONDS", 0.001)
    first, second, third = map(Replica, ranked("n1", ADDRESSES))
    link = Homing("|".join(ADDRESSES), {third.address})
    running = asyncio.create_task(link.run())
    assert [await link.tried.get() for _ in range(3)] == [first, second, third]
    link.throttling = True
    link.there.add(second.address)
    before = link.looks
    while link.looks < before + 3:  # noqa: ASYNC110  # no event to wait for
        await asyncio.sleep(0.001)
    assert link.tried.empty()
    link.throttling = False
    assert await link.tried.get() == first  # it is tried first again, and is unreachable
    assert await link.tried.get() == second
    link.there.add(first.address)
    assert await link.tried.get() == first
    running.cancel()


async def test_replicas_behind_one_name_divide_the_nodes_when_addresses_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the pods of a StatefulSet behind a headless service, which come back at other addresses."""
    stands_for = ["10.0.0.1", "10.0.0.2"]

    def found(host: str, port: int, family: int, *more: Any) -> list[Any]:
        if family != socket.AF_INET or host != "contention.mesh":
            raise socket.gaierror
        return [(family, socket.SOCK_STREAM, 0, "", (number, port)) for number in stands_for]

    def preferred() -> Replica:
        return Replica(ranked("n1", [f"{number}:7" for number in stands_for])[0], "contention.mesh")

    monkeypatch.setattr(socket, "getaddrinfo", found)
    monkeypatch.setattr(contention_link, "PREFERRED_CHECK_SECONDS", 0.001)
    link = Homing("contention.mesh:7", {f"10.0.0.{number}:7" for number in range(9)})
    running = asyncio.create_task(link.run())
    assert (here := await link.tried.get()) == preferred()
    stands_for += ["10.0.0.3", "10.0.0.4", "10.0.0.5", "10.0.0.6", "10.0.0.7"]  # scaled up
    assert preferred() != here
    assert (here := await link.tried.get()) == preferred()
    stands_for.clear()  # the name server is away: the stream stays
    looks = link.looks
    while link.looks < looks + 3:  # noqa: ASYNC110  # no event to wait for
        await asyncio.sleep(0.001)
    assert link.tried.empty()
    running.cancel()


async def test_a_refused_agent_backs_off_exponentially(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its first message seemed to go out: the answer comes after it."""
    waits: list[float] = []
    enough = asyncio.Event()

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 9:
            enough.set()
            await asyncio.Event().wait()

    async def refuse(self: ContentionLink, replica: Replica) -> None:
        nothing = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode.ALREADY_EXISTS, nothing, nothing)

    monkeypatch.setattr(ContentionLink, "_hold_stream", refuse)
    monkeypatch.setattr(ContentionLink, "_wait_for_preferred", lambda self, replica: asyncio.Event().wait())
    monkeypatch.setattr("cotenant.node_agent.control.contention_link.asyncio.sleep", sleep)
    link = ContentionLink(
        ADDRESSES[0], "", "n1",
        sample=lambda: None, apply_directive=lambda directive: None,  # type: ignore[arg-type, return-value]  # none is taken
        disconnected=lambda: None, any_throttled=lambda: False, interval_seconds=1.0, rng=Random(1),
    )  # fmt: skip
    running = asyncio.create_task(link.run())
    await enough.wait()
    running.cancel()
    assert all(2**n / 2 <= wait <= 2**n for n, wait in enumerate(waits[:6]))
    assert all(30 <= wait <= 60 for wait in waits[6:])
