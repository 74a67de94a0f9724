"""The page of predictions: the run times that were promised to jobs, against those that they had."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from cotenant.cli.connection import Mesh
from cotenant.cli.prediction_record import band_of, judged_jobs, pair_of, predictor_of, record_view, records_of
from cotenant.codec.specs import seconds
from cotenant.core.prediction.track_record import calibration, track_record, usual_ratios
from cotenant.v1.job_pb2 import Job
from cotenant.v1.policy_service_pb2 import ListPoliciesRequest
from cotenant.web.boards import MAY_NOT, Ask, BoardKind, part
from cotenant.web.rows import Row

SECONDS = 30.0
JOBS_MAX = 1_000  # of those that were submitted last and succeeded
GROUP = "cotenant.predictors"


async def read(ask: Ask) -> Mapping[str, Row]:
    """Return the judged jobs, and what they say of each predictor."""
    jobs: list[Job] = []

    async def judged(mesh: Mesh) -> list[Row]:
        jobs[:] = await judged_jobs(mesh, "", JOBS_MAX)
        return [job_row(job) for job in jobs]

    rows, predictors = await asyncio.gather(part(ask(judged)), part(ask(_predictors)))
    away = "" if predictors.trouble == MAY_NOT else predictors.trouble
    active = [one["name"] for one in predictors.rows if one["active"]]
    state = {"trouble": rows.trouble, "away": away, "predictors": active, "jobs_max": JOBS_MAX, **summary(jobs)}
    return {**{f"job {row['job']}": row for row in rows.rows}, "state": state}


KIND = BoardKind(read, SECONDS)


def job_row(job: Job) -> Row:
    """Return what was promised to a job, and how long it ran."""
    promised, ran = pair_of(job)
    band = band_of(job)
    return {
        "job": job.id,
        "name": job.spec.name,
        "tenant": job.spec.tenant,
        "predictor": predictor_of(job),
        "promised": promised,
        "ran": ran,
        "band": band,
        "held": band and band[0] <= ran <= band[1],
        "confidence": job.prediction_confidence,
        "ended": seconds(job.end_time),
    }


def summary(jobs: Sequence[Job]) -> Row:
    """Return how right the predictions of some jobs were."""
    judged = [(*pair_of(job), job.prediction_confidence) for job in jobs]
    pairs = [(promised, ran) for promised, ran, _ in judged]
    overall = track_record(pairs)
    banded = [(band, pair_of(job)[1]) for job in jobs if (band := band_of(job))]
    return {
        "banded": len(banded),
        "covered": sum(low <= ran <= high for (low, high), ran in banded),
        "overall": asdict(overall) if overall else None,
        "records": [record_view(key, record) for key, record in records_of(jobs).items()],
        "calibration": [asdict(one) for one in calibration(judged)],
        "ratios": usual_ratios(pairs),
    }


async def _predictors(mesh: Mesh) -> list[Row]:
    answer = await mesh.policies()["predictor"].ListPolicies(ListPoliciesRequest(group=GROUP))
    return [{"name": one.name, "active": one.active} for one in answer.policies]
