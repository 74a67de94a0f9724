"""Protects the disk that holds the agent's state, and perhaps the mesh's store, from being filled by jobs.

There are two bounds. An attempt whose own directory (its output, and its working directory if the job names none)
grows beyond `work_bytes_max` is evicted. And some bytes of the file system are reserved: when free space falls below
the reserve, working directories of ended attempts are removed first; then the attempts with the largest directories
are evicted one by one, and their files removed, until the reserve is free again. Each eviction is the reason of the
attempt's end.

The less space is left, the more often it is checked: a program may write gigabytes per second. This prevents no
program from entering the reserve or from using it up; a separate file system for jobs, or project quotas, would.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import structlog

from cotenant import telemetry
from cotenant.node_agent.runtime.attempt_status import AttemptKey, Status

log = structlog.get_logger()

ENTRIES_MAX = 200_000  # counted in one directory per check
WRITTEN_PER_SECOND_MAX = 4 * 1024**3  # bytes: how fast a disk may fill up
PAUSE_SECONDS_MIN, PAUSE_SECONDS_MAX = 0.05, 2.0
MEASURE_SECONDS = 2.0  # between measurements of attempts' directories
END_SECONDS_MAX = 10.0  # to wait for an eviction before the next one
LARGE_BYTES_MIN = 1024**2  # evicting an attempt for less does not help
RESERVE_BYTES_DEFAULT = 128 * 1024**2
RESERVE_SHARE_MAX = 0.1  # of the file system
GB, MB = 1e9, 1e6

DISK = telemetry.gauge("cotenant.agent.disk", "By", "File system of the agent's directory: free, reserve, total.")
ENDED = telemetry.counter("cotenant.agent.ended_for_disk", "{attempt}", "Attempts evicted for their disk usage.")


class KnownAttempt(Protocol):
    """An attempt that the agent knows."""

    status: Status


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """The free, total and reserved bytes of a file system."""

    free: int
    total: int
    reserve: int

    @classmethod
    def of(cls, path: Path, reserve_bytes: int) -> DiskSpace:
        """Return the space of the file system that holds a path. Raises `OSError`."""
        disk = os.statvfs(path)
        total = disk.f_blocks * disk.f_frsize
        return cls(disk.f_bavail * disk.f_frsize, total, min(reserve_bytes, int(RESERVE_SHARE_MAX * total)))

    @property
    def reserve_used(self) -> bool:
        """Whether the reserve is in use."""
        return self.free < self.reserve

    @property
    def pause_seconds(self) -> float:
        """The earliest time in which the reserve could be entered."""
        return min(PAUSE_SECONDS_MAX, max(PAUSE_SECONDS_MIN, (self.free - self.reserve) / WRITTEN_PER_SECOND_MAX))


def used_bytes(directory: Path, stop_at: float = float("inf")) -> int:
    """Return the disk usage of the files in a directory; stop counting soon after `stop_at` bytes."""
    size, seen, folders = 0, 0, [str(directory)]
    while folders and size <= stop_at and seen < ENTRIES_MAX:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                seen += 1
                with contextlib.suppress(OSError):  # removed in the meantime
                    size += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
    return size


def format_bytes(size: float) -> str:
    """Return a number of bytes as text.

    >>> format_bytes(12_300_000_000), format_bytes(2_500_000)
    ('12.3 GB', '2.5 MB')
    """
    return f"{size / GB:.1f} GB" if size >= GB else f"{size / MB:.1f} MB"


class Evictions:
    """Attempts that the agent ended on its own authority, each with the reason that its end gets."""

    def __init__(self, stop: Callable[[AttemptKey, float], None]) -> None:
        """`stop` ends an attempt with a grace period in seconds."""
        self._stop = stop
        self._reasons: dict[AttemptKey, str] = {}

    def __contains__(self, key: AttemptKey) -> bool:
        return key in self._reasons

    def end(self, key: AttemptKey, reason: str) -> None:
        """Evict an attempt at once for a reason."""
        log.warning("attempt_evicted", attempt=str(key), reason=reason)
        self._reasons[key] = reason
        ENDED.add()
        self._stop(key, 0.0)

    def with_reason(self, status: Status) -> Status:
        """Return the status with the eviction's reason if the agent evicted this attempt."""
        reason = self._reasons.get(status.key)
        if reason is None or not status.ended or status.state == "SUCCEEDED":  # it succeeded before the eviction
            return status
        return replace(status, state="FAILED", message=reason, stop_reason="")

    def forget(self, known: Mapping[AttemptKey, object]) -> None:
        """Drop the reasons of attempts that are not `known`."""
        for key in [key for key in self._reasons if key not in known]:
            del self._reasons[key]


