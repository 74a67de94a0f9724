"""Group commit: a store that commits small transactions together.

Theory of operation. A transaction costs an etcd cluster and its client about the same whether it writes one key or
fifty: a consensus round, an fsync on three disks, a call. So transactions that arrive while a commit is in flight
wait, and go into the next one together, as group commit does in databases (DeWitt et al. 1984, "Implementation
techniques for main memory database systems", section 5.2). After a quiet time the first transaction is committed at
once; under load, groups are paced.

A group holds only transactions that could as well have been committed one after the other with the same answers: no
key that one writes is written or compared by another, and a key that is compared twice is compared to the same
revision. All get the same revision. If any comparison fails, nothing of the group is done, and each transaction is
tried alone, in order. So a conflicting transaction costs the others time, and nothing else.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from cotenant.leadership.fenced_store import DelegatingStore
from cotenant.store.group_commit_pacing import CommitPacing
from cotenant.store.port import Committed, Compare, Conflict, Entry, LeaseLost, Listing, Operation, Put, Store

OPERATIONS_MAX = 92  # and as many comparisons: etcd accepts 128 of each, and a fence and parts of large specs are added
BYTES_MAX = 256 * 1024  # etcd accepts 1.5 MiB per request


@dataclass(frozen=True, slots=True)
class _Transaction:
    compares: Sequence[Compare]
    operations: Sequence[Operation]
    answer: asyncio.Future[Committed | Conflict]


class _Group:
    """Transactions that are committed together. Any transaction may be the first."""

    def __init__(self) -> None:
        self.members: list[_Transaction] = []
        self.compares: dict[str, Compare] = {}
        self.operations: list[Operation] = []
        self.written: set[str] = set()
        self.settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._bytes = 0

    def add_transaction(self, one: _Transaction) -> bool:
        """Add a transaction if it may join."""
        size = sum(len(each.value) for each in one.operations if isinstance(each, Put))
        if self.members and not (self._has_room(one, size) and self._is_independent(one)):
            return False
        self.members.append(one)
        self.compares.update((each.key, each) for each in one.compares)
        self.operations += one.operations
        self.written.update(each.key for each in one.operations)
        self._bytes += size
        return True

    def _has_room(self, one: _Transaction, size: int) -> bool:
        return (
            len(self.operations) + len(one.operations) <= OPERATIONS_MAX
            and len(self.compares) + len(one.compares) <= OPERATIONS_MAX
            and self._bytes + size <= BYTES_MAX
        )

    def _is_independent(self, one: _Transaction) -> bool:
        written = {each.key for each in one.operations}
        return (
            written.isdisjoint(self.written)
            and written.isdisjoint(self.compares)
            and all(each.key not in self.written and self.compares.get(each.key, each) == each for each in one.compares)
        )


class GroupedStore(DelegatingStore):
    """A store whose transactions are committed in groups under load."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._waiting: deque[_Transaction] = deque()
        self._worker: asyncio.Task[None] | None = None
        self._under_way: _Group | None = None
        self._pace = CommitPacing()

    async def get(self, key: str) -> Entry | None:
        """Read one key, after writes to it that are in flight."""
        await self._wait_until_settled(key)
        return await super().get(key)

    async def list(self, prefix: str) -> Listing:
        """Read all keys under a prefix, after writes to them that are in flight."""
        await self._wait_until_settled(prefix)
        return await super().list(prefix)

    async def _wait_until_settled(self, prefix: str) -> None:
        """Wait for the outcome of writes in flight.

        Their callers may have been cancelled, and be reading back what became of them.
        """
        if (group := self._under_way) and any(key.startswith(prefix) for key in group.written):
            await asyncio.wait([group.settled])

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Committed | Conflict:
        """Apply all operations if all comparisons hold, else none; together with other waiting transactions.

        A caller that is cancelled before its commit starts is left out.
        """
        one = _Transaction(compares, operations, asyncio.get_running_loop().create_future())
        self._waiting.append(one)
        if self._worker is None:
            self._worker = asyncio.create_task(self._run(), name="store-groups")
        return await one.answer

    async def _run(self) -> None:
        """Commit groups until no transaction waits."""
        try:
            while self._waiting:
                await self._pace.wait()
                self._under_way = group = self._next()
                self._pace.begin(len(group.members))
                try:
                    await self._commit(group)
                finally:
                    self._under_way = None
                    group.settled.set_result(None)
                    for one in group.members:
                        one.answer.cancel()  # unanswered: this task was cancelled
        finally:
            self._worker = None
            for one in self._waiting:  # likewise
                one.answer.cancel()
            self._waiting.clear()

    def _next(self) -> _Group:
        """Return a group of the oldest transactions that may go together, without those of cancelled callers."""
        group = _Group()
        while self._waiting:
            if not self._waiting[0].answer.done() and not group.add_transaction(self._waiting[0]):
                break
            self._waiting.popleft()
        return group

    async def _commit(self, group: _Group) -> None:
        if len(group.members) <= 1:
            for one in group.members:
                await self._commit_alone(one)
            return
        result: Committed | Conflict | None = None
        try:
            result = await self._store.transact([*group.compares.values()], group.operations)
        except (ValueError, TypeError, LeaseLost):
            pass  # caused by one of them; nothing was committed
        except Exception as error:  # every waiting caller gets the error
            for one in group.members:
                _fail(one, error)
            return
        if isinstance(result, Committed):
            for one in group.members:
                _resolve(one, result)
            return
        for one in group.members:
            await self._commit_alone(one)

    async def _commit_alone(self, one: _Transaction) -> None:
        if one.answer.done():
            return
        try:
            _resolve(one, await self._store.transact(one.compares, one.operations))
        except Exception as error:  # likewise
            _fail(one, error)


def _resolve(one: _Transaction, result: Committed | Conflict) -> None:
    if not one.answer.done():
        one.answer.set_result(result)


def _fail(one: _Transaction, error: Exception) -> None:
    if not one.answer.done():
        one.answer.set_exception(error)
