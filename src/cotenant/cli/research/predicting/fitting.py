"""Options and results of fits: as text, as a table, as JSON and as a chart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cotenant.cli.render import Column
from cotenant.cli.research.predicting.chart import Chart
from cotenant.cli.views import View
from cotenant.core.model.estimate import NO_QOS
from cotenant.core.model.job import Qos
from cotenant.core.model.loss_goal import NO_GOAL, LossGoal

P10 = 1.2815515655446004  # standard deviations from the median to the 10th percentile


@dataclass(frozen=True, slots=True)
class FitOptions:
    """Options of a fit; 0 and "" if not given."""

    cores_max: int = 0
    goal: LossGoal = NO_GOAL
    rate_per_second: float = 0.0  # of the steps of a loss curve
    promise: Qos = NO_QOS
    replicas: int = 1


@dataclass(frozen=True, slots=True)
class FitResult:
    """The fit of one model's measurements; no chart if there is nothing to plot."""

    card: Sequence[tuple[str, str]]
    view: View
    columns: Sequence[Column] = ()
    rows: Sequence[Sequence[str]] = ()
    chart: Chart | None = None


def figure(value: float) -> str:
    """Return a number with three digits.

    >>> figure(1234.5), figure(0.012345), figure(12.0)
    ('1234', '0.0123', '12')
    """
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def span(low: float, high: float) -> str:
    """Return an interval as text.

    >>> span(3, 3), span(4, 6.25)
    ('3', '4 to 6.25')
    """
    return figure(low) if low == high else f"{figure(low)} to {figure(high)}"


def around(rate: float, spread: float) -> tuple[float, float]:
    """Return the 10th and 90th percentiles of a rate with this relative standard deviation."""
    return rate * max(1 - P10 * spread, 0.0), rate * (1 + P10 * spread)
