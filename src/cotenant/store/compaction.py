"""Compaction: drops history that no watch needs, and releases its space on disk."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from cotenant import fail_points
from cotenant.core.model.limits import SPEC_BYTES_MAX
from cotenant.store.ballast import HoldsBallast
from cotenant.store.capacity import capacity_of
from cotenant.store.port import Delete, Put, Store, StoreUnavailable
from cotenant.telemetry.plain_structlog import structlog

log = structlog.get_logger()

HISTORY_SECONDS = 600.0  # of history: a watch that was interrupted for less resumes
TOUCHED_KEY = "store/tended"  # a key that is written and then deleted
INTERVAL_SECONDS, INTERVAL_SECONDS_MIN = 60.0, 1.0
PRESSED_HISTORY_SECONDS = 5.0  # of history, while space is short: watches interrupted for longer list again
LOOK_SECONDS = 2.0  # between two checks of the free space
COLLECT_SECONDS, PRESSED_COLLECT_SECONDS = 300.0, 10.0  # between two collections of unreferenced spec parts
STEPS_PENDING = 3  # whose pages are in use twice
STEPS_MAX = 256  # in which history is dropped; the first also drops what is older
RUNS_PER_RETENTION = 4  # history lives at most 1/4 longer than configured
PAGE_BYTES_MAX = 2 * SPEC_BYTES_MAX  # of etcd's file: a page holds two values or more, and few are larger than a spec


@runtime_checkable
class Defragments(Protocol):
    """A store that keeps the space of dropped history on disk until it is defragmented."""

    async def defragment(self) -> Sequence[str]:
        """Release unused space where there is much; return the members that did."""


@runtime_checkable
class CollectsParts(Protocol):
    """A store that stores large parts of specs separately."""

    async def collect_parts(self) -> int:
        """Delete unreferenced parts; return how many there were. Raises `StoreUnavailable`."""


class Compactor:
    """Drops history older than `kept_seconds`. Several processes may do it: compacting twice is no error."""

    def __init__(
        self, store: Store, *, kept_seconds: float = HISTORY_SECONDS, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._store, self._kept_seconds, self._now = store, kept_seconds, now
        self._seen: deque[tuple[float, int]] = deque()  # times and the store's revisions then
        self._forgotten = 0
        self._collected = -math.inf

    async def run(self) -> None:
        """Compact periodically until cancelled; while space is short, at each check."""
        pause = min(INTERVAL_SECONDS, max(INTERVAL_SECONDS_MIN, self._kept_seconds / RUNS_PER_RETENTION))
        tended = -math.inf
        while True:
            try:
                pressed = await self._is_pressed()
                if pressed or self._now() - tended >= pause:
                    await self.run_once(pressed=pressed)
                    tended = self._now()
            except StoreUnavailable as error:
                log.info("store_compaction_failed", error=str(error))
            await asyncio.sleep(min(pause, LOOK_SECONDS))

    async def _is_pressed(self) -> bool:
        capacity = await capacity_of(self._store)
        return capacity is not None and capacity.pressed

    async def _compact(self, revision: int) -> None:
        """Drop history up to a revision; that of an etcd in steps, so that its file does not reach its quota.

        Before etcd frees a page from which it drops something, it writes the rest of the page to another place: one
        compaction can double the size of its file. A page can be used again two commits after it was freed.
        """
        capacity, step = await capacity_of(self._store), revision
        if capacity and not capacity.path:
            step = max(1, (capacity.limit_bytes - capacity.size_bytes) // (STEPS_PENDING * PAGE_BYTES_MAX))
        begin = max(self._forgotten, revision - STEPS_MAX * step)
        for reached in (*range(begin + step, revision, step), revision):
            await self._store.compact(reached)
            await fail_points.reach("upkeep.compacted")
        self._forgotten = revision

    async def _touch(self) -> None:
        """Write once, so that etcd notices what it compacted: until then its status counts the pages as in use."""
        capacity = await capacity_of(self._store)
        if capacity is None or capacity.path or capacity.full:
            return
        for operation in (Put(TOUCHED_KEY, b""), Delete(TOUCHED_KEY)):
            await self._store.transact([], [operation])

    async def run_once(self, *, pressed: bool = False) -> int:
        """Drop old history, more of it while space is short; return the revision up to which it is dropped."""
        if isinstance(self._store, HoldsBallast):
            await self._store.hold_ballast()
        if isinstance(self._store, CollectsParts) and self._now() - self._collected >= (
            PRESSED_COLLECT_SECONDS if pressed else COLLECT_SECONDS
        ):
            self._collected = self._now()
            await self._store.collect_parts()
        revision = (await self._store.list("store/")).revision
        now = self._now()
        self._seen.append((now, revision))
        old, kept_seconds = 0, min(self._kept_seconds, PRESSED_HISTORY_SECONDS) if pressed else self._kept_seconds
        while self._seen and now - self._seen[0][0] >= kept_seconds:
            old = self._seen.popleft()[1]
        if old > self._forgotten:
            await self._compact(old)
        if pressed:
            await self._touch()
        if isinstance(self._store, Defragments):  # of earlier compactions: a store frees pages lazily
            for where in await self._store.defragment():
                log.info("store_defragmented", member=where)
        return self._forgotten
