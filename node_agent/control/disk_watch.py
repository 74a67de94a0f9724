"""Keeps jobs from filling the disk that the agent's state, and perhaps the mesh's store, is on.

Two bounds. An attempt whose own directory (its working directory, where the job names none, and its output) grows
beyond `work_bytes_max` is ended. And some bytes of the file system are a reserve: when free space falls below it, files
in working directories of attempts that have ended go first, and then the attempt with the largest directory is ended,
one after another, and its files are removed, until the reserve is free again. Each end says so as its reason.

Space is looked at the more often the less there is: a program may write some gigabytes in a second. Nobody is kept from
entering the reserve by this, nor from using it up; a file system of its own for jobs, or project quotas, would do that.
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

ENTRIES_MAX = 200_000  # of one directory that are counted at one look
WRITTEN_PER_SECOND_MAX = 4 * 1024**3  # bytes: how quickly a disk may fill up
PAUSE_SECONDS_MIN, PAUSE_SECONDS_MAX = 0.05, 2.0
MEASURE_SECONDS = 2.0  # between two looks at how much each attempt has written
END_SECONDS_MAX = 10.0  # to wait for an end before the next attempt is ended too
LARGE_BYTES_MIN = 1024**2  # ending an attempt for less would be no help
RESERVE_BYTES_DEFAULT = 128 * 1024**2
RESERVE_SHARE_MAX = 0.1  # of the file system
GB, MB = 1e9, 1e6

DISK = telemetry.gauge("cotenant.agent.disk", "By", "The file system of the agent's directory: free, reserve, total.")
ENDED = telemetry.counter("cotenant.agent.ended_for_disk", "{attempt}", "Attempts ended for what they wrote.")


class Runs(Protocol):
    """An attempt that the agent knows."""

    status: Status


@dataclass(frozen=True, slots=True)
class Space:
    """What a file system has, in bytes."""

    free: int
    total: int
    reserve: int

    @classmethod
    def of(cls, path: Path, reserve_bytes: int) -> Space:
        """Look at the file system of a path. Raises `OSError`."""
        disk = os.statvfs(path)
        total = disk.f_blocks * disk.f_frsize
        return cls(disk.f_bavail * disk.f_frsize, total, min(reserve_bytes, int(RESERVE_SHARE_MAX * total)))

    @property
    def entered(self) -> bool:
        """Whether the reserve is being used."""
        return self.free < self.reserve

    @property
    def pause_seconds(self) -> float:
        """How long it may be before the reserve could be entered."""
        return min(PAUSE_SECONDS_MAX, max(PAUSE_SECONDS_MIN, (self.free - self.reserve) / WRITTEN_PER_SECOND_MAX))


def used_bytes(directory: Path, stop_at: float = float("inf")) -> int:
    """Return what files under a directory take on disk; not much more than `stop_at` where that is reached earlier."""
    size, seen, folders = 0, 0, [str(directory)]
    while folders and size <= stop_at and seen < ENTRIES_MAX:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                seen += 1
                with contextlib.suppress(OSError):  # removed meanwhile
                    size += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
    return size


def in_words(size: float) -> str:
    """Write a number of bytes.

    >>> in_words(12_300_000_000), in_words(2_500_000)
    ('12.3 GB', '2.5 MB')
    """
    return f"{size / GB:.1f} GB" if size >= GB else f"{size / MB:.1f} MB"


class EnforcedEnds:
    """Attempts that are ended on the agent's own authority, each with the reason that its end then has."""

    def __init__(self, stop: Callable[[AttemptKey, float], None]) -> None:
        """`stop` ends an attempt with a grace in seconds."""
        self._stop = stop
        self._reasons: dict[AttemptKey, str] = {}

    def __contains__(self, key: AttemptKey) -> bool:
        return key in self._reasons

    def end(self, key: AttemptKey, reason: str) -> None:
        """End an attempt for a reason, at once."""
        log.warning("attempt_ended_by_agent", attempt=str(key), reason=reason)
        self._reasons[key] = reason
        ENDED.add()
        self._stop(key, 0.0)

    def applied(self, status: Status) -> Status:
        """Return a status with the reason for which the agent ended the attempt, where it did."""
        reason = self._reasons.get(status.key)
        if reason is None or not status.ended or status.state == "SUCCEEDED":  # the latter was done before
            return status
        return replace(status, state="FAILED", message=reason, stop_reason="")

    def forget(self, known: Mapping[AttemptKey, object]) -> None:
        """Forget attempts that the agent has forgotten."""
        for key in [key for key in self._reasons if key not in known]:
            del self._reasons[key]


