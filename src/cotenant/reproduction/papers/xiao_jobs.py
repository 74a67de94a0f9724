"""The jobs of Xiao's comparison, and the ways to share cores."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cotenant import simulator
from cotenant.core.model.estimate import Estimate
from cotenant.core.model.job import JobSpec, Request, Role
from cotenant.core.model.model_name import Model, model_of
from cotenant.core.model.node import NodeShape
from cotenant.core.policy.protocols import CpuAllocator, Sizing
from cotenant.core.sizing.resize import ResizableJob
from cotenant.policies.xiao import Xiao
from cotenant.reproduction import openb_mix
from cotenant.reproduction.model import Asked, Data, Figures, Stopped
from cotenant.simulator.physics.cores import speed

POSTERS = ("lenet", "alexnet", "overfeat", "googlenet", "lm", "bidaf", "deepspeech", "wavenet")
SYNERGYS = ("alexnet", "res18", "shufflenet", "mobilenet", "res50", "deepspeech", "gnmt", "lstm", "transformer")
GPU_ROLE = (Role("worker", 1, Request(1000, None)),)
CORES = 24
SWEPT_HOURS = 10.0
TRACE = "synergy/static_100job_6_3_1100.0"


class KnownTheta(Xiao):
    """Xiao's allocator with θ of every model known in advance: a bound for what can be learned."""

    name = "xiao"

    def size(self, spec: JobSpec, estimate: Estimate, shapes: Sequence[NodeShape]) -> Sizing:
        """Start with θ."""
        return super().size(spec, _knowing(spec, estimate), shapes)

    def resize(self, running: ResizableJob, now: float) -> Sizing | None:
        """Stay at θ."""
        return super().resize(replace(running, estimate=_knowing(running.spec, running.estimate)), now)


def _knowing(spec: JobSpec, estimate: Estimate) -> Estimate:
    model = model_of(spec.model)
    if model is None:
        return estimate
    rates = _speeds(model)
    useful = 1 + next(number for number, rate in enumerate(rates) if rate >= max(rates) - 1e-9)
    return replace(estimate, cores_useful=useful, cores_useful_confidence=1.0, source="known")


def _speeds(model: Model) -> list[float]:
    return [speed(model, gpus=1, cores_per_gpu=cores) or 1.0 for cores in range(1, CORES + 1)]


@dataclass(frozen=True, slots=True)
class Arm:
    """A way to share cores, and its knowledge; `isolation`: whether jobs have their cores to themselves.

    `balanced`: a job goes to the server with the largest share of free cores, instead of the one with the fewest free
    GPUs. `unlimited`: servers have as many cores as their jobs can use.
    """

    name: str
    allocator: str
    predictor: str = "none"
    isolation: str = "exclusive"
    balanced: bool = False
    unlimited: bool = False

    def made(self) -> CpuAllocator | str:
        """Return its allocator."""
        return KnownTheta() if self.predictor == "known" else self.allocator


ROLES, EQUAL = Arm("shares by role", "role-based"), Arm("equal shares", "proportional")
CROWDED = Arm("no isolation", "proportional", isolation="none")
UNCROWDED = Arm("no isolation, were crowding free", "proportional", isolation="ideal")
LEARNED = Arm("Xiao, curves learned", "xiao", "xiao-piecewise")
BY_ITSELF = Arm("Xiao, the allocator's own trials", "xiao")
KNOWN_THETA = Arm("Xiao, θ known beforehand", "xiao", "known")
BALANCED = Arm("Xiao, curves learned, cores balanced", "xiao", "xiao-piecewise", balanced=True)
TRIED = Arm("adaptive search, cores balanced", "coda-adaptive", balanced=True)
KNOWN_BALANCED = Arm("Xiao, θ known, cores balanced", "xiao", "known", balanced=True)
BOUND = Arm("bound: enough cores for all", "xiao", "known", unlimited=True)
ARMS = (CROWDED, UNCROWDED, ROLES, EQUAL, LEARNED, BY_ITSELF, KNOWN_THETA, BALANCED, TRIED, KNOWN_BALANCED, BOUND)
SWEPT_ARMS = (CROWDED, ROLES, EQUAL, LEARNED, BALANCED, TRIED, BOUND)


