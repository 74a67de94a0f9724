"""Placement's commits: single writes at once, many together, unanswered ones exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random

import pytest
from tests.support.sleeps import record_sleeps
from tests.unit.services.mesh import until

from cotenant.leadership.fenced_store import DelegatingStore
from cotenant.leadership.leadership_term import HeldTerm
from cotenant.services.placement.cluster import committer as committer_module
from cotenant.services.placement.cluster.committer import Committer, Fenced, Write
from cotenant.store.group_commit import PACE_SECONDS
from cotenant.store.memory import MemoryStore
from cotenant.store.port import (
    Committed,
    Compare,
    Conflict,
    Entry,
    NotLeader,
    Operation,
    Put,
    Store,
    StoreUnavailable,
)

FOR_LONG = 1_000_000


class Counting(DelegatingStore):
    """A store that counts its transactions."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.transactions = 0

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Committed | Conflict:
        self.transactions += 1
        return await super().transact(compares, operations)


@pytest.fixture
async def made() -> AsyncIterator[tuple[Committer, Counting]]:
    """A committer that leads, and what it writes to."""
    store = MemoryStore()
    held, counting = HeldTerm(store, "placement/leader"), Counting(store)
    await held.renew()
    committer = Committer(counting, held)
    committer.start(held.fence, {})
    yield committer, counting
    await committer.close()


def write(key: object) -> list[Write]:
    return [Write(f"placement/{key}", b"x")]


async def test_under_load_transactions_are_paced(made: tuple[Committer, Counting]) -> None:
    committer, counting = made
    loop = asyncio.get_running_loop()
    began = loop.time()
    await asyncio.gather(*(committer.commit(write(number)) for number in range(2)))
    assert counting.transactions == 1
    await asyncio.gather(*(committer.commit(write(f"next-{number}")) for number in range(50)))
    assert loop.time() - began >= PACE_SECONDS
    assert counting.transactions == 2


async def test_a_single_write_is_not_delayed(made: tuple[Committer, Counting], monkeypatch: pytest.MonkeyPatch) -> None:
    committer, _ = made
    slept = record_sleeps(monkeypatch)
    for number in range(5):
        await committer.commit(write(number))
    assert not slept


class Silent(Counting):
    """A store that loses requests and answers as scripted, and is unavailable for a while afterwards."""

    def __init__(self, store: Store, rng: Random) -> None:
        super().__init__(store)
        self._rng = rng
        self.losing, self.away = 0.3, 0

    def _present(self) -> None:
        if self.away:
            self.away -= 1
            raise StoreUnavailable("the store is away")

    async def get(self, key: str) -> Entry | None:
        self._present()
        return await super().get(key)

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Committed | Conflict:
        self._present()
        await asyncio.sleep(0)
        lost = self._rng.random() < self.losing
        if lost and self._rng.random() < 0.5:
            self.away = self._rng.randrange(3)
            raise StoreUnavailable("the request was lost")
        result = await super().transact(compares, operations)
        if lost:
            self.away = self._rng.randrange(3)
            raise StoreUnavailable("the answer was lost")
        return result


@dataclass
class Doubting:
    """A committer on a store that loses answers, with its callbacks recorded."""

    store: Silent
    held: HeldTerm
    committer: Committer
    doubts: list[bool]
    halts: list[Exception]


@asynccontextmanager
async def doubting(rng: Random) -> AsyncIterator[Doubting]:
    """Return a started committer."""
    store = Silent(MemoryStore(), rng)
    held, doubts, halts = HeldTerm(store, "placement/leader"), list[bool](), list[Exception]()

    def set_outcome_unknown(error: Exception | None) -> None:
        doubts.append(error is not None)

    store.losing = 0.0
    await held.renew()
    store.losing = 0.3
    committer = Committer(store, held)
    committer.halted.subscribe(halts.append)
    committer.outcome_unknown.subscribe(set_outcome_unknown)
    committer.start(held.fence, {})
    yield Doubting(store, held, committer, doubts, halts)
    await committer.close()


@pytest.mark.parametrize("seed", range(12))
async def test_each_group_is_committed_once_despite_lost_requests_and_answers(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committer_module, "RETRY_SECONDS", 0.0)
    rng = Random(f"silence {seed}")
    async with doubting(rng) as made:
        told: dict[str, tuple[int, bytes | None]] = {}

        async def one(number: int) -> None:
            for key in rng.sample([f"placement/k{at}" for at in range(6)], rng.randint(0, 3)):
                value = None if rng.random() < 0.3 else str(number).encode()
                revision = await made.committer.commit([Write(key, value)])
                if revision >= told.get(key, (0, b""))[0]:
                    told[key] = revision, value

        async with asyncio.timeout(60):
            for begin in range(0, 100, 10):
                await asyncio.gather(*(one(number) for number in range(begin, begin + 10)))
        made.store.losing, made.store.away = 0.0, 0
        for key, (revision, value) in told.items():
            entry = await made.store.get(key)
            if value is None:
                assert entry is None
            else:
                assert entry is not None
                assert (entry.value, entry.mod_revision) == (value, revision)
        assert not made.halts
        assert made.doubts == [True, False] * (len(made.doubts) // 2)
        assert made.doubts, "nothing was lost: this shows nothing"


async def test_nothing_is_committed_after_another_writer() -> None:
    async with doubting(Random(0)) as made:
        made.store.losing = 0.0
        await made.committer.commit([*write("a"), *write("b")])
        made.store.away = FOR_LONG
        waiting = made.committer.submit([Write("placement/a", b"y"), Write("placement/b", b"y")])
        await until(lambda: made.doubts == [True])
        await made.store._store.transact([], [Put("placement/a", b"foreign")])
        made.store.away = 0
        with pytest.raises(Fenced):
            await waiting
        assert [type(one) for one in made.halts] == [Fenced]


async def test_a_replaced_leader_commits_nothing() -> None:
    async with doubting(Random(0)) as made:
        made.store.losing = 0.0
        made.store.away = FOR_LONG
        waiting = made.committer.submit(write("a"))
        await until(lambda: made.doubts == [True])
        await HeldTerm(made.store._store, "placement/leader").renew()
        made.store.away = 0
        with pytest.raises(NotLeader):
            await waiting
        assert await made.store.get("placement/a") is None
