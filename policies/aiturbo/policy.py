"""Core counts by their value beside GPUs: AITurbo's unified step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cotenant.core.model.estimate import Candidate, Estimate
from cotenant.core.model.job import JobSpec
from cotenant.core.model.node import NodeShape
from cotenant.core.model.refusal import plural
from cotenant.core.model.validation import Violation
from cotenant.core.policy.protocols import Sizing
from cotenant.core.sizing.core_search import expected
from cotenant.core.sizing.core_shares import shares_of
from cotenant.core.sizing.resize import ResizableJob
from cotenant.policies.aiturbo.step import RIGID, Weights, best_step, neighbours, service


class AITurbo:
    """Change the cores of a predictable job by the step that saves most remaining time × service.

    The resizing part of AITurbo (Zhao et al., HPDC 2021 [P]): of one worker, one parameter server, one GPU or some
    cores more or fewer, the change with the largest benefit is made, the drop of remaining time × service [D], if it
    exceeds the cost of a checkpoint and a restart. Jobs do not declare that they are elastic, so only cores change,
    which restarts nothing. A unit of service is 10 for a GPU and 5 for a task [D], and 1 for a core [R]: one more core
    must speed up a job of one GPU by about a twentieth. Spare cores go where they save most: a gain is weighted by the
    remaining service. Unpredictable jobs get their GPUs' share.

    >>> from cotenant.core.prediction.core_curve import Point
    >>> from cotenant.core.model.estimate import UNKNOWN
    >>> from cotenant.core.model.job import Request, Role
    >>> spec = JobSpec(roles=(Role("worker", request=Request(gpu_milli=1000)),))
    >>> AITurbo().size(spec, UNKNOWN, [NodeShape(gpus=8, cores=24)]).cores
    (3,)
    >>> known = Estimate(predictable=True, confidence=1.0, remaining_seconds=3600.0)
    >>> seen = (Point(3, 10.0), Point(4, 10.1))
    >>> AITurbo().resize(ResizableJob("job", spec, known, (4,), (1,), seen, settled_seconds=90.0), now=0.0).cores
    (3,)
    """

    name = "aiturbo"
    api_version = 1

    @dataclass(frozen=True, slots=True)
    class Options:
        """When cores change, and their weights.

        interval_seconds: time between two checks of a job about which nothing new is known.
        warm_up_seconds: time after a change before rates count.
        measure_seconds: duration of a measurement.
        gpu_weight: units of service for a GPU.
        task_weight: units of service for a worker or a parameter server.
        core_weight: units of service for a core.
        step_cores_per_gpu: cores of a step for each GPU of a replica.
        confidence_min: minimum confidence from which a job is predictable.
        """

        interval_seconds: float = 240.0
        warm_up_seconds: float = 30.0
        measure_seconds: float = 60.0
        gpu_weight: float = 10.0
        task_weight: float = 5.0
        core_weight: float = 1.0
        step_cores_per_gpu: int = 1
        confidence_min: float = 0.5

        def check(self) -> Iterator[Violation]:
            """Yield a violation for each invalid option."""
            for name, least in (("interval_seconds", 1.0), ("warm_up_seconds", 0.0), ("measure_seconds", 1.0)):
                if not least <= getattr(self, name) <= 86_400:
                    yield Violation(name, f"must be from {least:g} to 86400, not {getattr(self, name):g}")
            for name in ("gpu_weight", "task_weight", "core_weight"):
                if not 0 < getattr(self, name) <= 1e6:
                    yield Violation(name, f"must be above 0 and at most 1e6, not {getattr(self, name):g}")
            if self.step_cores_per_gpu < 1:
                yield Violation("step_cores_per_gpu", f"must be 1 or more, not {self.step_cores_per_gpu}")
            if not 0 <= self.confidence_min <= 1:
                yield Violation("confidence_min", f"must be from 0 to 1, not {self.confidence_min:g}")

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()
        self.interval_seconds = self.options.interval_seconds
        self.warm_up_seconds = self.options.warm_up_seconds
        self.measure_seconds = self.options.measure_seconds
        self._weights = Weights(self.options.gpu_weight, self.options.task_weight, self.options.core_weight)

    def size(self, spec: JobSpec, estimate: Estimate, shapes: Sequence[NodeShape]) -> Sizing:
        """Start with the GPUs' share."""
        return Sizing(shares_of(spec, shapes), "its GPUs' share of a node's cores to begin with")

    def resize(self, running: ResizableJob, now: float) -> Sizing | None:
        """Return the step that saves most, once the present cores are measured."""
        rest, points = self._remaining(running.estimate), running.measured
        if rest is None:
            return running.wish(running.share, f"{plural(running.share, 'core')}: its remaining time is unknown")
        settled = running.settled_seconds >= self.warm_up_seconds + self.measure_seconds
        if not (points and settled):
            return None
        team, step = _team(running), self.options.step_cores_per_gpu * running.gpus
        choices = neighbours(team, RIGID, (1, running.most), step)
        judged = [(other, _expected_rate(running, other.cores)) for other in choices]
        change = best_step(team, expected(points, team.cores), rest, judged, weights=self._weights)
        if change is None:
            return running.wish(team.cores, f"{plural(team.cores, 'core')}: a step either way saves nothing")
        saved = f"saves {change.benefit_seconds:.0f} s of its service"
        return running.wish(change.to.cores, f"{plural(change.to.cores, 'core')}: a step that {saved}")

    def weight(self, running: ResizableJob) -> float:
        """Return the remaining service; for a job of unknown length, that of a minute."""
        rest, team = self._remaining(running.estimate), _team(running)
        each = service(team, self._weights) / (running.gpus * team.workers)
        return each * (60.0 if rest is None else max(rest, 1.0))

    def _remaining(self, estimate: Estimate) -> float | None:
        sure = estimate.predictable and estimate.confidence >= self.options.confidence_min
        return estimate.remaining_seconds if sure else None


def _team(running: ResizableJob) -> Candidate:
    """Return the leading role as workers; other roles with cores of their own are servers."""
    lead = running.spec.roles[running.lead]
    others = [role for number, role in enumerate(running.spec.roles) if number != running.lead]
    return Candidate(
        running.cores[running.lead],
        lead.request.gpu_milli,
        workers=lead.replicas,
        servers=sum(role.replicas for role in others),
    )


def _expected_rate(running: ResizableJob, cores: int) -> float:
    """Return the expected rate. Below the fewest measured cores it is assumed to stay, if it was level above them.

    If only the present cores were measured and no more are available, fewer are tried once.
    """
    points = sorted(running.measured, key=lambda point: point.cores)
    if cores >= points[0].cores:
        return expected(points, cores)
    lowest = points[0].rate
    level = points[1].rate <= lowest * (1 + 0.02) if len(points) > 1 else running.most <= points[0].cores
    return lowest if level else expected(points, cores)
