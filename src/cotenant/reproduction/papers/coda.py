"""Zhao et al., "CODA: Improving Resource Utilization by Slimming and Co-locating DNN and CPU Jobs" (ICDCS 2020)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from cotenant import simulator
from cotenant.core.model.job import JobKind
from cotenant.core.model.node import NodeShape
from cotenant.reproduction import openb_mix
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
    Line,
    Measured,
    Shape,
    Stopped,
    gain_percent,
    line_of,
)
from cotenant.reproduction.tables import by_arm, each
from cotenant.simulator.overlays import parse_overlays

GIBIBYTE = 1 << 30
QUANTILES = tuple(range(101))
SOURCE = "abstract [P]"


@dataclass(frozen=True, slots=True)
class Arm:
    """The policies of an arm. `unlimited`: nodes have far more cores and bandwidth than their jobs can use."""

    name: str
    queue: str
    placement: str = "consolidate"
    allocator: str = "requested"
    contention: str = "none"
    unlimited: bool = False


FIFO, DRF = Arm("FIFO, requested cores", "fifo"), Arm("DRF, requested cores", "drf")
SLIM = Arm("+ allocator", "drf", allocator="coda-adaptive")
ARRAYS = Arm("+ arrays", "drf", "multi-array", "coda-adaptive")
OURS = Arm("+ eliminator", "drf", "multi-array", "coda-adaptive", "coda-eliminator")
BOUND = Arm("bound: cores for all", "drf", allocator="proportional", unlimited=True)
ARMS = (FIFO, DRF, SLIM, ARRAYS, OURS, BOUND)
PLENTY_CORES, PLENTY_BYTES_PER_SECOND = 20, 1e15  # times the cores, and bandwidth, of nodes without limits


@dataclass(frozen=True, slots=True)
class Workload:
    """Nodes like openb's, or `servers` of its kind with 8 V100 and 64 cores; CPU jobs request a share of all cores.

    `load` is the GPU time that jobs would need at 3 cores per GPU, relative to the available GPU time.
    """

    name: str
    cpu_share: float
    servers: int = 0
    hours: float = 4.0
    load: float = 2.0

    def cluster(self, data: Data) -> simulator.Cluster:
        """Return its cluster."""
        if not self.servers:
            return openb_mix.cluster(data)
        shape = NodeShape(8, 64, memory_bytes=256 * GIBIBYTE, gpu_type="V100M16", shareable=True)
        return simulator.Cluster(self.name, (shape,) * self.servers, ("",) * self.servers)


V100 = Workload("8-GPU servers of 64 cores, CPU jobs 0.4", 0.4, servers=15)
LIGHT = Workload("the same, lightly loaded", 0.4, servers=15, load=1.0)
MANY, FEW = (Workload(f"openb's nodes, CPU jobs {share:g}", share) for share in (1.2, 0.4))
QUICK = Workload("five 8-GPU servers of 64 cores, CPU jobs 0.4", 0.4, servers=5, hours=3.0)


@dataclass(frozen=True, slots=True)
class Mixed:
    """One arm on one workload, until the last arrival, so that no tail of long jobs decides."""

    workload: Workload
    arm: Arm
    data: Data
    seed: int

    def run(self, stopped: Stopped) -> Figures | None:
        """Simulate it."""
        place, until_seconds = self.workload.cluster(self.data), 3600.0 * self.workload.hours
        overlay = parse_overlays([f"models=synergy,cpu-jobs=openb:{self.workload.cpu_share}"])
        mix = openb_mix.mix(
            self.data,
            place,
            load=self.workload.load,
            hours=self.workload.hours,
            seed=self.seed,
            open_cores=self.arm.allocator != "requested",
        )
        mix = overlay.apply(mix, place)  # by the cores that there are, whatever the arm has
        result = simulator.simulate(
            mix,
            _without_limits(place) if self.arm.unlimited else place,
            queue=self.arm.queue,
            placement=self.arm.placement,
            allocator=self.arm.allocator,
            predictor="none",
            contention=self.arm.contention,
            overlay=overlay,
            options={
                "simulator": {
                    "cores": "auto",
                    "speed": "cores,bandwidth",
                    "utilisation": "philly",
                    "preemption_cost_seconds": "model",
                }
            },
            seed=self.seed,
            until_seconds=until_seconds,
            watch=lambda _: not stopped(),
        )
        return None if result.simulated_seconds < until_seconds else _figures(result, until_seconds)


def _without_limits(place: simulator.Cluster) -> simulator.Cluster:
    shapes = tuple(replace(shape, cores=PLENTY_CORES * shape.cores) for shape in place.shapes)
    return replace(place, shapes=shapes, memory_bandwidths=(PLENTY_BYTES_PER_SECOND,) * len(shapes))


def _figures(result: simulator.Result, until_seconds: float) -> Figures:
    came = [one for one in result.outcomes if one.submitted_seconds < until_seconds]
    cpu = np.array([one.queue_seconds for one in came if one.kind is JobKind.CPU])
    gpu = np.array([one.queue_seconds for one in came if one.kind is not JobKind.CPU])
    return Figures(
        {
            "active_percent": 100 * (result.gpu_occupancy or 0.0),
            "utilisation_percent": 100 * (result.gpu_utilisation or 0.0),
            "cpu_queue_seconds": float(cpu.mean()),
            "gpu_queue_seconds": float(gpu.mean()),
            "cores_percent": 100 * (result.cpu_utilisation or 0.0),
            "finished": float(result.finished),
            "stops": float(result.preemptions + result.migrations + result.reclaims),
        },
        {"cpu_queue_seconds": tuple(float(one) for one in np.percentile(cpu, QUANTILES))},
    )


class Coda:
    """Slimmed GPU jobs and CPU jobs side by side on the same nodes."""

    name = "coda"
    title = "CODA: slimming and co-locating DNN and CPU jobs"
    reference = "Zhao et al., ICDCS 2020"
    assumptions = (
        "jobs with GPUs are openb's pods that ran for a minute to a day, with the cores that their users requested, and"
        " get one of Synergy's models each, whose speed depends on cores; CPU jobs are openb's CPU pods",
        "their memory requests are left out: they were made for other models",
        "at 3 cores per GPU, jobs with GPUs would need twice the available GPU time, with a light load all of"
        " it; most of them are faster with more cores",
        "CPU jobs request the given share of the core time",
        "jobs arrive at uniform times in an empty cluster; figures are taken at the last arrival",
        "utilization is Philly's by job size, times the rate at which the job runs",
        "a stop costs what saving and loading the model costs; all options are defaults",
        "the bound is what DRF gives on nodes with twenty times the cores and ample bandwidth: cores are then never"
        " short. The order of jobs differs a little, so a figure may exceed it by chance, by about half a point",
        "nothing is known of the jobs in advance: the allocator finds the cores while they run",
    )
    unsaid = (
        "the trace: it is the authors' own. Ours is public, and its cores are what Alibaba's users requested",
        "thresholds and intervals of all three parts: docs/cpu-sizing.md, docs/multi-array.md and docs/eliminator.md"
        " have ours",
        "whether the gain is in percent or percentage points: it is taken as relative, which is harder to reach at"
        " our load",
    )

    @cached_property
    def claims(self) -> Sequence[Claim]:
        """The gain over each of the two baselines, and its price for CPU jobs."""
        return (
            Claim("utilisation-fifo", "GPU utilization over FIFO", 20.8, "%", Better.HIGHER, SOURCE),
            Claim("utilisation-drf", "GPU utilization over DRF", 20.8, "%", Better.HIGHER, SOURCE),
            Claim("cpu-queueing", "CPU jobs' mean queueing over DRF", 0.0, "s", Better.LOWER, "abstract: not longer"),
        )

    def cases(self, asked: Asked) -> Sequence[Case]:
        """Return each arm on each workload."""
        return [*each(_workloads(asked), asked.seeds, ARMS, lambda load, arm, seed: Mixed(load, arm, asked.data, seed))]

    def findings(self, asked: Asked, done: Done) -> Findings:
        """Return the gains, and what each part adds."""
        workloads = [workload.name for workload in _workloads(asked)]
        return Findings(
            tuple(one for name in workloads for one in self._measured(done, name)),
            tuple(
                by_arm(done, name, [arm.name for arm in ARMS], FIGURES, title=f"What each part adds: {name}")
                for name in workloads
            ),
            (_gains(done, workloads), *(_waits(done, name, number) for number, name in enumerate(workloads))),
        )

    def _measured(self, done: Done, workload: str) -> Iterator[Measured]:
        over_fifo, over_drf, waits = self.claims
        for claim, base in ((over_fifo, FIFO), (over_drf, DRF)):
            gain = done.versus(workload, OURS.name, base.name, "utilisation_percent", gain_percent)
            bound = done.versus(workload, BOUND.name, base.name, "utilisation_percent", gain_percent)
            yield Measured(claim, workload, OURS.name, base.name, gain, bound=bound)
        longer = done.versus(workload, OURS.name, DRF.name, "cpu_queue_seconds", lambda ours, theirs: ours - theirs)
        yield Measured(waits, workload, OURS.name, DRF.name, longer)


def _workloads(asked: Asked) -> Sequence[Workload]:
    return (QUICK,) if asked.quick else (V100, LIGHT, MANY, FEW)


FIGURES = {  # columns of the table: title and number format
    "active_percent": ("GPUs held (%)", ".1f"),
    "utilisation_percent": ("GPU utilization (%)", ".1f"),
    "gpu_queue_seconds": ("GPU jobs wait (s)", ".0f"),
    "cpu_queue_seconds": ("CPU jobs wait (s)", ".0f"),
    "cores_percent": ("cores held (%)", ".1f"),
    "finished": ("finished", ".0f"),
    "stops": ("stops", ".0f"),
}


def _gains(done: Done, workloads: Sequence[str]) -> Chart:
    lines = []
    for arm in ARMS[1:]:
        spreads = [done.versus(name, arm.name, FIFO.name, "utilisation_percent", gain_percent) for name in workloads]
        lines.append(line_of(arm.name, spreads))
    return Chart(
        "gains",
        "GPU utilization over FIFO with requested cores, as each part is added",
        "Higher is better. Strokes span all seeds; the dashed line is CODA's figure.",
        Shape.BARS,
        "",
        "gain (%)",
        tuple(workloads),
        tuple(lines),
        (("published", 20.8),),
    )


def _waits(done: Done, workload: str, number: int) -> Chart:
    lines = []
    for arm in ARMS:
        series = [figures.series["cpu_queue_seconds"] for figures in done.of(workload, arm.name).values()]
        if series:
            lines.append(Line(arm.name, QUANTILES, x=tuple(np.maximum(np.mean(series, axis=0), 1.0))))
    return Chart(
        f"cpu-queueing-{number}",
        f"How long CPU jobs waited: {workload}",
        "The share of CPU jobs with at most this wait; quantiles, averaged over the seeds. Left is better.",
        Shape.LINES,
        "time spent waiting (s), logarithmic; left edge: 1 s or less",
        "share of CPU jobs (%)",
        (),
        tuple(lines),
        log_x=True,
    )


PAPER = Coda()
