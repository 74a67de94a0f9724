"""The format cotenant: our own columns, in CSV or Parquet. `docs/trace-format.md` documents it for users.

Only three columns are required. Missing columns and empty fields mean a job's defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from cotenant.core.model.estimate import NO_QOS
from cotenant.core.model.job import (
    NO_SPREAD,
    TENANT_DEFAULT,
    WHOLE_GPU_MILLI,
    JobKind,
    Locality,
    OpenReplicas,
    Qos,
    Request,
    Role,
    Spread,
    SpreadBy,
)
from cotenant.core.model.priority import CLASSES
from cotenant.core.model.resources import AMOUNT_MAX, AMOUNTS
from cotenant.core.policy.options import BOOLEAN_WORDS
from cotenant.core.prediction.batch_queueing import BatchTime
from cotenant.simulator.traces.rows import GPUS_MAX, SECONDS_MAX, Row
from cotenant.simulator.traces.trace_job import BadTrace, Ended, TraceJob, open_replicas, replicas

REQUIRED = ("job_id", "submitted_seconds", "work_seconds")
AUTO, NONE = "auto", "none"
CORES_MAX, REPLICAS_MAX, PRIORITY_MAX = 1_000_000, 1_000_000, 1_000_000
BANDWIDTH_MAX = 1e15
PERCENTILE_MAX, ARRIVALS_MAX = 99.999999, 1e12
OBJECTIVE = {
    "latency_seconds": ("seconds", SECONDS_MAX),
    "latency_percentile": ("per cent", PERCENTILE_MAX),
    "arrivals_per_second": ("requests a second", ARRIVALS_MAX),
}
BATCH = ("batch_request_seconds", "batch_fixed_seconds")

Word = TypeVar("Word", bound=StrEnum)


@dataclass(frozen=True, slots=True)
class Column:
    """A column: how a job's value is written, and its Parquet type."""

    name: str
    write: Callable[[TraceJob], str | float | int | bool | None]
    kind: str = "string"


def _request(job: TraceJob) -> Request:
    """Return the request of the only role, since the columns describe one.

    Raises:
        BadTrace: the job has several roles.
    """
    if len(job.roles) != 1:
        raise BadTrace(f"job {job.id} has {len(job.roles)} roles; this format supports only one")
    return job.roles[0].request


def _cores(job: TraceJob) -> str:
    cores = _request(job).cores
    return AUTO if cores is None else str(cores or "")


def _amount(name: str) -> Column:
    return Column(name, lambda job: getattr(_request(job), name) or None, "int64")


COLUMNS = (
    Column("job_id", lambda job: job.id),
    Column("submitted_seconds", lambda job: job.submitted_seconds, "float64"),
    Column("work_seconds", lambda job: job.work_seconds, "float64"),
    Column("gpu_milli", lambda job: _request(job).gpu_milli, "int64"),
    Column("replicas", lambda job: job.roles[0].replicas, "int64"),
    Column("replicas_max", lambda job: job.roles[0].open.most if job.roles[0].open else None, "int64"),
    Column("cores", _cores),
    *map(_amount, AMOUNTS),
    Column("gpu_type_wanted", lambda job: _request(job).gpu_type),
    Column("kind", lambda job: job.kind.value),
    Column("tenant", lambda job: "" if job.tenant == TENANT_DEFAULT else job.tenant),
    Column("user", lambda job: job.user),
    Column("model", lambda job: job.model),
    Column("name", lambda job: job.name),
    Column("gpu_type", lambda job: job.gpu_type),
    Column("priority", lambda job: job.priority, "int64"),
    Column("preemptible", lambda job: job.preemptible, "bool_"),
    Column("deadline_seconds", lambda job: job.deadline_seconds, "float64"),
    Column("locality", lambda job: job.locality.value if job.locality else ""),
    Column("spread_by", lambda job: job.spread.by.value if job.spread.by else ""),
    Column("spread_min", lambda job: job.spread.least or None, "int64"),
    Column("memory_bandwidth_bytes_per_second", lambda job: job.memory_bandwidth_bytes_per_second or None, "float64"),
    Column("ended", lambda job: job.ended.value if job.ended else ""),
    Column("latency_seconds", lambda job: job.qos.latency_seconds or None, "float64"),
    Column("latency_percentile", lambda job: job.qos.latency_percentile or None, "float64"),
    Column("arrivals_per_second", lambda job: job.qos.arrivals_per_second or None, "float64"),
    Column("batch_request_seconds", lambda job: job.batch.per_request if job.batch else None, "float64"),
    Column("batch_fixed_seconds", lambda job: job.batch.fixed if job.batch else None, "float64"),
)
OPTIONAL = ("gpus", *(column.name for column in COLUMNS if column.name not in REQUIRED))


