"""How fast each running job is, and whose speed changes when a neighbour comes or goes.

Theory of operation. A job's rate is relative to its trace: 1 is `TraceJob.work_seconds` as it stands. It is

    locality · min over its nodes of (cores · GPU type · GPU sharing · interference · bandwidth)

since a gang runs at the pace of its slowest replica. The first two and locality are fixed when a run begins; the others
depend on the neighbours. So a start or a stop touches the nodes that it is on, and once an instant's decisions are made
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
from cotenant.core.placement import interference
from cotenant.core.placement.candidate_allocations import chief
from cotenant.core.placement.interference import GANG_MILLI_MIN
from cotenant.core.policy.protocols import AttemptWindow, Directive, NodeWindow
from cotenant.simulator.clusters.cluster import Cluster
from cotenant.simulator.job import Life
from cotenant.simulator.physics import bandwidth, cores, gpus, sharing
from cotenant.simulator.physics.locality import Distances
from cotenant.simulator.physics.rates import Rate
from cotenant.simulator.physics.rounding import steady
from cotenant.simulator.physics.settings import Settings
from cotenant.simulator.physics.throttling import UNHELD, Held, Noise, held_by
from cotenant.simulator.traces import TraceJob

NEIGHBOURLY = frozenset({"colocation", "bandwidth"})  # the models in which neighbours count


@dataclass(frozen=True, slots=True)
class Place:
    """What a run has on one node. `own` is its speed there without neighbours, `demand` memory traffic in bytes/s."""

    node: int
    gpu_milli: int
    cores: int
    shared: tuple[int, ...]  # GPUs of which it has only a part
    own: float
    demand: float
    tasks: int = 1
    wants: float = 0.0  # cores, where they are shared


@dataclass(frozen=True, slots=True)
class Run:
    """A run under way. `gpu_type` is what of its rate the type of its GPUs makes."""

    life: Life
    model: Model | None
    places: tuple[Place, ...]
    together: float
    gpu_type: float
    gpu_milli: int  # over all its places

    @property
    def gang(self) -> bool:
        """Whether it is one of those that disturb each other."""
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
        self._neighbourly = self._shared or bool(self._on & NEIGHBOURLY)
        self._parts: dict[int, dict[int, float]] = {}  # of shared cores, by node and sequence
        self._runs: dict[int, Run] = {}  # by the job's sequence
        self._on_node: dict[int, dict[int, Place]] = {}  # by node and sequence
        self._touched: set[int] = set()
        self._held: dict[int, dict[int, Held]] = {}  # who is held back, by node and sequence
        self._noise = Noise(seed, settings.sample_noise)

    def model(self, job: TraceJob) -> Model | None:
        """Recognise a job's model, or take the default."""
        return (model_of(job.model) if job.model else None) or self._settings.model

    def started(self, life: Life, holdings: Sequence[Holding]) -> Rate:
        """Take a run in; returns its rate as it would be without neighbours."""
        run = self._run(life, holdings)
        if self._neighbourly:
            self._runs[life.sequence] = run
            for place in run.places:
                self._on_node.setdefault(place.node, {})[life.sequence] = place
                self._touched.add(place.node)
        return _rate(run, [place.own for place in run.places])

    def resized(self, life: Life, holdings: Sequence[Holding]) -> Rate:
        """Give a run other cores; returns its rate as it would be without neighbours."""
        run = self._run(life, holdings)
        if self._neighbourly:
            self._runs[life.sequence] = run
            for place in run.places:
                self._on_node[place.node][life.sequence] = place
                self._touched.add(place.node)
        return _rate(run, [place.own for place in run.places])

    def judged(self, job: TraceJob, one: Candidate) -> float:
        """Tell the rate that a job would have under an allocation, undisturbed, in as few racks as can be."""
        spec, model = job.spec(), self.model(job)
        role, gang_gpus = chief(spec), spec.gpu_milli / WHOLE_GPU_MILLI
        cores_held = (
            one.cores if role.request.cores != 0 else 0
        )  # one that asks for none is taken to have what it needs
        held = Holding(0, 0, cores_held, role.request.memory_bytes, ((0, one.gpu_milli),) if one.gpu_milli else ())
        rate = self._core_speed(model, gang_gpus, held)
        if "locality" in self._on and one.nodes > 1 and one.gpu_milli:
            there = next((shape.gpu_type for shape in self._shapes if shape.gpus), "")
            rate *= self._distances.over(model, gang_gpus, one.gpu_type or there, one.nodes)
        return steady(rate)

    def disturbed(self, life: Life) -> bool:
        """Tell whether neighbours slow a run down."""
        run = self._runs.get(life.sequence)
        return run is not None and life.rate < self._alone(run)

    def released(self, life: Life) -> None:
        """Let a run go."""
        if run := self._runs.pop(life.sequence, None):
            for place in run.places:
                self._held.get(place.node, {}).pop(life.sequence, None)
                del self._on_node[place.node][life.sequence]
                self._touched.add(place.node)

    def changed(self) -> Iterator[tuple[Life, Rate]]:
        """Give the runs on touched nodes whose rate is another now, by sequence, with that rate."""
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
            rate = _rate(run, [place.own * self._left(run, place, demands) for place in run.places])
            if rate.work != run.life.rate:
                yield run.life, rate

    def _share(self, node: int) -> None:
        """Share a node's cores anew among those on it."""
        here = self._on_node.get(node, {})
        wants, ideal = [place.wants for place in here.values()], self._settings.isolation == "ideal"
        given = sharing.shares(wants, self._shapes[node].cores, ideal=ideal)
        self._parts[node] = dict(zip(here, given, strict=True))

    @property
    def touched(self) -> Iterable[int]:
        """The nodes on which anything changed since rates were last told."""
        return self._touched

    def throttle(self, node: int, directive: Directive) -> Life | None:
        """Hold a run on a node back as is said, or let it go; None where it is so already, or has gone."""
        for sequence, place in self._on_node.get(node, {}).items():
            life = self._runs[sequence].life
            if (life.job.id, life.runs) == (directive.job_id, directive.number):
                held = self._held.setdefault(node, {})
                before = held.get(sequence, UNHELD)
                held[sequence] = now_held = held_by(
                    directive, place.cores, place.tasks, place.demand, self._peaks[node]
                )
                if now_held == UNHELD:
                    del held[sequence]
                self._touched.add(node)
                return life if before != now_held or directive.move else None
        return None

    def uneasy(self, node: int) -> bool:
        """Tell whether anybody on a node is held back, or a run with GPUs is disturbed."""
        if self._held.get(node):
            return True
        runs = (self._runs[sequence] for sequence, place in self._on_node.get(node, {}).items() if place.gpu_milli)
        return any(run.life.rate < self._alone(run) for run in runs)

    def window(self, node: int, now: float, seconds: float) -> NodeWindow | None:
        """Tell what the agent of a node would see, had it been so for some seconds; None where nothing runs."""
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
        """Tell what the agent of each node on which anything runs would see."""
        return (window for node in sorted(self._on_node) if (window := self.window(node, now, seconds)))

    def _attempt(self, node: int, run: Run, place: Place, total: float, now: float, seconds: float) -> AttemptWindow:
        life, held = run.life, self._held.get(node, {}).get(run.life.sequence, UNHELD)
        measured = self._noise.factor(life.sequence, life.runs, now)
        told = self._settings.contention_hardware != "none"
        drawn = bandwidth.granted(place.demand * held.part, total, self._peaks[node])
        return AttemptWindow(
            job_id=life.job.id,
            number=life.runs,
            cpu_job=not run.gpu_milli,
            cores_used=held.cores_used(place.cores, place.tasks),
            rate_per_second=life.rate * measured,
            gpu_utilisation_percent=min(100.0, 100 * life.busy * measured) if run.gpu_milli else None,
            memory_bandwidth_bytes_per_second=drawn if told else None,
            cores=place.cores,
            tasks=place.tasks,
            throttle=held.throttle,
            expected_rate_per_second=self._alone(run) if run.gpu_milli else None,
            unsteady=now - life.running_since < seconds,
        )

    def _alone(self, run: Run) -> float:
        return _rate(run, [place.own for place in run.places]).work

    def _run(self, life: Life, holdings: Sequence[Holding]) -> Run:
        job, model = life.job, self.model(life.job)
        by_node: dict[int, list[Holding]] = {}
        for holding in holdings:
            by_node.setdefault(holding.node, []).append(holding)
        gang_gpus = life.shape.gpu_milli / WHOLE_GPU_MILLI
        types = {node: self._type_speed(job, model, gang_gpus, node) for node in by_node}
        places = tuple(self._place(life, model, gang_gpus, node, held, types[node]) for node, held in by_node.items())
        with_gpus = [place.node for place in places if place.gpu_milli]
        together = 1.0
        if "locality" in self._on and len(with_gpus) > 1:
            together = self._distances.speed(model, gang_gpus, self._shapes[with_gpus[0]].gpu_type, with_gpus)
        return Run(
            life, model, places, together, min((types[node] for node in with_gpus), default=1.0), life.shape.gpu_milli
        )

    def _type_speed(self, job: TraceJob, model: Model | None, gang_gpus: float, node: int) -> float:
        here = self._shapes[node].gpu_type
        if "gpu-type" not in self._on or model is None or not (gang_gpus and here and job.gpu_type):
            return 1.0
        return gpus.relative_speed(model, gang_gpus, here, job.gpu_type) or 1.0

    def _place(
        self, life: Life, model: Model | None, gang_gpus: float, node: int, held: Sequence[Holding], type_speed: float
    ) -> Place:
        milli, own_cores = sum(map(_milli, held)), sum(holding.cores for holding in held)
        wants = self._wants(model, gang_gpus, node, milli, own_cores) if self._shared else 0.0
        if self._shared and milli and model:
            each = wants * WHOLE_GPU_MILLI / milli
            own = cores.speed(model, gpus=gang_gpus, cores_per_gpu=each) or 1.0
        else:
            own = min((self._core_speed(model, gang_gpus, holding) for holding in held), default=1.0)
        of_all = milli / life.shape.gpu_milli if life.shape.gpu_milli else _share_of_cores(life, held)
        return Place(
            node=node,
            gpu_milli=milli,
            cores=own_cores,
            shared=tuple(gpu for holding in held for gpu, part in holding.shares if part < WHOLE_GPU_MILLI),
            own=own * type_speed,
            demand=life.job.memory_bandwidth_bytes_per_second * of_all,
            tasks=max(1, round(of_all * life.shape.replicas)),
            wants=wants,
        )

    def _wants(self, model: Model | None, gang_gpus: float, node: int, milli: int, own_cores: int) -> float:
        """Tell how many shared cores a job keeps busy if it may: those that it can use, or that it asked for."""
        most = self._shapes[node].cores
        known = cores.useful(model, gpus=gang_gpus, most=most) if model and milli else None
        return min(float(most), known * milli / WHOLE_GPU_MILLI) if known else float(own_cores)

    def _core_speed(self, model: Model | None, gang_gpus: float, holding: Holding) -> float:
        """Give 1 for what has no GPUs, and for a job that asks for no cores: it is taken to have what it needs."""
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

    def _left(self, run: Run, place: Place, demands: dict[int, float]) -> float:
        """Tell what its neighbours leave of a run's speed on a node; `demands` remembers sums by node."""
        left = self._part(place.node, run.life.sequence)
        if self._shared:
            left *= self._crowded_out(run, place)
        if "colocation" in self._on and place.gpu_milli:
            left *= self._sharing(run, place)
            if self._settings.interference == "philly" and run.gang:
                left *= self._crowding(run, place)
        if "bandwidth" in self._on:
            if place.node not in demands:
                demands[place.node] = self._demand(place.node)
            bound = self._settings.bandwidth_sensitivity if run.gpu_milli else float(place.demand > 0)
            left *= bandwidth.speed(demands[place.node], self._peaks[place.node], bound)
        return left

    def _crowded_out(self, run: Run, place: Place) -> float:
        """Tell what part of the speed that it has with all the cores it wants its part of shared ones gives a run."""
        part = self._parts[place.node][run.life.sequence]
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

    def _sharing(self, run: Run, place: Place) -> float:
        """Multiply what each of those leaves with whom a GPU is shared, on the GPU where that is least."""
        return min((self._on_gpu(run, place.node, gpu) for gpu in place.shared), default=1.0)

    def _on_gpu(self, run: Run, node: int, gpu: int) -> float:
        gpu_type = self._shapes[node].gpu_type
        others = (
            self._runs[sequence].model
            for sequence, other in sorted(self._on_node[node].items())
            if gpu in other.shared and sequence != run.life.sequence
        )
        return math.prod(gpus.beside(run.model, other, gpu_type) for other in others)

    def _crowding(self, run: Run, place: Place) -> float:
        others = sum(
            other.gpu_milli
            for sequence, other in self._on_node[place.node].items()
            if sequence != run.life.sequence and self._runs[sequence].gang
        )
        rest = self._shapes[place.node].gpus * WHOLE_GPU_MILLI - place.gpu_milli
        return steady(interference.speed(others, rest, servers=sum(one.gpu_milli > 0 for one in run.places)))

    def _demand(self, node: int) -> float:
        return math.fsum(
            place.demand * self._part(node, sequence) for sequence, place in self._on_node.get(node, {}).items()
        )

    def _part(self, node: int, sequence: int) -> float:
        """Tell what part of its speed and of its traffic a run may have on a node."""
        held = self._held.get(node)
        return held[sequence].part if held and sequence in held else 1.0


def _rate(run: Run, by_place: Sequence[float]) -> Rate:
    work = steady(run.together * min(by_place, default=1.0))
    return Rate(work, work / run.gpu_type)


def _milli(holding: Holding) -> int:
    return holding.gpus * WHOLE_GPU_MILLI + sum(part for _, part in holding.shares)


def _share_of_cores(life: Life, held: Sequence[Holding]) -> float:
    """Tell what part of a job without GPUs runs on a node."""
    return sum(holding.cores for holding in held) / life.shape.cores if life.shape.cores else 1.0
