"""The terminal's bell after a long wait."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

LONG_SECONDS = 5.0  # nobody has looked away after less
BELL = "\a"


class Bell:
    """Rings once, if standard output is a terminal and the wait was long."""

    def __init__(self, *, wanted: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._wanted, self._clock, self._since = wanted, clock, clock()

    def ring(self) -> None:
        """Ring the bell of the terminal."""
        if self._wanted and self._clock() - self._since >= LONG_SECONDS and sys.stdout.isatty():
            sys.stdout.write(BELL)
            sys.stdout.flush()
