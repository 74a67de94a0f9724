"""A store that commits small transactions together.

Theory of operation. A transaction costs an etcd cluster, and whoever calls it, about the same whether it writes one key
or fifty: a consensus, a flush of three disks, a call. So while one is under way those that come wait, and go into the
next one together, as group commit does in databases (DeWitt et al. 1984, "Implementation techniques for main memory
database systems", section 5.2). The first of a quiet time waits for nobody; while many come, groups keep a pace.

Together is only what could as well have been committed one after the other with the same answers: no key that one of
them writes is written or compared by another one, and all that are compared twice are compared to the same revision.
All get the same revision. If a comparison of one fails, nothing of the group is done, and each is tried alone, in turn:
so one that conflicts costs the others time, and nothing else.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from cotenant.leadership.fenced_store import Through
from cotenant.store.group_commit_pacing import Pace
from cotenant.store.port import Committed, Compare, Conflict, Entry, LeaseLost, Listing, Operation, Put, Store

OPERATIONS_MAX = 92  # and as many comparisons: etcd takes 128 of each, and a fence and parts of large specs are added
BYTES_MAX = 256 * 1024  # etcd takes 1.5 MiB in a request


@dataclass(frozen=True, slots=True)
class _Waiting:
    compares: Sequence[Compare]
    operations: Sequence[Operation]
    answer: asyncio.Future[Committed | Conflict]


class _Group:
    """Transactions that go together. Any one is taken as the first."""

    def __init__(self) -> None:
        self.members: list[_Waiting] = []
        self.compares: dict[str, Compare] = {}
        self.operations: list[Operation] = []
        self.written: set[str] = set()
        self.decided: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._bytes = 0

    def take(self, one: _Waiting) -> bool:
        """Let one join, if it may."""
        size = sum(len(each.value) for each in one.operations if isinstance(each, Put))
        if self.members and not (self._has_room(one, size) and self._is_apart(one)):
            return False
        self.members.append(one)
        self.compares.update((each.key, each) for each in one.compares)
        self.operations += one.operations
        self.written.update(each.key for each in one.operations)
        self._bytes += size
        return True

    def _has_room(self, one: _Waiting, size: int) -> bool:
        return (
            len(self.operations) + len(one.operations) <= OPERATIONS_MAX
            and len(self.compares) + len(one.compares) <= OPERATIONS_MAX
            and self._bytes + size <= BYTES_MAX
        )

    def _is_apart(self, one: _Waiting) -> bool:
        written = {each.key for each in one.operations}
        return (
            written.isdisjoint(self.written)
            and written.isdisjoint(self.compares)
            and all(each.key not in self.written and self.compares.get(each.key, each) == each for each in one.compares)
        )


class GroupedStore(Through):
    """A store over another one, whose transactions go in groups while there are many."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._waiting: deque[_Waiting] = deque()
        self._worker: asyncio.Task[None] | None = None
        self._under_way: _Group | None = None
        self._pace = Pace()

    async def get(self, key: str) -> Entry | None:
        """Read one key, with what is being written to it now."""
        await self._decided(key)
        return await super().get(key)

    async def list(self, prefix: str) -> Listing:
        """Read all keys under a prefix, with what is being written to them now."""
        await self._decided(prefix)
        return await super().list(prefix)

    async def _decided(self, prefix: str) -> None:
        """Wait until it is decided what becomes of writes under way.

        Their callers may have been cancelled, and be looking for what came of them.
        """
        if (group := self._under_way) and any(key.startswith(prefix) for key in group.written):
            await asyncio.wait([group.decided])

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Committed | Conflict:
        """Do all operations if all comparisons hold, else nothing; with others, where some wait.

        A caller that is cancelled before its turn is left out.
        """
        one = _Waiting(compares, operations, asyncio.get_running_loop().create_future())
        self._waiting.append(one)
        if self._worker is None:
            self._worker = asyncio.create_task(self._run(), name="store-groups")
        return await one.answer

    async def _run(self) -> None:
        """Commit group after group until nobody waits."""
        try:
            while self._waiting:
                await self._pace.wait()
                self._under_way = group = self._next()
                self._pace.begin(len(group.members))
                try:
                    await self._commit(group)
                finally:
                    self._under_way = None
                    group.decided.set_result(None)
                    for one in group.members:
                        one.answer.cancel()  # of one that was not answered, since this is cut off
        finally:
            self._worker = None
            for one in self._waiting:  # the same
                one.answer.cancel()
            self._waiting.clear()

    def _next(self) -> _Group:
        """Gather those who come first, as long as they may go together; who has gone away is left out."""
        group = _Group()
        while self._waiting:
            if not self._waiting[0].answer.done() and not group.take(self._waiting[0]):
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
            pass  # that is one of them, and nothing was done
        except Exception as error:  # whatever it is, those who wait have to know
            for one in group.members:
                _fail(one, error)
            return
        if isinstance(result, Committed):
            for one in group.members:
                _tell(one, result)
            return
        for one in group.members:
            await self._commit_alone(one)

    async def _commit_alone(self, one: _Waiting) -> None:
        if one.answer.done():
            return
        try:
            _tell(one, await self._store.transact(one.compares, one.operations))
        except Exception as error:  # the same
            _fail(one, error)


def _tell(one: _Waiting, result: Committed | Conflict) -> None:
    if not one.answer.done():
        one.answer.set_result(result)


def _fail(one: _Waiting, error: Exception) -> None:
    if not one.answer.done():
        one.answer.set_exception(error)
