"""Every write of placement goes through here, one transaction at a time.

Theory of operation. Placement is the only writer of its keys as long as it leads, and it must find out at once when
it is not. So every write compares the revision at which this process last knew its key: another writer's change makes
the transaction fail as a whole. Giving out what a node has also writes the node's guard key, so that two leaders can
never both give out a part of the same node. Writes that arrive while a transaction is under way go into the next one
together, as long as they fit into it; that is what makes many small decisions cheap.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cotenant.store.port import Compare, Conflict, Delete, Put, Store, StoreUnavailable

OPERATIONS_MAX = 100  # etcd takes 128 in a transaction unless told otherwise
BYTES_MAX = 512 * 1024  # etcd takes 1.5 MiB in a request


class Fenced(Exception):
    """Someone else has written what this process believed to own; it must read its state anew."""


class TooLarge(ValueError):
    """One decision that would need more writes than a transaction may have."""


@dataclass(frozen=True, slots=True)
class Write:
    """Put a value under a key, or delete the key where the value is None."""

    key: str
    value: bytes | None


@dataclass(frozen=True, slots=True)
class _Group:
    writes: Sequence[Write]
    done: asyncio.Future[int]

    @property
    def size(self) -> int:
        return sum(len(write.value or b"") + len(write.key) for write in self.writes)


class Committer:
    """Commits groups of writes, each group whole or not at all, in the order in which they came."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._revisions: dict[str, int] = {}
        self._waiting: deque[_Group] = deque()
        self._wake = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None

    def start(self, revisions: Mapping[str, int]) -> None:
        """Begin, knowing the revision of each key; a key that is not named is known not to exist."""
        self._revisions = dict(revisions)
        self._worker = self._worker or asyncio.create_task(self._run(), name="placement-committer")

    async def close(self) -> None:
        """Stop; groups still waiting are told so."""
        if self._worker:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
        self._fail(list(self._waiting), StoreUnavailable("placement is shutting down"))
        self._waiting.clear()

    async def commit(self, writes: Sequence[Write]) -> int:
        """Commit a group and return the revision.

        Raises:
            Fenced: another writer owns one of the keys now.
            StoreUnavailable: the store did not answer; whether the group was committed is unknown.
            TooLarge: the group has more writes than a transaction may have.
        """
        if len(writes) > OPERATIONS_MAX:
            raise TooLarge(f"{len(writes)} writes belong together; a transaction takes {OPERATIONS_MAX}")
        group = _Group(writes, asyncio.get_running_loop().create_future())
        self._waiting.append(group)
        self._wake.set()
        return await group.done

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                await self._commit_batch(self._next_batch())

    def _next_batch(self) -> list[_Group]:
        batch, operations, size = [self._waiting.popleft()], 0, 0
        operations, size = len(batch[0].writes), batch[0].size
        while self._waiting:
            head = self._waiting[0]
            operations, size = operations + len(head.writes), size + head.size
            if operations > OPERATIONS_MAX or size > BYTES_MAX:
                break
            batch.append(self._waiting.popleft())
        return batch

    async def _commit_batch(self, batch: list[_Group]) -> None:
        last = {write.key: write for group in batch for write in group.writes}
        compares = [Compare(key, self._revisions.get(key, 0)) for key in last]
        operations = [Delete(w.key) if w.value is None else Put(w.key, w.value) for w in last.values()]
        try:
            result = await self._store.transact(compares, operations)
        except StoreUnavailable as error:
            self._fail(batch, error)
            return
        if isinstance(result, Conflict):
            await self._settle_conflict(batch, list(last))
            return
        for write in last.values():
            if write.value is None:
                self._revisions.pop(write.key, None)
            else:
                self._revisions[write.key] = result.revision
        for group in batch:
            if not group.done.done():
                group.done.set_result(result.revision)

    async def _settle_conflict(self, batch: list[_Group], keys: list[str]) -> None:
        """Find out whom the conflict concerns: groups are tried one by one, the only one left is told."""
        if len(batch) == 1:
            self._fail(batch, Fenced(f"another writer has changed one of {', '.join(sorted(keys)[:3])}"))
            return
        for group in batch:
            await self._commit_batch([group])

    @staticmethod
    def _fail(groups: Sequence[_Group], error: Exception) -> None:
        for group in groups:
            if not group.done.done():
                group.done.set_exception(error)
