"""What a store forgets, and when: history that no watch asks for any more, and the room that it took on disk."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import structlog

from cotenant import fail_points
from cotenant.store.ballast import HoldsBallast
from cotenant.store.capacity import capacity_of
from cotenant.store.port import Delete, Put, Store, StoreUnavailable

log = structlog.get_logger()

KEPT_SECONDS = 600.0  # of history: a watch that was away for less goes on where it was
TENDED = "store/tended"  # a key that is written and deleted at once
TEND_SECONDS, TEND_SECONDS_MIN = 60.0, 1.0
PRESSED_KEPT_SECONDS = 5.0  # of history, while space is short: a watch that was away for longer lists again
LOOK_SECONDS = 2.0  # between two looks at how much space there is
COLLECT_SECONDS, PRESSED_COLLECT_SECONDS = 300.0, 10.0  # between two looks for parts of specs that nobody names
TENDS_WITHIN = 4  # so much later than it may be is it forgotten at most


@runtime_checkable
class Defragments(Protocol):
    """A store that takes room on disk for what it has forgotten, until it is told to give it back."""

    async def defragment(self) -> Sequence[str]:
        """Give room back where there is much, and say where that was."""


@runtime_checkable
class CollectsParts(Protocol):
    """A store that keeps parts of specs apart."""

    async def collect_parts(self) -> int:
        """Delete parts that no record names; return how many there were. Raises `StoreUnavailable`."""


class Upkeep:
    """Forgets history older than `kept_seconds`. Several processes may do it: what is forgotten is no error."""

    def __init__(
        self, store: Store, *, kept_seconds: float = KEPT_SECONDS, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._store, self._kept_seconds, self._now = store, kept_seconds, now
        self._seen: deque[tuple[float, int]] = deque()  # when the store was at which revision
        self._forgotten = 0
        self._collected = -math.inf

    async def run(self) -> None:
        """Tend the store for ever; at each look while space is short."""
        pause = min(TEND_SECONDS, max(TEND_SECONDS_MIN, self._kept_seconds / TENDS_WITHIN))
        tended = -math.inf
        while True:
            try:
                pressed = await self._is_pressed()
                if pressed or self._now() - tended >= pause:
                    await self.tend(pressed=pressed)
                    tended = self._now()
            except StoreUnavailable as error:
                log.info("store_not_tended", error=str(error))
            await asyncio.sleep(min(pause, LOOK_SECONDS))

    async def _is_pressed(self) -> bool:
        capacity = await capacity_of(self._store)
        return capacity is not None and capacity.pressed

    async def _write_a_little(self) -> None:
        """Have etcd notice what it compacted: without a write its status goes on counting the pages as in use."""
        capacity = await capacity_of(self._store)
        if capacity is None or capacity.path or capacity.full:
            return
        for operation in (Put(TENDED, b""), Delete(TENDED)):
            await self._store.transact([], [operation])

    async def tend(self, *, pressed: bool = False) -> int:
        """Forget what is old enough, sooner where space is pressed, and return up to which revision."""
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
        old, kept_seconds = 0, min(self._kept_seconds, PRESSED_KEPT_SECONDS) if pressed else self._kept_seconds
        while self._seen and now - self._seen[0][0] >= kept_seconds:
            old = self._seen.popleft()[1]
        if old > self._forgotten:
            await self._store.compact(old)
            await fail_points.reach("upkeep.compacted")
            self._forgotten = old
        if pressed:
            await self._write_a_little()
        if isinstance(self._store, Defragments):  # of what was forgotten some time ago: a store forgets at its leisure
            for where in await self._store.defragment():
                log.info("store_defragmented", member=where)
        return self._forgotten
