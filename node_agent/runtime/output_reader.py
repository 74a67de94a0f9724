"""Reads a task's output while the supervisor writes and rotates it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

PIECE_BYTES = 65536


@dataclass(frozen=True, slots=True)
class Piece:
    """Some bytes in order; none where there are no more now. `truncated`: older ones were rotated away before."""

    data: bytes
    truncated: bool = False


class OutputReader:
    """A place in one task's output. What lies before it is not read again, what is rotated away is missed.

    It holds the directory open, so that it goes on when that is moved.
    """

    def __init__(self, directory: Path, rank: int, *, tail_bytes: int = 0) -> None:
        self._directory = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._current = f"output-{rank}.log"
        self._older = self._current + ".1"
        self._descriptor = -1
        self._whole = not tail_bytes
        self._skip_bytes = self._before(tail_bytes) if tail_bytes else 0
        self._truncated = False

    def _before(self, tail_bytes: int) -> int:
        """How much to leave out so that only the tail comes."""
        there = (self._stat(name) for name in (self._older, self._current))
        return max(0, sum(found.st_size for found in there if found) - tail_bytes)

    def read(self) -> Piece:
        """The next bytes."""
        if self._descriptor < 0 and not self._open_first():
            return Piece(b"")
        data = os.read(self._descriptor, PIECE_BYTES)
        if not data and self._rotated():
            # Read once more: something may have been written after the first look, but nothing after the rotation.
            data = os.read(self._descriptor, PIECE_BYTES)
            if not data and self._turn():
                data = os.read(self._descriptor, PIECE_BYTES)
        truncated, self._truncated = self._truncated and bool(data), self._truncated and not data
        return Piece(data, truncated)

    def _open_first(self) -> bool:
        """Begin with the older file where there is one, at the byte that the tail begins with."""
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

    def _holds(self, found: os.stat_result) -> bool:
        """Whether a file is the one that we have open."""
        return os.fstat(self._descriptor).st_ino == found.st_ino

    def _rotated(self) -> bool:
        """Whether the file that we hold is not the current one any more."""
        current = self._stat(self._current)
        return current is not None and not self._holds(current)

    def _turn(self) -> bool:
        """Go on with the file that follows the one we hold."""
        older = self._stat(self._older)
        if older is not None and not self._holds(older):
            self._truncated = True  # rotated twice since: a whole file may have come and gone unseen
            return self._open(self._older)
        return self._open(self._current)

    def close(self) -> None:
        """Let go of the file and the directory."""
        for descriptor in (self._descriptor, self._directory):
            if descriptor >= 0:
                os.close(descriptor)
        self._descriptor = self._directory = -1


def ranks_in(directory: Path) -> list[int]:
    """The ranks of which there is output."""
    found = (path.name.removeprefix("output-").removesuffix(".log") for path in directory.glob("output-*.log"))
    return sorted(int(text) for text in found if text.isascii() and text.isdigit())
