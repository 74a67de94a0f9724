"""What all callbacks share: when to tell, how to read a loss, and that nothing that goes wrong here reaches the job."""

from __future__ import annotations

import functools
import os
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from cotenant import progress

VALIDATION = "validation"
TELL_SECONDS = 0.1  # longer than what `progress` waits between two lines, so that none takes another's place
LOSS_SECONDS = 1.0  # between two losses: to read one waits for the device

Hook = TypeVar("Hook", bound=Callable[..., None])


class Tell(Protocol):
    """`progress.step`, or what stands for it in a test."""

    def __call__(self, n: int | None = None, *, loss: float | None = None, phase: str = "") -> None:
        """Tell a step."""


class Reporter:
    """Counts the steps of each phase and tells them now and then; the last of a phase is always told.

    `off` where nobody listens: then nothing is counted, read or told.
    """

    def __init__(self, tell: Tell = progress.step, clock: Callable[[], float] = time.monotonic) -> None:
        self.off = tell is progress.step and not os.environ.get(progress.VARIABLE)
        self._tell, self._clock = tell, clock
        self._counts: dict[str, int] = {}
        self._unsent: tuple[int, str] | None = None
        self._not_before = self._no_loss_before = 0.0
        self._warned = False

    def __reduce__(self) -> tuple[type[Reporter], tuple[()]]:
        """Begin anew in another process: a callback is sent there with its trainer."""
        return Reporter, ()

    def step(self, number: int | None = None, loss: Any = None, phase: str = "", *, loss_is_new: bool = False) -> None:
        """Note a step; without a number, one more of its phase. `loss_is_new` tells it now, whenever the last was."""
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
        self._not_before, self._unsent = now + TELL_SECONDS, None
        self._tell(count, loss=told, phase=phase)

    def flush(self) -> None:
        """Tell the last step, if it has not been told."""
        if self._unsent:
            (count, phase), self._unsent = self._unsent, None
            self._tell(count, phase=phase)

    def failed(self, error: Exception) -> None:
        """Warn once; even a warning that is turned into an error stays here."""
        if not self._warned:
            self._warned = True
            try:
                warnings.warn(f"progress is not told to Cotenant: {type(error).__name__}: {error}", stacklevel=3)
            except Warning:
                return


def harmless(hook: Hook) -> Hook:
    """Let a callback's hook do nothing where nobody listens, and swallow whatever goes wrong in it."""

    @functools.wraps(hook)
    def guarded(self: Any, *given: Any, **named: Any) -> None:
        reporter: Reporter = self.reporter
        if reporter.off:
            return
        try:
            hook(self, *given, **named)
        except Exception as error:  # whatever it is, training is more important
            reporter.failed(error)

    return guarded  # type: ignore[return-value]  # of the same signature


def loss_of(told: Any) -> float | None:
    """Read a loss: a number, a tensor with one, or a map that has it under `loss`; None where there is none.

    >>> loss_of({"loss": 0.5, "accuracy": 1.0}), loss_of(2), loss_of({"accuracy": 1.0}), loss_of(None)
    (0.5, 2.0, None, None)
    """
    if isinstance(told, Mapping):
        told = told.get("loss")
    return None if told is None else float(told)
