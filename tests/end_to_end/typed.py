"""Commands that are typed on a terminal of their own."""

from __future__ import annotations

import os
import pty
import select
import struct
import time
from fcntl import ioctl
from termios import TIOCSWINSZ

from tests.end_to_end.commands import COTENANT, SECONDS_MAX, TRACEBACK, Cli


class Typed:
    """A command on a terminal of its own."""

    def __init__(self, cli: Cli, *arguments: str, rows: int = 31, columns: int = 97) -> None:
        self.pid, self.descriptor = pty.fork()
        if self.pid == 0:
            os.execve(COTENANT, [COTENANT, *arguments], {**cli.environment, "TERM": "vt100"})
        self.resize(rows, columns)
        self.said = b""

    def resize(self, rows: int, columns: int) -> None:
        ioctl(self.descriptor, TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text: str) -> None:
        os.write(self.descriptor, text.encode())

    def expect(self, words: str) -> None:
        """Read until these words were printed; forget what was printed up to them."""
        deadline = time.monotonic() + SECONDS_MAX
        while words.encode() not in self.said:
            ready, _, _ = select.select([self.descriptor], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{words!r} was not printed: {self.said!r}"
            self.said += os.read(self.descriptor, 65536)
        assert TRACEBACK.encode() not in self.said
        self.said = self.said.partition(words.encode())[2]

    def wait(self) -> int:
        _, status = os.waitpid(self.pid, 0)
        os.close(self.descriptor)
        return os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        """Close the terminal, as a window that is closed, and wait for the command's end."""
        os.close(self.descriptor)
        os.waitpid(self.pid, 0)
