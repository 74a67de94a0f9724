"""The command line that the system shows for this process, such as in `ps` and /proc/PID/cmdline.

A process that was forked shows its parent's; this replaces it in place [proc(5), /proc/pid/cmdline]. The supervisor
loads this file by its bare name without the package; it imports next to nothing.
"""

from __future__ import annotations

import ctypes
import os

FIRST_FIELD = 3  # the first field after the name in /proc/PID/stat [proc(5)]
ARG_START, ARG_END = 48, 49


class CommandLine:
    """The memory of this process's command line; no words fit if the kernel does not say where it is."""

    def __init__(self) -> None:
        try:
            with open("/proc/self/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
            self._start, end = (int(fields[field - FIRST_FIELD]) for field in (ARG_START, ARG_END))
            self._room_bytes = max(0, end - self._start - 1) if self._start else 0
        except (OSError, IndexError, ValueError):
            self._start = self._room_bytes = 0

    def replace(self, words: list[str]) -> bool:
        """Show these words from now on; return False, and change nothing, if there is not enough room for them."""
        text = b"".join(os.fsencode(word) + b"\0" for word in words)
        if len(text) > self._room_bytes:
            return False
        ctypes.memmove(self._start, text.ljust(self._room_bytes, b"\0"), self._room_bytes)
        return True
