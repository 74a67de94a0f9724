"""The cases for AITurbo: schedulers, their knowledge, and the traces they are tried on."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from cotenant import simulator
from cotenant.reproduction.model import Data, Figures, Stopped
from cotenant.reproduction.papers import philly
from cotenant.reproduction.recurring_names import named

COST_SECONDS = 30.0  # of work repeated after each preemption


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What is known of run times in advance."""

    name: str
    predictor: str
    predictable: float | None = None  # share of predictable jobs, with a noisy oracle

    @property
    def options(self) -> dict[str, str]:
        """The predictor's options."""
        return {} if self.predictable is None else {"predictable": f"{self.predictable}"}


NOTHING = Knowledge("", "none")
LEARNED = Knowledge("learned", "lightgbm-duration,history")
NOISY = Knowledge("30 % wrong", "noisy-oracle", 1.0)
PERFECT = Knowledge("perfect", "oracle")


@dataclass(frozen=True, slots=True)
class Arm:
    """A scheduler with its options and knowledge; `sizes`: its allocator if speed depends on cores."""

    scheduler: str
    queue: str
    options: tuple[tuple[str, str], ...] = ()
    knows: Knowledge = NOTHING
    setting: str = ""
    sizes: str = "proportional"

    @property
    def name(self) -> str:
        """Its name for users."""
        return ", ".join(part for part in (self.scheduler, self.knows.name, self.setting) if part)

    def knowing(self, knowledge: Knowledge) -> Arm:
        """Return the same arm with other knowledge."""
        return replace(self, knows=knowledge)

    def given(self, setting: str, **options: object) -> Arm:
        """Return the same arm with some options."""
        return replace(self, setting=setting, options=tuple((name, f"{value}") for name, value in options.items()))


FIFO = Arm("FIFO", "fifo", (("mode", "strict"),))
BACKFILL = Arm("FIFO with backfill", "fifo", (("mode", "backfill"),))
LAS = Arm("LAS", "las")
SRTF, SRSF = Arm("SRTF", "srtf"), Arm("SRSF", "srsf")
OPTIMUS = Arm("Optimus", "optimus")
LITERAL = Arm("literal Borda", "borda-mlfq", (("variant", "literal"), ("cadence_seconds", "1200")), sizes="aiturbo")
BORDA = Arm("borda-mlfq", "borda-mlfq", (("variant", "expected"),), sizes="aiturbo")
BLIND, SEEING = (FIFO, BACKFILL, LAS), (SRTF, SRSF, OPTIMUS, LITERAL, BORDA)
BASES = (FIFO, LAS, SRTF, OPTIMUS)


@dataclass(frozen=True, slots=True)
class Workload:
    """A trace on the smallest cluster of 8-GPU nodes that can do its work in its time.

    `recurs`: jobs have names. `cores`: speed depends on cores, which the allocator decides. `servers`: gangs have
    parameter servers or are one process. `faster`: jobs arrive this many times as fast as in the trace.
    """

    name: str
    trace: str  # the bundled one, a virtual cluster of Philly, or a file of the data
    cluster: str
    recurs: bool = True
    cores: bool = False
    servers: bool = False
    faster: float = 1.0

    def jobs(self, data: Data, seed: int) -> simulator.Trace:
        """Return the trace, with what the seed adds to it."""
        trace = _sped_up(self._loaded(data), self.faster)
        trace = named(trace, seed) if self.recurs else trace
        return _with_servers(trace) if self.servers else trace

    def _loaded(self, data: Data) -> simulator.Trace:
        if self.trace in philly.VIRTUAL_CLUSTERS:
            both = philly.jobs_of(data, philly.VIRTUAL_CLUSTERS)
            jobs = tuple(job for job in both.jobs if job.tenant == self.trace)
            first = jobs[0].submitted_seconds
            shifted = (replace(job, submitted_seconds=job.submitted_seconds - first) for job in jobs)
            return simulator.Trace(self.trace, both.format, tuple(shifted))
        return simulator.load(data.file(self.trace) or self.trace if self.trace.endswith(".csv") else self.trace)


def _sped_up(trace: simulator.Trace, times: float) -> simulator.Trace:
    """Return a trace whose jobs arrive this many times as fast."""
    if times == 1.0:
        return trace
    return replace(
        trace, jobs=tuple(replace(job, submitted_seconds=job.submitted_seconds / times) for job in trace.jobs)
    )


def _with_servers(trace: simulator.Trace) -> simulator.Trace:
    """Return a trace in which every other gang is one process with all its GPUs; the rest get parameter servers."""
    jobs = []
    for number, job in enumerate(trace.jobs):
        worker = job.roles[0]
        gpus = worker.replicas
        if number % 2 and gpus <= 8:
            request = replace(worker.request, gpu_milli=1000 * gpus)
            roles: tuple[Any, ...] = (replace(worker, replicas=1, request=request),)
        else:
            request = replace(worker.request, gpu_milli=0)
            roles = (worker, replace(worker, name="ps", request=request))
        jobs.append(replace(job, roles=roles))
    return replace(trace, jobs=tuple(jobs))


ITP = Workload("ITP cluster 10, 16 GPUs", "sample", "2x8")
ITP_BARE = replace(ITP, name=f"{ITP.name}, no names", recurs=False)
ITP_CORES = replace(ITP, name=f"{ITP.name}, speed by cores", cores=True)
ITP_SERVERS = replace(ITP, name=f"{ITP.name}, parameter servers", servers=True)
ITP_FASTER = tuple(replace(ITP, name=f"{ITP.name}, {times:g} times as fast", faster=times) for times in (2.0, 3.0))
SMALL = Workload("Philly 2869ce, 40 GPUs", "2869ce", "5x8")
SMALL_BARE = replace(SMALL, name=f"{SMALL.name}, no names", recurs=False)
LARGE = Workload("Philly 0e4a51, 48 GPUs", "0e4a51", "6x8")
LARGE_BARE = replace(LARGE, name=f"{LARGE.name}, no names", recurs=False)
OF_DATA = (
    Workload("Philly ed69ec, 8 GPUs", "philly/ed69ec.csv", "1x8"),
    Workload("Philly 103959, 24 GPUs", "philly/103959.csv", "3x8"),
)


@dataclass(frozen=True, slots=True)
class Replayed:
    """One arm on one workload; the seed draws names, and prediction errors."""

    workload: Workload
    arm: Arm
    data: Data
    seed: int

    def run(self, stopped: Stopped) -> Figures | None:
        """Simulate it."""
        physics = {"preemption_cost_seconds": f"{COST_SECONDS}"}
        if self.workload.cores:
            physics |= {"cores": "auto", "speed": "cores"}
        result = simulator.simulate(
            self.workload.jobs(self.data, self.seed),
            self.workload.cluster,
            queue=self.arm.queue,
            placement="consolidate",
            allocator=self.arm.sizes if self.workload.cores else "requested",
            predictor=self.arm.knows.predictor,
            overlay=f"models=synergy,seed={self.seed}" if self.workload.cores else "",
            options={"queue": dict(self.arm.options), "predictor": self.arm.knows.options, "simulator": physics},
            seed=self.seed,
            watch=lambda _: not stopped(),
        )
        if not result.complete:
            return None
        return Figures(
            {
                "avg_jct_hours": (result.avg_jct_seconds or math.nan) / 3600,
                "p99_jct_hours": (result.p99_jct_seconds or math.nan) / 3600,
                "makespan_days": (result.makespan_seconds or math.nan) / 86400,
                "stops": result.preemptions / result.jobs,
            }
        )
