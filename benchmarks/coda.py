"""CODA's arrays and its CPU allocator beside FIFO and DRF with the cores that users asked for, on a mix like openb's.

Nodes are every 50th of each kind of Alibaba's cluster (openb, ATC 2023); jobs with GPUs are drawn from its pods that
ran for 1 minute to 1 day, with the cores that their users asked for, and get one of Synergy's models each; CPU jobs are
those of the overlay `cpu-jobs`, of which those that openb calls latency sensitive may not be stopped. Work comes at
uniform times over four hours to an empty cluster: with GPUs 1.2 times as much as the GPUs could do, and CPU jobs that
ask for 40, 80 or 120 % of the cores. Speeds depend on cores and on memory bandwidth. Arms with `coda-adaptive` leave
the cores of GPU jobs open. Figures are taken at the end of the four hours, so that no tail of long jobs decides: the
share of GPUs that was held (active), and what jobs made of them (utilisation). A stop costs what saving and loading a
model costs. All options are defaults.

CODA (Zhao et al., ICDCS 2020) reports a GPU utilisation 20.8 % above the schedulers before it, on its own trace, with
the queueing of CPU jobs no longer than before.
"""

from __future__ import annotations

import csv
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import harness  # noqa: E402 - the root of the checkout has to be on the path first

from cotenant import simulator  # noqa: E402 - likewise
from cotenant.core.jobs import JobKind, Request, Role  # noqa: E402 - likewise
from cotenant.core.nodes import NodeShape  # noqa: E402 - likewise
from cotenant.simulator import run as replaying  # noqa: E402 - likewise

DATA = ROOT.parent / "shared" / "data" / "openb"
EVERY = 50
HORIZON_SECONDS = 14_400.0
LOAD = 1.2  # GPU time asked for, over that which there is
CPU_SHARES = (0.4, 0.8, 1.2)  # core time that CPU jobs ask for, over that which there is
BAR_PERCENT = 20.8
ARMS = {  # queue, placement, allocator
    "FIFO, requested": ("fifo", "consolidate", "requested"),
    "DRF, requested": ("drf", "consolidate", "requested"),
    "DRF, arrays alone": ("drf", "multi-array", "requested"),
    "DRF, allocator alone": ("drf", "consolidate", "coda-adaptive"),
    "DRF, arrays and allocator": ("drf", "multi-array", "coda-adaptive"),
}
REFERENCES, OURS = ("FIFO, requested", "DRF, requested"), "DRF, arrays and allocator"


class Figures(NamedTuple):
    """What is looked at of a simulation."""

    active: float
    utilisation: float
    cpu_queue_seconds: float
    gpu_queue_seconds: float
    cores_held: float
    finished: float
    stops: float
    wall_seconds: float


@cache
def cluster() -> simulator.Cluster:
    """Take every 50th node of each kind; without the data, a cluster like it."""
    path = DATA / "openb_node_list_all_node.csv"
    if not path.is_file():
        shapes: tuple[NodeShape, ...] = (NodeShape(8, 96, 384 * 2**30, shareable=True),) * 8 + (
            NodeShape(0, 96, 512 * 2**30),
        ) * 3
    else:
        shapes = tuple(sorted(simulator.parse_cluster(str(path)).shapes, key=repr)[::EVERY])
    return simulator.Cluster("openb/50", shapes, ("",) * len(shapes))


