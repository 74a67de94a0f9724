"""Tell the scheduler how far a job has come: `from cotenant import progress; progress.step(loss=0.3)`.

It needs nothing but the standard library, never raises, never waits, and does nothing at all outside of Cotenant.
Each call is a few microseconds; at most 20 lines a second are sent, and the last one is always sent in the end.
"""

from __future__ import annotations

import atexit
import os
import socket
import time

__all__ = ["batch", "step"]

VARIABLE = "COTENANT_PROGRESS"
INTERVAL_SECONDS = 0.05


class _Teller:
    """One process's line to the agent. The path is looked up anew for each line: agents come and go."""

    def __init__(self) -> None:
        self._path = os.environ.get(VARIABLE, "")
        self._socket: socket.socket | None = None
        self._counts: dict[str, int] = {}  # by phase
        self._unsent: dict[str, str] = {}  # by what it tells of; only the last word of each counts
        self._not_before = 0.0

    def step(self, number: int | None, loss: float | None, phase: str) -> None:
        count = self._counts[phase] = self._counts.get(phase, 0) + 1 if number is None else int(number)
        if not self._path:
            return
        told = f"step={count}" if loss is None else f"step={count} loss={float(loss)!r}"
        self._tell(f"{'step' if loss is None else 'loss'} {phase}", f"{told} phase={_word(phase)}" if phase else told)

    def batch(self, size: int, seconds: float) -> None:
        told = f"batch={int(size)} batch_seconds={float(seconds)!r}"
        if self._path:
            self._tell("batch", told)

    def _tell(self, what: str, told: str) -> None:
        self._unsent.pop(what, None)  # what is told last stands last
        self._unsent[what] = told
        now = time.monotonic()
        if now >= self._not_before:
            self._not_before = now + INTERVAL_SECONDS
            self.flush()

    def flush(self) -> None:
        """Send the last lines if they have not been sent; they stay for the next time where nobody takes them."""
        if self._unsent:
            if self._socket is None:
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                self._socket.setblocking(False)
            lines = "\n".join(list(self._unsent.values()))  # a copy: a service may tell from several threads
            self._socket.sendto(lines.encode(), self._path)
            self._unsent = {}


def _word(text: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in text)


_teller = _Teller()


def step(n: int | None = None, *, loss: float | None = None, phase: str = "") -> None:
    """Tell that step `n` is done; without a number, one more than the last time. `loss` is passed on as it is.

    `phase` names what the job does, such as `validation`, where its steps take another time than those of training.
    Each phase counts its own steps, on from one time that it is entered to the next.
    """
    try:
        _teller.step(n, loss, phase)
    except (OSError, ValueError, TypeError, AttributeError, OverflowError):
        return  # whatever it is, training is more important


def batch(size: int, seconds: float) -> None:
    """Tell, from a service, that a batch of so many requests took so many seconds to answer."""
    try:
        _teller.batch(size, seconds)
    except (OSError, ValueError, TypeError, OverflowError):
        return  # whatever it is, serving is more important


def _tell_last() -> None:
    try:
        _teller.flush()
    except OSError:
        return  # the agent is away; the job is not to hear of it


atexit.register(_tell_last)
