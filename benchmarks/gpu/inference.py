"""Inference: a service at three loads, its measured latencies against those that the latency model predicts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

from benchmarks.gpu.machine import missing_gpu
from benchmarks.gpu.points import Point, PointRun
from benchmarks.harness import Row, percentile
from benchmarks.local_mesh import LocalMesh, MeshFailed

from cotenant.core.model.estimate import Candidate, Latency, Observation, Query
from cotenant.core.model.job import Qos
from cotenant.policies.latency import LatencyModel

SETTINGS = 'predictor = "history,latency"\ncontention = "none"\n'
LOADS = ("0.5", "0.8", "0.95")
START_SECONDS, START_SECONDS_MAX, END_SECONDS_MAX = 20.0, 60.0, 30.0  # of the mesh and the service
SECONDS_MIN, SECONDS_MAX = 2.0, 12.0  # at each load
MODEL = "gpu-check-service"


def measure(run: PointRun) -> Iterator[Row]:
    """Run the service as a job, and compare."""
    seconds = min(SECONDS_MAX, max(SECONDS_MIN, (run.left() - START_SECONDS) / (len(LOADS) + 1)))
    out = run.directory / "service.json"
    options = ["--device", run.machine.device, "--out", out, "--seconds", seconds, "--loads", ",".join(LOADS)]
    options += ["--small"] if run.machine.rehearsal else []
    command = run.machine.program("service", *options)
    with closing(LocalMesh(run.directory, SETTINGS)) as up:
        wanted = ("--kind", "inference", "--gpus", "1", "--cpus", str(min(2, run.machine.cores)), "--model", MODEL)
        job = up.submit(*wanted, "--", *command)
        view = up.wait_for_end(job, START_SECONDS_MAX + len(LOADS) * seconds + END_SECONDS_MAX)
        if view["phase"] != "succeeded":
            raise MeshFailed(f"the service {view['phase']}: {view['phase_reason']}: {up.run('logs', job)[-1000:]}")
    found = run.raw["service"] = json.loads(out.read_text())
    yield from latency_rows(found)


def latency_rows(found: dict[str, Any]) -> Iterator[Row]:
    """Yield the mean and the percentiles at each load, measured and predicted from the service's own batches."""
    yield Row("requests that one replica can answer", found["most_per_second"], "1/s")
    for load, served in found["loads"].items():
        latencies = served["latencies"]
        told = predicted([*found["calibration"], *served["batches"]], served["arrivals_per_second"])
        name = f"{100 * float(load):.0f} % load"
        mean, p95, p99 = sum(latencies) / len(latencies), percentile(latencies, 95), percentile(latencies, 99)
        bound = told.mean_seconds_max
        yield Row(f"{name}: mean latency", 1000 * mean, "ms", _milliseconds(bound), "predicted bound")
        yield Row(f"{name}: 95th percentile", 1000 * p95, "ms", _milliseconds(told.p95_seconds), "predicted")
        yield Row(f"{name}: 99th percentile", 1000 * p99, "ms", _milliseconds(told.p99_seconds), "predicted")


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def predicted(batches: Sequence[Sequence[float]], arrivals_per_second: float) -> Latency:
    """Return what the latency model predicts from these batches (sizes and seconds) at this rate of arrivals."""
    model, held = LatencyModel(), Candidate(cores=1, gpu_milli=1000)
    for size, seconds in batches:
        seen = Observation("check", MODEL, "", 1000, 1, held, batch_size=int(size), batch_seconds=seconds)
        model.observe(seen)
    asked = Qos(arrivals_per_second=arrivals_per_second)
    query = Query("check", MODEL, "", gpu_milli=1000, replicas=1, qos=asked, candidates=(held,))
    return model.estimate(query).candidates[0].latency or Latency(1)


POINT = Point("inference", 60.0, 35.0, measure, missing_gpu)
