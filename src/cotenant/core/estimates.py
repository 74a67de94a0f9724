"""What predictors say, and what they are told."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """An allocation to be judged, the same for each replica."""

    cores: int
    gpu_milli: int = 0
    nodes: int = 1
    gpu_type: str = ""


@dataclass(frozen=True, slots=True)
class CandidateEstimate:
    """Rate and remaining time under one candidate; None where unknown."""

    rate_per_second: float | None = None
    remaining_seconds: float | None = None
    confidence: float = 0.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """What is known of a job. An unpredictable job is a first-class answer: `predictable` False and no figures."""

    predictable: bool = False
    confidence: float = 0.0
    remaining_seconds: float | None = None
    remaining_p10_seconds: float | None = None
    remaining_p90_seconds: float | None = None
    cores_useful: int | None = None  # θ per replica: beyond it nothing is gained (Xiao [P])
    candidates: tuple[CandidateEstimate, ...] = ()
    source: str = ""


UNKNOWN = Estimate(source="nothing is known of this job")


@dataclass(frozen=True, slots=True)
class Query:
    """A job to be estimated."""

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


@dataclass(frozen=True, slots=True)
class Observation:
    """A window of a job's rate, or, with `run_seconds`, its end."""

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
