"""Jeon et al., "Analysis of Large-Scale Multi-Tenant GPU Clusters for DNN Training Workloads" (USENIX ATC 2019)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from types import MappingProxyType

from cotenant import simulator
from cotenant.core.model.job import WHOLE_GPU_MILLI
from cotenant.core.model.node import NodeShape
from cotenant.core.model.tenancy import Tenant
from cotenant.reproduction.model import (
    Asked,
    Better,
    Case,
    Chart,
    Claim,
    Data,
    Done,
    Figures,
    Findings,
    Measured,
    Shape,
    Stopped,
    Table,
    gain_percent,
    line_of,
    reading,
    table,
)
from cotenant.reproduction.tables import by_arm, each
from cotenant.simulator.traces import workers

SAMPLE = Path(simulator.__file__).parent / "samples" / "philly_two.csv.gz"
SERVERS, SERVERS_PER_RACK = 16, 4
VIRTUAL_CLUSTERS = ("0e4a51", "2869ce")
CAUSES = ("fair_share", "fragmentation", "capacity")
QUOTA, LIMIT = 0.5, 0.75  # of all GPUs, for each virtual cluster
RANGES = MappingProxyType(  # of GPUs
    {"1": (1, 1), "4": (4, 4), "8": (8, 8), "16 and more": (16, math.inf), "all": (0, math.inf)}
)
FEW_SERVERS = 4  # maximum servers of a compact wide gang
GUIDELINES = {  # columns of the table: title and number format
    "avg_jct_hours": ("average JCT (h)", ".1f"),
    "avg_queue_hours": ("average wait (h)", ".1f"),
    "failed_trials": ("failed trials", ".1f"),
    "gpu_hours_of_failed": ("GPU hours of jobs that fail", ".1f"),
    "wide_few": ("16+ GPUs on up to 4 servers (%)", ".1f"),
    "wide_more": ("on more servers (%)", ".1f"),
}
SIZES = ("2-4", "5-8", "over 8")
QUEUEING = MappingProxyType({"2-4": (40.6, 59.4), "5-8": (25.8, 74.2), "over 8": (2.1, 97.9)})  # percent of jobs [P]
UTILISATION = MappingProxyType({"1": 52.38, "4": 45.18, "8": 58.99, "16 and more": 40.39, "all": 52.32})  # percent [P]
OUTCOMES = MappingProxyType(  # percent of jobs, and of GPU time [P]
    {"passed": (69.3, 44.53), "killed": (13.5, 37.69), "failed": (17.2, 17.76)}
)
SOURCE = "guideline, without a figure [P]"


@dataclass(frozen=True, slots=True)
class Arm:
    """A scheduler: how long gangs wait for locality, which get their own servers, and which failures are retried."""

    name: str
    locality: Mapping[str, str]
    retries: str = "philly"


AT_ONCE = {"server_seconds": "0", "rack_seconds": "0", "dedicated_share": "2", "moves_max": "0"}
BASE = Arm("takes any place at once, retries all", AT_ONCE)
WAITS = Arm("+ waits for locality", {"dedicated_share": "2", "moves_max": "0"})
APART = Arm("+ servers of their own, moves", {})
OURS = Arm("+ retries wisely", {}, "transient")
ARMS = (BASE, WAITS, APART, OURS)


@dataclass(frozen=True, slots=True)
class Workload:
    """Two virtual clusters, each with a quota of half of the GPUs, which may use up to three quarters of them."""

    name: str
    servers: int

    def cluster(self) -> simulator.Cluster:
        """Return servers of 8 GPUs in racks of four."""
        racks = tuple(f"rack{number // SERVERS_PER_RACK}" for number in range(self.servers))
        return simulator.Cluster(self.name, (NodeShape(8, 48),) * self.servers, racks)

    def tenants(self) -> tuple[Tenant, ...]:
        """Return each virtual cluster's quota."""
        every = self.servers * 8 * WHOLE_GPU_MILLI
        quota, limit = round(QUOTA * every), round(LIMIT * every)
        return tuple(Tenant(name, quota_gpu_milli=quota, limit_gpu_milli=limit) for name in VIRTUAL_CLUSTERS)


TIGHT, ROOMY = Workload("two virtual clusters, 128 GPUs", 16), Workload("two virtual clusters, 160 GPUs", 20)


