"""Laws of the simulated world, and a slow world that recomputes every job's rate at every instant."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.properties import examples

from cotenant.core.capacity.ledger import Holding
from cotenant.core.model.job import WHOLE_GPU_MILLI, JobKind, Request, Role
from cotenant.core.model.model_name import model_of
from cotenant.core.model.node import NodeShape
from cotenant.core.placement import interference
from cotenant.core.policy.options import parse
from cotenant.policies.consolidate import Consolidate
from cotenant.policies.fifo import Fifo
from cotenant.policies.first_fit import FirstFit
from cotenant.policies.las import Las
from cotenant.policies.requested import Requested
from cotenant.simulator import Cluster, Outcome, Result, Trace, TraceJob, simulate
from cotenant.simulator.engine import Simulation
from cotenant.simulator.job import SimulatedJob
from cotenant.simulator.physics import bandwidth, cores, gpus
from cotenant.simulator.physics.locality import Distances
from cotenant.simulator.physics.settings import Settings
from cotenant.simulator.physics.world import World
from cotenant.simulator.policy_set import Policies
from cotenant.simulator.prediction_arms import Oracle

PEAK = 100e9
CLUSTER = Cluster(
    "made up",
    (
        NodeShape(4, 24, gpu_type="V100", shareable=True),
        NodeShape(4, 24, gpu_type="K80"),
        NodeShape(4, 24, gpu_type="P100", shareable=True),
        NodeShape(0, 24),
    ),
    ("r1", "r1", "r2", "r2"),
    (PEAK, PEAK, 2 * PEAK, PEAK),
)
MODELS = ("ResNet-18 (batch size 64)", "LM (batch size 5)", "res50", "alexnet", "vgg19", "own", "")
SLOWER = ("locality", "colocation", "bandwidth")


@st.composite
def jobs(draw: st.DrawFn, number: int, clock: float) -> TraceJob:
    kind = draw(st.sampled_from((JobKind.TRAINING, JobKind.TRAINING, JobKind.CPU)))
    replicas = draw(st.integers(1, 6))
    if kind is JobKind.CPU:
        request = Request(cores=draw(st.integers(1, 8)))
        replicas = min(replicas, 2)
    elif draw(st.booleans()):
        request, replicas = Request(gpu_milli=draw(st.sampled_from((250, 500))), cores=1), 1
    else:
        request = Request(gpu_milli=1000, cores=draw(st.integers(0, 4)))
    return TraceJob(
        f"j{number}",
        clock,
        float(draw(st.integers(1, 5000))),
        (Role("worker", replicas, request),),
        kind=kind,
        model=draw(st.sampled_from(MODELS)),
        gpu_type=draw(st.sampled_from(("", "V100", "K80"))),
        memory_bandwidth_bytes_per_second=draw(st.sampled_from((0.0, 20e9, 90e9))),
    )


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    made, clock = [], 0.0
    for number in range(draw(st.integers(1, 12))):
        made.append(draw(jobs(number, clock)))
        clock += draw(st.sampled_from((0.0, 10.0, 500.0)))
    return Trace("made up", "none", tuple(made))


def fates(result: Result) -> dict[str, Outcome]:
    return {one.id: one for one in result.outcomes}


def replay(trace: Trace, options: Mapping[str, str], *, preempt: bool) -> Simulation:
    policies = Policies(
        Las(parse(Las.Options, {})) if preempt else Fifo(parse(Fifo.Options, {"mode": "backfill"})),
        FirstFit() if preempt else Consolidate(),
        Requested(),
    )
    return Simulation(trace, CLUSTER, policies, Oracle(len(trace)), world=World(CLUSTER, parse(Settings, options), 3))


class SlowWorld:
    """Knows only what runs where; every rate is recomputed from that at every instant."""

    def __init__(self, simulation: Simulation, options: Settings) -> None:
        self.simulation, self.options = simulation, options
        self.distances = Distances(CLUSTER.shapes, CLUSTER.racks)
        self.done: dict[str, list[float]] = {}

    def run(self) -> None:
        """Replay the trace, adding up what each running job does between instants."""
        before = 0.0
        running: list[tuple[SimulatedJob, float, float]] = []
        while self.simulation.step():
            now = self.simulation.now
            for sim_job, rate, works_from in running:
                self.done.setdefault(sim_job.job.id, []).append(rate * max(0.0, now - max(before, works_from)))
            active = [sim_job for sim_job in self.simulation.sim_jobs if sim_job.running]
            running = [(sim_job, self.rate(sim_job, active), sim_job.working_since) for sim_job in active]
            for sim_job, rate, _ in running:
                assert math.isclose(sim_job.rate, rate, rel_tol=1e-8), sim_job
            before = now

    def rate(self, sim_job: SimulatedJob, active: Sequence[SimulatedJob]) -> float:
        """The definition, word by word."""
        nodes = sorted({holding.node for holding in sim_job.holdings})
        held = sum(map(milli, sim_job.holdings))
        with_gpus = sorted({holding.node for holding in sim_job.holdings if milli(holding)})
        together = 1.0
        if "locality" in self.options.speeds and len(with_gpus) > 1:
            first = CLUSTER.shapes[sim_job.holdings[0].node].gpu_type
            together = self.distances.speed(model_of(sim_job.job.model), held / 1000, first, with_gpus)
        return together * min(self.on_node(sim_job, node, held, active) for node in nodes)

    def on_node(self, sim_job: SimulatedJob, node: int, held: int, active: Sequence[SimulatedJob]) -> float:
        on, model, shape = self.options.speeds, model_of(sim_job.job.model), CLUSTER.shapes[node]
        mine = [holding for holding in sim_job.holdings if holding.node == node]
        here = [(other, holding) for other in active for holding in other.holdings if holding.node == node]
        rate = 1.0
        if "cores" in on and model and held and all(holding.cores for holding in mine):
            per_gpu = 1000 * mine[0].cores / milli(mine[0])
            rate *= cores.speed(model, gpus=held / 1000, cores_per_gpu=per_gpu) or 1.0
        if "gpu-type" in on and model and held and sim_job.job.gpu_type:
            rate *= gpus.relative_speed(model, held / 1000, shape.gpu_type, sim_job.job.gpu_type) or 1.0
        if "colocation" in on:
            for gpu, part in mine[0].shares:
                for other, holding in here:
                    if other is not sim_job and part < 1000 and gpu in dict(holding.shares):
                        rate *= gpus.beside(model, model_of(other.job.model), shape.gpu_type)
            gangs = [(other, holding) for other, holding in here if other.job_class.gpu_milli >= 2000]
            if self.options.interference == "philly" and held >= 2000:
                others = sum(milli(holding) for other, holding in gangs if other is not sim_job)
                rest = 1000 * shape.gpus - sum(map(milli, mine))
                rate *= interference.speed(others, rest, servers=len({one.node for one in sim_job.holdings}))
        if "bandwidth" in on:
            demand = math.fsum(demand_on(other, holding) for other, holding in here)
            wants = sim_job.job.memory_bandwidth_bytes_per_second > 0
            bound = self.options.bandwidth_sensitivity if held else float(wants)
            rate *= bandwidth.speed(demand, CLUSTER.memory_bandwidths[node], bound)
        return rate


def milli(holding: Holding) -> int:
    return WHOLE_GPU_MILLI * holding.gpus + sum(part for _, part in holding.shares)


def demand_on(sim_job: SimulatedJob, holding: Holding) -> float:
    whole = sim_job.job_class.gpu_milli or sim_job.job_class.cores
    return sim_job.job.memory_bandwidth_bytes_per_second * (milli(holding) or holding.cores) / whole


ANY_SPEED = st.lists(st.sampled_from(("cores", "gpu-type", *SLOWER)), unique=True, min_size=1).map(",".join)


@settings(deadline=None, max_examples=examples(60))
@given(traces(), ANY_SPEED, st.booleans(), st.sampled_from(("0", "7", "model")))
def test_work_is_conserved_and_rates_equal_a_full_computation(
    trace: Trace, speed: str, preempt: bool, cost: str
) -> None:
    options = {"speed": speed, "preemption_cost_seconds": cost}
    if "colocation" in speed:
        options["interference"] = "philly"
    slow = SlowWorld(replay(trace, options, preempt=preempt), parse(Settings, options))
    slow.run()
    assert all(sim_job.finished for sim_job in slow.simulation.sim_jobs)
    for sim_job in slow.simulation.sim_jobs:
        assert math.isclose(math.fsum(slow.done[sim_job.job.id]), sim_job.job.work_seconds, rel_tol=1e-7, abs_tol=1e-5)


@settings(deadline=None, max_examples=examples(60))
@given(traces(), st.booleans())
def test_where_speeds_only_slow_down_no_run_is_shorter_than_its_work(trace: Trace, preempt: bool) -> None:
    options = {"speed": ",".join(SLOWER), "interference": "philly"}
    simulation = replay(trace, options, preempt=preempt)
    while simulation.step():
        assert all(0 < sim_job.rate <= 1 for sim_job in simulation.sim_jobs)
    for sim_job in simulation.sim_jobs:
        assert sim_job.attained_seconds >= sim_job.job.work_seconds * (1 - 1e-9)
        assert sim_job.busy_seconds <= sim_job.attained_seconds * (1 + 1e-9)


@settings(deadline=None, max_examples=examples(40))
@given(traces())
def test_speeds_without_anything_to_act_on_change_nothing_to_the_last_digit(trace: Trace) -> None:
    plain = Trace("made up", "none", tuple(job for job in trace.jobs if job.roles[0].request.gpu_milli != 250))
    undisturbing = [
        TraceJob(job.id, job.submitted_seconds, job.work_seconds, job.roles, kind=job.kind) for job in plain.jobs
    ]
    bare = Trace("made up", "none", tuple(undisturbing))
    cluster = Cluster("pool", (NodeShape(16, 256),), ("",))

    def figures(**options: str) -> dict[str, Any]:
        told = simulate(bare, cluster, queue="las", options={"simulator": options}).as_json() if bare.jobs else {}
        return {key: told.get(key) for key in told if key not in ("wall_seconds", "options", "notes")}

    assert figures() == figures(speed="all")


@settings(deadline=None, max_examples=examples(40))
@given(traces(), st.booleans(), st.integers(1, 20))
def test_no_job_runs_on_a_failed_node_and_lost_work_is_repeated(trace: Trace, preempt: bool, interval: int) -> None:
    options = {"node_mtbf_hours": "0.3", "node_repair_hours": "0.1", "checkpoint_interval_seconds": f"{interval * 60}"}
    simulation = replay(trace, options, preempt=preempt)
    down: set[int] = set()
    due = simulation.world.outages.due

    def watched(now: float, *, idle: bool = False) -> Any:
        for node, back in due(now, idle=idle):
            (down.discard if back else down.add)(node)
            yield node, back

    simulation.world.outages.due = watched  # type: ignore[method-assign]  # to know what the scheduler is told
    while simulation.step():
        assert not any(holding.node in down for sim_job in simulation.sim_jobs for holding in sim_job.holdings)
    for sim_job in simulation.sim_jobs:
        assert sim_job.finished
        assert math.isclose(sim_job.attained_seconds, sim_job.job.work_seconds + sim_job.lost_seconds, rel_tol=1e-9)
        assert sim_job.lost_seconds <= sim_job.crashes * interval * 60 * (1 + 1e-9)


@settings(deadline=None, max_examples=examples(30))
@given(traces(), st.integers(0, 5))
def test_every_arm_sees_the_same_fates(trace: Trace, seed: int) -> None:
    options = {"simulator": {"failures": "philly", "failed_percent": "50", "retries": "philly", "speed": "all"}}
    arms = [simulate(trace, CLUSTER, queue=queue, options=options, seed=seed) for queue in ("fifo", "las")]
    ends = [{one.id: (one.ended, one.failure) for one in arm.outcomes} for arm in arms]
    assert ends[0] == ends[1]
    assert all(one.failures >= (one.failure != "") for arm in arms for one in arm.outcomes)
