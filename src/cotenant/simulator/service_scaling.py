"""Services in a simulation: their number of replicas if that is variable, and what is known of their batches.

Similar services, of one tenant and one model, have equal batch times. The `oracle` knows them; predictors are shown
batches of some sizes of each service that ends, as they would be reported while it ran.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from cotenant.core.model.estimate import Candidate, CandidateEstimate, Estimate, Latency, Observation
from cotenant.core.model.gang import Gang
from cotenant.core.model.job_table import JobTable
from cotenant.simulator.job import SimulatedJob, job_class_of
from cotenant.simulator.traces import TraceJob

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 4, 8, 2, 1)  # batch sizes a service is assumed to have answered


def scale(sim_job: SimulatedJob, gang: Gang, table: JobTable) -> None:
    """Set a starting service's replicas as decided, until it waits again."""
    if gang.parts != sim_job.job_class.parts:
        sim_job.job_class = replace(
            job_class_of(gang, sim_job.job_class.tenant), first=sim_job.job_class.first or sim_job.job_class
        )
        count(sim_job, table)


def count(sim_job: SimulatedJob, table: JobTable) -> None:
    """Update the needs of a job's class in the table."""
    job_class = sim_job.job_class
    table.update(
        sim_job.job.id,
        **job_class.needs._asdict(),
        replicas=job_class.replicas,
    )


def with_batch_latency(job: TraceJob, estimate: Estimate) -> Estimate:
    """Return an estimate with the true batch times of a service."""
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
    """Yield observations of a service's batches on what each replica `held`; `like` has the job's fields."""
    for size in BATCH_SIZES if job.batch else ():
        assert job.batch
        yield replace(like, allocation=held, run_seconds=None, batch_size=size, batch_seconds=job.batch.seconds(size))
