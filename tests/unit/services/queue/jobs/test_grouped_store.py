"""Group commit: equivalent to sequential commits, with fewer transactions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.sleeps import record_sleeps

from cotenant.leadership.fenced_store import DelegatingStore
from cotenant.services.queue.jobs.grouped_store import LIMITS, GroupedStore
from cotenant.store.group_commit import PACE_SECONDS
from cotenant.store.memory import MemoryStore
from cotenant.store.port import (
    Committed,
    Compare,
    Conflict,
    Delete,
    Operation,
    Put,
    Store,
    StoreUnavailable,
)


class Counting(DelegatingStore):
    """A store that may be blocked, and records its transactions."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.seen: list[tuple[Sequence[Compare], Sequence[Operation]]] = []
        self.fails: list[Exception] = []
        self.begun, self.goes_on = asyncio.Event(), asyncio.Event()
        self.goes_on.set()

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Committed | Conflict:
        self.seen.append((compares, operations))
        self.begun.set()
        await self.goes_on.wait()
        if self.fails:
            raise self.fails.pop()
        return await super().transact(compares, operations)


def stores() -> tuple[Counting, GroupedStore]:
    counting = Counting(MemoryStore())
    return counting, GroupedStore(counting)


def put(key: str, value: bytes = b"x", revision: int = 0) -> tuple[list[Compare], list[Operation]]:
    return [Compare(key, revision)], [Put(key, value)]


async def test_transactions_arriving_during_a_commit_are_grouped() -> None:
    counting, grouped = stores()
    results = await asyncio.gather(*(grouped.transact(*put(f"k{number}")) for number in range(50)))
    assert len(counting.seen) == 1  # all of them arrived before the first could be committed
    assert len(set(results)) == 1
    assert len((await grouped.list("k")).entries) == 50


async def test_a_group_never_exceeds_transaction_limits() -> None:
    counting, grouped = stores()
    await asyncio.gather(*(grouped.transact(*put(f"k{number}")) for number in range(250)))
    assert [len(operations) for _, operations in counting.seen] == [LIMITS.operations, LIMITS.operations, 66]
    counting.seen.clear()
    large = b"x" * 200_000
    await asyncio.gather(*(grouped.transact(*put(f"l{number}", large)) for number in range(3)))
    assert [len(operations) for _, operations in counting.seen] == [1, 1, 1]


async def test_a_conflicting_or_malformed_transaction_does_not_fail_its_group() -> None:
    _, grouped = stores()
    await grouped.transact(*put("there"))
    for wrong, expected in ((put("there"), Conflict), (([], [Put("a", b""), Put("a", b"")]), ValueError)):
        calls: list[Any] = [grouped.transact(*put(f"{expected.__name__}{number}")) for number in range(3)]
        calls.insert(1, grouped.transact(*wrong))
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(one) for one in results] == [Committed, expected, Committed, Committed]
    assert len((await grouped.list("")).entries) == 7


async def test_an_unavailable_store_fails_the_whole_group_but_not_later_ones() -> None:
    counting, grouped = stores()
    counting.fails.append(StoreUnavailable("gone"))
    first = [asyncio.ensure_future(grouped.transact(*put(f"k{number}"))) for number in range(3)]
    await counting.begun.wait()
    second = grouped.transact(*put("later"))
    assert isinstance(await second, Committed)
    results = await asyncio.gather(*first, return_exceptions=True)
    assert [type(one) for one in results] == [StoreUnavailable] * 3


async def test_a_caller_cancelled_before_its_commit_is_left_out() -> None:
    counting, grouped = stores()
    counting.goes_on.clear()
    first = asyncio.ensure_future(grouped.transact(*put("first")))
    await counting.begun.wait()
    gone, stays = (asyncio.ensure_future(grouped.transact(*put(key))) for key in ("gone", "stays"))
    await asyncio.sleep(0)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    counting.goes_on.set()
    await asyncio.gather(first, stays)
    assert [one.key for one in (await grouped.list("")).entries] == ["first", "stays"]


