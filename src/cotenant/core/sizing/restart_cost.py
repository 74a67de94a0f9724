"""What a resize by a restart costs a job, learned by model from the resizes that were made.

A resize costs the time from the warning until the job does new work: until it reports a step beyond the last one before
it stopped. So steps that were lost, because the program saved nothing when it was warned, are part of the cost. The
estimate is the median of the model's last resizes; without any, that of all models, and at first an assumption.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from statistics import median

RESTART_SECONDS = 30.0  # until a job that was stopped with a checkpoint does new work, before any was measured [C]
KEPT_OF_MODEL, KEPT_OF_ALL = 8, 64
MODELS_MAX = 1_000


@dataclass(frozen=True, slots=True)
class ResizeCost:
    """The expected cost of a resize, in seconds: until everything has stopped, and from there until new work.

    It is the median of `measured` resizes, of the same model if `own`.
    """

    stop_seconds: float = 0.0
    restart_seconds: float = RESTART_SECONDS
    measured: int = 0
    own: bool = False

    @property
    def seconds(self) -> float:
        """The whole cost."""
        return self.stop_seconds + self.restart_seconds

    def __str__(self) -> str:
        """Return the cost in words, with where the figure is from."""
        if not self.measured:
            return f"a resize is assumed to cost it {self.seconds:.3g} s, since none was measured yet"
        source = f"median of {self.measured}" if self.own else f"median of {self.measured} of other jobs"
        return (
            f"a resize costs it {self.seconds:.3g} s ({source}): {self.stop_seconds:.3g} s to stop, "
            f"{self.restart_seconds:.3g} s until new steps"
        )


@dataclass(slots=True)
class ResizeCosts:
    """The last resizes of each model.

    >>> costs = ResizeCosts()
    >>> costs.expected("bert").seconds
    30.0
    >>> for restart in (8.0, 9.0, 60.0):
    ...     costs.observe("bert", 2.0, restart)
    >>> print(costs.expected("bert"))
    a resize costs it 11 s (median of 3): 2 s to stop, 9 s until new steps
    >>> print(costs.expected("gpt"))
    a resize costs it 11 s (median of 3 of other jobs): 2 s to stop, 9 s until new steps
    """

    _of_model: dict[Hashable, deque[tuple[float, float]]] = field(default_factory=dict)
    _of_all: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=KEPT_OF_ALL))

    def observe(self, model: Hashable, stop_seconds: float, restart_seconds: float) -> None:
        """Add a resize; of many models, the one that was measured longest ago is forgotten."""
        own = self._of_model.pop(model, None) or deque(maxlen=KEPT_OF_MODEL)
        own.append((stop_seconds, restart_seconds))
        self._of_all.append((stop_seconds, restart_seconds))
        self._of_model[model] = own
        if len(self._of_model) > MODELS_MAX:
            del self._of_model[next(iter(self._of_model))]

    def expected(self, model: Hashable) -> ResizeCost:
        """Return the expected cost of a resize of a job of this model."""
        own = self._of_model.get(model)
        known = own or self._of_all
        if not known:
            return ResizeCost()
        stops, restarts = zip(*known, strict=True)
        return ResizeCost(median(stops), median(restarts), len(known), own=own is not None)
