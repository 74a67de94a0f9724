"""A job mix like that of Alibaba's cluster openb (Weng et al., ATC 2023): its nodes, its GPU jobs, and CPU jobs.

Jobs with GPUs are drawn from its pods that ran for a minute to a day, each with the GPUs and the cores that its user
requested, and arrive at uniform times over some hours in an empty cluster. Their memory is left out: it was requested
for models other than those whose profiles give the jobs' speed, some of which are very slow with little memory. CPU
jobs are those of the overlay `cpu-jobs`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from cotenant import simulator
from cotenant.core.model.job import WHOLE_GPU_MILLI, Request, Role
from cotenant.reproduction.model import BadData, Data, reading, table

SAMPLES = Path(simulator.__file__).parent / "samples"
PODS, NODES = "openb/openb_pod_list_default.csv", "openb/openb_node_list_all_node.csv"
SECONDS_MIN, SECONDS_MAX = 60.0, 86_400.0
TENANTS = 8
TIMES = ("creation_time", "scheduled_time", "deletion_time")
EVERY = 50  # one node represents this many


@cache
def cluster(data: Data) -> simulator.Cluster:
    """Return every fiftieth node, sorted by shape."""
    whole = data.file(NODES)
    found = simulator.parse_cluster(str(whole or SAMPLES / "openb_nodes.csv"))
    shapes = tuple(sorted(found.shapes, key=repr)[:: EVERY if whole else 1])
    return simulator.Cluster("openb/50", shapes, ("",) * len(shapes))


@cache
def pods(data: Data) -> tuple[tuple[Role, float], ...]:
    """Return the pods with GPUs: the role of each, and its run time in seconds."""
    whole = data.file(PODS)
    path = whole or SAMPLES / "openb_gpu_pods.csv.gz"
    with reading(path):
        rows = table(path, "num_gpu", "gpu_milli", "cpu_milli", *(TIMES if whole else ()))
        read = [(row, _seconds(row)) for row in rows if int(row["num_gpu"])]
        able = tuple((_role(row), seconds) for row, seconds in read if SECONDS_MIN <= seconds <= SECONDS_MAX)
    if not able:
        raise BadData(f"{path} has no pod with GPUs that ran for a minute to a day")
    return able


def _seconds(row: dict[str, str]) -> float:
    if "duration_seconds" in row:
        return float(row["duration_seconds"])
    if not row["deletion_time"]:
        return 0.0  # it was still running when the trace ended
    return float(row["deletion_time"]) - float(row["scheduled_time"] or row["creation_time"])


def _role(row: dict[str, str]) -> Role:
    gpu_milli = int(row["num_gpu"]) * int(row["gpu_milli"])
    cores = -(-int(row["cpu_milli"]) // 1000)
    return Role("worker", 1, Request(gpu_milli, cores))


def mix(
    data: Data, place: simulator.Cluster, *, load: float, hours: float, seed: int, open_cores: bool
) -> simulator.Trace:
    """Draw GPU jobs that request `load` times the cluster's GPU time; `open_cores` leaves theirs to an allocator.

    They belong to several tenants, among which DRF divides the cluster.
    """
    seconds_max = 3600.0 * hours
    drawn = sorted(_drawn(data, place, load * place.gpus * seconds_max, seconds_max, seed), key=lambda job: job[0])
    jobs = [
        simulator.TraceJob(f"gpu{number}", at, seconds, (_open(role) if open_cores else role,), tenant=tenant)
        for number, (at, role, seconds, tenant) in enumerate(drawn)
    ]
    return simulator.Trace("like openb", "none", tuple(jobs))


def _drawn(
    data: Data, place: simulator.Cluster, gpu_seconds: float, until_seconds: float, seed: int
) -> Iterator[tuple[float, Role, float, str]]:
    rng = np.random.default_rng(seed)
    widest = max(shape.gpus for shape in place.shapes) * WHOLE_GPU_MILLI
    able = [(role, seconds) for role, seconds in pods(data) if role.request.gpu_milli <= widest]
    while gpu_seconds > 0:
        role, seconds = able[rng.integers(len(able))]
        yield rng.random() * until_seconds, role, seconds, f"tenant{rng.integers(TENANTS)}"
        gpu_seconds -= role.request.gpu_milli / WHOLE_GPU_MILLI * seconds


def _open(role: Role) -> Role:
    return replace(role, request=replace(role.request, cores=None))
