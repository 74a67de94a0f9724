"""Estimates of jobs that are not submitted, and hints how to improve them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from cotenant.cli.connection import Mesh
from cotenant.cli.jobs.estimate_view import estimate_view, percent, remaining
from cotenant.cli.jobs.job_file import Draft
from cotenant.cli.prediction_record import judged_jobs, judged_predictions
from cotenant.cli.render import Column
from cotenant.cli.research.predicting.fitting import figure
from cotenant.cli.views import View
from cotenant.codec.estimates import write_trusted
from cotenant.core.model.job import JobKind, JobSpec
from cotenant.core.prediction.earned_trust import source_of
from cotenant.deferred import grpc
from cotenant.v1.predictor_service_pb2 import (
    CandidateAllocation,
    Estimate,
    EstimateQuery,
    EstimateRequest,
    EstimateResponse,
    PlanProfileRequest,
    PlanProfileResponse,
)

USUAL_CORES = (1, 2, 4, 8, 16)  # candidates if a job has auto cores
CANDIDATES_MAX = 64
JUDGED_MAX = 1_000  # of the jobs that were submitted last and have succeeded, for the record of predictions
CORES_MAX_USUAL = 16  # profiling limit unless more cores are requested

COLUMNS = (
    Column("CORES", right=True),
    Column("NODES", right=True),
    Column("STEPS/S", right=True),
    Column("REMAINING", right=True),
    Column("P95", right=True),
    Column("P99", right=True),
    Column("CONFIDENCE", right=True),
)


async def ask(mesh: Mesh, drafts: Sequence[Draft], cores: Sequence[int], nodes: Sequence[int]) -> list[View]:
    """Return estimates of jobs, and for jobs with unknown useful cores what to measure next.

    The queue's own forecasts believe a predictor as far as the same record goes.
    """
    specs = [draft.spec for draft in drafts]
    queries = [query_of(draft, cores, nodes) for draft in drafts]
    answer: EstimateResponse = await mesh.predictor.Estimate(EstimateRequest(queries=queries))
    judged = judged_predictions(await judged_jobs(mesh, "", JUDGED_MAX))
    views = []
    for spec, query, estimate in zip(specs, queries, answer.estimates, strict=True):
        write_trusted(estimate, judged.trust(source_of(estimate.source), spec.tenant), 0.0)
        planned = None
        if spec.gpu_milli and not estimate.cores_useful and spec.kind is JobKind.TRAINING:
            most = max(CORES_MAX_USUAL, *(one.cores for one in query.candidates))
            planned = await _planned(mesh, PlanProfileRequest(spec=query.spec, cores_max=most))
        views.append(answer_view(spec, query, estimate, planned))
    return views


async def _planned(mesh: Mesh, request: PlanProfileRequest) -> PlanProfileResponse | None:
    """Return what to measure next; None for callers without access to all tenants."""
    try:
        planned: PlanProfileResponse = await mesh.predictor.PlanProfile(request)
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.PERMISSION_DENIED:
            raise
        return None
    return planned


def query_of(draft: Draft, cores: Sequence[int], nodes: Sequence[int]) -> EstimateQuery:
    """Return the query for a job as specified and for other core and node counts."""
    spec = draft.spec
    main = max(spec.roles, key=lambda role: role.request.gpu_milli)  # the first of equals
    own = main.request.cores or 0
    wanted = cores or (() if main.request.cores else USUAL_CORES)
    others = ((one, on) for one, on in product(wanted or (own,), nodes or (1,)) if (one, on) != (own, 1))
    candidates = [
        CandidateAllocation(cores=one, gpu_milli=main.request.gpu_milli, nodes=on, gpu_type=main.request.gpu_type)
        for one, on in ((own, 1), *others)
    ]
    return EstimateQuery(spec=draft.to_wire(spec), candidates=candidates)


def answer_view(spec: JobSpec, query: EstimateQuery, estimate: Estimate, planned: PlanProfileResponse | None) -> View:
    """Return the estimate of a job, each candidate with its cores and nodes."""
    view = estimate_view(estimate)
    for one, allocation in zip(view["candidates"], query.candidates, strict=False):
        one["cores"], one["nodes"] = allocation.cores or None, allocation.nodes
    next_up = None
    if planned is not None and planned.cores:
        next_up = {"cores": list(planned.cores), "steps": planned.steps, "reason": planned.reason}
    return {"name": spec.name, "model": spec.model or None, **view, "next": next_up, "hints": list(_hints(spec, view))}


def _hints(spec: JobSpec, view: View) -> Iterator[str]:
    """Yield what would make an unpredictable job predictable."""
    if spec.kind is JobKind.INFERENCE:
        if not spec.qos.arrivals_per_second:
            yield "set qos.arrivals, the requests per second: latency depends on it"
        elif not any(one["latency"] for one in view["candidates"]):
            yield "report batches of two sizes (progress.batch); `latency` must be among the predictors"
        return
    if view["predictable"]:
        return
    if not (spec.steps_total or spec.loss_goal.given):
        yield "set its steps or its loss goal: the remaining time follows from its rate"
    if not spec.model:
        yield "set its model: jobs with the same model share history"
    if spec.expected_seconds is None:
        yield "set its expected run time, which is used until more is known"
    yield "or run it once: finished jobs show how long such jobs take"


def further_card(view: View) -> Iterator[tuple[str, str]]:
    """Yield what would improve the estimate."""
    if view["next"]:
        yield "measure next", f"{', '.join(map(str, view['next']['cores']))} cores: {view['next']['reason']}"
    for hint in view["hints"]:
        yield "hint", hint


def candidate_table(view: View) -> tuple[Sequence[Column], Sequence[Sequence[str]]]:
    """Return the candidates as a table; rows and columns without data are omitted."""
    rows = [row for one in view["candidates"] if (row := _row(one))]
    kept = [at for at in range(len(COLUMNS)) if any(row[at] for row in rows)]
    return [COLUMNS[at] for at in kept], [[row[at] for at in kept] for row in rows]


def _row(one: View) -> Sequence[str]:
    latency = one["latency"]
    if one["rate_per_second"] is None and latency is None:
        return ()
    tails = [latency and latency[name] for name in ("p95_seconds", "p99_seconds")]
    return [
        str(one["cores"] or "auto"),
        str(one["nodes"]),
        "" if one["rate_per_second"] is None else figure(one["rate_per_second"]),
        remaining(one),
        *("" if tail is None else f"{1000 * tail:.3g} ms" for tail in tails),
        percent(latency["confidence"] if latency else one["confidence"]),
    ]
