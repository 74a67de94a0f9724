"""Reports a job's progress to the scheduler: `from cotenant import progress; progress.step(loss=0.3)`.

Or a step for each item of a loop: `for batch in progress(loader):`.

It needs only the standard library, never raises, never blocks, and does nothing outside of Cotenant. Each call takes a
few microseconds; at most 20 lines a second are sent, and the last line is always sent at exit. If the process has a run
of MLflow or Weights & Biases, its id is reported as well.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import time
from types import ModuleType

TYPE_CHECKING = False  # as type checkers read it; importing `typing` would take longer than the rest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any, TypeVar

    T = TypeVar("T")

__all__ = ["batch", "over", "step"]

VARIABLE = "COTENANT_PROGRESS"
INTERVAL_SECONDS = 0.05


class _Reporter:
    """A process's connection to the agent. The path is resolved again for each line: agents come and go."""

    def __init__(self) -> None:
        self._path = os.environ.get(VARIABLE, "")
        self._socket: socket.socket | None = None
        self._counts: dict[str, int] = {}  # by phase
        self._unsent: dict[str, str] = {}  # by kind of report; only the latest of each counts
        self._not_before = 0.0

    def step(self, number: int | None, loss: float | None, phase: str) -> None:
        count = self._counts[phase] = self._counts.get(phase, 0) + 1 if number is None else int(number)
        if not self._path:
            return
        told = f"step={count}" if loss is None else f"step={count} loss={float(loss)!r}"
        self._write(f"{'step' if loss is None else 'loss'} {phase}", f"{told} phase={_word(phase)}" if phase else told)

    def batch(self, size: int, seconds: float) -> None:
        told = f"batch={int(size)} batch_seconds={float(seconds)!r}"
        if self._path:
            self._write("batch", told)

    def _write(self, what: str, told: str) -> None:
        self._unsent.pop(what, None)  # the latest report comes last
        self._unsent[what] = told
        now = time.monotonic()
        if now >= self._not_before:
            self._not_before = now + INTERVAL_SECONDS
            self.flush()

    def flush(self) -> None:
        """Send the unsent lines; keep them for the next time if the agent does not receive them."""
        if self._unsent:
            if self._socket is None:
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                self._socket.setblocking(False)
            told = [*self._unsent.values()]  # a copy: a service may report from several threads
            if runs := _tracked_runs():  # in each report: an agent that was restarted has forgotten them
                told.append(" ".join(f"{tracker}_run={run}" for tracker, run in runs.items()))
            lines = "\n".join(told)
            self._socket.sendto(lines.encode(), self._path)
            self._unsent = {}


def _tracked_runs() -> dict[str, str]:
    """Return the ids of this process's runs in experiment trackers; what it has not imported is not imported here."""
    found = {"mlflow": _active_run("mlflow", _mlflow_run), "wandb": _active_run("wandb", _wandb_run)}
    return {tracker: _word(run) for tracker, run in found.items() if run and isinstance(run, str)}


def _active_run(tracker: str, run_of: Callable[[Any], object]) -> object:
    variable = os.environ.get(f"{tracker.upper()}_RUN_ID")
    module = sys.modules.get(tracker)
    try:
        return (run_of(module) if module else None) or variable
    except Exception:  # whatever another library raises; training matters more
        return variable


def _mlflow_run(mlflow: Any) -> object:
    active = mlflow.active_run()
    return active and active.info.run_id


def _wandb_run(wandb: Any) -> object:
    return wandb.run and wandb.run.id


def _word(text: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in text)


_reporter = _Reporter()


def step(n: int | None = None, *, loss: float | None = None, phase: str = "") -> None:
    """Report that step `n` is done; without a number, the next step. `loss` is passed on as given.

    `phase` names the job's activity, such as `validation`, if its steps take another time than those of training. Each
    phase counts its own steps, and continues counting when it is entered again.
    """
    try:
        _reporter.step(n, loss, phase)
    except (OSError, ValueError, TypeError, AttributeError, OverflowError):
        return  # training matters more than any error here


def batch(size: int, seconds: float) -> None:
    """Report, from a service, that a batch of `size` requests took this many seconds to answer."""
    try:
        _reporter.batch(size, seconds)
    except (OSError, ValueError, TypeError, OverflowError):
        return  # serving matters more than any error here


def over(items: Iterable[T], *, phase: str = "") -> Iterable[T]:
    """Return an iterable of the same items that reports a step after each; it has the length of `items`, if any.

    It may be iterated again, for each epoch: steps are counted on. `progress(items)` is the same.
    """
    return _Over(items, phase)


class _Over:
    def __init__(self, items: Iterable[Any], phase: str) -> None:
        self._items, self._phase = items, phase

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]  # fails for those without a length, as it should

    def __length_hint__(self) -> int:
        return len(self) if hasattr(self._items, "__len__") else 0

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            yield item
            step(phase=self._phase)


class _CallableModule(ModuleType):
    def __call__(self, items: Iterable[T], *, phase: str = "") -> Iterable[T]:
        return over(items, phase=phase)


def _flush() -> None:
    try:
        _reporter.flush()
    except OSError:
        return  # the agent is unavailable; the job must not notice


atexit.register(_flush)
sys.modules[__name__].__class__ = _CallableModule