@dataclass(frozen=True, slots=True)
class Replayed:
    """The two virtual clusters' jobs under one arm; the seed draws outcomes and failures."""

    workload: Workload
    arm: Arm
    data: Data
    seed: int

    def run(self, stopped: Stopped) -> Figures | None:
        """Simulate it."""
        result = simulator.simulate(
            jobs_of(self.data, VIRTUAL_CLUSTERS),
            self.workload.cluster(),
            queue="fifo",
            placement="locality",
            predictor="none",
            tenants=self.workload.tenants(),
            options={
                "queue": {"mode": "backfill"},
                "placement": self.arm.locality,
                "simulator": {
                    "speed": "locality,colocation",
                    "interference": "philly",
                    "utilisation": "philly",
                    "failures": "philly",
                    "retries": self.arm.retries,
                },
            },
            seed=self.seed,
            watch=lambda _: not stopped(),
        )
        return Figures(dict(_figures(result))) if result.complete else None


@cache
def jobs_of(data: Data, virtual_clusters: tuple[str, ...]) -> simulator.Trace:
    """Return the jobs of some virtual clusters, each of which is a tenant."""
    files = [data.file(f"philly/{name}.csv") for name in virtual_clusters]
    read = [row for path in ([SAMPLE] if None in files else files) if path for row in _rows(path)]
    read.sort(key=lambda row: (row.at, row.cluster))
    jobs = (
        simulator.TraceJob(f"job{number}", row.at - read[0].at, row.seconds, workers(row.gpus), tenant=row.cluster)
        for number, row in enumerate(read)
    )
    return simulator.Trace("+".join(virtual_clusters), "philly", tuple(jobs))


@dataclass(frozen=True, slots=True)
class _Row:
    """A job in the trace."""

    at: float
    seconds: float
    gpus: int
    cluster: str


def _rows(path: Path) -> list[_Row]:
    with reading(path):
        return [
            _Row(_at(row["timestamp"]), float(row["duration"]), int(row["num_gpus"]), row["cluster"])
            for row in table(path, "timestamp", "duration", "num_gpus", "cluster")
        ]


def _at(timestamp: str) -> float:
    return datetime.fromisoformat(timestamp).replace(tzinfo=UTC).timestamp()


def _figures(result: simulator.Result) -> Iterator[tuple[str, float]]:
    yield "avg_jct_hours", (result.avg_jct_seconds or 0.0) / 3600
    yield "avg_queue_hours", (result.avg_queue_seconds or 0.0) / 3600
    yield "failed_trials", float(sum(result.failures.values()))
    yield "gpu_hours_of_failed", sum(one.gpu_seconds for one in result.outcomes if one.failures) / 3600
    for size in SIZES:
        waits = result.waits_by_gpus[size]
        both = sum(waits[cause] for cause in CAUSES)
        yield f"waits_{size}", float(both)
        for cause in CAUSES:
            yield f"{cause}_{size}", 100 * waits[cause] / both if both else math.nan
    for end, count in result.ends.items():
        yield f"jobs_{end}", 100 * count / result.finished
        yield f"gpu_time_{end}", 100 * (result.ends_gpu_time[end] or 0.0)
    for size, (least, most) in RANGES.items():
        sized = [one for one in result.outcomes if least <= one.gpu_milli / WHOLE_GPU_MILLI <= most]
        yield f"utilisation_{size}", _utilisation(sized)
    wide = [one for one in result.outcomes if one.gpu_milli >= 16 * WHOLE_GPU_MILLI]
    yield "wide_few", _utilisation([one for one in wide if one.servers <= FEW_SERVERS])
    yield "wide_more", _utilisation([one for one in wide if one.servers > FEW_SERVERS])


def _utilisation(outcomes: Sequence[simulator.Outcome]) -> float:
    held = sum(one.gpu_seconds for one in outcomes)
    busy = sum(one.busy_seconds * one.gpu_milli / WHOLE_GPU_MILLI for one in outcomes)
    return 100 * busy / held if held else math.nan


