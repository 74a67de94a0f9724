"""Group commit: transactions that wait while another is written are committed together.

Theory of operation. A transaction costs an etcd cluster and its client about the same whether it writes one key or
fifty: a consensus round, an fsync on three disks, a call. So transactions that arrive while a commit is in flight
wait, and go into the next one together, as group commit does in databases (DeWitt et al. 1984, "Implementation
techniques for main memory database systems", section 5.2). After a quiet time the first transaction is committed at
once; under load, groups are paced.

A group holds only transactions that could as well have been committed one after the other with the same answers: none
compares a key that an earlier one writes, and a key that is compared twice is compared to the same revision. Of two
writes of one key the later stands. All get the same revision. A group that is refused because of one of its
transactions is halved until that one is alone, so it costs the others time, and nothing else.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from cotenant.store.port import Compare, Conflict, LeaseLost, Operation, Put

PACE_SECONDS = 0.02  # from the begin of a group to the next; a single transaction delays nothing

Result = TypeVar("Result")


class TransactionRefused(Exception):
    """A transaction cannot be committed, and nothing was written; others of its group may be committed without it."""


REFUSALS = (TransactionRefused, ValueError, TypeError, LeaseLost)  # caused by one transaction; nothing was committed


@dataclass(frozen=True, slots=True)
class Limits:
    """What a group may hold. A larger single transaction is passed on, and the store decides."""

    operations: int
    compares: int
    size_bytes: int  # of values and their keys
    compares_per_operation: int = 0  # that `transact` adds


class _Transaction(Generic[Result]):
    """A submitted transaction and its future result."""

    __slots__ = (
        "answer",
        "by_compared_key",
        "by_written_key",
        "compares",
        "is_well_formed",  # it compares each key once and writes each key once
        "operations",
        "size_bytes",
    )

    def __init__(
        self, compares: Sequence[Compare], operations: Sequence[Operation], answer: asyncio.Future[Result]
    ) -> None:
        self.compares, self.operations, self.answer = compares, operations, answer
        self.by_compared_key = {one.key: one for one in compares}
        self.by_written_key = {one.key: one for one in operations}
        self.is_well_formed = len(self.by_compared_key) == len(compares) and len(self.by_written_key) == len(operations)
        self.size_bytes = 0
        for one in operations:
            if isinstance(one, Put):
                self.size_bytes += len(one.key) + len(one.value)


class _Group(Generic[Result]):
    """Transactions that are committed together, and their union."""

    def __init__(self, members: Iterable[_Transaction[Result]] = ()) -> None:
        self.members: list[_Transaction[Result]] = []
        self.compares: dict[str, Compare] = {}
        self.operations: dict[str, Operation] = {}
        self._size_bytes = 0
        for one in members:
            self.add(one)

    def add(self, one: _Transaction[Result]) -> None:
        self.members.append(one)
        self.compares |= one.by_compared_key
        self.operations |= one.by_written_key
        self._size_bytes += one.size_bytes

    def accepts(self, one: _Transaction[Result], limits: Limits) -> bool:
        """Return whether a transaction may be added. Any may be the first; a malformed one stays alone."""
        if not self.members:
            return True
        if not (one.is_well_formed and self.members[0].is_well_formed):
            return False
        return self._is_independent(one) and self._has_room(one, limits)

    def _is_independent(self, one: _Transaction[Result]) -> bool:
        return self.operations.keys().isdisjoint(one.by_compared_key) and not any(
            self.compares[key] != one.by_compared_key[key] for key in self.compares.keys() & one.by_compared_key
        )

    def _has_room(self, one: _Transaction[Result], limits: Limits) -> bool:
        operations = len(self.operations) + len(one.by_written_key.keys() - self.operations.keys())
        compares = len(self.compares) + len(one.by_compared_key.keys() - self.compares.keys())
        return (
            operations <= limits.operations
            and compares + limits.compares_per_operation * operations <= limits.compares
            and self._size_bytes + one.size_bytes <= limits.size_bytes
        )


class GroupCommit(Generic[Result]):
    """Commits transactions in groups, one group at a time, in order of submission.

    `transact` commits the union of a group: it returns a result for all members, a `Conflict` or one of `REFUSALS` if
    one of them cannot be committed, or any other exception, which all of them get. A transaction whose caller was
    cancelled before its commit began is left out, unless `keep_cancelled`.
    """

    def __init__(
        self,
        name: str,
        transact: Callable[[Sequence[Compare], Sequence[Operation]], Awaitable[Result]],
        limits: Limits,
        *,
        keep_cancelled: bool = False,
    ) -> None:
        self._name, self._transact, self._limits, self._keep_cancelled = name, transact, limits, keep_cancelled
        self._waiting: deque[_Transaction[Result]] = deque()
        self._worker: asyncio.Task[None] | None = None
        self._in_flight: _Group[Result] = _Group()
        self._settled = asyncio.Event()  # set and cleared at once, to wake all current waiters
        self._next_seconds = 0.0  # on the loop's clock: when the next group may begin

    def submit(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> asyncio.Future[Result]:
        """Submit a transaction at once, and return its future result."""
        one = _Transaction(compares, operations, asyncio.get_running_loop().create_future())
        self._waiting.append(one)
        if self._worker is None:
            self._worker = asyncio.create_task(self._run(), name=self._name)
        return one.answer

    async def settled(self, prefix: str) -> None:
        """Wait for the outcome of the group in flight if it writes under a prefix."""
        if any(key.startswith(prefix) for key in self._in_flight.operations):
            await self._settled.wait()

    def fail_waiting(self, error: Exception) -> None:
        """Fail the transactions that are not in flight yet."""
        _fail(self._waiting, error)
        self._waiting.clear()

    def stop(self, error: Exception) -> Sequence[asyncio.Task[None]]:
        """Fail all unanswered transactions, and return the tasks to cancel. The outcome of those in flight is unknown.

        Submit nothing after this.
        """
        self.fail_waiting(error)
        _fail(self._in_flight.members, error)
        return [self._worker] if self._worker else []

    async def _run(self) -> None:
        """Commit groups until no transaction waits."""
        try:
            while self._waiting:
                await self._pace()
                self._in_flight = group = self._next_group()
                if len(group.members) > 1:
                    self._next_seconds = asyncio.get_running_loop().time() + PACE_SECONDS
                await self._commit(group)
                self._settle()
        finally:
            self._worker = None
            for one in (*self._in_flight.members, *self._waiting):
                one.answer.cancel()  # this task was cancelled
            self._waiting.clear()
            self._settle()

    async def _pace(self) -> None:
        """Wait until the next group may begin, so that more transactions fit into it.

        A fast etcd would otherwise get hundreds of transactions per second with a few writes each. On a busy machine a
        transaction of one write took its three members 4 ms of CPU time, and one of twelve writes 6 ms.
        """
        left_seconds = self._next_seconds - asyncio.get_running_loop().time()
        if left_seconds > 0:
            await asyncio.sleep(left_seconds)

    def _next_group(self) -> _Group[Result]:
        """Return a group of the oldest transactions that may go together."""
        group = _Group[Result]()
        while self._waiting:
            if not self._is_dropped(self._waiting[0]):
                if not group.accepts(self._waiting[0], self._limits):
                    break
                group.add(self._waiting[0])
            self._waiting.popleft()
        return group

    def _is_dropped(self, one: _Transaction[Result]) -> bool:
        return one.answer.cancelled() and not self._keep_cancelled

    async def _commit(self, group: _Group[Result]) -> None:
        """Commit a group; a refused group is halved, so that a transaction that cannot be committed fails alone."""
        members = group.members
        if not members:
            return
        alone = members[0] if len(members) == 1 else None
        try:
            if alone:
                result = await self._transact(alone.compares, alone.operations)
            else:
                result = await self._transact([*group.compares.values()], [*group.operations.values()])
        except Exception as error:
            if alone or not isinstance(error, REFUSALS):
                _fail(members, error)
                return
        else:
            if alone or not isinstance(result, Conflict):
                _resolve(members, result)
                return
        middle = len(members) // 2
        for half in members[:middle], members[middle:]:
            await self._commit(_Group(one for one in half if not self._is_dropped(one)))

    def _settle(self) -> None:
        self._in_flight = _Group()
        self._settled.set()
        self._settled.clear()


def _resolve(members: Iterable[_Transaction[Result]], result: Result) -> None:
    for one in members:
        if not one.answer.done():
            one.answer.set_result(result)


def _fail(members: Iterable[_Transaction[Result]], error: Exception) -> None:
    for one in members:
        if not one.answer.done():
            one.answer.set_exception(error)
            one.answer.exception()  # mark it as retrieved: the caller may be gone