@cache
def pods() -> tuple[tuple[Role, float], ...]:
    """Read the pods with GPUs that ran for a minute to a day: what each asks for, and its seconds."""
    path = DATA / "openb_pod_list_default.csv"
    if not path.is_file():
        return tuple((Role("worker", 1, Request(gpus * 1000, 10 * gpus)), 3000.0) for gpus in (1, 1, 1, 1, 1, 1, 1, 4))
    with path.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if int(row["num_gpu"]) and row["deletion_time"]]
    read = [(row, float(row["deletion_time"]) - float(row["scheduled_time"] or row["creation_time"])) for row in rows]
    return tuple(
        (
            Role(
                "worker",
                1,
                Request(
                    int(row["num_gpu"]) * int(row["gpu_milli"]),
                    -(-int(row["cpu_milli"]) // 1000),
                    int(row["memory_mib"]) * 2**20,
                ),
            ),
            seconds,
        )
        for row, seconds in read
        if 60 <= seconds <= 86_400
    )


def trace(seed: int, *, open_cores: bool) -> simulator.Trace:
    """Draw jobs with GPUs until they ask for the load; of several tenants, which DRF shares between."""
    rng, drawn = np.random.default_rng(seed), []
    wanted = LOAD * cluster().gpus * HORIZON_SECONDS * 1000
    widest = max(shape.gpus for shape in cluster().shapes) * 1000
    able = [(role, seconds) for role, seconds in pods() if role.request.gpu_milli <= widest]
    while wanted > 0:
        role, seconds = able[rng.integers(len(able))]
        drawn.append((role, seconds, rng.random() * HORIZON_SECONDS, f"tenant{rng.integers(8)}"))
        wanted -= role.request.gpu_milli * seconds
    drawn.sort(key=lambda one: one[2])
    jobs = [
        simulator.TraceJob(f"gpu{number}", at, seconds, (_open(role) if open_cores else role,), tenant=tenant)
        for number, (role, seconds, at, tenant) in enumerate(drawn)
    ]
    return simulator.Trace("like openb", "none", tuple(jobs))


def _open(role: Role) -> Role:
    return replace(role, request=replace(role.request, cores=None))


def run(arm: str, cpu_share: float, seed: int) -> Figures:
    """Simulate one arm until the last job has come."""
    queue, placement, allocator = ARMS[arm]
    begin = time.process_time()
    result = simulator.simulate(
        trace(seed, open_cores=allocator != "requested"),
        cluster(),
        queue=queue,
        placement=placement,
        allocator=allocator,
        overlay=f"models=synergy,cpu-jobs=openb:{cpu_share}",
        options={
            "simulator": {
                "cores": "auto",
                "speed": "cores,bandwidth",
                "utilisation": "philly",
                "preemption_cost_seconds": "model",
            }
        },
        seed=seed,
        watch=lambda simulation: simulation.now < HORIZON_SECONDS,
    )
    cpu = [one for one in result.outcomes if one.kind is JobKind.CPU and one.submitted_seconds < HORIZON_SECONDS]
    gpu = [one for one in result.outcomes if one.kind is not JobKind.CPU]
    return Figures(
        100 * (result.gpu_occupancy or 0.0),
        100 * (result.gpu_utilisation or 0.0),
        statistics.fmean(one.queue_seconds for one in cpu),
        statistics.fmean(one.queue_seconds for one in gpu),
        100 * (result.cpu_utilisation or 0.0),
        float(result.finished),
        float(result.preemptions + result.migrations + result.reclaims),
        time.process_time() - begin,
    )


def compare(cpu_share: float, seeds: Sequence[int]) -> Iterator[harness.Row]:
    """Compare all arms beside so many CPU jobs: means over the seeds, and gains over each reference with spread."""
    runs = {arm: [run(arm, cpu_share, seed) for seed in seeds] for arm in ARMS}
    units = dict.fromkeys(Figures._fields, "%")
    units |= {"cpu_queue_seconds": "s", "gpu_queue_seconds": "s", "finished": "jobs", "stops": "1", "wall_seconds": "s"}
    for arm, figures in runs.items():
        for name in Figures._fields:
            value = statistics.fmean(getattr(one, name) for one in figures)
            beside = statistics.fmean(getattr(one, name) for one in runs["FIFO, requested"])
            label = f"{name.removesuffix('_seconds').replace('_', ' ')}, CPU jobs {cpu_share:g}, {arm}"
            yield harness.Row(label, value, units[name], beside, "FIFO, requested")
    for arm in list(ARMS)[2:]:
        for reference in REFERENCES:
            yield from _gains(
                runs[arm], runs[reference], f"CPU jobs {cpu_share:g}, {arm} over {reference}", barred=arm == OURS
            )


def _gains(ours: Sequence[Figures], theirs: Sequence[Figures], name: str, *, barred: bool) -> Iterator[harness.Row]:
    for what in ("active", "utilisation"):
        gains = [100 * (getattr(one, what) / getattr(other, what) - 1) for one, other in zip(ours, theirs, strict=True)]
        mean, bar = statistics.fmean(gains), f"at least {BAR_PERCENT:g} %" if barred else ""
        yield harness.Row(f"gain of {what}, {name}", mean, "%", bar=bar, holds=mean >= BAR_PERCENT if barred else None)
        yield harness.Row(f"  least of {len(gains)} seeds", min(gains), "%", max(gains), "most")
    longer = [one.cpu_queue_seconds - other.cpu_queue_seconds for one, other in zip(ours, theirs, strict=True)]
    mean = statistics.fmean(longer)
    yield harness.Row(
        f"CPU jobs wait longer by, {name}",
        mean,
        "s",
        bar="not longer" if barred else "",
        holds=mean <= 0 if barred else None,
    )
    yield harness.Row(f"  least of {len(longer)} seeds", min(longer), "s", max(longer), "most")


def measure(quick: bool) -> Sequence[harness.Row]:
    """Compare beside few CPU jobs and many."""
    replaying.WATCH_EVENTS, replaying.WATCH_SECONDS = 1, 0.0  # looked at after every event: all stop at the same time
    rows: list[harness.Row] = []
    for cpu_share in CPU_SHARES[1:2] if quick else CPU_SHARES:
        rows += compare(cpu_share, range(1 if quick else 5))
        print(f"CPU jobs {cpu_share:g}", file=sys.stderr, flush=True)
    return rows


if __name__ == "__main__":
    harness.main(measure, "CODA's arrays and allocator, beside FIFO and DRF")
