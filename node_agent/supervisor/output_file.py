"""A process's output on disk: the newest bytes, in a current and one older file.

The supervisor loads this file by its bare name without the package; it imports next to nothing.
"""

from __future__ import annotations

import os


class OutputFile:
    """Keeps at most `bytes_max` of output; what the disk refuses is dropped and counted without waiting."""

    def __init__(self, path: str, bytes_max: int) -> None:
        self.dropped_bytes = 0
        self.drop_reason = ""
        self._unmarked_bytes = 0
        self._path = path
        self._half_bytes = max(1, bytes_max // 2)
        self._descriptor = -1
        self._size_bytes = 0

    def write(self, data: bytes) -> None:
        """Append output; rotate when the current file has reached half of the limit."""
        while data:
            try:
                if self._descriptor < 0 or self._size_bytes >= self._half_bytes:
                    self._rotate()
                self._mark_drops()
                written = self._append(data[: max(1, self._half_bytes - self._size_bytes)])
            except OSError as error:
                self._drop(len(data), error)
                return
            data = data[written:]

    def _rotate(self) -> None:
        """Start a new file; the current one replaces the older one."""
        if self._descriptor >= 0:
            if os.path.exists(self._path + ".1"):
                os.close(os.open(self._path + ".lost", os.O_WRONLY | os.O_CREAT, 0o600))  # for readers
            os.rename(self._path, self._path + ".1")
        fresh = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.close()
        self._descriptor, self._size_bytes = fresh, 0

    def _mark_drops(self) -> None:
        """Note dropped bytes in the output itself."""
        if self._unmarked_bytes:
            note = f"\n[cotenant: {self._unmarked_bytes} bytes of output dropped: {self.drop_reason}]\n"
            self._append(note.encode())
            self._unmarked_bytes = 0

    def _append(self, data: bytes) -> int:
        written = os.write(self._descriptor, data)
        self._size_bytes += written
        return written

    def _drop(self, count: int, error: OSError) -> None:
        self.dropped_bytes += count
        self._unmarked_bytes += count
        self.drop_reason = error.strerror or "unknown error"

    def close(self) -> None:
        """Close the current file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
