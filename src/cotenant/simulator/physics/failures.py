"""Outcomes of jobs: some are killed by their users, some fail, and failures repeat.

Measured (Jeon et al., ATC 2019, section 4 [P]): 17.2 % of jobs are unsuccessful and 13.5 % killed; failures come in 20
classes, with the number of failed trials of each and quantiles of the run time to failure; an unsuccessful job fails
2.3 times. Run times to failure are drawn from a quantile function that is log-linear through the three published
quantiles; below the median it continues with the slope above it, beyond the last one with the slope before it [R]. A
killed job ends at a uniformly drawn share of its work [R]. A failed job that is retried fails again, since Philly's
unsuccessful jobs were retried too: 2 or 3 trials, 2.3 on average [R].

Which classes are transient is our judgment [R]: those not caused by the job's own code and input.
"""

from __future__ import annotations

import math
from bisect import bisect
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from cotenant.core.model.job import JobKind
from cotenant.simulator.physics.rounding import steady
from cotenant.simulator.traces.trace_job import Ended, TraceJob

FAILED_PERCENT, KILLED_PERCENT = 17.2, 13.5
TRIALS_MEAN = 2.3
_STREAM = 2  # separate from the arms' errors: each has its own stream


@dataclass(frozen=True, slots=True)
class Class:
    """A class of failures: its number of failed trials, and minutes to failure at 50, 90 and 95 %."""

    name: str
    trials: int
    minutes: tuple[float, float, float]
    transient: bool = False

    def seconds(self, probability: float) -> float:
        """Return the run time to failure at a quantile.

        >>> [CLASSES[0].seconds(p) for p in (0.5, 0.9, 0.95)]
        [807.0, 1063.8, 2038.2]
        """
        (low, a), (high, b) = ((0.5, 0), (0.9, 1)) if probability < 0.9 else ((0.9, 1), (0.95, 2))
        steps = (probability - low) / (high - low)
        ratio = math.log(self.minutes[b] / self.minutes[a])
        return steady(60 * self.minutes[a] * math.exp(steps * ratio))


CLASSES = (
    Class("cpu_out_of_memory", 12076, (13.45, 17.73, 33.97)),
    Class("incorrect_inputs", 9690, (1.87, 404.83, 2095.73)),
    Class("semantic_error", 2943, (2.72, 376.0, 1436.88)),
    Class("core_dump", 2912, (0.85, 72.75, 431.65)),
    Class("invalid_memory_access", 2602, (1.03, 403.5, 1357.38)),
    Class("model_checkpoint_error", 1995, (181.67, 3728.93, 8196.02), transient=True),
    Class("no_signature", 1684, (1.87, 28.0, 95.17), transient=True),
    Class("cuda_failure", 1484, (1.32, 19.87, 82.17)),
    Class("syntax_error", 1132, (0.58, 5.02, 12.0)),
    Class("traceback_from_crash", 777, (1.02, 894.33, 1394.07)),
    Class("mpi_error", 634, (1.62, 3015.27, 5143.98), transient=True),
    Class("gpu_out_of_memory", 487, (18.53, 353.62, 2740.28)),
    Class("mpi_runtime_failure", 478, (1389.48, 13778.6, 18090.88), transient=True),
    Class("permission_error", 299, (1.0, 8.15, 15.85)),
    Class("import_error", 148, (0.67, 4.58, 10.73)),
    Class("job_preempted", 147, (559.08, 2682.85, 5892.23), transient=True),
    Class("cuda_init_failed", 141, (1.08, 2.18, 4.63), transient=True),
    Class("model_diverged", 84, (1.48, 44.37, 76.53)),
    Class("cuda_version_mismatch", 49, (0.83, 1.65, 1.67)),
    Class("gpu_ecc_error", 10, (26.82, 671.92, 2035.02), transient=True),
)
_UP_TO = list(accumulate(one.trials for one in CLASSES))


@dataclass(frozen=True, slots=True)
class Fate:
    """The outcome of a job in any schedule. `trials_seconds` are run times to each failure; empty if none fails.

    `work_share` is the share of its work that a killed job does. A failed job without trials fails at its end.
    """

    ended: Ended = Ended.PASSED
    work_share: float = 1.0
    failure: Class | None = None
    trials_seconds: tuple[float, ...] = ()


PASSES = Fate()


def fate_in_trace(job: TraceJob) -> Fate:
    """Return the outcome in the trace: the job ends as recorded, after all of its work."""
    return Fate(job.ended) if job.ended else PASSES


@dataclass(frozen=True, slots=True)
class Fates:
    """Draws the outcomes of jobs, equal in every arm: from the seed and the job's number in the trace alone."""

    seed: int
    failed_percent: float = FAILED_PERCENT
    killed_percent: float = KILLED_PERCENT
    retries: str = "transient"  # none, transient or philly

    def draw(self, job: TraceJob, number: int) -> Fate:
        """Return the outcome of a training job; the trace takes precedence, and other kinds of job pass."""
        rng = np.random.default_rng([self.seed, _STREAM, number])
        end, which, more, share, *moments = rng.random(7).tolist()
        if job.ended is Ended.FAILED:
            return Fate(Ended.FAILED, failure=class_at(which))
        if job.ended or job.kind is not JobKind.TRAINING:
            return fate_in_trace(job)
        if end < self.failed_percent / 100:
            failure = class_at(which)
            trials = self._trials(failure, more)
            return Fate(Ended.FAILED, failure=failure, trials_seconds=tuple(map(failure.seconds, moments[:trials])))
        if end < (self.failed_percent + self.killed_percent) / 100:
            return Fate(Ended.KILLED, work_share=steady(1 - share))  # from (0, 1]: it runs at least a moment
        return PASSES

    def _trials(self, failure: Class, drawn: float) -> int:
        """Return the number of trials before a job is given up."""
        if self.retries == "none" or (self.retries == "transient" and not failure.transient):
            return 1
        fewest = math.floor(TRIALS_MEAN)
        return fewest + (drawn < TRIALS_MEAN - fewest)


def class_at(share: float) -> Class:
    """Return the class for a number from 0 to 1, each as often as its trials.

    >>> class_at(0.0).name, class_at(0.9999999).name
    ('cpu_out_of_memory', 'gpu_ecc_error')
    """
    return CLASSES[min(bisect(_UP_TO, share * _UP_TO[-1]), len(CLASSES) - 1)]
