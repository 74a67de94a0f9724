"""The embedded store: all state in memory, and each write in an SQLite file before it is acknowledged.

A disk commits a hundred transactions in about the time of one, so they are committed in groups. While the writer thread
waits for the disk, transactions queue up; when it is done, all queued transactions are drafted one after another, each
checked on its own, and the draft is written as one SQLite transaction. Only then are its futures resolved and its
changes visible to readers and watches. So more writers make larger groups; no writer waits for more than two commits.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cotenant.store.capacity import RESERVE_BYTES_DEFAULT, Capacity, disk_capacity, effective_reserve
from cotenant.store.keyspace import Draft, HistoryLimit
from cotenant.store.local_store import LocalStore, Result
from cotenant.store.memory import DEFAULT_LIMIT
from cotenant.store.port import StoreUnavailable
from cotenant.store.sqlite_journal import Journal
from cotenant.store.sqlite_sidecar import SYNC_SECONDS

GROUP_MAX = 1_000  # transactions in one commit: about 10 ms of drafting


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step that waits to be drafted, and the future of its caller."""

    step: Callable[[Draft], Any]
    done: asyncio.Future[Any]


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step, delivered once the draft is committed."""

    done: asyncio.Future[Any]
    result: Any = None
    refusal: Exception | None = None

    def deliver(self) -> None:
        """Resolve the future, unless its caller is gone."""
        if self.done.done():
            return
        if self.refusal:
            self.done.set_exception(self.refusal)
        else:
            self.done.set_result(self.result)


class SqliteStore(LocalStore):
    """The port over one file, which no other process may have open.

    Opening reads the whole file; do it at startup. `now` is the clock for leases.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        limit: HistoryLimit = DEFAULT_LIMIT,
        now: Callable[[], float] = time.monotonic,
        reserve_bytes: int = RESERVE_BYTES_DEFAULT,
    ) -> None:
        """Open the file. `reserve_bytes` of its file system are reserved: they are not for new jobs."""
        self._reserve_bytes = reserve_bytes
        self._journal = Journal(Path(path))
        try:
            super().__init__(self._journal.load(), limit, now)
        except BaseException:
            self._journal.close()  # do not lock out a repair of the file
            raise
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cotenant-store")
        self._asked: deque[PendingStep] = deque()
        self._committing: asyncio.Task[None] | None = None
        self._syncing: asyncio.TimerHandle | None = None

    @property
    def regression(self) -> str:
        """How the file is older than what was committed, or another one; "" if it is neither."""
        return self._journal.regression

    async def accept(self) -> None:
        """Accept the file as it is."""
        revision = self._keyspace.revision
        await asyncio.get_running_loop().run_in_executor(self._writer, self._journal.accept, revision)

    async def _submit(self, step: Callable[[Draft], Result]) -> Result:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Result] = loop.create_future()
        self._asked.append(PendingStep(step, done))
        if self._committing is None:
            self._committing = loop.create_task(self._commit_all())
        return await done

    async def _commit_all(self) -> None:
        """Commit groups until no step waits."""
        loop = asyncio.get_running_loop()
        try:
            while self._asked:
                draft, answers = self._draft_group()
                try:
                    if not draft.is_empty:
                        await loop.run_in_executor(self._writer, self._journal.write, draft)
                        self._keep(draft)
                        self._sync_soon()
                except Exception as error:  # any error must reach the callers; nothing was applied
                    answers = [StepResult(answer.done, refusal=error) for answer in answers]
                for answer in answers:
                    answer.deliver()
        finally:
            self._committing = None

    def _sync_soon(self) -> None:
        """Schedule a sync of the sidecar, for which no commit waits."""
        if self._syncing is None and self._journal.sidecar.dirty:
            self._syncing = asyncio.get_running_loop().call_later(SYNC_SECONDS, self._sync)

    def _sync(self) -> None:
        self._syncing = None
        asyncio.get_running_loop().run_in_executor(None, self._journal.sidecar.sync)

    def _draft_group(self) -> tuple[Draft, list[StepResult]]:
        draft = Draft(self._keyspace)
        answers = [attempt(self._asked.popleft(), draft) for _ in range(min(len(self._asked), GROUP_MAX))]
        draft.trim(self._limit)
        return draft, answers

    async def capacity(self) -> Capacity:
        """Return how much space the file system has."""
        try:
            return await asyncio.to_thread(self._capacity)
        except OSError as error:
            raise StoreUnavailable(f"cannot check the space of {self._journal.path}: {error.strerror}") from error

    def _capacity(self) -> Capacity:
        disk = os.statvfs(self._journal.path.parent)
        return disk_capacity(
            self._journal.size_bytes(),
            disk.f_bavail * disk.f_frsize,
            disk.f_blocks * disk.f_frsize,
            self._reserve_bytes,
            str(self._journal.path),
            self._journal.full,
        )

    async def hold_ballast(self) -> None:
        """Allocate the ballast if it is missing and there is space beside the reserve."""
        await asyncio.get_running_loop().run_in_executor(self._writer, self._take_ballast)

    def _take_ballast(self) -> None:
        with suppress(OSError):
            disk = os.statvfs(self._journal.path.parent)
            total = disk.f_blocks * disk.f_frsize
            self._journal.ballast.take(effective_reserve(self._reserve_bytes, total))

    async def close(self) -> None:
        """Commit the waiting steps, end all watches and close the file."""
        if self._closed:
            return
        await super().close()
        if self._committing:
            await asyncio.wait([self._committing])
        if self._syncing:
            self._syncing.cancel()
        await asyncio.get_running_loop().run_in_executor(self._writer, self._journal.close)
        self._writer.shutdown()


def attempt(asked: PendingStep, draft: Draft) -> StepResult:
    """Try one step; its error concerns only its caller."""
    try:
        return StepResult(asked.done, asked.step(draft))
    except Exception as refusal:  # any error goes to the caller
        return StepResult(asked.done, refusal=refusal)