def read(row: Row) -> TraceJob:
    """Return the job of a row."""
    kind = _word(row, "kind", JobKind)
    request = _read_request(row, kind)
    return TraceJob(
        id=row.text("job_id"),
        submitted_seconds=row.seconds("submitted_seconds"),
        work_seconds=row.duration_seconds("work_seconds"),
        roles=_roles(row, request),
        kind=kind or (JobKind.TRAINING if request.gpu_milli else JobKind.CPU),
        tenant=row.fields.get("tenant") or TENANT_DEFAULT,
        model=row.fields.get("model", ""),
        name=row.fields.get("name", ""),
        user=row.fields.get("user", ""),
        gpu_type=row.fields.get("gpu_type", ""),
        priority=_priority(row),
        preemptible=_flag(row, "preemptible", default=True),
        deadline_seconds=row.seconds("deadline_seconds") if row.has("deadline_seconds") else None,
        locality=_word(row, "locality", Locality),
        spread=_spread(row),
        memory_bandwidth_bytes_per_second=(
            row.number("memory_bandwidth_bytes_per_second", "bytes/s", BANDWIDTH_MAX)
            if row.has("memory_bandwidth_bytes_per_second")
            else 0.0
        ),
        ended=_word(row, "ended", Ended),
        qos=_objective(row, kind),
        batch=_batch(row),
    )


def _roles(row: Row, request: Request) -> tuple[Role, ...]:
    """Return the replicas: a fixed number, or, with a maximum, as many as a service's latency needs."""
    count = _count(row, "replicas", 1, REPLICAS_MAX, least=1)
    if not row.has("replicas_max"):
        return replicas(count, request)
    return open_replicas(OpenReplicas(count, _count(row, "replicas_max", 1, REPLICAS_MAX, least=count)), request)


def _spread(row: Row) -> Spread:
    """Return on how many different nodes or racks the replicas have to be."""
    by = _word(row, "spread_by", SpreadBy)
    if not row.has("spread_min"):
        if by:
            raise row.bad("spread_min", "a number together with spread_by")
        return NO_SPREAD
    return Spread(by, _count(row, "spread_min", 0, _count(row, "replicas", 1, REPLICAS_MAX, least=1)))


def _objective(row: Row, kind: JobKind | None) -> Qos:
    """Return the objective of a service; a service with variable replicas needs all its fields."""
    left_open = row.has("replicas_max")
    if left_open and kind is not JobKind.INFERENCE:
        raise row.bad("replicas_max", "nothing, except for a job of kind inference")
    missing = next((column for column in OBJECTIVE if left_open and not row.has(column)), None)
    if missing:
        raise row.bad(missing, "a value, which a service with replicas_max needs")
    told = [
        row.above_zero(column, what, most) if row.has(column) else 0.0 for column, (what, most) in OBJECTIVE.items()
    ]
    return Qos(0.0, *told) if any(told) else NO_QOS


def _batch(row: Row) -> BatchTime | None:
    told = [row.number(column, "seconds", SECONDS_MAX) if row.has(column) else 0.0 for column in BATCH]
    return BatchTime(*told) if any(told) else None


def _read_request(row: Row, kind: JobKind | None) -> Request:
    request = Request(
        gpu_milli=_gpu_milli(row, kind),
        cores=_read_cores(row),
        gpu_type=row.fields.get("gpu_type_wanted", ""),
        **{name: _count(row, name, 0, AMOUNT_MAX) for name in AMOUNTS},
    )
    if not request.gpu_milli and request.cores == 0:
        raise row.bad("cores", f"a number of cores, or {AUTO}, for a job without GPUs")
    if request.gpu_type and not request.gpu_milli:
        raise row.bad("gpu_type_wanted", "nothing for a job without GPUs")
    return request


def _gpu_milli(row: Row, kind: JobKind | None) -> int:
    """Return the GPUs a replica requests, in thousandths: by default one whole GPU, none for a CPU job."""
    if row.has("gpus") and row.has("gpu_milli"):
        raise row.bad("gpu_milli", "nothing together with gpus")
    column = "gpu_milli" if row.has("gpu_milli") else "gpus"
    each = 1 if column == "gpu_milli" else WHOLE_GPU_MILLI
    milli = _count(row, column, int(kind is not JobKind.CPU), GPUS_MAX * WHOLE_GPU_MILLI // each) * each
    if milli > WHOLE_GPU_MILLI and milli % WHOLE_GPU_MILLI:
        raise row.bad(column, "thousandths of one GPU, or a number of whole GPUs")
    if milli and kind is JobKind.CPU:
        raise row.bad(column, "no GPUs for a job of kind cpu")
    return milli


def _read_cores(row: Row) -> int | None:
    text = row.fields.get("cores", "").lower()
    if text == AUTO:
        return None
    if text in ("", NONE):
        return 0
    try:
        return row.count("cores", CORES_MAX)
    except BadTrace:
        raise row.bad("cores", f"an integer from 0 to {CORES_MAX}, {AUTO} or {NONE}") from None


def _priority(row: Row) -> int:
    """Return a priority, given as a class or a number."""
    named = CLASSES.get(row.fields.get("priority", "").lower())
    return _count(row, "priority", 0, PRIORITY_MAX, least=-PRIORITY_MAX) if named is None else named


def _count(row: Row, column: str, default: int, most: int, *, least: int = 0) -> int:
    return row.count(column, most, least=least) if row.has(column) else default


def _flag(row: Row, column: str, *, default: bool) -> bool:
    if not row.has(column):
        return default
    words: Mapping[str, bool] = BOOLEAN_WORDS
    if (word := row.fields[column].lower()) not in words:
        raise row.bad(column, "true or false")
    return words[word]


def _word(row: Row, column: str, words: type[Word]) -> Word | None:
    if not row.has(column):
        return None
    try:
        return words(row.fields[column].lower())
    except ValueError:
        raise row.bad(column, f"one of {', '.join(words)}") from None