class DiskWatch:
    """Watches one node's disk."""

    def __init__(
        self,
        state_dir: Path,
        attempts: Callable[[], Mapping[AttemptKey, Runs]],
        directory: Callable[[AttemptKey], Path | None],
        ends: EnforcedEnds,
        *,
        work_bytes_max: int = 0,
        reserve_bytes: int = RESERVE_BYTES_DEFAULT,
    ) -> None:
        """`work_bytes_max` of 0: an attempt may take as much as there is beside the reserve."""
        self._state_dir, self._attempts, self._directory, self._ends = state_dir, attempts, directory, ends
        self._work_bytes_max, self._reserve_bytes = work_bytes_max, reserve_bytes
        self._measured = float("-inf")

    async def run(self) -> None:
        """Watch for ever."""
        while True:
            pause = PAUSE_SECONDS_MAX
            try:
                pause = await self.look()
            except OSError as error:  # health says so too
                log.warning("disk_not_seen", error=str(error))
            await asyncio.sleep(pause)

    async def look(self) -> float:
        """Look once, and end what has to be ended; return after how many seconds to look again."""
        self._ends.forget(self._attempts())
        space = await self._space()
        for name in ("free", "reserve", "total"):
            DISK.set(getattr(space, name), of=name)
        if space.entered:
            await self._free_reserve(space)
            return PAUSE_SECONDS_MAX
        if self._work_bytes_max and time.monotonic() - self._measured >= MEASURE_SECONDS:
            self._measured = time.monotonic()
            for key, size in await self._measure(self._work_bytes_max):
                if size > self._work_bytes_max:
                    told = f"disk limit exceeded: {in_words(size)} of {in_words(self._work_bytes_max)}"
                    self._ends.end(key, told)
        return space.pause_seconds

    async def _space(self) -> Space:
        return await asyncio.to_thread(Space.of, self._state_dir, self._reserve_bytes)

    async def _measure(self, stop_at: float = float("inf")) -> Sequence[tuple[AttemptKey, int]]:
        """Return how much each running attempt's own directory takes, the largest first."""
        running = [key for key, one in self._attempts().items() if not one.status.ended and key not in self._ends]
        folders = [(key, folder) for key in running if (folder := self._directory(key))]
        sizes = await asyncio.to_thread(lambda: [(key, used_bytes(folder, stop_at)) for key, folder in folders])
        return sorted(sizes, key=lambda one: (-one[1], one[0]))

    async def _free_reserve(self, space: Space) -> None:
        """Make room until the reserve is free again, or nobody's files would make a difference."""
        log.warning("disk_reserve_entered", free_bytes=space.free, reserve_bytes=space.reserve)
        await asyncio.to_thread(self._remove_kept)
        while (space := await self._space()).entered:
            key, size = next(iter(await self._measure()), (None, 0))
            if key is None or size < LARGE_BYTES_MIN:
                return
            told = (
                f"disk reserve used: only {in_words(space.free)} of {in_words(space.total)} are free on the node's "
                f"disk, {in_words(space.reserve)} are kept for the mesh itself, and this attempt's directory took the "
                f"most, {in_words(size)}; its working directory was removed"
            )
            self._ends.end(key, told)
            await self._ended(key)
            if folder := self._directory(key):
                await asyncio.to_thread(shutil.rmtree, folder / "work", ignore_errors=True)

    async def _ended(self, key: AttemptKey) -> None:
        """Wait until an attempt has ended, but not for ever."""
        deadline = time.monotonic() + END_SECONDS_MAX
        while time.monotonic() < deadline:
            known = self._attempts().get(key)
            if known is None or known.status.ended:
                return
            await asyncio.sleep(PAUSE_SECONDS_MIN)

    def _remove_kept(self) -> None:
        """Remove working directories of attempts that have ended, the oldest first, until the reserve is free."""
        kept = self._state_dir / "kept"
        with contextlib.suppress(OSError):
            for folder in sorted(kept.glob("*/work"), key=lambda one: one.stat().st_mtime):
                if not Space.of(self._state_dir, self._reserve_bytes).entered:
                    return
                log.warning("kept_files_removed", directory=str(folder))
                shutil.rmtree(folder, ignore_errors=True)
