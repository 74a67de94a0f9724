"""Commits every write of placement, one transaction at a time.

Theory of operation. Placement is the only writer of its keys while it leads, and must notice at once when it no longer
does. So every transaction compares the leader key with the term under which the state was loaded: once another
placement leads, nothing of this process is committed, not even requests that are still on their way to the store. In
addition, every write compares the revision at which this process last knew its key, and allocating a node's resources
also writes the node's guard key: two leaders can never both allocate from the same node, whatever else goes wrong.

Writes that arrive while a transaction is in progress are grouped into the next one, as far as they fit; this makes many
small decisions cheap. Under load, transactions are paced so that more writes fit into each.

If a transaction gets no answer, its outcome is unknown: it may have been committed, or may still be. So a new term is
begun as soon as the store is available, which fences off the old transaction. Then its keys show the outcome, because
no other process has written them: either all have the same newer revision, or none has, and the transaction is
retried. Nothing else has to be reloaded for that, and queued writes keep waiting. Only if another process has written
placement's keys is the content of the store no longer known: then all waiting writes fail, and nothing is committed
until `start` provides the loaded revisions.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import structlog

from cotenant import fail_points, telemetry
from cotenant.history.events import Wrote
from cotenant.history.recording import record
from cotenant.rpc.task_cancellation import cancel_and_wait
from cotenant.store.group_commit_pacing import CommitPacing
from cotenant.store.port import (
    Committed,
    Compare,
    Conflict,
    Delete,
    Entry,
    NotLeader,
    Put,
    Store,
    StoreUnavailable,
)

log = structlog.get_logger()

Answer = TypeVar("Answer")

OPERATIONS_MAX = 100  # etcd's default limit is 128 per transaction
COMPARES_MAX = 120  # the same limit applies to comparisons
BYTES_MAX = 512 * 1024  # etcd's default limit is 1.5 MiB per request
RETRY_SECONDS = 0.3

COMMITS = telemetry.counter("cotenant.placement.commits", "{transaction}", "Transactions of placement, by outcome.")


class Fenced(Exception):
    """Another process has written keys that this process owned; the state must be reloaded."""


class Halted(Exception):
    """Nothing is committed now: the state is being reloaded, or placement is shutting down."""


class Outdated(Exception):
    """A condition of a write no longer holds; nothing was written. `key` is the record that has changed."""

    def __init__(self, compare: Compare) -> None:
        super().__init__(f"{compare.key} has changed since revision {compare.mod_revision}")
        self.key = compare.key


class TooLarge(ValueError):
    """A decision needs more or larger writes than fit into one transaction."""


@dataclass(frozen=True, slots=True)
class Write:
    """A put of a value under a key, or a delete of the key if the value is None."""

    key: str
    value: bytes | None


@dataclass(frozen=True, slots=True)
class _Group:
    writes: Sequence[Write]
    done: asyncio.Future[int]
    under: Sequence[Compare] = ()

    @property
    def size(self) -> int:
        return sum(len(write.value or b"") + len(write.key) for write in self.writes)


class Committer:
    """Commits groups of writes, each atomically, in order of submission.

    `renew` begins a new term and returns its fence. `on_unknown_outcome` is called with the error that left an outcome
    unknown, and with None once it is resolved; `on_halt` with the error that stopped all commits.
    """

    def __init__(
        self,
        store: Store,
        on_halt: Callable[[Exception], None],
        renew: Callable[[], Awaitable[Compare]],
        on_unknown_outcome: Callable[[Exception | None], None],
    ) -> None:
        self._store, self._on_halt, self._renew, self._on_unknown_outcome = store, on_halt, renew, on_unknown_outcome
        self.identity = ""  # the writer's identity, for recorded histories
        self._fence: Compare | None = None  # None while halted
        self._revisions: dict[str, int] = {}
        self._waiting: deque[_Group] = deque()
        self._wake = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None
        self._pace = CommitPacing()

    def start(self, fence: Compare, revisions: Mapping[str, int]) -> None:
        """Start committing; `revisions` holds the revision of every existing key."""
        self._fence, self._revisions = fence, dict(revisions)
        self._worker = self._worker or asyncio.create_task(self._run(), name="placement-committer")

    async def close(self) -> None:
        """Stop committing and fail the waiting groups."""
        self._fence = None
        if self._worker:
            await cancel_and_wait(self._worker)
        self._fail_waiting(Halted("placement is shutting down"))

    def halt(self, error: Exception) -> None:
        """Stop committing until the next `start`, and fail the waiting groups with the error."""
        if self._fence is None:
            return
        self._fence = None
        self._fail_waiting(error)
        log.error("committer_halted", error=f"{type(error).__name__}: {error}")
        self._on_halt(error)

    async def commit(self, writes: Sequence[Write], under: Sequence[Compare] = ()) -> int:
        """Commit a group and return the revision.

        Raises: see `submit`.
        """
        return await self.submit(writes, under)

    def submit(self, writes: Sequence[Write], under: Sequence[Compare] = ()) -> asyncio.Future[int]:
        """Submit a group at once and return a future of its revision. Waiting groups fail when the committer halts.

        `conditions` must also hold for the commit: the leadership of the service that asked for the write, or the
        revision of records on which the decision is based.

        Raises (now, or from the future):
            Fenced: another writer owns one of the keys now.
            NotLeader: another process leads; whether the group was committed is unknown.
            Halted: the group was not submitted to the store.
            TooLarge: the group does not fit into one transaction.
            Outdated: one of its conditions no longer holds.
        """
        if self._fence is None:
            raise Halted("placement is reloading its state")
        if len(writes) > OPERATIONS_MAX:
            raise TooLarge(f"{len(writes)} writes belong together; a transaction takes {OPERATIONS_MAX}")
        group = _Group(writes, asyncio.get_running_loop().create_future(), under)
        self._waiting.append(group)
        self._wake.set()
        return group.done

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                batch = self._next_batch()
                self._pace.begin(len(batch))
                try:
                    await self._commit_batch(batch)
                except Exception as error:  # fail the waiting callers whatever the error is, and go on
                    _fail(batch, error)
                    self.halt(error)
                await self._pace.wait()

    def _next_batch(self) -> list[_Group]:
        batch = [self._waiting.popleft()]
        operations, size, under = len(batch[0].writes), batch[0].size, set(batch[0].under)
        while self._waiting:
            head = self._waiting[0]
            operations, size, under = operations + len(head.writes), size + head.size, under.union(head.under)
            if operations > OPERATIONS_MAX or operations + len(under) > COMPARES_MAX or size > BYTES_MAX:
                break
            batch.append(self._waiting.popleft())
        return batch

    async def _commit_batch(self, batch: list[_Group]) -> None:
        """Commit groups together; if that fails, commit the valid ones, so that a bad group fails alone."""
        last = {write.key: write for group in batch for write in group.writes}
        under = dict.fromkeys(compare for group in batch for compare in group.under)
        try:
            result = await self._transacted(under, last)
        except ValueError as error:  # larger than the store accepts; nothing was written
            COMMITS.add(outcome=TooLarge.__name__)
            if len(batch) == 1:
                _fail(batch, TooLarge(str(error)))
            else:
                for group in batch:
                    await self._commit_batch([group])
            return
        if not isinstance(result, Conflict):
            record(Wrote(result.revision, "placement", self.identity))
            self._take(last, result.revision)
            _resolve(batch, result.revision)
            return
        over = await self._outdated(under)
        COMMITS.add(outcome=(Outdated if over else Fenced).__name__)
        if not over:
            raise Fenced(_fenced_reason(last))
        rest = []
        for group in batch:
            if why := next((compare for compare in group.under if compare in over), None):
                _fail([group], Outdated(why))
            else:
                rest.append(group)
        if rest:
            await self._commit_batch(rest)

    async def _transacted(self, under: Iterable[Compare], last: Mapping[str, Write]) -> Committed | Conflict:
        """Run a transaction, and resolve its outcome if no answer comes."""
        operations = [Delete(w.key) if w.value is None else Put(w.key, w.value) for w in last.values()]
        own = [Compare(key, self._revisions.get(key, 0)) for key in last]
        while True:
            if self._fence is None:
                raise Halted("placement is reloading its state")
            await fail_points.reach("placement.committing")
            try:
                result = await self._store.transact([self._fence, *under, *own], operations)
            except NotLeader:
                raise
            except StoreUnavailable as error:
                COMMITS.add(outcome="unanswered")
                if committed := await self._resolve_unknown_outcome(last, own, error):
                    return committed
            else:
                await fail_points.reach("placement.committed")
                return result

    async def _resolve_unknown_outcome(
        self, last: Mapping[str, Write], own: Sequence[Compare], error: Exception
    ) -> Committed | None:
        """Return the outcome of an unanswered transaction, read from its keys; None: it will never be committed.

        Raises:
            Fenced: another process has written one of the keys.
        """
        fence = self._fence
        log.warning("commit_outcome_unknown", error=str(error))
        self._on_unknown_outcome(error)
        renewed = await _retry_until_answered(self._renew)
        if self._fence is not fence:
            raise Halted("placement is reloading its state")
        self._fence = renewed
        conclusive = [one for one in own if one.mod_revision or last[one.key].value is not None]
        found = {one.key: await self._entry(one.key) for one in conclusive}
        self._on_unknown_outcome(None)
        changed = [one.key for one in conclusive if _revision(found[one.key]) != one.mod_revision]
        log.info("commit_outcome_resolved", committed=bool(changed), term=renewed.mod_revision)
        if not changed:
            return None
        revisions = {entry.mod_revision for key in changed if (entry := found[key])}
        if len(changed) < len(conclusive) or len(revisions) > 1:
            raise Fenced(_fenced_reason(changed))
        return Committed(revisions.pop() if revisions else renewed.mod_revision)

    async def _entry(self, key: str) -> Entry | None:
        async def ask() -> Entry | None:
            return await self._store.get(key)

        return await _retry_until_answered(ask)

    async def _outdated(self, under: Iterable[Compare]) -> set[Compare]:
        """Return the failed conditions on other services' records, which do not mean that another placement leads."""
        return {compare for compare in under if _revision(await self._entry(compare.key)) != compare.mod_revision}

    def _take(self, writes: Mapping[str, Write], revision: int) -> None:
        COMMITS.add(outcome="committed")
        for write in writes.values():
            if write.value is None:
                self._revisions.pop(write.key, None)
            else:
                self._revisions[write.key] = revision

    def _fail_waiting(self, error: Exception) -> None:
        _fail(self._waiting, error)
        self._waiting.clear()


async def _retry_until_answered(ask: Callable[[], Awaitable[Answer]]) -> Answer:
    """Call the store until it answers.

    Raises:
        NotLeader: another process leads.
    """
    while True:
        try:
            return await ask()
        except NotLeader:
            raise
        except StoreUnavailable as error:
            log.info("store_unavailable", error=str(error))
            await asyncio.sleep(RETRY_SECONDS)


def _fenced_reason(keys: Iterable[str]) -> str:
    first = ", ".join(sorted(keys)[:3])
    return f"another writer has changed one of {first}" if first else "another placement has begun to lead"


def _revision(entry: Entry | None) -> int:
    return entry.mod_revision if entry else 0


def _resolve(groups: Sequence[_Group], revision: int) -> None:
    for group in groups:
        if not group.done.done():
            group.done.set_result(revision)


def _fail(groups: Sequence[_Group] | deque[_Group], error: Exception) -> None:
    for group in groups:
        if not group.done.done():
            group.done.set_exception(error)
            group.done.exception()  # mark it as retrieved: the caller may be gone
