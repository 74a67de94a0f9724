"""Reads a task's output while the supervisor writes and rotates it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

PIECE_BYTES = 65536


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive bytes; empty if no more are available now. `truncated`: older bytes before them were rotated away."""

    data: bytes
    truncated: bool = False


class OutputReader:
    """A position in one task's output. It only moves forward; output that is rotated away is skipped.

    It keeps the directory open, so it continues when the directory is moved.
    """

    def __init__(self, directory: Path, rank: int, *, tail_bytes: int = 0) -> None:
        self._directory = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._current = f"output-{rank}.log"
        self._older = self._current + ".1"
        self._descriptor = -1
        self._whole = not tail_bytes
        self._skip_bytes = self._bytes_before_tail(tail_bytes) if tail_bytes else 0
        self._truncated = False

    def _bytes_before_tail(self, tail_bytes: int) -> int:
        """Return how many bytes to skip to read only the tail."""
        there = (self._stat(name) for name in (self._older, self._current))
        return max(0, sum(found.st_size for found in there if found) - tail_bytes)

    def read(self) -> Piece:
        """Return the next bytes."""
        if self._descriptor < 0 and not self._open_first():
            return Piece(b"")
        data = os.read(self._descriptor, PIECE_BYTES)
        if not data and self._rotated():
            # Read again: data may have been written after the first read, but none after the rotation.
            data = os.read(self._descriptor, PIECE_BYTES)
            if not data and self._next_file():
                data = os.read(self._descriptor, PIECE_BYTES)
        truncated, self._truncated = self._truncated and bool(data), self._truncated and not data
        return Piece(data, truncated)

    def _open_first(self) -> bool:
        """Open the older file if there is one, at the first byte of the tail."""
        self._truncated = self._whole and self._stat(self._current + ".lost") is not None
        for name in (self._older, self._current):
            if not self._open(name):
                continue
            length = os.fstat(self._descriptor).st_size
            if self._skip_bytes < length or name is self._current:
                os.lseek(self._descriptor, min(self._skip_bytes, length), os.SEEK_SET)
                self._skip_bytes = 0
                return True
            self._skip_bytes -= length
        return self._descriptor >= 0

    def _open(self, name: str) -> bool:
        try:
            fresh = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._directory)
        except FileNotFoundError:
            return False
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = fresh
        return True

    def _stat(self, name: str) -> os.stat_result | None:
        try:
            return os.stat(name, dir_fd=self._directory)
        except FileNotFoundError:
            return None

    def _is_open_file(self, found: os.stat_result) -> bool:
        """Return whether a file is the one that is open."""
        return os.fstat(self._descriptor).st_ino == found.st_ino

    def _rotated(self) -> bool:
        """Return whether the open file is no longer the current one."""
        current = self._stat(self._current)
        return current is not None and not self._is_open_file(current)

    def _next_file(self) -> bool:
        """Open the file that follows the current one."""
        older = self._stat(self._older)
        if older is not None and not self._is_open_file(older):
            self._truncated = True  # rotated twice since: a whole file may have been missed
            return self._open(self._older)
        return self._open(self._current)

    def close(self) -> None:
        """Close the file and the directory."""
        for descriptor in (self._descriptor, self._directory):
            if descriptor >= 0:
                os.close(descriptor)
        self._descriptor = self._directory = -1


def ranks_in(directory: Path) -> list[int]:
    """Return the ranks that have output."""
    found = (path.name.removeprefix("output-").removesuffix(".log") for path in directory.glob("output-*.log"))
    return sorted(int(text) for text in found if text.isascii() and text.isdigit())
