"""The speed of each running job, and whose speed changes when a neighbor starts or stops.

Theory of operation. A job's rate is relative to its trace: at rate 1 it runs for `TraceJob.work_seconds`. It is
  locality · min over its nodes of (cores · GPU type · GPU sharing · interference · bandwidth)
since a gang runs at the pace of its slowest replica. The first two and locality are fixed when a run begins; the others
depend on the neighbors. So a start or a stop touches the nodes of that job, and once an instant's decisions are made
the jobs on touched nodes, and no others, are given new rates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from cotenant.core.capacity.ledger import Holding
from cotenant.core.model.estimate import Candidate
from cotenant.core.model.job import WHOLE_GPU_MILLI
from cotenant.core.model.model_name import Model, model_of
from cotenant.core.model.resources import amounts_of
from cotenant.core.placement import interference
from cotenant.core.placement.candidate_allocations import largest_role
from cotenant.core.placement.interference import GANG_MILLI_MIN
from cotenant.core.policy.protocols import AttemptWindow, Directive, NodeWindow
from cotenant.simulator.clusters.cluster import Cluster
from cotenant.simulator.job import SimulatedJob
from cotenant.simulator.physics import bandwidth, cores, gpus, sharing
from cotenant.simulator.physics.locality import Distances
from cotenant.simulator.physics.rates import Rate
from cotenant.simulator.physics.rounding import steady
from cotenant.simulator.physics.settings import Settings
from cotenant.simulator.physics.throttling import UNTHROTTLED, Noise, ThrottleEffect, effect_of
from cotenant.simulator.traces import TraceJob

NEIGHBOR_MODELS = frozenset({"colocation", "bandwidth"})  # the models in which neighbors count


@dataclass(frozen=True, slots=True)
class Place:
    """What a run has on one node. `own` is its speed there without neighbors, `demand` memory traffic in bytes/s."""

    node: int
    gpu_milli: int
    cores: int
    shared: tuple[int, ...]  # GPUs of which it has only a share
    own: float
    demand: float
    tasks: int = 1
    wants: float = 0.0  # cores, if they are shared


@dataclass(frozen=True, slots=True)
class Run:
    """A run in progress. `gpu_type` is the factor of its GPU type in the rate."""

    sim_job: SimulatedJob
    model: Model | None
    places: tuple[Place, ...]
    together: float
    gpu_type: float
    gpu_milli: int  # over all its places

    @property
    def gang(self) -> bool:
        """Whether it is one of the gangs that disturb each other."""
        return self.gpu_milli >= GANG_MILLI_MIN


class Speeds:
    """The rates of all running jobs under the speed models that are on."""

    def __init__(self, cluster: Cluster, settings: Settings, seed: int = 0) -> None:
        self._on = settings.speeds
        self._settings = settings
        self._shapes = cluster.shapes
        self._peaks = tuple(peak or settings.memory_bandwidth_bytes_per_second for peak in cluster.memory_bandwidths)
        self._distances = Distances(cluster.shapes, cluster.racks)
        self._shared = settings.isolation != "exclusive" and "cores" in self._on
        self._neighbors_matter = self._shared or bool(self._on & NEIGHBOR_MODELS)
        self._parts: dict[int, dict[int, float]] = {}  # of shared cores, by node and sequence
        self._runs: dict[int, Run] = {}  # by the job's sequence
        self._on_node: dict[int, dict[int, Place]] = {}  # by node and sequence
        self._touched: set[int] = set()
        self._throttled: dict[int, dict[int, ThrottleEffect]] = {}  # throttled runs, by node and sequence
        self._noise = Noise(seed, settings.sample_noise)

    def model(self, job: TraceJob) -> Model | None:
        """Return a job's model, or the default."""
        return (model_of(job.model) if job.model else None) or self._settings.model

    def started(self, sim_job: SimulatedJob, holdings: Sequence[Holding]) -> Rate:
        """Add a run; returns its rate without neighbors."""
        run = self._run(sim_job, holdings)
        if self._neighbors_matter:
            self._runs[sim_job.sequence] = run
            for place in run.places:
                self._on_node.setdefault(place.node, {})[sim_job.sequence] = place
                self._touched.add(place.node)
        return _rate(run, [place.own for place in run.places])

    def resized(self, sim_job: SimulatedJob, holdings: Sequence[Holding]) -> Rate:
        """Resize a run; returns its rate without neighbors."""
        run = self._run(sim_job, holdings)
        if self._neighbors_matter:
            self._runs[sim_job.sequence] = run
            for place in run.places:
                self._on_node[place.node][sim_job.sequence] = place
                self._touched.add(place.node)
        return _rate(run, [place.own for place in run.places])

    def rate_under(self, job: TraceJob, one: Candidate) -> float:
        """Return a job's rate under an allocation, undisturbed, in as few racks as possible."""
        spec, model = job.spec(), self.model(job)
        role, gang_gpus = largest_role(spec), spec.gpu_milli / WHOLE_GPU_MILLI
        cores_held = one.cores if role.request.cores != 0 else 0  # a job that requests none is assumed to have enough
        shares = ((0, one.gpu_milli),) if one.gpu_milli else ()
        held = Holding(0, 0, cores_held, shares, **amounts_of(role.request))
        rate = self._core_speed(model, gang_gpus, held) * self._type_speed(job, model, gang_gpus, one.gpu_type)
        if "locality" in self._on and one.nodes > 1 and one.gpu_milli:
            there = next((shape.gpu_type for shape in self._shapes if shape.gpus), "")
            rate *= self._distances.over(model, gang_gpus, one.gpu_type or there, one.nodes)
        return steady(rate)

    def disturbed(self, sim_job: SimulatedJob) -> bool:
        """Return whether neighbors slow a run down."""
        run = self._runs.get(sim_job.sequence)
        return run is not None and sim_job.rate < self._alone(run)

    def released(self, sim_job: SimulatedJob) -> None:
        """Remove a run."""
        if run := self._runs.pop(sim_job.sequence, None):
            for place in run.places:
                self._throttled.get(place.node, {}).pop(sim_job.sequence, None)
                del self._on_node[place.node][sim_job.sequence]
                self._touched.add(place.node)

    def changed(self) -> Iterator[tuple[SimulatedJob, Rate]]:
        """Yield the runs on touched nodes whose rate has changed, by sequence, with that rate."""
        if not self._touched:
            return
        if self._shared:
            for node in self._touched:
                self._share(node)
        sequences = sorted({sequence for node in self._touched for sequence in self._on_node.get(node, ())})
        self._touched.clear()
        demands: dict[int, float] = {}
        for sequence in sequences:
            run = self._runs[sequence]
            rate = _rate(run, [place.own * self._speed_left(run, place, demands) for place in run.places])
            if rate.work != run.sim_job.rate:
                yield run.sim_job, rate

    def _share(self, node: int) -> None:
        """Share a node's cores among its jobs."""
        here = self._on_node.get(node, {})
        wants, ideal = [place.wants for place in here.values()], self._settings.isolation == "ideal"
        given = sharing.shares(wants, self._shapes[node].cores, ideal=ideal)
        self._parts[node] = dict(zip(here, given, strict=True))

    @property
    def touched(self) -> Iterable[int]:
        """The nodes on which anything changed since rates were last computed."""
        return self._touched

    def throttle(self, node: int, directive: Directive) -> SimulatedJob | None:
        """Apply a directive to a run on a node; returns the job if that changes anything."""
        for sequence, place in self._on_node.get(node, {}).items():
            sim_job = self._runs[sequence].sim_job
            if (sim_job.job.id, sim_job.runs) == (directive.job_id, directive.number):
                held = self._throttled.setdefault(node, {})
                before = held.get(sequence, UNTHROTTLED)
                held[sequence] = now_held = effect_of(
                    directive, place.cores, place.tasks, place.demand, self._peaks[node]
                )
                if now_held == UNTHROTTLED:
                    del held[sequence]
                self._touched.add(node)
                return sim_job if before != now_held or directive.move else None
        return None

    def needs_attention(self, node: int) -> bool:
        """Return whether a run on a node is throttled, or a run with GPUs is disturbed."""
        if self._throttled.get(node):
            return True
        runs = (self._runs[sequence] for sequence, place in self._on_node.get(node, {}).items() if place.gpu_milli)
        return any(run.sim_job.rate < self._alone(run) for run in runs)

    def window(self, node: int, now: float, seconds: float) -> NodeWindow | None:
        """Return what the agent of a node would report after some seconds of this state; None if the node is empty."""
        here = sorted(self._on_node.get(node, {}).items())
        if not here:
            return None
        total, peak = self._demand(node), self._peaks[node]
        told = self._settings.contention_hardware != "none"
        return NodeWindow(
            f"node-{node}",
            now,
            seconds,
            tuple([self._attempt(node, self._runs[sequence], place, total, now, seconds) for sequence, place in here]),
            memory_bandwidth_bytes_per_second=min(total, peak) if told else None,
            memory_bandwidth_peak_bytes_per_second=peak if told else None,
            bandwidth_enforced=self._settings.contention_hardware == "enforced",
        )

    def windows(self, now: float, seconds: float) -> Iterator[NodeWindow]:
        """Yield the window of each node with jobs."""
        return (window for node in sorted(self._on_node) if (window := self.window(node, now, seconds)))

    def _attempt(self, node: int, run: Run, place: Place, total: float, now: float, seconds: float) -> AttemptWindow:
        sim_job, held = run.sim_job, self._throttled.get(node, {}).get(run.sim_job.sequence, UNTHROTTLED)
        measured = self._noise.factor(sim_job.sequence, sim_job.runs, now)
        told = self._settings.contention_hardware != "none"
        drawn = bandwidth.granted(place.demand * held.part, total, self._peaks[node])
        return AttemptWindow(
            job_id=sim_job.job.id,
            number=sim_job.runs,
            cpu_job=not run.gpu_milli,
            cores_used=held.cores_used(place.cores, place.tasks),
            rate_per_second=sim_job.rate * measured,
            gpu_utilisation_percent=min(100.0, 100 * sim_job.busy * measured) if run.gpu_milli else None,
            memory_bandwidth_bytes_per_second=drawn if told else None,
            cores=place.cores,
            tasks=place.tasks,
            throttle=held.throttle,
            expected_rate_per_second=self._alone(run) if run.gpu_milli else None,
            steady=now - sim_job.running_since >= seconds,
        )

    def _alone(self, run: Run) -> float:
        return _rate(run, [place.own for place in run.places]).work

    def _run(self, sim_job: SimulatedJob, holdings: Sequence[Holding]) -> Run:
        job, model = sim_job.job, self.model(sim_job.job)
        by_node: dict[int, list[Holding]] = {}
        for holding in holdings:
            by_node.setdefault(holding.node, []).append(holding)
        gang_gpus = sim_job.job_class.gpu_milli / WHOLE_GPU_MILLI
        types = {node: self._type_speed(job, model, gang_gpus, self._shapes[node].gpu_type) for node in by_node}
        places = tuple(
            self._place(sim_job, model, gang_gpus, node, held, types[node]) for node, held in by_node.items()
        )
        with_gpus = [place.node for place in places if place.gpu_milli]
        together = 1.0
        if "locality" in self._on and len(with_gpus) > 1:
            together = self._distances.speed(model, gang_gpus, self._shapes[with_gpus[0]].gpu_type, with_gpus)
        return Run(
            sim_job,
            model,
            places,
            together,
            min((types[node] for node in with_gpus), default=1.0),
            sim_job.job_class.gpu_milli,
        )

    def _type_speed(self, job: TraceJob, model: Model | None, gang_gpus: float, here: str) -> float:
        if "gpu-type" not in self._on or model is None or not (gang_gpus and here and job.gpu_type):
            return 1.0
        return gpus.relative_speed(model, gang_gpus, here, job.gpu_type) or 1.0

    def _place(
        self,
        sim_job: SimulatedJob,
        model: Model | None,
        gang_gpus: float,
        node: int,
        held: Sequence[Holding],
        type_speed: float,
    ) -> Place:
        milli, own_cores = sum(map(_milli, held)), sum(holding.cores for holding in held)
        wants = self._wants(model, gang_gpus, node, milli, own_cores) if self._shared else 0.0
        if self._shared and milli and model:
            each = wants * WHOLE_GPU_MILLI / milli
            own = cores.speed(model, gpus=gang_gpus, cores_per_gpu=each) or 1.0
        else:
            own = min((self._core_speed(model, gang_gpus, holding) for holding in held), default=1.0)
        of_all = milli / sim_job.job_class.gpu_milli if sim_job.job_class.gpu_milli else _share_of_cores(sim_job, held)
        return Place(
            node=node,
            gpu_milli=milli,
            cores=own_cores,
            shared=tuple(gpu for holding in held for gpu, part in holding.shares if part < WHOLE_GPU_MILLI),
            own=own * type_speed,
            demand=sim_job.job.memory_bandwidth_bytes_per_second * of_all,
            tasks=max(1, round(of_all * sim_job.job_class.replicas)),
            wants=wants,
        )

    def _wants(self, model: Model | None, gang_gpus: float, node: int, milli: int, own_cores: int) -> float:
        """Return how many shared cores a job keeps busy if it can: its useful cores, or those it requested."""
        most = self._shapes[node].cores
        known = cores.useful(model, gpus=gang_gpus, most=most) if model and milli else None
        return min(float(most), known * milli / WHOLE_GPU_MILLI) if known else float(own_cores)

    def _core_speed(self, model: Model | None, gang_gpus: float, holding: Holding) -> float:
        """Return 1 without GPUs, and for a job that requests no cores, which is assumed to have enough."""
        milli = _milli(holding)
        if "cores" not in self._on or model is None or not (milli and holding.cores):
            return 1.0
        held_gpus = milli / WHOLE_GPU_MILLI
        known = cores.speed(
            model,
            gpus=gang_gpus,
            cores_per_gpu=holding.cores / held_gpus,
            memory_bytes_per_gpu=holding.memory_bytes / held_gpus,
        )
        return 1.0 if known is None else known

    def _speed_left(self, run: Run, place: Place, demands: dict[int, float]) -> float:
        """Return the share of its speed that neighbors leave a run on a node; `demands` caches sums by node."""
        left = self._part(place.node, run.sim_job.sequence)
        if self._shared:
            left *= self._core_contention(run, place)
        if "colocation" in self._on and place.gpu_milli:
            left *= self._gpu_sharing(run, place)
            if self._settings.interference == "philly" and run.gang:
                left *= self._interference(run, place)
        if "bandwidth" in self._on:
            if place.node not in demands:
                demands[place.node] = self._demand(place.node)
            bound = self._settings.bandwidth_sensitivity if run.gpu_milli else float(place.demand > 0)
            left *= bandwidth.speed(demands[place.node], self._peaks[place.node], bound)
        return left

    def _core_contention(self, run: Run, place: Place) -> float:
        """Return a run's speed on its share of the cores relative to its speed on all the cores it wants."""
        part = self._parts[place.node][run.sim_job.sequence]
        if part >= place.wants or not place.wants:
            return 1.0
        if run.model is None or not place.gpu_milli:
            return part / place.wants
        per_gpu = WHOLE_GPU_MILLI / place.gpu_milli
        whole, here = (
            cores.speed(run.model, gpus=run.gpu_milli / WHOLE_GPU_MILLI, cores_per_gpu=count * per_gpu)
            for count in (place.wants, part)
        )
        return here / whole if here and whole else 1.0

    def _gpu_sharing(self, run: Run, place: Place) -> float:
        """Return the factor of GPU sharing on the most affected GPU, over all jobs that share it."""
        return min((self._on_gpu(run, place.node, gpu) for gpu in place.shared), default=1.0)

    def _on_gpu(self, run: Run, node: int, gpu: int) -> float:
        gpu_type = self._shapes[node].gpu_type
        others = (
            self._runs[sequence].model
            for sequence, other in sorted(self._on_node[node].items())
            if gpu in other.shared and sequence != run.sim_job.sequence
        )
        return math.prod(gpus.beside(run.model, other, gpu_type) for other in others)

    def _interference(self, run: Run, place: Place) -> float:
        others = sum(
            other.gpu_milli
            for sequence, other in self._on_node[place.node].items()
            if sequence != run.sim_job.sequence and self._runs[sequence].gang
        )
        rest = self._shapes[place.node].gpus * WHOLE_GPU_MILLI - place.gpu_milli
        return steady(interference.speed(others, rest, servers=sum(one.gpu_milli > 0 for one in run.places)))

    def _demand(self, node: int) -> float:
        return math.fsum(
            place.demand * self._part(node, sequence) for sequence, place in self._on_node.get(node, {}).items()
        )

    def _part(self, node: int, sequence: int) -> float:
        """Return the share of its speed and its traffic that a throttle leaves a run on a node."""
        held = self._throttled.get(node)
        return held[sequence].part if held and sequence in held else 1.0


def _rate(run: Run, by_place: Sequence[float]) -> Rate:
    work = steady(run.together * min(by_place, default=1.0))
    return Rate(work, work / run.gpu_type)


def _milli(holding: Holding) -> int:
    return holding.gpus * WHOLE_GPU_MILLI + sum(part for _, part in holding.shares)


def _share_of_cores(sim_job: SimulatedJob, held: Sequence[Holding]) -> float:
    """Return the share of a job without GPUs that runs on a node."""
    return sum(holding.cores for holding in held) / sim_job.job_class.cores if sim_job.job_class.cores else 1.0
