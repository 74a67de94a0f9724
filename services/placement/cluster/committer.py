"""Every write of placement goes through here, one transaction at a time.

Theory of operation. Placement is the only writer of its keys as long as it leads, and it must find out at once when
it is not. So every transaction compares the leader key with the term under which the state was read: once another
placement leads, nothing of this one is committed any more, not even what the store was asked for before. Besides, every
write compares the revision at which this process last knew its key, and giving out what a node has also writes the
node's guard key: two leaders could never both give out a part of the same node, whatever else goes wrong.

Writes that arrive while a transaction is under way go into the next one together, as long as they fit into it; that is
what makes many small decisions cheap. While many come, transactions keep a pace, so that more fit into each.

Where no answer to a transaction comes, it may have been committed, or may still be. So a new term is begun, as soon as
the store is there: from then on what was asked for under the old one is refused. Then the keys tell what became of it,
for nobody else has written them: all of them bear one newer revision, or none does, and then it is tried again. Nothing
else has to be read anew for that, and whatever waits in line goes on waiting. Only where somebody else has written what
is ours is it not known any more what the store holds: everything that waits fails then, and nothing is committed before
`start` says what the store holds.
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
from cotenant.rpc.task_cancellation import end
from cotenant.store.group_commit_pacing import Pace
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

OPERATIONS_MAX = 100  # etcd takes 128 in a transaction unless told otherwise
COMPARES_MAX = 120  # and as many comparisons
BYTES_MAX = 512 * 1024  # etcd takes 1.5 MiB in a request
RETRY_SECONDS = 0.3

COMMITS = telemetry.counter("cotenant.placement.commits", "{transaction}", "Transactions of placement, by outcome.")


class Fenced(Exception):
    """Someone else has written what this process believed to own; it must read its state anew."""


class Halted(Exception):
    """Nothing is committed now: the state is being read anew, or placement is shutting down."""


class Outdated(Exception):
    """What this was wanted for is so no more; nothing was written. `key` is the record that has changed."""

    def __init__(self, compare: Compare) -> None:
        super().__init__(f"{compare.key} has changed since revision {compare.mod_revision}")
        self.key = compare.key


class TooLarge(ValueError):
    """One decision that would need more writes, or larger ones, than a transaction may have."""


@dataclass(frozen=True, slots=True)
class Write:
    """Put a value under a key, or delete the key where the value is None."""

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
    """Commits groups of writes, each group whole or not at all, in the order in which they came.

    `renew` begins a new term and returns its fence. `on_doubt` hears why it is not known what has been committed, and
    None once it is; `on_halt` why nothing is committed any more.
    """

    def __init__(
        self,
        store: Store,
        on_halt: Callable[[Exception], None],
        renew: Callable[[], Awaitable[Compare]],
        on_doubt: Callable[[Exception | None], None],
    ) -> None:
        self._store, self._on_halt, self._renew, self._on_doubt = store, on_halt, renew, on_doubt
        self.identity = ""  # under which this writes, for histories
        self._fence: Compare | None = None  # None while halted
        self._revisions: dict[str, int] = {}
        self._waiting: deque[_Group] = deque()
        self._wake = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None
        self._pace = Pace()

    def start(self, fence: Compare, revisions: Mapping[str, int]) -> None:
        """Begin, knowing the revision of each key; a key that is not named is known not to exist."""
        self._fence, self._revisions = fence, dict(revisions)
        self._worker = self._worker or asyncio.create_task(self._run(), name="placement-committer")

    async def close(self) -> None:
        """Stop; groups still waiting are told so."""
        self._fence = None
        if self._worker:
            await end(self._worker)
        self._fail_waiting(Halted("placement is shutting down"))

    def halt(self, error: Exception) -> None:
        """Commit nothing any more until the next `start`, and say why to all who wait."""
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
        """Put a group in line at once, and promise its revision. What waits in line fails when the committer halts.

        `under` is what has to be so besides: another service's leadership at whose word this is written, or its records
        that it was decided on.

        Raises (now, or when the promise is kept):
            Fenced: another writer owns one of the keys now.
            NotLeader: another process leads; whether the group was committed is unknown.
            Halted: it was not tried.
            TooLarge: the group is more than a transaction may have.
            Outdated: some of what it is written under is so no more.
        """
        if self._fence is None:
            raise Halted("placement is reading its state anew")
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
                except Exception as error:  # whatever it is, those who wait have to know, and the next ones be served
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
        """Commit groups together; where they cannot be, those that can, so that a failure concerns nobody else."""
        last = {write.key: write for group in batch for write in group.writes}
        under = dict.fromkeys(compare for group in batch for compare in group.under)
        try:
            result = await self._transacted(under, last)
        except ValueError as error:  # more than the store takes; nothing was done
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
            _tell(batch, result.revision)
            return
        over = await self._outdated(under)
        COMMITS.add(outcome=(Outdated if over else Fenced).__name__)
        if not over:
            raise Fenced(_why_fenced(last))
        rest = []
        for group in batch:
            if why := next((compare for compare in group.under if compare in over), None):
                _fail([group], Outdated(why))
            else:
                rest.append(group)
        if rest:
            await self._commit_batch(rest)

    async def _transacted(self, under: Iterable[Compare], last: Mapping[str, Write]) -> Committed | Conflict:
        """Write, and find out what came of it where no answer comes."""
        operations = [Delete(w.key) if w.value is None else Put(w.key, w.value) for w in last.values()]
        own = [Compare(key, self._revisions.get(key, 0)) for key in last]
        while True:
            if self._fence is None:
                raise Halted("placement is reading its state anew")
            await fail_points.reach("placement.committing")
            try:
                result = await self._store.transact([self._fence, *under, *own], operations)
            except NotLeader:
                raise
            except StoreUnavailable as error:
                COMMITS.add(outcome="unanswered")
                if committed := await self._find_out(last, own, error):
                    return committed
            else:
                await fail_points.reach("placement.committed")
                return result

    async def _find_out(self, last: Mapping[str, Write], own: Sequence[Compare], error: Exception) -> Committed | None:
        """What became of a transaction, by the keys that it wrote; None where it was not committed and never will be.

        Raises:
            Fenced: somebody else has written one of them.
        """
        fence = self._fence
        log.warning("commit_in_doubt", error=str(error))
        self._on_doubt(error)
        renewed = await _patiently(self._renew)
        if self._fence is not fence:
            raise Halted("placement is reading its state anew")
        self._fence = renewed
        telling = [one for one in own if one.mod_revision or last[one.key].value is not None]
        found = {one.key: await self._entry(one.key) for one in telling}
        self._on_doubt(None)
        changed = [one.key for one in telling if _revision(found[one.key]) != one.mod_revision]
        log.info("commit_found_out", committed=bool(changed), term=renewed.mod_revision)
        if not changed:
            return None
        revisions = {entry.mod_revision for key in changed if (entry := found[key])}
        if len(changed) < len(telling) or len(revisions) > 1:
            raise Fenced(_why_fenced(changed))
        return Committed(revisions.pop() if revisions else renewed.mod_revision)

    async def _entry(self, key: str) -> Entry | None:
        async def ask() -> Entry | None:
            return await self._store.get(key)

        return await _patiently(ask)

    async def _outdated(self, under: Iterable[Compare]) -> set[Compare]:
        """Find the comparisons with others' records that fail: these are no sign that another placement leads."""
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


async def _patiently(ask: Callable[[], Awaitable[Answer]]) -> Answer:
    """Ask the store until it answers.

    Raises:
        NotLeader: it says that another process leads.
    """
    while True:
        try:
            return await ask()
        except NotLeader:
            raise
        except StoreUnavailable as error:
            log.info("store_away", error=str(error))
            await asyncio.sleep(RETRY_SECONDS)


def _why_fenced(keys: Iterable[str]) -> str:
    first = ", ".join(sorted(keys)[:3])
    return f"another writer has changed one of {first}" if first else "another placement has begun to lead"


def _revision(entry: Entry | None) -> int:
    return entry.mod_revision if entry else 0


def _tell(groups: Sequence[_Group], revision: int) -> None:
    for group in groups:
        if not group.done.done():
            group.done.set_result(revision)


def _fail(groups: Sequence[_Group] | deque[_Group], error: Exception) -> None:
    for group in groups:
        if not group.done.done():
            group.done.set_exception(error)
            group.done.exception()  # whoever waited may have gone, and then nobody looks at it
