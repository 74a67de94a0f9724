"""How right the predictions of jobs that have ended were, as the API tells it: for commands and the dashboard."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cotenant.cli.connection import Mesh
from cotenant.cli.views import View
from cotenant.codec.specs import seconds
from cotenant.core.prediction.earned_trust import ALL_TENANTS, JudgedPrediction, JudgedPredictions
from cotenant.core.prediction.track_record import TrackRecord, track_record
from cotenant.v1.job_pb2 import JOB_PHASE_SUCCEEDED, Job
from cotenant.v1.job_service_pb2 import JobFilter, ListJobsRequest, ListJobsResponse

PAGE_SIZE = 1000

Key = tuple[str, str]  # predictor and tenant


async def judged_jobs(mesh: Mesh, tenant: str, most: int) -> list[Job]:
    """Return the jobs that succeeded and whose run time was predicted, among the `most` that were submitted last."""
    wanted = JobFilter(phases=[JOB_PHASE_SUCCEEDED], tenant=tenant)
    found: list[Job] = []
    seen, token = 0, ""
    while seen < most:
        request = ListJobsRequest(filter=wanted, page_size=min(PAGE_SIZE, most - seen), page_token=token)
        page: ListJobsResponse = await mesh.jobs.ListJobs(request)
        seen += len(page.jobs)
        found += [job for job in page.jobs if job.HasField("predicted_run_time")]
        token = page.next_page_token
        if not token:
            break
    return found


def records_of(jobs: Iterable[Job]) -> Mapping[Key, TrackRecord]:
    """Return the record of each predictor over all tenants, and with each tenant if there are several."""
    pairs: dict[Key, list[tuple[float, float]]] = {}
    for job in jobs:
        for tenant in (ALL_TENANTS, job.spec.tenant):
            pairs.setdefault((predictor_of(job), tenant), []).append(pair_of(job))
    several = {source for source, _ in pairs if sum(one == source for one, _ in pairs) > 2}
    shown = sorted(key for key in pairs if key[1] == ALL_TENANTS or key[0] in several)
    return {key: record for key in shown if (record := track_record(pairs[key]))}


def judged_predictions(jobs: Iterable[Job]) -> JudgedPredictions:
    """Return the judged predictions of ended jobs, from which the trust in estimates follows."""
    found = JudgedPredictions()
    for job in jobs:
        ended = seconds(job.end_time)
        found.add(JudgedPrediction(ended, job.id, predictor_of(job), job.spec.tenant, *pair_of(job)))
    return found


def record_view(key: Key, record: TrackRecord) -> View:
    """Return one record."""
    predictor, tenant = key
    return {
        "predictor": predictor,
        "tenant": tenant or None,
        "jobs": record.jobs,
        "median_factor": record.median_factor,
        "within_twice": record.within_twice,
        "bias": record.bias,
        "explained": record.explained,
    }


def predictor_of(job: Job) -> str:
    """Return the predictor of a job's run time."""
    return job.prediction_source or "unknown"


def band_of(job: Job) -> tuple[float, float] | None:
    """Return the 10th and the 90th percentile of an ended job's predicted run time, in seconds; None if not kept."""
    if not job.HasField("predicted_run_time_p10") or not job.HasField("predicted_run_time_p90"):
        return None
    return seconds(job.predicted_run_time_p10), seconds(job.predicted_run_time_p90)


def pair_of(job: Job) -> tuple[float, float]:
    """Return the predicted and the real run time of an ended job, in seconds."""
    return seconds(job.predicted_run_time), seconds(job.run_time)
