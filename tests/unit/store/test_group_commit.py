"""The engine of group commit: what goes together, and what a refusal costs the others."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from cotenant.store.group_commit import GroupCommit, Limits, TransactionRefused
from cotenant.store.memory import MemoryStore
from cotenant.store.port import Committed, Compare, Conflict, Delete, Operation, Put, StoreUnavailable

LIMITS = Limits(operations=50, compares=50, size_bytes=1_000)


class Transactions:
    """Records the transactions that are committed; those with a key in `refused` or `failing` raise."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.seen: list[Sequence[Operation]] = []
        self.refused: set[str] = set()
        self.failing: set[str] = set()
        self.gate = asyncio.Event()
        self.gate.set()

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Committed | Conflict:
        self.seen.append(operations)
        await self.gate.wait()
        keys = {one.key for one in operations}
        if keys & self.failing:
            raise StoreUnavailable("gone")
        if keys & self.refused:
            raise TransactionRefused("no")
        return await self.store.transact(compares, operations)

    @property
    def sizes(self) -> list[int]:
        return [len(operations) for operations in self.seen]


def put(key: object, value: bytes = b"x") -> list[Operation]:
    return [Put(f"k{key}", value)]


async def answers(futures: Sequence[asyncio.Future[Committed | Conflict]]) -> list[type]:
    return [type(one) for one in await asyncio.gather(*futures, return_exceptions=True)]


async def test_of_two_writes_of_one_key_the_later_stands_in_one_transaction() -> None:
    done = Transactions()
    commits = GroupCommit("test", done.transact, LIMITS)
    futures = [commits.submit([], operations) for operations in (put(1, b"a"), put(2), put(1, b"b"), put(2, b"y"))]
    futures.append(commits.submit([], [Delete("k2")]))
    assert await answers(futures) == [Committed] * 5
    assert done.sizes == [2]
    assert [(one.key, one.value) for one in (await done.store.list("")).entries] == [("k1", b"b")]


@pytest.mark.parametrize("size", [2, 3, 8, 33])
async def test_a_refused_transaction_fails_alone_after_few_attempts(size: int) -> None:
    for bad in range(size):
        done = Transactions()
        done.refused = {f"k{bad}"}
        commits = GroupCommit("test", done.transact, LIMITS)
        expected: list[type] = [Committed] * size
        expected[bad] = TransactionRefused
        assert await answers([commits.submit([], put(number)) for number in range(size)]) == expected
        assert len(done.seen) <= 1 + 2 * size.bit_length()


async def test_an_error_of_the_store_fails_all_that_were_sent_together() -> None:
    done = Transactions()
    done.failing = {"k3"}
    commits = GroupCommit("test", done.transact, LIMITS)
    assert await answers([commits.submit([], put(number)) for number in range(4)]) == [StoreUnavailable] * 4
    assert len(done.seen) == 1
    assert await answers([commits.submit([], put("later"))]) == [Committed]


async def test_contradictory_and_malformed_transactions_are_committed_alone() -> None:
    done = Transactions()
    commits = GroupCommit("test", done.transact, LIMITS)
    twice: list[Operation] = [*put(1), *put(1)]
    futures = [
        commits.submit([], twice),
        commits.submit([], put(2)),
        commits.submit([Compare("k9", 5), Compare("k9", 0)], put(3)),
        commits.submit([], put(4)),
        commits.submit([], twice),
    ]
    assert await answers(futures) == [ValueError, Committed, Conflict, Committed, ValueError]


async def test_a_group_keeps_each_limit() -> None:
    for limits, each in (
        (Limits(operations=3, compares=50, size_bytes=1_000), 3),
        (Limits(operations=50, compares=4, size_bytes=1_000), 4),
        (Limits(operations=50, compares=8, size_bytes=1_000, compares_per_operation=1), 4),
        (Limits(operations=50, compares=50, size_bytes=18), 6),
    ):
        done = Transactions()
        commits = GroupCommit("test", done.transact, limits)
        await asyncio.gather(*(commits.submit([Compare(f"k{n:02}", 0)], put(f"{n:02}", b"")) for n in range(10)))
        assert done.sizes[0] == each, limits
        assert max(done.sizes) == done.sizes[0]
        assert sum(done.sizes) == 10


async def test_cancelled_callers_are_left_out_unless_they_are_kept() -> None:
    for keep, expected in ((False, ["k1", "k3"]), (True, ["k1", "k2", "k3"])):
        done = Transactions()
        commits = GroupCommit("test", done.transact, LIMITS, keep_cancelled=keep)
        one, two, three = (commits.submit([], put(number)) for number in (1, 2, 3))
        two.cancel()
        await asyncio.gather(one, three)
        assert [entry.key for entry in (await done.store.list("")).entries] == expected


async def test_a_stop_answers_everybody() -> None:
    done = Transactions()
    done.gate.clear()
    commits = GroupCommit("test", done.transact, LIMITS)
    in_flight = [commits.submit([], put(number)) for number in range(3)]
    await asyncio.sleep(0)
    assert done.seen
    waiting = [commits.submit([], put(number)) for number in range(3, 6)]
    (worker,) = commits.stop(StoreUnavailable("closing"))
    assert await answers([*in_flight, *waiting]) == [StoreUnavailable] * 6
    worker.cancel()
    await asyncio.wait([worker])
    assert len(done.seen) == 1
