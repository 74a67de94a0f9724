"""Cores up to the sweet spot of the job's curve."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from cotenant.core.model.estimate import Estimate
from cotenant.core.model.job import JobSpec
from cotenant.core.model.node import NodeShape
from cotenant.core.model.refusal import plural
from cotenant.core.model.validation import Violation
from cotenant.core.policy.protocols import Sizing
from cotenant.core.prediction.core_curve import Curve, Point, fit, ladder
from cotenant.core.prediction.experiment_design import plan
from cotenant.core.sizing.core_shares import shares_of
from cotenant.core.sizing.resize import ResizableJob, leading_role, resizable


class Xiao:
    """Give a job θ cores, the sweet spot beyond which its rate does not grow; else its GPUs' share.

    From Xiao et al., "Scheduling CPU for GPU-based Deep Learning Jobs" (SoCC 2018): the rate is S(C) = P₀·log C + P₁·C
    below θ and constant from there on, θ is the number of cores to give, and jobs are resized every 10 to 30 minutes
    [P]. θ comes from the predictor. If the predictor does not know it, measured rates decide, by the same curve; if
    there are too few, the core counts of an optimal experiment design are tried, at most five [R]. A job starts with at
    most its GPUs' share, so that no GPU is left without cores; cores beyond that, up to θ, are lent [R].

    >>> from cotenant.core.model.estimate import UNKNOWN
    >>> from cotenant.core.model.job import Request, Role
    >>> spec = JobSpec(roles=(Role("worker", request=Request(gpu_milli=1000)),))
    >>> Xiao().size(spec, Estimate(cores_useful=1, cores_useful_confidence=0.9), [NodeShape(gpus=8, cores=24)]).cores
    (1,)
    >>> Xiao().size(spec, UNKNOWN, [NodeShape(gpus=8, cores=24)]).cores
    (3,)
    """

    name = "xiao"
    api_version = 1

    @dataclass(frozen=True, slots=True)
    class Options:
        """When cores change, and the required confidence in θ.

        interval_seconds: time between two checks of a job about which nothing new is known.
        warm_up_seconds: time after a change before rates count.
        measure_seconds: duration of a measurement.
        confidence_min: minimum confidence from which θ is used.
        trials: whether core counts are tried if too little is known; otherwise only predictions count.
        """

        interval_seconds: float = 1200.0
        warm_up_seconds: float = 30.0
        measure_seconds: float = 60.0
        confidence_min: float = 0.5
        trials: bool = True

        def check(self) -> Iterator[Violation]:
            """Yield a violation for each invalid option."""
            for name, least in (("interval_seconds", 1.0), ("warm_up_seconds", 0.0), ("measure_seconds", 1.0)):
                if not least <= getattr(self, name) <= 86_400:
                    yield Violation(name, f"must be from {least:g} to 86400, not {getattr(self, name):g}")
            if not 0 <= self.confidence_min <= 1:
                yield Violation("confidence_min", f"must be from 0 to 1, not {self.confidence_min:g}")

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()
        self.interval_seconds = self.options.interval_seconds
        self.warm_up_seconds = self.options.warm_up_seconds
        self.measure_seconds = self.options.measure_seconds

    def size(self, spec: JobSpec, estimate: Estimate, shapes: Sequence[NodeShape]) -> Sizing:
        """Start with θ if it is known, within the GPUs' share."""
        cores = list(shares_of(spec, shapes))
        if not resizable(spec):
            return Sizing(tuple(cores), "as requested; roles without a request get their GPUs' share")
        lead = leading_role(spec)
        theta = self._predicted_theta(estimate)
        if theta is None:
            return Sizing(tuple(cores), f"its GPUs' share of {plural(cores[lead], 'core')}: θ is unknown")
        less = f", of which its GPUs' share is {cores[lead]}" if cores[lead] < theta else ""
        cores[lead] = min(cores[lead], theta)
        return Sizing(tuple(cores), f"θ is {plural(theta, 'core')}{less}")

    def _predicted_theta(self, estimate: Estimate) -> int | None:
        if estimate.cores_useful is None or estimate.cores_useful_confidence < self.options.confidence_min:
            return None
        return max(1, estimate.cores_useful)

    def resize(self, running: ResizableJob, now: float) -> Sizing | None:
        """Return θ cores; if θ is unknown, the next count worth measuring."""
        theta = self._predicted_theta(running.estimate)
        if theta is not None:
            return running.wish(theta, f"θ is {plural(theta, 'core')}: {running.estimate.source or 'as predicted'}")
        points = running.measured
        if not (points and self.options.trials):
            return None
        curve = _curve(points, running.most)
        if _known(curve):
            return running.wish(curve.cores_useful, f"θ is {plural(curve.cores_useful, 'core')}, as measured")
        if running.settled_seconds < self.warm_up_seconds + self.measure_seconds:
            return None  # the present cores are being measured
        if next_ := _next(points, running.most):
            return running.wish(next_, f"{plural(next_, 'core')} on trial: θ is not yet known")
        return running.wish(curve.cores_useful, f"θ may be {plural(curve.cores_useful, 'core')} or more")

    def weight(self, running: ResizableJob) -> float:
        """Return 1: all gains are equal."""
        return 1.0


@lru_cache(maxsize=4096)
def _curve(points: tuple[Point, ...], most: int) -> Curve:
    return fit(points, most)


def _known(curve: Curve) -> bool:
    """Return whether θ is known within one step of the ladder, whatever cores are available."""
    rungs = ladder(int(curve.thetas[-1]))
    low, high = (rungs.index(min(rungs, key=lambda rung: abs(rung - end))) for end in curve.interval)
    return len(curve.points) > 1 and curve.levels_off and high - low <= 1


@lru_cache(maxsize=4096)
def _next(points: tuple[Point, ...], most: int) -> int | None:
    """Return the count that an optimal design would measure next; None if enough is known."""
    return next(iter(plan(points, most).cores), None)
