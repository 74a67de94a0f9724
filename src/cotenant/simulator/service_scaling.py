"""Services in a simulation: how many replicas they have that leave that open, and what is known of their batches.

Services alike, of one tenant and one model, take alike for a batch. The `oracle` knows how long that is; predictors are
shown batches of some sizes of each service that ends, as they would be told while it ran.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from cotenant.core.model.estimate import Candidate, CandidateEstimate, Estimate, Latency, Observation
from cotenant.core.model.gang import Gang
from cotenant.core.model.job_table import JobTable
from cotenant.simulator.job import Life, shape_of
from cotenant.simulator.traces import TraceJob

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 4, 8, 2, 1)  # that a service is taken to have answered


def scale(life: Life, gang: Gang, table: JobTable) -> None:
    """Let a service that starts have as many replicas as were decided, until it waits again."""
    if gang.parts != life.shape.parts:
        life.shape = replace(shape_of(gang, life.shape.tenant), first=life.shape.first or life.shape)
        count(life, table)


def count(life: Life, table: JobTable) -> None:
    """Let the table know what a job of its shape needs."""
    shape = life.shape
    table.update(
        life.job.id,
        gpu_milli=shape.gpu_milli,
        cores=shape.cores,
        memory_bytes=shape.memory_bytes,
        replicas=shape.replicas,
    )


def judged(job: TraceJob, estimate: Estimate) -> Estimate:
    """Add to an estimate how long batches of a service really take."""
    if job.batch is None:
        return estimate
    request = job.roles[0].request
    told = Latency(
        job.roles[0].replicas,
        confidence=1.0,
        per_request_seconds=job.batch.per_request,
        fixed_seconds=job.batch.fixed,
    )
    allocation = Candidate(request.cores or 0, request.gpu_milli, gpu_type=request.gpu_type)
    return replace(estimate, candidates=(CandidateEstimate(latency=told, allocation=allocation), *estimate.candidates))


def batches(job: TraceJob, held: Candidate, like: Observation) -> Iterator[Observation]:
    """Tell of batches of a service on what each replica `held`; `like` says whose they are."""
    for size in BATCH_SIZES if job.batch else ():
        assert job.batch
        yield replace(like, allocation=held, run_seconds=None, batch_size=size, batch_seconds=job.batch.seconds(size))