async def test_a_caller_cancelled_during_its_commit_finds_the_outcome_in_the_store() -> None:
    counting, grouped = stores()
    counting.goes_on.clear()
    going = asyncio.ensure_future(grouped.transact(*put("going")))
    await counting.begun.wait()
    going.cancel()
    with pytest.raises(asyncio.CancelledError):
        await going
    found, listed = asyncio.ensure_future(grouped.get("going")), asyncio.ensure_future(grouped.list("go"))
    assert await grouped.get("other") is None  # which waits for no commit
    assert not found.done()
    assert not listed.done()
    counting.goes_on.set()
    assert await found
    assert (await listed).entries


async def test_a_cancelled_worker_leaves_no_caller_waiting() -> None:
    counting, grouped = stores()
    counting.goes_on.clear()
    calls = [asyncio.ensure_future(grouped.transact(*put(f"k{number}"))) for number in range(200)]
    await counting.begun.wait()
    (worker,) = (task for task in asyncio.all_tasks() if task.get_name() == "store-groups")
    worker.cancel()
    results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 5.0)
    assert {type(one) for one in results} == {asyncio.CancelledError}
    counting.goes_on.set()
    assert isinstance(await grouped.transact(*put("later")), Committed)


KEYS = st.sampled_from("abcd")
OPERATIONS = st.dictionaries(KEYS, st.sampled_from([b"1", b"2", None]), max_size=2)
TRANSACTIONS = st.lists(st.tuples(st.dictionaries(KEYS, st.integers(0, 4), max_size=2), OPERATIONS), max_size=8)


@given(TRANSACTIONS)
def test_group_commit_is_equivalent_to_sequential_commits(
    told: list[tuple[dict[str, int], dict[str, bytes | None]]],
) -> None:
    """Answers and contents equal those of sequential commits; revisions may differ, but not their order."""
    written = [
        (
            compares,
            [Delete(key) if value is None else Put(key, value) for key, value in operations.items()],
        )
        for compares, operations in told
    ]

    async def run(store: Store, *, together: bool) -> tuple[list[type], list[tuple[str, bytes]]]:
        versions: dict[str, list[int]] = {}  # revisions of a key, in order: a comparison refers to one by position

        async def one(compares: dict[str, int], operations: list[Operation]) -> type:
            named = [
                Compare(key, ([0, *versions.get(key, [])] + [10**6] * 5)[place]) for key, place in compares.items()
            ]
            return type(await store.transact(named, operations))

        answers = []
        for start in range(0, len(written), 4):
            some = written[start : start + 4]
            if together:
                answers += await asyncio.gather(*(one(*each) for each in some))
            else:
                before = {key: list(all_of) for key, all_of in versions.items()}
                for each in some:
                    versions = {key: list(all_of) for key, all_of in before.items()}
                    answers.append(await one(*each))
            for entry in (await store.list("")).entries:
                if entry.mod_revision not in versions.setdefault(entry.key, []):
                    versions[entry.key].append(entry.mod_revision)
        return answers, [(one.key, one.value) for one in (await store.list("")).entries]

    assert asyncio.run(run(GroupedStore(MemoryStore()), together=True)) == asyncio.run(
        run(MemoryStore(), together=False)
    )


async def test_groups_are_paced_under_load() -> None:
    counting, grouped = stores()
    loop = asyncio.get_running_loop()
    began = loop.time()
    await asyncio.gather(*(grouped.transact(*put(f"k{number}")) for number in range(2)))
    await grouped.transact(*put("next"))
    assert loop.time() - began >= PACE_SECONDS
    assert len(counting.seen) == 2


async def test_a_single_transaction_is_committed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _, grouped = stores()
    slept = record_sleeps(monkeypatch)
    for number in range(5):
        await grouped.transact(*put(f"k{number}"))
    assert not slept
