"""Finds the right number of cores by trial while a job runs: CODA's adaptive CPU allocator."""

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
from cotenant.core.sizing.core_search import SearchOptions, next_trial
from cotenant.core.sizing.core_shares import shares_of
from cotenant.core.sizing.resize import ResizableJob, leading_role, resizable


class CodaAdaptive:
    """Find N*, the fewest cores that keep a job's GPUs at full speed, by trying a few more and a few fewer.

    The adaptive CPU allocator of CODA (Zhao et al., ICDCS 2020 [P]); its start, steps and thresholds are our
    reconstruction [R]. A job starts with the N* of its job class, else the median of its category, else a number per
    GPU for the category (vision 6, speech 3, language 2), else its GPUs' share of the node. Each trial is a warm-up and
    a measurement. More cores are tried as long as they gain 2 %, else fewer as long as the loss is smaller than that;
    steps double, and the last gap is bisected. A job starts with at most its GPUs' share, so that no GPU is left
    without cores; further useful cores are lent to it while they are spare. Jobs whose user requested a number of cores
    keep that number.

    >>> from cotenant.core.prediction.core_curve import Point
    >>> from cotenant.core.model.estimate import UNKNOWN
    >>> from cotenant.core.model.job import Request
    >>> spec = JobSpec(roles=(Role("worker", request=Request(gpu_milli=1000)),), model="bert")
    >>> CodaAdaptive().size(spec, UNKNOWN, [NodeShape(gpus=8, cores=24)]).cores
    (2,)
    >>> seen = (Point(1, 9.9, windows=4), Point(2, 10.0, windows=4), Point(3, 10.0, windows=4))
    >>> CodaAdaptive().resize(ResizableJob("job", spec, UNKNOWN, (2,), (3,), seen, settled_seconds=90.0), now=0.0).cores
    (1,)
    """

    name = "coda-adaptive"
    api_version = 1

    @dataclass(frozen=True, slots=True)
    class Options:
        """Parameters of the core search.

        warm_up_seconds: time after a change before rates count.
        measure_seconds: duration of a measurement.
        step_cores_per_gpu: cores of the first step for each GPU of a replica.
        tolerance: gains and losses below this are ignored; relative to the rate.
        noise: standard deviation of a measured rate, relative to it; differences within the noise decide nothing.
        counts_max: maximum number of core counts that one job tries, not counting those that cost it nothing.
        vision: initial cores per GPU for jobs on images, if nothing is known of such jobs yet.
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
            """Yield a violation for each invalid option."""
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
        """Return the initial cores: what similar jobs were found to need, within the GPUs' share."""
        cores = list(shares_of(spec, shapes))
        if not resizable(spec):
            return Sizing(tuple(cores), "as requested; roles without a request get their GPUs' share")
        lead = leading_role(spec)
        start, why = self._start_of(spec.roles[lead], spec, estimate, cores[lead])
        within = min(cores[lead], start)
        cores[lead] = within
        reason = f"{plural(within, 'core')} to begin with: {why}"
        return Sizing(tuple(cores), reason + (f", of which its GPUs' share is {within}" if within < start else ""))

    def _start_of(self, role: Role, spec: JobSpec, estimate: Estimate, share: int) -> tuple[int, str]:
        if estimate.cores_useful is not None:
            return max(1, estimate.cores_useful), f"similar jobs need {estimate.cores_useful}"
        model = model_of(spec.model or spec.name)
        if model and model.kind in self._start:
            each = self._start[model.kind]
            return -(-each * role.request.gpu_milli // WHOLE_GPU_MILLI), f"{each} per GPU for {model.kind}"
        return share, "its GPUs' share of the node"

    def resize(self, running: ResizableJob, now: float) -> Sizing | None:
        """Try other cores once the present ones are measured; hold N* once it is found."""
        lead = running.lead
        held = running.cores[lead]
        if not running.measured:
            start, why = self._start_of(running.spec.roles[lead], running.spec, running.estimate, running.share)
            short = f", of which {running.most} can be had" if running.most < start else ""
            return running.wish(start, f"{plural(start, 'core')} to begin with: {why}{short}")
        how = SearchOptions(
            self.options.tolerance,
            self.options.noise,
            self.options.step_cores_per_gpu * running.gpus,
            self.options.counts_max,
        )
        trial = next_trial(running.measured, held, running.most, how, tried=len(running.points))
        if not trial.found and running.settled_seconds < self.interval_seconds:
            return None  # the present cores are being measured
        return running.wish(trial.cores, trial.reason)

    def weight(self, running: ResizableJob) -> float:
        """Return 1: all gains are equal."""
        return 1.0