@dataclass(frozen=True, slots=True)
class Workload:
    """A number of jobs of some models, over some hours or all at once. Without models: Synergy's trace."""

    name: str
    models: tuple[str, ...]
    servers: int
    gpus: int
    jobs: int = 0
    hours: float = 0.0

    def cluster(self, cores: int = CORES) -> simulator.Cluster:
        """Return its servers."""
        return simulator.Cluster(self.name, (NodeShape(self.gpus, cores),) * self.servers, ("",) * self.servers)

    def trace(self, data: Data, seed: int) -> simulator.Trace:
        """Return its jobs.

        Raises:
            BadData: the data directory does not contain the trace.
        """
        if not self.models:
            found = data.file(TRACE)
            assert found, "this workload needs the data directory"
            return simulator.load(found, "synergy")
        rng, lasting = np.random.default_rng([seed, self.jobs]), [seconds for _, seconds in openb_mix.pods(data)]
        at = np.sort(rng.uniform(0.0, 3600.0 * self.hours, self.jobs)) if self.hours else np.arange(self.jobs) / 1000
        jobs = [
            simulator.TraceJob(
                f"job{number}",
                float(submitted),
                lasting[int(rng.integers(len(lasting)))],
                GPU_ROLE,
                model=self.models[int(rng.integers(len(self.models)))],
            )
            for number, submitted in enumerate(at)
        ]
        return simulator.Trace(self.name, "none", tuple(jobs))


NC24 = Workload("the poster's models, 4 GPUs a server, all at once", POSTERS, servers=4, gpus=4, jobs=160)
CALM = Workload("the same over ten hours", POSTERS, servers=4, gpus=4, jobs=160, hours=10.0)
DENSE = Workload("Synergy's models, 8 GPUs a server, all at once", SYNERGYS, servers=4, gpus=8, jobs=320)
PUBLIC = Workload("Synergy's trace of 100 jobs", (), servers=4, gpus=8)


def workloads(asked: Asked) -> Sequence[Workload]:
    """Return the workloads."""
    if asked.quick:
        return (NC24, DENSE)
    return (NC24, CALM, DENSE, PUBLIC) if asked.data.directory else (NC24, CALM, DENSE)


@dataclass(frozen=True, slots=True)
class Sweep:
    """Jobs like those of a workload, over ten hours, at increasing loads.

    A load is the GPU time that they need on average at 3 cores, relative to the available GPU time.
    """

    name: str
    like: Workload
    loads: tuple[float, ...]
    loads_quick: tuple[float, ...]

    def points(self, asked: Asked) -> Mapping[float, Workload]:
        """Return the workload at each load."""
        return {load: self._at(load) for load in (self.loads_quick if asked.quick else self.loads)}

    def _at(self, load: float) -> Workload:
        each_seconds = statistics.fmean(seconds for _, seconds in openb_mix.pods(Data()))
        gpu_seconds = self.like.servers * self.like.gpus * 3600 * SWEPT_HOURS
        jobs = round(load * gpu_seconds / each_seconds)
        return replace(self.like, name=f"{self.name}, load {load:g}", jobs=jobs, hours=SWEPT_HOURS)


SWEEPS = (
    Sweep("poster's models over ten hours", NC24, (1.0, 1.5, 2.0, 2.5, 3.0), (2.0,)),
    Sweep("Synergy's models over ten hours", DENSE, (0.8, 1.2, 1.5, 1.75, 2.0), (1.5,)),
)


@dataclass(frozen=True, slots=True)
class Replay:
    """One arm on one workload, until the last job is done."""

    workload: Workload
    arm: Arm
    data: Data
    seed: int

    def run(self, stopped: Stopped) -> Figures | None:
        """Simulate it."""
        trace = self.workload.trace(self.data, self.seed)
        result = simulator.simulate(
            trace,
            self.workload.cluster(CORES * self.workload.gpus if self.arm.unlimited else CORES),
            queue="fifo",
            placement="locality" if self.arm.balanced else "consolidate",
            allocator=self.arm.made(),
            predictor="none" if self.arm.predictor == "known" else self.arm.predictor,
            options={
                "simulator": {"cores": "auto", "speed": "cores", "isolation": self.arm.isolation},
                "placement": {"balance_cores": "true"} if self.arm.balanced else {},
            },
            seed=self.seed,
            watch=lambda _: not stopped(),
        )
        if result.finished < result.jobs:
            return None
        jct_seconds = float(result.avg_jct_seconds or 0.0)
        run_seconds = jct_seconds - float(result.avg_queue_seconds or 0.0)
        return Figures(
            {
                "jct_seconds": jct_seconds,
                "run_seconds": run_seconds,
                "makespan_seconds": float(result.makespan_seconds or 0.0),
                "utilisation_percent": 100 * _unstarved_seconds(trace) / run_seconds,
                "cores_percent": 100 * (result.cpu_utilisation or 0.0),
                "resizes": float((result.sizing or {}).get("resizes") or 0.0) / result.jobs,
            }
        )


def _unstarved_seconds(trace: simulator.Trace) -> float:
    """Return the mean time that jobs would hold their GPUs with enough cores: their compute time."""
    models = {job.model: model_of(job.model) for job in trace.jobs}
    best = {name: max(_speeds(model)) if model else 1.0 for name, model in models.items()}
    return float(np.mean([job.work_seconds / best[job.model] for job in trace.jobs]))
