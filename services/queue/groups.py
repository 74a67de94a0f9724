"""A store that commits small transactions together.

Theory of operation. A transaction costs an etcd cluster, and whoever calls it, about the same whether it writes one key
or fifty: a consensus, a flush of three disks, a call. So while one is under way those that come wait, and go into the
next one together, as group commit does in databases (DeWitt et al. 1984, "Implementation techniques for main memory
database systems", section 5.2). The first of a quiet time waits for nobody.

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

from cotenant.replicas.stores import Through
from cotenant.store.port import Committed, Compare, Conflict, LeaseLost, Operation, Put, Store

OPERATIONS_MAX = 96  # and as many comparisons: etcd takes 128 of each unless told otherwise, and a fence may be added
BYTES_MAX = 256 * 1024  # etcd takes 1.5 MiB in a request


@dataclass(slots=True, eq=False)
class _Waiting:
    compares: Sequence[Compare]
    operations: Sequence[Operation]
    answer: asyncio.Future[Committed | Conflict]
    begun: bool = False


class _Group:
    """Transactions that go together. Any one is taken as the first."""

    def __init__(self) -> None:
        self.members: list[_Waiting] = []
        self.compares: dict[str, Compare] = {}
        self.operations: list[Operation] = []
        self._written: set[str] = set()
        self._bytes = 0

    def take(self, one: _Waiting) -> bool:
        """Let one join, if it may."""
        size = sum(len(each.value) for each in one.operations if isinstance(each, Put))
        if self.members and not (self._has_room(one, size) and self._is_apart(one)):
            return False
        self.members.append(one)
        self.compares.update((each.key, each) for each in one.compares)
        self.operations += one.operations
        self._written.update(each.key for each in one.operations)
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
            written.isdisjoint(self._written)
            and written.isdisjoint(self.compares)
            and all(
                each.key not in self._written and self.compares.get(each.key, each) == each for each in one.compares
            )
        )


class GroupedStore(Through):
    """A store over another one, whose transactions go in groups while there are many."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._waiting: deque[_Waiting] = deque()
        self._worker: asyncio.Task[None] | None = None

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Committed | Conflict:
        """Do all operations if all comparisons hold, else nothing; with others, where some wait.

        A caller that is cancelled before its turn is left out. One that is cancelled later is let go only once it is
        decided whether its transaction was committed, so that it finds the outcome in the store if it looks.
        """
        one = _Waiting(compares, operations, asyncio.get_running_loop().create_future())
        self._waiting.append(one)
        if self._worker is None:
            self._worker = asyncio.create_task(self._run(), name="store-groups")
        try:
            return await asyncio.shield(one.answer)
        except asyncio.CancelledError:
            if one.begun:
                await asyncio.wait([one.answer])
            one.answer.cancel()
            raise

    async def _run(self) -> None:
        """Commit group after group until nobody waits."""
        group = _Group()
        try:
            while self._waiting:
                group = self._next()
                await self._commit(group)
        finally:
            self._worker = None
            for one in (*group.members, *self._waiting):  # somebody, only where this is cut off
                one.answer.cancel()
            self._waiting.clear()

    def _next(self) -> _Group:
        """Gather those who come first, as long as they may go together; who has gone away is left out."""
        group = _Group()
        while self._waiting:
            if not self._waiting[0].answer.done() and not group.take(self._waiting[0]):
                break
            self._waiting.popleft().begun = True
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
