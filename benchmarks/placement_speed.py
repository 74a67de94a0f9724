"""The speed of decisions: full cycles, cycles after one event, one huge gang, and placements per second.

Cycles are the simulator's: ordering, admission, placement of each gang and a label for each waiting gang, by the same
code as in the live mesh. Ten thousand synthetic gangs of 1 to 64 GPUs wait, under a queue with backfill. In the first
cycle all nodes are empty; in later ones the cluster is full, and one job arrives or finishes. In another workload two
fifths of the gangs have no GPUs: for policies that lend cores to them, a second batch of the same size arrives when
the cluster is full, and gangs with GPUs reclaim what was lent. The simulator skips gangs whose answer it knows, but
the live mesh does not; so finally all gangs, each with a unique shape, go through the cycle itself. The reference of
each figure is the time of as many dictionary look-ups within the same minutes. All times are CPU time.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import harness  # noqa: E402 - the root of the checkout has to be on the path first

from cotenant import plugins, simulator  # noqa: E402 - likewise
from cotenant.core.capacity.ledger import Holding, Ledger  # noqa: E402 - likewise
from cotenant.core.model.gang import Demand, Gang, Part  # noqa: E402 - likewise
from cotenant.core.model.job import Request, Role  # noqa: E402 - likewise
from cotenant.core.model.node import NodeShape  # noqa: E402 - likewise
from cotenant.core.policy.cluster_view import ClusterView, RunningJob  # noqa: E402 - likewise
from cotenant.core.scheduling import cycle  # noqa: E402 - likewise
from cotenant.simulator.scheduler import Scheduler  # noqa: E402 - likewise
from cotenant.simulator.traces import TraceJob  # noqa: E402 - likewise
from cotenant.simulator.traces.trace_job import replicas  # noqa: E402 - likewise

GROUP = "cotenant.placement_policies"
GPUS, CORES, MEMORY_BYTES = 8, 24, 2**39  # of a node
SIZES, SHARES = (1, 2, 4, 8, 16, 32, 64), (0.30, 0.15, 0.20, 0.25, 0.06, 0.03, 0.01)
WAITING = 10_000
NODES = (100, 1_000, 10_000)
CYCLE_MS = {"consolidate": 200.0, "locality": 200.0, "qos": 500.0, "multi-array": 500.0}  # at 1,000 nodes
CYCLE_10K_MS = dict.fromkeys(CYCLE_MS, 2_000.0)
STEP_MS, GANG_MS = 10.0, 100.0
PLACEMENTS_PER_SECOND = 1_000.0
STEPS = 100  # measured arrivals, and measured finishes
GANG_GPUS = 512
CPU_SHARE = 0.4  # share of gangs without GPUs in the mixed workload


class EnoughCycles(Exception):
    """Stops a simulation after the last measured cycle."""


@dataclass(frozen=True, slots=True)
class Cycle:
    """One cycle: its simulated time, its duration, and the number of starts."""

    now: float
    milliseconds: float
    starts: int


class RunningJobs(ClusterView):
    """A cluster view with the given running jobs."""

    now = 0.0

    def __init__(self, running_jobs: Mapping[str, RunningJob]) -> None:
        self._residents = running_jobs
        self._on: dict[int, list[RunningJob]] = {}
        for one in running_jobs.values():
            for node in {holding.node for holding in one.holdings}:
                self._on.setdefault(node, []).append(one)

    def running_jobs(self) -> Mapping[str, RunningJob]:
        return self._residents

    def jobs_on(self, node: int) -> Sequence[RunningJob]:
        return self._on.get(node, ())


def jobs(count: int, *, alike: bool, seed: int = 0) -> list[TraceJob]:
    """Return jobs that all arrive at once: of 84 shapes if `alike`, else each with a unique memory request."""
    rng = np.random.default_rng(seed)
    sizes, cores = rng.choice(SIZES, size=count, p=SHARES), rng.integers(1, 4, size=count)
    memory = rng.choice([4, 8, 16, 32], size=count) * 2**30 if alike else rng.integers(2**30, 2**35, size=count)
    seconds = rng.uniform(1e3, 1e5, size=count)
    return [
        TraceJob(
            f"job-{number}", 0.0, float(lasts), replicas(int(gpus), Request(1000, int(each), memory_bytes=int(bytes_)))
        )
        for number, (gpus, each, bytes_, lasts) in enumerate(zip(sizes, cores, memory, seconds, strict=True))
    ]


def mixed(count: int, *, seed: int, submitted_seconds: float, name: str) -> list[TraceJob]:
    """Return jobs of which two fifths have no GPUs but 1 to 4 replicas of 1 to 12 cores."""
    rng = np.random.default_rng(seed)
    made: list[TraceJob] = []
    for job in jobs(count, alike=True, seed=seed):
        roles = job.roles
        if rng.random() < CPU_SHARE:
            memory = int(rng.choice([4, 8, 16]) * 2**30)
            roles = (
                Role("worker", int(rng.integers(1, 5)), Request(0, int(rng.integers(1, 13)), memory_bytes=memory)),
            )
        made.append(TraceJob(f"{name}-{job.id}", submitted_seconds, job.work_seconds, roles))
    return made


def late(some: Sequence[TraceJob]) -> list[TraceJob]:
    """Return jobs with these shapes that arrive one after another, before any finishes."""
    return [TraceJob(f"late-{number}", 1.0 + number, 1e5, job.roles) for number, job in enumerate(some[:STEPS])]


def cycles(some: Sequence[TraceJob], nodes: int, placement: str, count: int) -> list[Cycle]:
    """Simulate `count` cycles and time each."""
    done: list[Cycle] = []
    decide = Scheduler.decide

    def timed(scheduler: Scheduler, now: float) -> object:
        began = time.process_time()
        started = decide(scheduler, now)
        done.append(Cycle(now, 1e3 * (time.process_time() - began), len(started)))
        if len(done) == count:
            raise EnoughCycles
        return started

    trace = simulator.Trace("synthetic", "synthetic", tuple(some))
    with mock.patch.object(Scheduler, "decide", timed):
        try:
            options = {"queue": {"mode": "backfill"}}
            cluster = f"{nodes}x{GPUS}x{CORES}"
            simulator.simulate(trace, cluster, queue="fifo", placement=placement, options=options)
        except EnoughCycles:
            pass
    return done


def lookup_ms(count: int) -> float:
    """Return the milliseconds of `count` dictionary look-ups, over rounds that are long enough to time."""
    table = {f"job-{number}": number for number in range(count)}
    passes = 20
    return 1e3 / passes * least_seconds(lambda: [sum(table[name] for name in table) for _ in range(passes)], rounds=5)


def least_seconds(work: Callable[[], object], rounds: int = 3) -> float:
    """Return the minimum CPU time of a few rounds; other load can only add to it."""
    took = []
    for _ in range(rounds):
        began = time.process_time()
        work()
        took.append(time.process_time() - began)
    return min(took)


def whole_cycles(policy: str, rounds: int) -> Iterator[harness.Row]:
    """Place as many of 10,000 gangs as fit on empty nodes and refuse the rest."""
    by_nodes: dict[int, float] = {}
    for nodes in NODES:
        first = [cycles(jobs(WAITING, alike=True), nodes, policy, 1)[0] for _ in range(rounds)]
        by_nodes[nodes] = min(one.milliseconds for one in first)
        most = {1_000: CYCLE_MS, 10_000: CYCLE_10K_MS}.get(nodes, {}).get(policy)
        name = f"{policy}: a cycle of {WAITING:,} gangs on {nodes:,} empty nodes, {first[0].starts:,} started"
        yield _row(name, by_nodes[nodes], most)
    growth = by_nodes[NODES[-1]] / by_nodes[NODES[0]]
    yield harness.Row(f"{policy}: growth of that from {NODES[0]:,} to {NODES[-1]:,} nodes", growth, "")
    own = min(cycles(jobs(WAITING, alike=False), 1_000, policy, 1)[0].milliseconds for _ in range(rounds))
    yield _row(f"{policy}: a cycle of {WAITING:,} gangs, each of a shape of its own, on 1,000 nodes", own, None)


def mixed_cycles(policy: str, rounds: int) -> Iterator[harness.Row]:
    """Place gangs with and without GPUs on empty nodes, and a second batch of the same size on full nodes."""
    by_nodes: dict[int, float] = {}
    for nodes in NODES:
        first = mixed(WAITING, seed=0, submitted_seconds=0.0, name="first")
        second = mixed(WAITING, seed=1, submitted_seconds=1.0, name="second")
        done = [cycles([*first, *second], nodes, policy, 2) for _ in range(rounds)]
        most = {1_000: CYCLE_MS, 10_000: CYCLE_10K_MS}.get(nodes, {}).get(policy)
        for number, what in enumerate(("empty", "full")):
            took = by_nodes[nodes] = min(one[number].milliseconds for one in done)
            name = f"{policy}: a cycle of {WAITING:,} gangs with and without GPUs on {nodes:,} {what} nodes"
            yield _row(f"{name}, {done[0][number].starts:,} started", took, most)
    growth = by_nodes[NODES[-1]] / by_nodes[NODES[0]]
    yield harness.Row(f"{policy}: growth of that from {NODES[0]:,} to {NODES[-1]:,} full nodes", growth, "")


def distinct_gangs(policy_name: str, rounds: int) -> Iterator[harness.Row]:
    """Place 10,000 gangs, each with a unique shape, on empty nodes, and as many on full nodes."""
    first, second = (
        [_gang(job, name) for job in jobs(WAITING, alike=False, seed=seed)] for seed, name in ((0, "a"), (1, "b"))
    )
    took: dict[str, list[float]] = {"empty": [], "full": []}
    for _ in range(rounds):
        policy, rng = plugins.load(GROUP, policy_name), np.random.default_rng(0)
        ledger = Ledger([NodeShape(GPUS, CORES, memory_bytes=MEMORY_BYTES)] * 1_000)
        running_jobs: dict[str, RunningJob] = {}
        for what, gangs in (("empty", first), ("full", second)):
            began = time.process_time()
            plan = cycle.place(gangs, ledger, policy, rng, cluster_view=RunningJobs(running_jobs))
            took[what].append(1e3 * (time.process_time() - began))
            for start in plan.starts:
                running_jobs[start.gang.job_id] = RunningJob(
                    start.gang, start.holdings, 0.0, reclaimable=start.reclaimable
                )
                for holding in start.holdings:
                    ledger.hold(holding)
    for what, each in took.items():
        name = f"{policy_name}: {WAITING:,} gangs, each of a shape of its own, all asked about, on 1,000 {what} nodes"
        yield _row(name, min(each), CYCLE_MS.get(policy_name))


def _gang(job: TraceJob, prefix: str) -> Gang:
    role = job.roles[0]
    demand = Demand(1000, role.request.cores or 0, memory_bytes=role.request.memory_bytes)
    return Gang(f"{prefix}-{job.id}", (Part(role.name, role.replicas, demand),))


def _row(name: str, milliseconds: float, most: float | None) -> harness.Row:
    bar = "" if most is None else f"≤ {most:g} ms"
    holds = None if most is None else milliseconds <= most
    return harness.Row(name, milliseconds, "ms", lookup_ms(WAITING), f"{WAITING:,} look-ups", bar, holds)


def steps(policy: str, sizes: Sequence[int]) -> Iterator[harness.Row]:
    """Time cycles on a full cluster with 10,000 waiting gangs, after one arrival or one finish."""
    for nodes in sizes:
        some = jobs(WAITING + 3 * nodes, alike=True)  # about half of the additional jobs run, the rest waits
        done = cycles([*some, *late(some)], nodes, policy, 1 + 2 * STEPS)
        most = STEP_MS if nodes == 1_000 and policy in CYCLE_MS else None
        for what, part in (("one arrived", done[1 : 1 + STEPS]), ("one finished", done[1 + STEPS :])):
            middle = statistics.median(one.milliseconds for one in part)
            high = harness.percentile([one.milliseconds for one in part], 95)
            yield _row(f"{policy}: a cycle in which {what}, {nodes:,} full nodes, median", middle, most)
            yield _row(f"{policy}: a cycle in which {what}, {nodes:,} full nodes, p95", high, most)


def one_huge_gang(policy_name: str) -> Iterator[harness.Row]:
    """Place or refuse a gang of 512 GPUs on half-full nodes."""
    for nodes in (250, 1_000, 4_000):
        ledger = Ledger([NodeShape(GPUS, CORES, memory_bytes=MEMORY_BYTES)] * nodes)
        for node in range(nodes):
            ledger.take(node, Demand(1000, 3), GPUS // 2)
        for what, demand in (("single GPUs", Demand(1000, 3)), ("whole nodes", Demand(1000 * GPUS, CORES))):
            gang = Gang("huge", (Part("worker", GANG_GPUS * 1000 // demand.gpu_milli, demand),))
            policy = plugins.load(GROUP, policy_name)

            def decide(gang: Gang = gang, policy: object = policy, ledger: Ledger = ledger) -> cycle.Plan:
                return cycle.place([gang], ledger, policy, np.random.default_rng(0))  # type: ignore[arg-type]  # loaded by name

            answer = "placed" if decide().starts else "refused"
            took = 1e3 * least_seconds(decide)
            most = GANG_MS if nodes == 1_000 else None
            yield _row(f"{policy_name}: {GANG_GPUS} GPUs as {what} on {nodes:,} half-full nodes, {answer}", took, most)


def steady(policy_name: str, seconds: float) -> Iterator[harness.Row]:
    """Keep a cluster 90 % full with the core alone: place gangs and release as many GPUs."""
    for nodes in NODES:
        policy, rng = plugins.load(GROUP, policy_name), np.random.default_rng(0)
        ledger = Ledger([NodeShape(GPUS, CORES, memory_bytes=MEMORY_BYTES)] * nodes)
        source = jobs(20_000, alike=True)
        running: list[tuple[Holding, ...]] = []
        placed = number = 0
        began: float | None = None
        while began is None or time.process_time() - began < seconds:
            page = []
            for _ in range(20):
                page.append(_gang(source[number % len(source)], f"gang-{number}"))
                number += 1
            plan = cycle.place(page, ledger, policy, rng)
            for start in plan.starts:
                for holding in start.holdings:
                    ledger.hold(holding)
                running.append(start.holdings)
            placed += len(plan.starts)
            while ledger.free_gpu_milli < 0.1 * ledger.total_gpu_milli:
                began = time.process_time() if began is None else began
                for holding in running.pop(int(rng.integers(len(running)))):
                    ledger.release(holding)
            if began is None:
                placed = 0
        rate = placed / (time.process_time() - began)
        most = PLACEMENTS_PER_SECOND if nodes == 1_000 else None
        bar, holds = ("", None) if most is None else (f"≥ {most:,.0f}/s", rate >= most)
        looked_up = 1e3 * WAITING / lookup_ms(WAITING)
        name = f"{policy_name}: placements in a steady state on {nodes:,} nodes"
        yield harness.Row(name, rate, "1/s", looked_up, "look-ups", bar, holds)


def measure(quick: bool) -> Iterator[harness.Row]:
    """Measure every installed policy that has a bar, and in the long form also `fgd`."""
    known = {plugin.name for plugin in plugins.discover(GROUP)}
    for policy in CYCLE_MS if quick else (*CYCLE_MS, "fgd"):
        if policy in known:
            yield from whole_cycles(policy, 1 if quick else 3)
            if policy in CYCLE_MS:
                yield from distinct_gangs(policy, 1 if quick else 3)
            if policy == "multi-array":
                yield from mixed_cycles(policy, 1 if quick else 3)
            yield from steps(policy, NODES[:2] if quick else NODES)
            yield from one_huge_gang(policy)
            yield from steady(policy, 0.5 if quick else 2.0)


if __name__ == "__main__":
    harness.main(lambda quick: list(measure(quick)), __doc__ or "")