class DiskWatch:
    """Monitors one node's disk."""

    def __init__(
        self,
        state_dir: Path,
        attempts: Mapping[AttemptKey, KnownAttempt],
        directory: Callable[[AttemptKey], Path | None],
        ends: Evictions,
        *,
        work_bytes_max: int = 0,
        reserve_bytes: int = RESERVE_BYTES_DEFAULT,
    ) -> None:
        """With a `work_bytes_max` of 0, an attempt may use all space beyond the reserve."""
        self._state_dir, self._attempts, self._directory, self._ends = state_dir, attempts, directory, ends
        self._work_bytes_max, self._reserve_bytes = work_bytes_max, reserve_bytes
        self._measured = float("-inf")

    async def run(self) -> None:
        """Check the disk forever."""
        while True:
            pause = PAUSE_SECONDS_MAX
            try:
                pause = await self.check()
            except OSError as error:  # node health reports it too
                log.warning("disk_check_failed", error=str(error))
            await asyncio.sleep(pause)

    async def check(self) -> float:
        """Check once and evict attempts as needed; return the seconds until the next check."""
        self._ends.forget(self._attempts)
        space = await self._space()
        for name in ("free", "reserve", "total"):
            DISK.set(getattr(space, name), of=name)
        if space.reserve_used:
            await self._free_reserve(space)
            return PAUSE_SECONDS_MAX
        if self._work_bytes_max and time.monotonic() - self._measured >= MEASURE_SECONDS:
            self._measured = time.monotonic()
            for key, size in await self._measure(self._work_bytes_max):
                if size > self._work_bytes_max:
                    reason = f"disk limit exceeded: {format_bytes(size)} of {format_bytes(self._work_bytes_max)}"
                    self._ends.end(key, reason)
        return space.pause_seconds

    async def _space(self) -> DiskSpace:
        return await asyncio.to_thread(DiskSpace.of, self._state_dir, self._reserve_bytes)

    async def _measure(self, stop_at: float = float("inf")) -> Sequence[tuple[AttemptKey, int]]:
        """Return the size of each running attempt's directory, the largest first."""
        attempts = self._attempts.items()
        running = [key for key, attempt in attempts if not attempt.status.ended and key not in self._ends]
        folders = [(key, folder) for key in running if (folder := self._directory(key))]
        sizes = await asyncio.to_thread(lambda: [(key, used_bytes(folder, stop_at)) for key, folder in folders])
        return sorted(sizes, key=lambda entry: (-entry[1], entry[0]))

    async def _free_reserve(self, space: DiskSpace) -> None:
        """Remove files and evict attempts until the reserve is free again or nothing large is left."""
        log.warning("disk_reserve_entered", free_bytes=space.free, reserve_bytes=space.reserve)
        await asyncio.to_thread(self._remove_kept)
        while (space := await self._space()).reserve_used:
            key, size = next(iter(await self._measure()), (None, 0))
            if key is None or size < LARGE_BYTES_MIN:
                return
            free, total, reserve = (format_bytes(size) for size in (space.free, space.total, space.reserve))
            reason = (
                f"disk reserve used: only {free} of {total} are free on the node's disk, {reserve} are reserved for "
                f"the mesh, and this attempt's directory is the largest, {format_bytes(size)}; its working directory "
                "was removed"
            )
            self._ends.end(key, reason)
            await self._ended(key)
            if folder := self._directory(key):
                await asyncio.to_thread(shutil.rmtree, folder / "work", ignore_errors=True)

    async def _ended(self, key: AttemptKey) -> None:
        """Wait until an attempt has ended, for `END_SECONDS_MAX` at most."""
        deadline = time.monotonic() + END_SECONDS_MAX
        while time.monotonic() < deadline:
            known = self._attempts.get(key)
            if known is None or known.status.ended:
                return
            await asyncio.sleep(PAUSE_SECONDS_MIN)

    def _remove_kept(self) -> None:
        """Remove working directories of ended attempts, the oldest first, until the reserve is free."""
        kept = self._state_dir / "kept"
        with contextlib.suppress(OSError):
            for folder in sorted(kept.glob("*/work"), key=lambda path: path.stat().st_mtime):
                if not DiskSpace.of(self._state_dir, self._reserve_bytes).reserve_used:
                    return
                log.warning("retained_files_removed", directory=str(folder))
                shutil.rmtree(folder, ignore_errors=True)
