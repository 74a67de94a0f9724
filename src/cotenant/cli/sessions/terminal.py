"""The caller's terminal during a session: raw, its size passed on, and restored whatever happens."""

from __future__ import annotations

import asyncio
import os
import signal
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from cotenant.v1.session_pb2 import TerminalSize

ROWS_DEFAULT, COLUMNS_DEFAULT = 24, 80
ENDING = (signal.SIGTERM, signal.SIGHUP)


def terminal_size(descriptor: int) -> TerminalSize:
    """Return the size of a terminal; a usual one if it does not know its own."""
    try:
        size = os.get_terminal_size(descriptor)
    except OSError:
        return TerminalSize(rows=ROWS_DEFAULT, columns=COLUMNS_DEFAULT)
    return TerminalSize(rows=size.lines or ROWS_DEFAULT, columns=size.columns or COLUMNS_DEFAULT)


@contextmanager
def raw_terminal(descriptor: int, resized: Callable[[], None]) -> Iterator[None]:
    """Pass every key on as it is typed, and call `resized` when the window changes; runs in the event loop.

    SIGTERM and SIGHUP cancel the current task, so that the terminal is restored before the process ends.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    before = termios.tcgetattr(descriptor)
    loop.add_signal_handler(signal.SIGWINCH, resized)
    for number in ENDING:
        loop.add_signal_handler(number, task.cancel)
    try:
        tty.setraw(descriptor, termios.TCSANOW)  # what was typed in the meantime is kept
        yield
    finally:
        with suppress(termios.error):  # it was closed
            termios.tcsetattr(descriptor, termios.TCSANOW, before)  # also if nobody reads the terminal
        for number in (signal.SIGWINCH, *ENDING):
            loop.remove_signal_handler(number)
