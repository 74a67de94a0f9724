"""How right the predictions of jobs that have ended were, as a table and for `--json`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cotenant.cli.connection import Mesh
from cotenant.cli.render import Column
from cotenant.cli.views import View
from cotenant.codec.specs import seconds
from cotenant.core.prediction.track_record import TrackRecord, track_record
from cotenant.v1.job_pb2 import JOB_PHASE_SUCCEEDED, Job
from cotenant.v1.job_service_pb2 import JobFilter, ListJobsRequest, ListJobsResponse

PAGE_SIZE = 1000
ALL_TENANTS = ""  # no tenant is called that
COLUMNS = (
    Column("PREDICTOR", elastic=True),
    Column("TENANT", elastic=True),
    Column("JOBS", right=True),
    Column("OFF BY", right=True),
    Column("WITHIN 2×", right=True),
    Column("BIAS", right=True),
    Column("EXPLAINED", right=True),
)
LEGEND = (
    "OFF BY: half of the predictions were off by at most this factor; BIAS: the median of predicted / real run time",
    "EXPLAINED: the share of the squared error (of log run time) that predictions take away; below 0 they mislead",
)
EXPLAINED_JOBS_MIN = 10  # of fewer jobs, the share is mostly chance

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
        source, pair = job.prediction_source or "unknown", (seconds(job.predicted_run_time), seconds(job.run_time))
        for tenant in (ALL_TENANTS, job.spec.tenant):
            pairs.setdefault((source, tenant), []).append(pair)
    several = {source for source, _ in pairs if sum(one == source for one, _ in pairs) > 2}
    shown = sorted(key for key in pairs if key[1] == ALL_TENANTS or key[0] in several)
    return {key: record for key in shown if (record := track_record(pairs[key]))}


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


def row(key: Key, record: TrackRecord) -> tuple[str, ...]:
    """Return one record as a row of the table."""
    return (
        key[0],
        key[1] or "all",
        str(record.jobs),
        f"{record.median_factor:.2f}×",
        f"{100 * record.within_twice:.0f} %",
        f"{record.bias:.2f}",
        "" if record.explained is None or record.jobs < EXPLAINED_JOBS_MIN else f"{100 * record.explained:.0f} %",
    )
