"""How often placement commits: what comes alone at once, what comes in crowds together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from tests.sleeps import heard_sleeps

from cotenant.replicas.stores import Through
from cotenant.replicas.tenure import Held
from cotenant.services.placement.committer import Committer, Write
from cotenant.store.memory import MemoryStore
from cotenant.store.pace import PACE_SECONDS
from cotenant.store.port import Committed, Compare, Conflict, Operation, Store


class Counting(Through):
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
    held, counting = Held(store, "placement/leader"), Counting(store)
    await held.renew()
    committer = Committer(counting, on_halt=lambda error: None)
    committer.start(held.fence, {})
    yield committer, counting
    await committer.close()


def write(key: object) -> list[Write]:
    return [Write(f"placement/{key}", b"x")]


async def test_while_many_come_transactions_keep_a_pace(made: tuple[Committer, Counting]) -> None:
    committer, counting = made
    loop = asyncio.get_running_loop()
    began = loop.time()
    await asyncio.gather(*(committer.commit(write(number)) for number in range(2)))
    assert counting.transactions == 1
    await asyncio.gather(*(committer.commit(write(f"next-{number}")) for number in range(50)))
    assert loop.time() - began >= PACE_SECONDS
    assert counting.transactions == 2


async def test_what_comes_alone_after_another_waits_for_nobody(
    made: tuple[Committer, Counting], monkeypatch: pytest.MonkeyPatch
) -> None:
    committer, _ = made
    slept = heard_sleeps(monkeypatch)
    for number in range(5):
        await committer.commit(write(number))
    assert not slept
