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
    """A place in one task's output. What lies before it is not read again, what is rotated away is missed."""

    def __init__(self, path: Path, *, tail_bytes: int = 0) -> None:
        self._current = path
        self._older = path.with_name(path.name + ".1")
        self._descriptor = -1
        self._skip_bytes = self._before(tail_bytes) if tail_bytes else 0
        self._truncated = False
        self._whole = not tail_bytes

    def _before(self, tail_bytes: int) -> int:
        """How much to leave out so that only the tail comes."""
        return max(0, sum(size(path) for path in (self._older, self._current)) - tail_bytes)

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
        self._truncated = self._whole and self._current.with_name(self._current.name + ".lost").exists()
        for path in (self._older, self._current):
            if not self._open(path):
                continue
            length = os.fstat(self._descriptor).st_size
            if self._skip_bytes < length or path is self._current:
                os.lseek(self._descriptor, min(self._skip_bytes, length), os.SEEK_SET)
                self._skip_bytes = 0
                return True
            self._skip_bytes -= length
        return self._descriptor >= 0

    def _open(self, path: Path) -> bool:
        try:
            fresh = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        self.close()
        self._descriptor = fresh
        return True

    def _rotated(self) -> bool:
        """Whether the file that we hold is not the current one any more."""
        current = inode(self._current)
        return current is not None and current != inode(self._descriptor)

    def _turn(self) -> bool:
        """Go on with the file that follows the one we hold."""
        held, older = inode(self._descriptor), inode(self._older)
        if older is not None and older != held:
            self._truncated = True  # rotated twice since: a whole file may have come and gone unseen
            return self._open(self._older)
        return self._open(self._current)

    def close(self) -> None:
        """Let go of the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def size(path: Path) -> int:
    """A file's length in bytes; 0 where it is not there."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def inode(file: Path | int) -> int | None:
    """What tells one file from another under the same name; None where there is none."""
    try:
        return os.stat(file).st_ino
    except FileNotFoundError:
        return None
