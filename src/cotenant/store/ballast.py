"""A file of no use but its size: what is given up on a full disk so that ends of jobs can still be written.

A disk is filled by others than the store: a job's output, a log, a copy. Until somebody makes room nothing could be
written, and every job that ends meanwhile would wait to be recorded. So the store holds some bytes beside its file,
lets go of them when the disk refuses a write, and takes them again once there is room for that and for what the
operator keeps free.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Protocol, runtime_checkable

import structlog

log = structlog.get_logger()

BYTES = 8 * 1024**2  # some thousand ends of jobs
SHARE_MAX = 0.02  # of the file system


@runtime_checkable
class HoldsBallast(Protocol):
    """A store that keeps a ballast."""

    async def hold_ballast(self) -> None:
        """Take the ballast again where it was dropped and there is room for it now."""


class Ballast:
    """The file, beside the one that it is kept for. Blocks; not for two threads at once."""

    def __init__(self, path: Path) -> None:
        self.path = path.with_name(f"{path.name}-ballast")

    @property
    def held(self) -> bool:
        """Whether there is something to let go of."""
        return self.path.exists()

    def take(self, reserve_bytes: int) -> bool:
        """Make the file where there is room for it beside a reserve; return whether it is there."""
        if self.held:
            return True
        try:
            disk = os.statvfs(self.path.parent)
            size = min(BYTES, int(SHARE_MAX * disk.f_blocks * disk.f_frsize))
            if size <= 0 or disk.f_bavail * disk.f_frsize < reserve_bytes + size:
                return False
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, size)
            finally:
                os.close(descriptor)
        except OSError as error:
            log.warning("ballast_not_taken", path=str(self.path), error=str(error))
            with suppress(OSError):
                self.path.unlink(missing_ok=True)
            return False
        return True

    def drop(self) -> bool:
        """Give its room back; return whether there was any."""
        try:
            self.path.unlink()
        except OSError:
            return False
        log.warning("ballast_dropped", path=str(self.path))
        return True
