"""Commits every write of placement, one transaction at a time.

Theory of operation. Placement is the only writer of its keys while it leads, and must notice at once when it no longer
does. So every transaction compares the leader key with the term under which the state was loaded: once another
placement leads, nothing of this process is committed, not even requests that are still on their way to the store. In
addition, every write compares the revision at which this process last knew its key, and allocating a node's resources
also writes the node's guard key: two leaders can never both allocate from the same node, whatever else goes wrong.

Writes that arrive while a transaction is in progress are grouped into the next one (`store.group_commit`), which makes
many small decisions cheap.

If a transaction gets no answer, its outcome is unknown: it may have been committed, or may still be. So a new term is
begun as soon as the store is available, which fences off the old transaction. Then its keys show the outcome, because
no other process has written them: either all have the same newer revision, or none has, and the transaction is
retried. Nothing else has to be reloaded for that, and queued writes keep waiting. Only if another process has written
placement's keys is the content of the store no longer known: then all waiting writes fail, and nothing is committed
until `start` provides the loaded revisions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import structlog

from cotenant import fail_points, telemetry
from cotenant.history.events import Wrote
from cotenant.history.recording import record
from cotenant.leadership.leadership_term import LeadershipTerm
from cotenant.rpc.events import Event
from cotenant.rpc.task_cancellation import cancel_and_wait
from cotenant.store.group_commit import GroupCommit, Limits, TransactionRefused
from cotenant.store.port import (
    Committed,
    Compare,
    Conflict,
    Delete,
    Entry,
    NotLeader,
    Operation,
    Put,
    Store,
    StoreUnavailable,
)

log = structlog.get_logger()

Answer = TypeVar("Answer")

OPERATIONS_MAX = 100
# etcd accepts 128 operations, as many comparisons and 1.5 MiB; each write compares its key, and a fence is added
LIMITS = Limits(operations=OPERATIONS_MAX, compares=120, size_bytes=512 * 1024, compares_per_operation=1)
RETRY_SECONDS = 0.3

COMMITS = telemetry.counter("cotenant.placement.commits", "{transaction}", "Transactions of placement, by outcome.")


class Fenced(Exception):
    """Another process has written keys that this process owned; the state must be reloaded."""


class Halted(Exception):
    """Nothing is committed now: the state is being reloaded, or placement is shutting down."""


class Outdated(TransactionRefused):
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


class Committer:
    """Commits writes in order of submission, those of a submission atomically.

    After an unknown outcome it begins a new leadership term.
    """

    def __init__(self, store: Store, leadership_term: LeadershipTerm) -> None:
        self._store, self._leadership_term = store, leadership_term
        self.halted: Event[[Exception]] = Event()  # with the error that stopped all commits
        # with the error that left an outcome unknown, and with None once it is resolved
        self.outcome_unknown: Event[[Exception | None]] = Event()
        self._fence: Compare | None = None  # None while halted
        self._revisions: dict[str, int] = {}
        self._commits = GroupCommit("placement-committer", self._transact, LIMITS, keep_cancelled=True)

    def start(self, fence: Compare, revisions: Mapping[str, int]) -> None:
        """Start committing; `revisions` holds the revision of every existing key."""
        self._fence, self._revisions = fence, dict(revisions)

    async def close(self) -> None:
        """Stop committing and fail all unanswered writes."""
        self._fence = None
        await cancel_and_wait(*self._commits.stop(Halted("placement is shutting down")))

    def halt(self, error: Exception) -> None:
        """Stop committing until the next `start`, and fail the waiting writes with the error."""
        if self._fence is None:
            return
        self._fence = None
        self._commits.fail_waiting(error)
        log.error("committer_halted", error=f"{type(error).__name__}: {error}")
        self.halted(error)

    async def commit(self, writes: Sequence[Write], under: Sequence[Compare] = ()) -> int:
        """Commit writes and return the revision.

        Raises: see `submit`.
        """
        return await self.submit(writes, under)

    def submit(self, writes: Sequence[Write], under: Sequence[Compare] = ()) -> asyncio.Future[int]:
        """Submit writes at once and return a future of their revision. Waiting writes fail when the committer halts.

        `under` must also hold for the commit: the leadership of the service that asked for the write, or the revision
        of records on which the decision is based.

        Raises (now, or from the future):
            Fenced: another writer owns one of the keys now.
            NotLeader: another process leads; whether this was committed is unknown.
            Halted: nothing was submitted to the store.
            TooLarge: this does not fit into one transaction.
            Outdated: one of the conditions no longer holds.
        """
        if self._fence is None:
            raise Halted("placement is reloading its state")
        if len(writes) > OPERATIONS_MAX:
            raise TooLarge(f"{len(writes)} writes belong together; a transaction takes {OPERATIONS_MAX}")
        last = {one.key: one for one in writes}
        return self._commits.submit(
            under, [Delete(key) if one.value is None else Put(key, one.value) for key, one in last.items()]
        )

    async def _transact(self, under: Sequence[Compare], operations: Sequence[Operation]) -> int:
        """Commit operations and return the revision; on an error that is not of single writes, halt."""
        try:
            return await self._transact_fenced(under, operations)
        except (TooLarge, Outdated):
            raise
        except Exception as error:  # fail the waiting callers whatever the error is
            self.halt(error)
            raise

    async def _transact_fenced(self, under: Sequence[Compare], operations: Sequence[Operation]) -> int:
        try:
            result = await self._transact_answered(under, operations)
        except ValueError as error:  # larger than the store accepts; nothing was written
            COMMITS.add(outcome=TooLarge.__name__)
            raise TooLarge(str(error)) from error
        if isinstance(result, Conflict):
            over = await self._outdated(under)
            COMMITS.add(outcome=(Outdated if over else Fenced).__name__)
            raise Outdated(over) if over else Fenced(_fenced_reason(one.key for one in operations))
        record(Wrote(result.revision, "placement", self._leadership_term.identity))
        self._take(operations, result.revision)
        return result.revision

    async def _transact_answered(
        self, under: Sequence[Compare], operations: Sequence[Operation]
    ) -> Committed | Conflict:
        """Run a transaction, and resolve its outcome if no answer comes."""
        own = [Compare(one.key, self._revisions.get(one.key, 0)) for one in operations]
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
                if committed := await self._resolve_unknown_outcome(operations, own, error):
                    return committed
            else:
                await fail_points.reach("placement.committed")
                return result

    async def _resolve_unknown_outcome(
        self, operations: Sequence[Operation], own: Sequence[Compare], error: Exception
    ) -> Committed | None:
        """Return the outcome of an unanswered transaction, read from its keys; None: it will never be committed.

        Raises:
            Fenced: another process has written one of the keys.
        """
        fence = self._fence
        log.warning("commit_outcome_unknown", error=str(error))
        self.outcome_unknown(error)
        await _retry_until_answered(self._leadership_term.renew)
        renewed = self._leadership_term.fence
        if self._fence is not fence:
            raise Halted("placement is reloading its state")
        self._fence = renewed
        conclusive = [
            one for one, made in zip(own, operations, strict=True) if one.mod_revision or isinstance(made, Put)
        ]
        found = {one.key: await self._entry(one.key) for one in conclusive}
        self.outcome_unknown(None)
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

    async def _outdated(self, under: Sequence[Compare]) -> Compare | None:
        """Return a failed condition on another service's record, which does not mean that another placement leads."""
        for compare in under:
            if _revision(await self._entry(compare.key)) != compare.mod_revision:
                return compare
        return None

    def _take(self, operations: Sequence[Operation], revision: int) -> None:
        COMMITS.add(outcome="committed")
        for one in operations:
            if isinstance(one, Delete):
                self._revisions.pop(one.key, None)
            else:
                self._revisions[one.key] = revision


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
