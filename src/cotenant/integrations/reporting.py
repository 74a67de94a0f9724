"""Shared by all callbacks: when to report, how to read a loss, and protection of the job from errors here."""

from __future__ import annotations

import functools
import os
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from cotenant import progress

VALIDATION = "validation"
REPORT_SECONDS = 0.1  # longer than the interval of `progress` between two lines, so that none replaces another
LOSS_SECONDS = 1.0  # between two losses, since reading one blocks on the device

Hook = TypeVar("Hook", bound=Callable[..., None])


class ReportStep(Protocol):
    """`progress.step`, or a substitute in tests."""

    def __call__(self, n: int | None = None, *, loss: float | None = None, phase: str = "") -> None:
        """Report a step."""


class Reporter:
    """Counts the steps of each phase and reports some of them; the last of a phase is always reported.

    `off` if there is no listener: then nothing is counted, read or reported.
    """

    def __init__(self, tell: ReportStep = progress.step, clock: Callable[[], float] = time.monotonic) -> None:
        self.off = tell is progress.step and not os.environ.get(progress.VARIABLE)
        self._tell, self._clock = tell, clock
        self._counts: dict[str, int] = {}
        self._unsent: tuple[int, str] | None = None
        self._not_before = self._no_loss_before = 0.0
        self._warned = False

    def __reduce__(self) -> tuple[type[Reporter], tuple[()]]:
        """Start fresh in another process: a callback is sent there with its trainer."""
        return Reporter, ()

    def step(self, number: int | None = None, loss: Any = None, phase: str = "", *, loss_is_new: bool = False) -> None:
        """Count a step; without a number, one more of its phase. `loss_is_new` reports it at once."""
        count = self._counts[phase] = self._counts.get(phase, 0) + 1 if number is None else int(number)
        if self._unsent and self._unsent[1] != phase:
            self.flush()
        now = self._clock()
        if now < self._not_before and not loss_is_new:
            self._unsent = count, phase
            return
        told = None
        if loss is not None and (loss_is_new or now >= self._no_loss_before):
            self._no_loss_before, told = now + LOSS_SECONDS, loss_of(loss)
        self._not_before, self._unsent = now + REPORT_SECONDS, None
        self._tell(count, loss=told, phase=phase)

    def flush(self) -> None:
        """Report the last step, if it has not been reported."""
        if self._unsent:
            (count, phase), self._unsent = self._unsent, None
            self._tell(count, phase=phase)

    def failed(self, error: Exception) -> None:
        """Warn once; a warning that is turned into an error is caught here."""
        if not self._warned:
            self._warned = True
            try:
                warnings.warn(f"progress is not reported to Cotenant: {type(error).__name__}: {error}", stacklevel=3)
            except Warning:
                return


def harmless(hook: Hook) -> Hook:
    """Return the hook, disabled without a listener, and with all exceptions caught."""

    @functools.wraps(hook)
    def guarded(self: Any, *given: Any, **named: Any) -> None:
        reporter: Reporter = self.reporter
        if reporter.off:
            return
        try:
            hook(self, *given, **named)
        except Exception as error:  # training is more important than any error here
            reporter.failed(error)

    return guarded  # type: ignore[return-value]  # of the same signature


def loss_of(told: Any) -> float | None:
    """Return a loss: a number, a tensor with one, or a mapping with the key `loss`; None if there is none.

    >>> loss_of({"loss": 0.5, "accuracy": 1.0}), loss_of(2), loss_of({"accuracy": 1.0}), loss_of(None)
    (0.5, 2.0, None, None)
    """
    if isinstance(told, Mapping):
        told = told.get("loss")
    return None if told is None else float(told)
