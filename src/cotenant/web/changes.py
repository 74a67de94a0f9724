"""A table of rows that changes, and readers that follow it from where they were.

A reader keeps only a position. It gets each changed row once, however often the row has changed since, so a slow
reader costs nothing and misses nothing.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import NamedTuple

REMOVALS_MAX = 10_000


class Batch(NamedTuple):
    """What has changed up to a position; `whole`: these are all rows, and the reader begins anew."""

    position: str
    rows: list[str]
    removed: list[str]
    whole: bool


class Changes:
    """Rows by id, each as JSON."""

    def __init__(self) -> None:
        self._epoch = secrets.token_hex(4)  # positions of another table, or of another process, are unknown here
        self._number = 0
        self._rows: dict[str, tuple[int, str]] = {}  # the last changed last
        self._removed: dict[str, int] = {}  # likewise
        self._floor = 0  # removals up to here are forgotten
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._rows)

    def ids(self) -> set[str]:
        """Return the ids of all rows."""
        return set(self._rows)

    @property
    def position(self) -> str:
        """The present position."""
        return f"{self._epoch}-{self._number}"

    def put(self, row_id: str, row: str) -> None:
        """Set a row; an equal one is no change."""
        if (known := self._rows.get(row_id)) and known[1] == row:
            return
        self._rows.pop(row_id, None)  # goes to the end
        self._removed.pop(row_id, None)
        self._number += 1
        self._rows[row_id] = self._number, row
        self._notify()

    def remove(self, row_id: str) -> None:
        """Remove a row, if it is there."""
        if self._rows.pop(row_id, None) is None:
            return
        self._number += 1
        self._removed[row_id] = self._number
        if len(self._removed) > REMOVALS_MAX:
            oldest = next(iter(self._removed))
            self._floor = self._removed.pop(oldest)
        self._notify()

    def after(self, position: str) -> Batch:
        """Return what has changed after a position; everything if it is unknown or too old."""
        epoch, _, number = position.partition("-")
        seen = int(number) if epoch == self._epoch and number.isascii() and number.isdigit() else -1
        if seen < self._floor or seen > self._number:
            return Batch(self.position, [row for _, row in self._rows.values()], [], whole=True)
        rows: list[str] = []
        for changed, row in reversed(self._rows.values()):
            if changed <= seen:
                break
            rows.append(row)
        removed = [row_id for row_id, changed in self._removed.items() if changed > seen]
        return Batch(self.position, rows[::-1], removed, whole=False)

    async def wait(self, position: str, seconds: float) -> None:
        """Wait until there is something after a position, or for some seconds."""
        if self.position != position:
            return
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            pass

    def _notify(self) -> None:
        """Wake all readers that wait."""
        self._changed.set()
        self._changed = asyncio.Event()
