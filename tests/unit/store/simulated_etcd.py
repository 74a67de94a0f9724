"""A linearizable etcd in memory, behind the real client code: the test decides when an answer arrives, if at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from aetcd import rpc  # type: ignore[import-untyped]  # ships no types

from cotenant.store.etcd import EtcdStore
from cotenant.store.port import StoreUnavailable


@dataclass
class State:
    """The keys of an etcd, each with value, create revision and mod revision."""

    revision: int = 1
    keys: dict[bytes, tuple[bytes, int, int]] = field(default_factory=dict)

    def copied(self) -> State:
        return State(self.revision, copy(self.keys))

    def found(self, request: Any) -> list[Any]:
        end = request.range_end or request.key + b"\0"
        return [
            rpc.KeyValue(key=key, value=value, create_revision=created, mod_revision=changed)
            for key, (value, created, changed) in sorted(self.keys.items())
            if request.key <= key and (key < end or end == b"\0")
        ]

    def put(self, key: bytes, value: bytes, revision: int) -> None:
        _, created, _ = self.keys.get(key, (b"", revision, 0))
        self.keys[key] = (value, created, revision)


@dataclass
class Flight:
    """A request in transit: to etcd until it is `done`, then its answer on the way back."""

    work: Callable[[], Any]
    answer: asyncio.Future[Any]
    done: bool = False
    result: Any = None

    def step(self) -> None:
        """Evaluate it; the next time, deliver its answer."""
        if not self.done:
            self.done, self.result = True, self.work()
        elif not self.answer.done():
            self.answer.set_result(self.result)

    def lose(self) -> None:
        """Drop the answer; a request that is not evaluated yet may still be evaluated later."""
        if not self.answer.done():
            self.answer.set_exception(StoreUnavailable("the answer is lost"))


class Etcd:
    """The server. `states` is its past, and `flights` are the requests in transit."""

    def __init__(self) -> None:
        self.states = [State()]
        self.flights: list[Flight] = []
        self.applied: list[tuple[str, Any]] = []  # requests that were committed, each with its client's name

    @property
    def now(self) -> State:
        return self.states[-1]

    def range(self, request: Any) -> Any:
        reply = rpc.RangeResponse(kvs=self.now.found(request))
        reply.header.revision = self.now.revision
        return reply

    def _holds(self, compare: Any) -> bool:
        changed = self.now.keys.get(compare.key, (b"", 0, 0))[2]
        if compare.result == rpc.Compare.EQUAL:
            return bool(changed == compare.mod_revision)
        return bool(changed > compare.mod_revision)

    def transact(self, client: str, request: Any) -> Any:
        succeeded = all(map(self._holds, request.compare))
        reply = rpc.TxnResponse(succeeded=succeeded)
        after = self.now.copied()
        for one in request.success if succeeded else request.failure:
            response = reply.responses.add()
            if one.HasField("request_put"):
                after.put(one.request_put.key, one.request_put.value, self.now.revision + 1)
            elif one.HasField("request_delete_range"):
                after.keys.pop(one.request_delete_range.key, None)
            else:
                response.response_range.kvs.extend(self.now.found(one.request_range))
        if after.keys != self.now.keys:
            after.revision += 1
            self.states.append(after)
        if succeeded:
            self.applied.append((client, request))
        reply.header.revision = self.now.revision
        return reply

    def expire(self) -> None:
        """End a lease: a revision without a request of the mesh."""
        after = self.now.copied()
        after.revision += 1
        self.states.append(after)

    def roll_back(self, count: int, bump: int) -> None:
        """Go back by some revisions, as after restoring a snapshot; requests in transit are lost."""
        for flight in self.flights:
            if not flight.done:
                flight.lose()
        self.flights = [flight for flight in self.flights if flight.done]
        old = self.states[max(0, len(self.states) - 1 - count)].copied()
        old.revision += bump
        self.states = [old]

    def client(self, name: str) -> EtcdStore:
        """Return a store that sends real requests to this server."""

        async def asked(work: Callable[[], Any]) -> Any:
            flight = Flight(work, asyncio.get_running_loop().create_future())
            self.flights.append(flight)
            return await flight.answer

        kv = SimpleNamespace(
            Range=lambda request, timeout: asked(lambda: self.range(request)),
            Txn=lambda request, timeout: asked(lambda: self.transact(name, request)),
        )
        store = EtcdStore(["simulated:1"])
        store._members = _Members(SimpleNamespace(kv=kv))  # type: ignore[assignment]  # below the requests
        return store


class _Members:
    def __init__(self, member: Any) -> None:
        self.raft_term = 0
        self._member = member

    async def call(self, ask: Callable[[Any, float], Any], *, repeat: bool) -> Any:
        return await ask(self._member, 1.0)

    async def close(self) -> None:
        pass
