"""What predictors are asked, what they observe and what they answer."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from cotenant.core.model.job import Qos, Role
from cotenant.core.model.loss_goal import NO_GOAL, LossGoal

TRAINING = ""  # the phase of a job that does not report one


@dataclass(frozen=True, slots=True)
class Candidate:
    """An allocation to estimate: the same for each replica, or for each worker of a job with parameter servers."""

    cores: int
    gpu_milli: int = 0
    nodes: int = 1
    gpu_type: str = ""
    workers: int = 0  # replicas other than parameter servers, or of a service; 0: the job's own number
    servers: int = 0  # parameter servers
    server_cores: int = 0  # of each


@dataclass(frozen=True, slots=True)
class Latency:
    """Response times of a service whose replicas share its requests evenly.

    Figures are None if the replicas cannot keep up, so that waits grow without bound.
    """

    replicas: int  # the number that the figures are for
    mean_seconds_max: float | None = None  # an upper bound of the mean
    p95_seconds: float | None = None
    p99_seconds: float | None = None
    promised_seconds: float | None = None  # at the percentile of the job's objective; None if it has none
    replicas_needed: int | None = None  # the fewest that meet the objective; None: no number does, or no objective
    confidence: float = 0.0
    per_request_seconds: float | None = None  # a batch of b requests takes b times this, and
    fixed_seconds: float | None = None  # plus this; None if the predictor does not give it


@dataclass(frozen=True, slots=True)
class CandidateEstimate:
    """Rate and remaining time on one candidate allocation, and latency for a service; None if unknown.

    `allocation` is the candidate, where it is sent along with the estimate.
    """

    rate_per_second: float | None = None
    remaining_seconds: float | None = None
    confidence: float = 0.0
    latency: Latency | None = None
    allocation: Candidate | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """What is known about a job. An unpredictable job is a first-class answer: `predictable` False, and no figures."""

    predictable: bool = False
    confidence: float = 0.0
    remaining_seconds: float | None = None
    remaining_p10_seconds: float | None = None
    remaining_p90_seconds: float | None = None
    cores_useful: int | None = None  # θ per replica: more cores do not help (Xiao [P])
    candidates: tuple[CandidateEstimate, ...] = ()
    source: str = ""
    cores_useful_confidence: float = 0.0


def as_of(estimate: Estimate, passed_seconds: float) -> Estimate:
    """Return an earlier estimate, adjusted for the time that has passed since.

    >>> as_of(Estimate(predictable=True, remaining_seconds=60, remaining_p90_seconds=90), 70).remaining_p90_seconds
    20
    """

    def left(seconds: float | None) -> float | None:
        return None if seconds is None else max(0.0, seconds - max(0.0, passed_seconds))

    return replace(
        estimate,
        remaining_seconds=left(estimate.remaining_seconds),
        remaining_p10_seconds=left(estimate.remaining_p10_seconds),
        remaining_p90_seconds=left(estimate.remaining_p90_seconds),
    )


NO_QOS = Qos()
UNKNOWN = Estimate(source="nothing is known about this job")


@dataclass(frozen=True, slots=True)
class Submission:
    """What else is known about a job at submission; nothing here depends on how it runs."""

    submitter: str = ""
    submitted_seconds: float | None = None  # unix time; in a simulation, the trace's clock
    kind: str = ""  # training, inference or cpu; empty if not given
    roles: tuple[Role, ...] = ()
    steps_total: int = 0
    labels: tuple[tuple[str, str], ...] = ()


NO_SUBMISSION = Submission()


@dataclass(frozen=True, slots=True)
class OwnRate:
    """The rate of a job's own training steps, over windows of its reports.

    `spread` is the standard deviation of the logarithm of the windows' rates. Without windows, the rate is from before
    a change of what the job runs on; 0 means that none is known. `gap_seconds` is the longest time between two reports
    of steps, `silent_seconds` the time since the last one.
    """

    rate_per_second: float
    windows: int
    spread: float = 0.0
    gap_seconds: float = 0.0
    silent_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Query:
    """A job to estimate."""

    user: str
    model: str
    name: str
    gpu_milli: int
    replicas: int
    cores: int | None = None
    gpu_type: str = ""
    attained_gpu_seconds: float = 0.0
    run_seconds: float = 0.0
    step: int = 0
    steps_total: int = 0
    expected_seconds: float | None = None
    candidates: tuple[Candidate, ...] = ()
    phase: str = TRAINING
    job_id: str = ""  # empty for a job that was not submitted
    loss_goal: LossGoal = NO_GOAL
    qos: Qos = NO_QOS
    submission: Submission = NO_SUBMISSION
    own_rate: OwnRate | None = None  # None if it has not reported a step


@dataclass(frozen=True, slots=True)
class Observation:
    """A window of a job's rate or, with `run_seconds`, the end of the job.

    `phase` keeps windows of validation, for example, apart from those of training, because their rates differ (Xiao
    [P]). A loss that is not a finite number is reported as it is: a training that diverged is a fact about the job.
    """

    user: str
    model: str
    name: str
    gpu_milli: int
    replicas: int
    allocation: Candidate
    rate_per_second: float | None = None
    window_seconds: float = 0.0
    run_seconds: float | None = None
    succeeded: bool = False
    phase: str = TRAINING
    job_id: str = ""
    step: int | None = None
    loss: float | None = None  # at that step
    batch_size: int | None = None  # requests answered together
    batch_seconds: float | None = None  # duration of that batch
    submission: Submission = NO_SUBMISSION
    surprising: bool | None = None  # of an end: whether it was unpredictable; None if unknown
    seen_seconds: float | None = None  # when the window or the job ended, on the clock of `submitted_seconds`
    loss_goal: LossGoal = NO_GOAL  # as in queries about the job


def validated_rate(observation: Observation) -> float:
    """Return the observed rate, or 0 if there is none.

    Raises:
        ValueError: the rate or the run time is negative or not finite.
    """
    for what, figure in (("rate", observation.rate_per_second), ("run time", observation.run_seconds)):
        if figure is not None and not 0 <= figure < math.inf:
            raise ValueError(f"a {what} must be positive and finite, not {figure:g}")
    return observation.rate_per_second or 0.0
