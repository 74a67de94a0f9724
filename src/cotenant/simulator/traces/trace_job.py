"""A job of a trace, and errors of traces."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from cotenant.core.model.estimate import NO_QOS
from cotenant.core.model.job import (
    NO_SPREAD,
    TENANT_DEFAULT,
    WHOLE_GPU_MILLI,
    JobKind,
    JobSpec,
    Locality,
    OpenReplicas,
    Qos,
    Request,
    Role,
    Spread,
)
from cotenant.core.prediction.batch_queueing import BatchTime


class Ended(StrEnum):
    """The outcome of a job (Philly, section 4 [P])."""

    PASSED = "passed"
    KILLED = "killed"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class TraceJob:
    """One job of a trace.

    `work_seconds` is the job's run time at reference speed: without stops or interference, with its gang as close
    together as possible, on the GPUs and with the cores of the trace. `deadline_seconds` is on the trace's clock.
    `memory_bandwidth_bytes_per_second` is the job's unlimited traffic, over all its replicas. `ended` is its outcome in
    the trace.
    """

    id: str
    submitted_seconds: float
    work_seconds: float
    roles: tuple[Role, ...]
    kind: JobKind = JobKind.TRAINING
    tenant: str = TENANT_DEFAULT
    model: str = ""
    name: str = ""  # the user's name for it; few traces have it
    user: str = ""
    gpu_type: str = ""  # on which the trace was recorded; the job's requirements are in its roles' requests
    priority: int = 0
    preemptible: bool = True
    deadline_seconds: float | None = None
    locality: Locality | None = None
    spread: Spread = NO_SPREAD
    memory_bandwidth_bytes_per_second: float = 0.0
    ended: Ended | None = None
    qos: Qos = NO_QOS
    batch: BatchTime | None = None  # of a service: how long its batches take

    def spec(self) -> JobSpec:
        """Return the job's spec as its user would have submitted it."""
        return JobSpec(
            name=self.name,
            kind=self.kind,
            tenant=self.tenant,
            roles=self.roles,
            model=self.model,
            priority=self.priority,
            preemptible=self.preemptible,
            deadline_seconds=self.deadline_seconds,
            locality=self.locality,
            spread=self.spread,
            qos=self.qos,
        )


@lru_cache(maxsize=1024)
def workers(gpus: int) -> tuple[Role, ...]:
    """Return a gang of one-GPU replicas, for traces that give only a number of GPUs.

    >>> workers(4)[0].replicas, workers(4)[0].request.gpu_milli, workers(4)[0].request.cores
    (4, 1000, 0)
    """
    return (Role("worker", gpus, Request(gpu_milli=WHOLE_GPU_MILLI, cores=0)),)


@lru_cache(maxsize=4096)
def replicas(count: int, request: Request) -> tuple[Role, ...]:
    """Return a gang of equal replicas; equal gangs share one object."""
    return (Role("worker", count, request),)


@lru_cache(maxsize=4096)
def open_replicas(bounds: OpenReplicas, request: Request) -> tuple[Role, ...]:
    """Return a service with a variable number of replicas."""
    return (Role("worker", bounds.least, request, open=bounds),)


class BadTrace(Exception):
    """A trace that cannot be read; the message is one sentence that names the file."""


class BadRow(BadTrace):
    """One row that cannot be read: where it is, what was expected there and what was found."""

    def __init__(self, source: str, line: int, column: str, expected: str, found: str, unit: str = "line") -> None:
        where = f"{source}, {unit} {line}" + (f", column {column!r}" if column else "")
        super().__init__(f"{where}: expected {expected}, found {found}")
        self.line, self.column, self.expected, self.found = line, column, expected, found
