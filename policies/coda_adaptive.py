"""Cores found by trying, while the job runs: CODA's adaptive CPU allocator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cotenant.core.model.estimate import Estimate
from cotenant.core.model.job import WHOLE_GPU_MILLI, JobSpec, Role
from cotenant.core.model.model_name import model_of
from cotenant.core.model.node import NodeShape
from cotenant.core.model.refusal import plural
from cotenant.core.model.validation import Violation
from cotenant.core.policy.protocols import Sizing
from cotenant.core.sizing.core_search import Climb, climb
from cotenant.core.sizing.core_shares import shares_of
from cotenant.core.sizing.resize import Running, leading_role, resizable


class CodaAdaptive:
    """Find N*, the fewest cores that keep a job's GPUs at full speed, by trying a few more and a few fewer.

    The adaptive CPU allocator of CODA (Zhao et al., ICDCS 2020 [P]); its start, its steps and its thresholds are our
    reconstruction [R]. A job starts from the N* of its kind, else the median of its category, else a figure of the
    category per GPU (vision 6, speech 3, language 2), else its GPUs' share of the node. Each trial is a warm-up and a
    measurement. More cores are tried while that gains 2 %, else fewer while that loses less; steps double, and the last
    gap is halved. It starts with no more than its GPUs' share, so that no GPU is left without cores; what it could use
    beyond that is lent to it while nobody else holds it. Jobs whose cores the user gave keep them.

    >>> from cotenant.core.prediction.core_curve import Point
    >>> from cotenant.core.model.estimate import UNKNOWN
    >>> from cotenant.core.model.job import Request
    >>> spec = JobSpec(roles=(Role("worker", request=Request(gpu_milli=1000)),), model="bert")
    >>> CodaAdaptive().size(spec, UNKNOWN, [NodeShape(gpus=8, cores=24)]).cores
    (2,)
    >>> seen = (Point(1, 9.9, windows=4), Point(2, 10.0, windows=4), Point(3, 10.0, windows=4))
    >>> CodaAdaptive().resize(Running("job", spec, UNKNOWN, (2,), (3,), seen, settled_seconds=90.0), now=0.0).cores
    (1,)
    """

    name = "coda-adaptive"
    api_version = 1

    @dataclass(frozen=True, slots=True)
    class Options:
        """How the search goes.

        warm_up_seconds: what passes after a change before a rate counts.
        measure_seconds: how long a rate is measured.
        step_cores_per_gpu: cores of the first step for each GPU of a replica.
        tolerance: a gain of less is none, and a loss of less is none; relative to the rate.
        noise: standard deviation of one measured rate, relative to it; a difference within it decides nothing.
        counts_max: core counts that one job tries, not counting those that cost it nothing.
        vision: cores per GPU to begin with for jobs that work on images, if nothing is known of such jobs yet.
        speech: the same for speech and sound.
        language: the same for text.
        """

        warm_up_seconds: float = 30.0
        measure_seconds: float = 60.0
        step_cores_per_gpu: int = 1
        tolerance: float = 0.02
        noise: float = 0.02
        counts_max: int = 8
        vision: int = 6
        speech: int = 3
        language: int = 2

        def check(self) -> Iterator[Violation]:
            """Name every option that makes no sense."""
            for name in ("step_cores_per_gpu", "counts_max", "vision", "speech", "language"):
                if getattr(self, name) < 1:
                    yield Violation(name, f"must be 1 or more, not {getattr(self, name)}")
            for name, least in (("warm_up_seconds", 0.0), ("measure_seconds", 1.0)):
                if not least <= getattr(self, name) <= 86_400:
                    yield Violation(name, f"must be from {least:g} to 86400, not {getattr(self, name):g}")
            for name in ("tolerance", "noise"):
                if not 0 <= getattr(self, name) < 1:
                    yield Violation(name, f"must be 0 or more and below 1, not {getattr(self, name):g}")

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()
        self.warm_up_seconds = self.options.warm_up_seconds
        self.measure_seconds = self.options.measure_seconds
        self.interval_seconds = self.warm_up_seconds + self.measure_seconds
        self._start = {name: getattr(self.options, name) for name in ("vision", "speech", "language")}

    def size(self, spec: JobSpec, estimate: Estimate, shapes: Sequence[NodeShape]) -> Sizing:
        """Start from what jobs like this one were found to need, within the GPUs' share."""
        cores = list(shares_of(spec, shapes))
        if not resizable(spec):
            return Sizing(tuple(cores), "as requested, and the share of GPUs where nothing was")
        lead = leading_role(spec)
        start, why = self._start_of(spec.roles[lead], spec, estimate, cores[lead])
        within = min(cores[lead], start)
        cores[lead] = within
        reason = f"{plural(within, 'core')} to begin with: {why}"
        return Sizing(tuple(cores), reason + (f", of which its GPUs' share is {within}" if within < start else ""))

    def _start_of(self, role: Role, spec: JobSpec, estimate: Estimate, share: int) -> tuple[int, str]:
        if estimate.cores_useful is not None:
            return max(1, estimate.cores_useful), f"jobs like it need {estimate.cores_useful}"
        model = model_of(spec.model or spec.name)
        if model and model.kind in self._start:
            each = self._start[model.kind]
            return -(-each * role.request.gpu_milli // WHOLE_GPU_MILLI), f"{each} per GPU for {model.kind}"
        return share, "its GPUs' share of the node"

    def resize(self, running: Running, now: float) -> Sizing | None:
        """Try other cores once the present ones are measured; hold N* once it is found."""
        lead = running.lead
        held = running.cores[lead]
        if not running.measured:
            start, why = self._start_of(running.spec.roles[lead], running.spec, running.estimate, running.share)
            return running.wish(start, f"{plural(start, 'core')} to begin with: {why}")
        how = Climb(
            self.options.tolerance,
            self.options.noise,
            self.options.step_cores_per_gpu * running.gpus,
            self.options.counts_max,
        )
        trial = climb(running.measured, held, running.most, how, tried=len(running.points))
        if not trial.found and running.settled_seconds < self.interval_seconds:
            return None  # the present cores are being measured
        return running.wish(trial.cores, trial.reason)

    def weight(self, running: Running) -> float:
        """A gain is a gain."""
        return 1.0
