"""A ballast file: reserved space that is released on a full disk so that ends of jobs can still be written.

A disk fills up for other reasons than the store: a job's output, a log, a copy. Until an operator frees space nothing
could be written, and every job that ends would wait to be recorded. So the store reserves some bytes beside its file,
releases them when the disk refuses a write, and reserves them again once there is space for them and for the operator's
reserve.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Protocol, runtime_checkable

from cotenant.telemetry.plain_structlog import structlog

log = structlog.get_logger()

BYTES = 8 * 1024**2  # enough for thousands of ends of jobs
SHARE_MAX = 0.02  # of the file system


@runtime_checkable
class HoldsBallast(Protocol):
    """A store that has a ballast file."""

    async def hold_ballast(self) -> None:
        """Allocate the ballast again if it was released and there is space now."""


class Ballast:
    """The ballast file beside a store file. Blocking; not safe for concurrent use."""

    def __init__(self, path: Path) -> None:
        self.path = path.with_name(f"{path.name}-ballast")

    @property
    def held(self) -> bool:
        """Whether the ballast is allocated."""
        return self.path.exists()

    def take(self, reserve_bytes: int) -> bool:
        """Allocate the file if there is space for it beside a reserve; return whether it exists."""
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
            log.warning("ballast_allocation_failed", path=str(self.path), error=str(error))
            with suppress(OSError):
                self.path.unlink(missing_ok=True)
            return False
        return True

    def drop(self) -> bool:
        """Release its space; return whether there was any."""
        try:
            self.path.unlink()
        except OSError:
            return False
        log.warning("ballast_dropped", path=str(self.path))
        return True
