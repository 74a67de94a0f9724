"""The format openb: pods of Alibaba's GPU cluster of 2023 (FGD, ATC'23 [D]).

A pod is one process: with 8 GPUs it requests 8 GPUs of one node. Our reading of what the files leave open [R]:

- `cpu_milli` becomes whole cores, rounded up, because here a core belongs to one job;
- the work is deletion − scheduling, or deletion − creation for a pod that was never scheduled;
- a pod without GPUs is a `cpu` job;
- `qos`: LS (latency sensitive) is inference, Guaranteed and the others are training; LS and Guaranteed have priority 2
  and are not preempted, Burstable has 1, BE (best effort) 0;
- `gpu_spec` names a GPU type, or alternatives separated by `|`, one of which is requested;
- `pod_phase`: Succeeded is passed, Failed is failed; pods still running or waiting have no outcome.
"""

from __future__ import annotations

from cotenant.core.model.job import WHOLE_GPU_MILLI, JobKind, Request
from cotenant.simulator.traces.rows import GPUS_MAX, Row
from cotenant.simulator.traces.trace_job import Ended, TraceJob, replicas

COLUMNS = ("name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli", "qos", "creation_time", "deletion_time")
MEBIBYTE = 2**20
CORES_MAX, MEMORY_MIB_MAX = 1_000_000, 2**30
PRIORITIES = {"LS": 2, "Guaranteed": 2, "Burstable": 1, "BE": 0}
NOT_PREEMPTED = ("LS", "Guaranteed")
ENDS = {"Succeeded": Ended.PASSED, "Failed": Ended.FAILED}


def read(row: Row) -> TraceJob:
    """Return the job of a pod."""
    qos = row.fields["qos"]
    if qos not in PRIORITIES:
        raise row.bad("qos", f"one of {', '.join(PRIORITIES)}")
    request = _request(row)
    return TraceJob(
        id=row.text("name"),
        submitted_seconds=row.seconds("creation_time"),
        work_seconds=_work_seconds(row),
        roles=replicas(1, request),
        kind=_kind(request, qos),
        priority=PRIORITIES[qos],
        preemptible=qos not in NOT_PREEMPTED,
        ended=ENDS.get(row.fields.get("pod_phase", "")),
    )


def whole_cores(milli: int) -> int:
    """Round thousandths of a core up to whole cores.

    >>> whole_cores(12500), whole_cores(8000)
    (13, 8)
    """
    return -(-milli // 1000)


def _request(row: Row) -> Request:
    gpus = row.count("num_gpu", GPUS_MAX)
    milli = row.count("gpu_milli", WHOLE_GPU_MILLI)
    if gpus and (milli == 0 or (gpus > 1 and milli != WHOLE_GPU_MILLI)):
        raise row.bad("gpu_milli", f"{'1 to ' if gpus == 1 else ''}1000 for {gpus} GPUs")
    cores = whole_cores(row.count("cpu_milli", CORES_MAX * 1000))
    if not (gpus or cores):
        raise row.bad("cpu_milli", "cores for a pod without GPUs")
    return Request(
        gpu_milli=gpus * milli,
        cores=cores,
        memory_bytes=row.count("memory_mib", MEMORY_MIB_MAX) * MEBIBYTE,
        gpu_type=row.fields.get("gpu_spec", "") if gpus else "",
    )


def _work_seconds(row: Row) -> float:
    began = "scheduled_time" if row.has("scheduled_time") else "creation_time"
    seconds = row.seconds("deletion_time") - row.seconds(began)
    if seconds <= 0:
        raise row.bad("deletion_time", f"a time after {began}, which is {row.fields[began]}")
    return seconds


def _kind(request: Request, qos: str) -> JobKind:
    if not request.gpu_milli:
        return JobKind.CPU
    return JobKind.INFERENCE if qos == "LS" else JobKind.TRAINING
