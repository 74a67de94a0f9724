"""Xiao et al., "Scheduling CPU for GPU-based Deep Learning Jobs" (SoCC 2018, poster)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from cotenant.core.predicting import design
from cotenant.core.predicting.curves import Point, fit
from cotenant.reproduction.words import Asked, Case, Cell, Claim, Done, Figures, Findings, Stopped, Table

CORES_MAX = 24  # of the poster's virtual machine
NOISE = 0.03  # of a rate over some tens of iterations, relative [R]
LINEAR_SHARE = 0.5  # of the best rate, which is the linear part's: Synergy's curves rise nearly as a line [R]
BEST_CORES = MappingProxyType(  # for the best speed on one P100 [P]
    {
        "LeNet": 20,
        "AlexNet": 19,
        "OverFeat": 22,
        "GoogLeNet": 11,
        "language model": 1,
        "Bi-Att-Flow": 8,
        "DeepSpeech": 3,
        "WaveNet": 3,
    }
)
EIGHT = "the poster's eight models"
FOUND = ("cores", "speed_percent", "points", "error_percent")


@dataclass(frozen=True, slots=True)
class Learning:
    """A model whose curve is the poster's form with its θ, measured as the design says, with noise, and fitted."""

    model: str
    seed: int

    def run(self, stopped: Stopped) -> Figures | None:
        """Measure until the design wants no more."""
        theta, rng = BEST_CORES[self.model], np.random.default_rng([self.seed, *self.model.encode()])
        points: list[Point] = []
        while planned := design.plan(points, CORES_MAX).cores:
            if stopped():
                return None
            cores = planned[0]
            points.append(Point(cores, rate_of(theta, cores) * (1 + NOISE * rng.standard_normal())))
        curve = fit(points, CORES_MAX)
        errors = [abs(curve.rate(cores) / rate_of(theta, cores) - 1) for cores in range(1, CORES_MAX + 1)]
        given = rate_of(theta, curve.cores_useful)
        return Figures(
            {
                "cores": float(curve.cores_useful),
                "points": float(len(points)),
                "error_percent": 100.0 * float(np.mean(errors)),
                "speed_percent": 100.0 * given,
            }
        )


def rate_of(theta: int, cores: int) -> float:
    """Tell a model's rate as a share of its best: P₀·log C + P₁·C below θ.

    >>> rate_of(8, 8), rate_of(1, 24), round(rate_of(8, 2), 2)
    (1.0, 1.0, 0.29)
    """
    if cores >= theta:
        return 1.0
    return (1 - LINEAR_SHARE) * math.log(cores) / math.log(theta) + LINEAR_SHARE * cores / theta


class Xiao:
    """How many cores a job needs, and what a wrong count costs."""

    name = "xiao"
    title = "Scheduling CPU for GPU-based Deep Learning Jobs"
    reference = "Xiao et al., SoCC 2018 (poster)"
    claims: Sequence[Claim] = ()
    assumptions = (
        "the eight models have the poster's form of curve with the poster's best core counts",
        f"rates are measured with a relative noise of {NOISE:.0%}",
    )
    unsaid = ("the parameters of the eight curves: only their best core counts are told",)

    def cases(self, asked: Asked) -> Sequence[Case]:
        """Learn each of the eight curves with each seed."""
        return [Case(EIGHT, model, seed, Learning(model, seed)) for seed in asked.seeds for model in BEST_CORES]

    def findings(self, asked: Asked, done: Done) -> Findings:
        """Set the cores that were found beside the poster's."""
        rows: list[tuple[Cell, ...]] = [
            (model, float(cores), *(done.mean(EIGHT, model, name) for name in FOUND))
            for model, cores in BEST_CORES.items()
        ]
        columns = ("model", "cores, published", "cores, found", "speed (% of the best)", "points", "curve's error (%)")
        formats = ("", ".0f", ".1f", ".1f", ".1f", ".1f")
        return Findings(
            (), (Table("eight", "Cores for the best speed of eight models", columns, formats, tuple(rows)),)
        )


PAPER = Xiao()