class Philly:
    """Problems of a real cluster, and three guidelines."""

    name = "philly"
    title = "Analysis of large-scale multi-tenant GPU clusters"
    reference = "Jeon et al., USENIX ATC 2019"
    assumptions = (
        "jobs are those of two of Philly's virtual clusters, 1,857 over 89 days, with the run times of the trace; each"
        " virtual cluster has a quota of half of the GPUs and may use up to three quarters of them",
        "outcomes and failures are drawn as often as the paper counts them, with its run times to failure; utilization"
        " by size is the paper's, times a job's speed: these tables agree by construction, and the"
        " interesting part is the effect of placement",
        "spread gangs and gangs with neighbors are slower, as the paper measured for ResNet-50; utilization of 16-GPU"
        " jobs falls with their servers as published",
        "a job waits for fair share if its virtual cluster is at its limit; other waits are fragmentation in the"
        " paper's sense; the last column gives how many of those waited because the cluster was full",
        "the scheduler is FIFO with backfill; nothing is known of run times",
    )
    unsaid = (
        "quotas of the virtual clusters, and how far they could be exceeded",
        "how long Philly's gangs waited before they relaxed: 5 minutes at each level here, defaults",
        "what the guidelines would have gained: no figure is published, so any gain above 0 counts",
        "a pre-run on one GPU (the third guideline) exists in the live mesh and is not simulated",
    )
    claims: Sequence[Claim] = (
        Claim(
            "locality",
            "utilization of 16-GPU gangs, waiting for locality",
            0.0,
            "%",
            Better.HIGHER,
            SOURCE,
            figure=False,
        ),
        Claim("apart", "average JCT, with own servers and moves", 0.0, "%", Better.LOWER, SOURCE, figure=False),
        Claim("retries", "GPU time of failing jobs, with wise retries", 0.0, "%", Better.LOWER, SOURCE, figure=False),
    )

    def cases(self, asked: Asked) -> Sequence[Case]:
        """Return each arm on each workload."""
        return [
            *each(_workloads(asked), asked.seeds, ARMS, lambda load, arm, seed: Replayed(load, arm, asked.data, seed))
        ]

    def findings(self, asked: Asked, done: Done) -> Findings:
        """Return the paper's tables beside ours, and the effect of each guideline."""
        names = [workload.name for workload in _workloads(asked)]
        return Findings(
            tuple(one for name in names for one in self._measured(done, name)),
            tuple(table for name in names for table in _tables(done, name)),
            (_chart(done, names),),
        )

    def _measured(self, done: Done, workload: str) -> Iterator[Measured]:
        pairs = (
            (WAITS, BASE, "utilisation_16 and more"),
            (APART, WAITS, "avg_jct_hours"),
            (OURS, APART, "gpu_hours_of_failed"),
        )
        for claim, (arm, base, figure) in zip(self.claims, pairs, strict=True):
            change = done.versus(workload, arm.name, base.name, figure, gain_percent)
            yield Measured(claim, workload, arm.name, base.name, change)


def _workloads(asked: Asked) -> Sequence[Workload]:
    return (TIGHT,) if asked.quick else (TIGHT, ROOMY)


def _tables(done: Done, workload: str) -> Iterator[Table]:
    def mean(name: str, arm: Arm = BASE) -> float:
        return done.mean(workload, arm.name, name)

    yield _queueing(workload, mean)
    yield Table(
        f"utilisation-{workload}",
        f"Mean GPU utilization by size (%): {workload}",
        ("GPUs", "published", *(arm.name for arm in ARMS)),
        ("", *(".1f" for _ in (BASE, *ARMS))),
        tuple((size, told, *(mean(f"utilisation_{size}", arm) for arm in ARMS)) for size, told in UTILISATION.items()),
    )
    yield Table(
        f"outcomes-{workload}",
        f"Outcomes of jobs (%): {workload}",
        ("outcome", "jobs", "published", "GPU time", "published "),
        ("", *(".1f" for _ in range(4))),
        tuple(
            (end, mean(f"jobs_{end}"), jobs, mean(f"gpu_time_{end}"), time) for end, (jobs, time) in OUTCOMES.items()
        ),
        "Lengths and outcomes are drawn independently, so killed jobs hold less GPU time than Philly's did.",
    )
    title = f"The guidelines, each switched on: {workload}"
    yield by_arm(done, workload, [arm.name for arm in ARMS], GUIDELINES, title=title, name="guidelines")


def _queueing(workload: str, mean: Callable[[str], float]) -> Table:
    rows = []
    for size, (fair, other) in QUEUEING.items():
        ours = mean(f"fair_share_{size}")
        rows.append((size, mean(f"waits_{size}"), ours, fair, 100 - ours, other, mean(f"capacity_{size}")))
    return Table(
        f"queueing-{workload}",
        f"Waits of gangs by cause, percent of those that waited: {workload}",
        ("GPUs", "jobs", "fair share", "published", "fragmentation", "published ", "of all, full"),
        ("", ".0f", *(".1f" for _ in range(5))),
        tuple(rows),
        "Under the scheduler without guidelines, means over the seeds.",
    )


def _chart(done: Done, workloads: Sequence[str]) -> Chart:
    lines = []
    for arm in ARMS:
        spreads = [done.spread(name, arm.name, "avg_jct_hours") for name in workloads]
        lines.append(line_of(arm.name, spreads))
    return Chart(
        "guidelines",
        "Average JCT as each guideline is added",
        "Lower is better. Strokes reach from the minimum to the maximum over the seeds.",
        Shape.BARS,
        "",
        "average JCT (h)",
        tuple(workloads),
        tuple(lines),
    )


PAPER = Philly()
