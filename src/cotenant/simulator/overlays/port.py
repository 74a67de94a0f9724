"""The interface of overlays, and functions that all of them need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from cotenant.core.model.validation import shown
from cotenant.simulator.traces import Trace, TraceJob

if TYPE_CHECKING:
    from cotenant.simulator.clusters.cluster import Cluster

DIGITS = 9  # significant digits of drawn factors, so that they are equal on every machine


@dataclass(frozen=True, slots=True)
class Setting:
    """What overlays apply to: the cluster, and the trace before any overlay."""

    cluster: Cluster
    trace: Trace


class Overlay(Protocol):
    """Adds one property to jobs. `form` shows how its value is written."""

    key: ClassVar[str]
    form: ClassVar[str]

    def apply(self, jobs: Sequence[TraceJob], setting: Setting, rng: np.random.Generator) -> list[TraceJob]:
        """Return the jobs with that property; the trace's jobs first and in order, then added jobs.

        Raises:
            BadOption: it does not match the cluster or the trace.
        """
        ...


class Kind(Protocol):
    """A class of overlays: creates an overlay from its value."""

    key: str
    form: str

    def parse(self, value: str) -> Overlay:
        """Parse the value.

        Raises:
            ValueError: the value is invalid; the message says what was expected.
        """
        ...


def rounded(values: NDArray[np.float64]) -> list[float]:
    """Round drawn numbers to `DIGITS` significant digits.

    >>> rounded(np.array([1 / 3, 2e9 / 3]))
    [0.333333333, 666666667.0]
    """
    return [float(f"{value:.{DIGITS}g}") for value in values.tolist()]


def picks(rng: np.random.Generator, count: int, weights: Sequence[float]) -> list[int]:
    """Draw indices by weight.

    >>> picks(np.random.default_rng(1), 4, [1, 0, 3])
    [2, 2, 0, 2]
    """
    sums = np.cumsum(np.array(weights, dtype=np.float64))
    found = np.searchsorted(sums, rng.random(count) * sums[-1], side="right")
    return [int(index) for index in np.minimum(found, len(weights) - 1)]


def one_of(value: str, choices: Sequence[str]) -> str:
    """Return one of a few words.

    Raises:
        ValueError: it is not one of them.
    """
    if value not in choices:
        raise ValueError(f"must be one of {', '.join(choices)}, not {shown(value)}")
    return value


def whole(value: str, least: int, most: int) -> int:
    """Return an integer.

    Raises:
        ValueError: it is not an integer, or out of bounds.
    """
    if not (value.isascii() and value.isdigit() and len(value) < 20 and least <= int(value) <= most):
        raise ValueError(f"must be an integer from {least} to {most}, not {shown(value)}")
    return int(value)


def number(value: str, above: float, most: float) -> float:
    """Return a number.

    Raises:
        ValueError: it is not a number, or out of bounds.
    """
    try:
        read = float(value)
    except ValueError:
        read = float("nan")
    if not above < read <= most:
        raise ValueError(f"must be a number above {above:g} and at most {most:g}, not {shown(value)}")
    return read
