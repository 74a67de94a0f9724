"""Properties of a store that regresses, over random interleavings of members: no false and no missed alarm."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
import structlog.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.properties import examples
from tests.unit.store.simulated_etcd import Etcd

from cotenant.store import identity_check
from cotenant.store.guarded_store import GuardedStore
from cotenant.store.port import Committed, Compare, Delete, Operation, Put, StoreDistrusted, StoreUnavailable
from cotenant.store.regression_acceptance import accept
from cotenant.store.revision_offset import OffsetStore
from cotenant.store.witness import RememberedStore

EXAMPLES = 200
MEMBERS = 3
SETTLED_TURNS = 10  # of the event loop, after which nothing more can happen


@dataclass
class Member:
    """A process: its store, what it remembers on disk, and the highest write that it knows."""

    store: GuardedStore
    knows: int = 0
    kept: tuple[RememberedStore | None, int] = (None, 0)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)


class World:
    """Members of one mesh over one etcd. `alarms` are the rejections of the store as regressed."""

    def __init__(self) -> None:
        self.etcd = Etcd()
        self.alarms: list[str] = []
        self.names = 0
        self.rolled_back_to: int | None = None  # the progress that is left
        self.sent_knowing: set[bytes] = set()  # keys of writes whose sender knew of a write that is gone
        self.members = [self.started(None, 0) for _ in range(MEMBERS)]

    def started(self, memory: RememberedStore | None, knows: int) -> Member:
        self.names += 1
        store = GuardedStore(OffsetStore(self.etcd.client(f"m{self.names}")))
        store.trust.remembered = memory
        return Member(store, knows, (memory, knows))

    def begin(self, member: Member, what: str) -> None:
        self.names += 1
        member.tasks.append(asyncio.create_task(self._do(member, what, f"/{self.names}")))

    async def _do(self, member: Member, what: str, key: str) -> None:
        try:
            if what == "read":
                await member.store.list("/")
            elif what == "look":
                await member.store.trust.open()
                await member.store.trust.look()
            else:
                await member.store.trust.open()
                if self.rolled_back_to is not None and member.knows > self.rolled_back_to:
                    self.sent_knowing.add(key.encode())
                operations: list[Operation] = [Put(key, b""), *([Delete("/old")] if what == "replace" else [])]
                written = await member.store.transact([Compare(key, 0)], operations)
                assert isinstance(written, Committed)
                if self.rolled_back_to is None:
                    member.knows = max(member.knows, written.revision)
        except StoreDistrusted as error:
            self.alarms.append(str(error))
        except StoreUnavailable:
            pass
        if member.store.trust.verdict:
            self.alarms.append(member.store.trust.verdict.text)
        elif (known := member.store.trust.remembered) and self.rolled_back_to is None:
            member.knows = max(member.knows, known.progress)

    def keep(self, member: Member) -> None:
        memory = member.store.trust.remembered
        member.kept = (memory, memory.progress if memory and self.rolled_back_to is None else member.kept[1])

    async def crash(self, index: int, *, forgets: bool = False) -> None:
        member = self.members[index]
        for task in [*member.tasks, member.store.trust._looking]:
            if task:
                task.cancel()
        self.members[index] = self.started(*((None, 0) if forgets else member.kept))
        await settled()

    async def accepted(self) -> None:
        under_way = len(self.etcd.flights)
        operator = asyncio.create_task(accept(self.etcd.client("operator"), []))
        while not operator.done():
            await settled()
            for flight in self.etcd.flights[under_way:]:
                flight.step()
        with suppress(StoreUnavailable):
            await operator

    async def play(self, steps: list[tuple[str, int]]) -> None:
        for what, number in steps:
            member = self.members[number % MEMBERS]
            flights = self.etcd.flights = [one for one in self.etcd.flights if not (one.done and one.answer.done())]
            flight = flights[number % len(flights)] if flights else None
            if what in ("read", "look", "write", "replace"):
                self.begin(member, what)
            elif what == "step" and flight:
                flight.step()
            elif what == "lose" and flight:
                flight.lose()
            elif what == "keep":
                self.keep(member)
            elif what == "crash":
                await self.crash(number % MEMBERS, forgets=number % 2 == 0)
            elif what == "expire":
                self.etcd.expire()
            elif what == "accept":
                await self.accepted()
            await settled()

    async def quiet(self) -> None:
        """Answer requests until there are none."""
        await settled()
        while self.etcd.flights:
            for flight in self.etcd.flights:
                flight.step()
            self.etcd.flights = [one for one in self.etcd.flights if not (one.done and one.answer.done())]
            await settled()

    async def roll_back(self, count: int, bump: int) -> None:
        self.etcd.roll_back(count, bump)
        self.rolled_back_to = self.etcd.now.keys.get(identity_check.PROGRESS.encode(), (b"", 0, 0))[2]
        await settled()
        for index, member in enumerate(self.members):
            if member.knows <= self.rolled_back_to:  # see "What is not noticed": it went on as if nothing had been
                await self.crash(index, forgets=True)

    async def end(self) -> None:
        for member in self.members:
            for task in [*member.tasks, member.store.trust._looking]:
                if task:
                    task.cancel()
        await settled()


async def settled() -> None:
    for _ in range(SETTLED_TURNS):
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def looks_when_asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(identity_check, "LOOK_SECONDS", 1e6)
    with structlog.testing.capture_logs():  # of thousands of openings
        yield


KINDS = ["write", "write", "replace", "read", "look", "lose", "keep", "crash", "expire", *(["step"] * 12)]
STEPS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 11)), max_size=120)
WITH_ACCEPTANCE = st.lists(st.tuples(st.sampled_from([*KINDS, "accept"]), st.integers(0, 11)), max_size=120)


@settings(max_examples=examples(EXAMPLES), deadline=None)
@given(steps=WITH_ACCEPTANCE)
def test_no_interleaving_of_members_raises_an_alarm(steps: list[tuple[str, int]]) -> None:
    async def play() -> None:
        world = World()
        await world.play(steps)
        await world.quiet()
        for member in world.members:
            world.begin(member, "write")
        await world.quiet()
        await world.end()
        assert world.alarms == []

    asyncio.run(play())


@settings(max_examples=examples(EXAMPLES), deadline=None)
@given(before=STEPS, back=st.integers(1, 12), bump=st.sampled_from([0, 1_000_000]), after=STEPS)
def test_no_process_that_knows_of_a_lost_write_adds_to_a_regressed_store(
    before: list[tuple[str, int]], back: int, bump: int, after: list[tuple[str, int]]
) -> None:
    async def play() -> None:
        world = World()
        await world.play(before)
        await world.roll_back(back, bump)
        await world.play(after)
        await world.quiet()
        for member in world.members:
            world.begin(member, "write")
        await world.quiet()
        await world.end()
        for _, request in world.etcd.applied:
            keys = {one.request_put.key for one in request.success}
            assert not keys & world.sent_knowing
        for member in world.members:
            if member.knows > (world.rolled_back_to or 0):
                assert member.store.trust.verdict

    asyncio.run(play())
