"""How long policies take to decide, in worlds of a given size; each policy and its baseline get the same questions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import median
from typing import Any

import numpy as np

from cotenant.core.capacity.ledger import Ledger, Overcommitted
from cotenant.core.model.estimate import UNKNOWN, Candidate, Observation, Query
from cotenant.core.model.gang import Demand, Gang, Part
from cotenant.core.model.job import JobSpec, Request, Role
from cotenant.core.model.job_table import Capacity, JobRow, JobTable
from cotenant.core.model.node import NodeShape
from cotenant.core.policy.capabilities import capability_of
from cotenant.core.policy.cluster_view import EmptyClusterView, UsesClusterView
from cotenant.core.policy.protocols import AttemptWindow, NodeWindow, Trains

SEED = 7
ROUNDS = 5
GANGS = 16
QUESTIONS = 200  # of those of which each job or node has one
GPUS, CORES = 8, 64
MODELS = 50

Decide = Callable[[], int]  # makes some decisions, and returns how many


@dataclass(frozen=True, slots=True)
class Times:
    """The median time of one decision, of a policy and of its baseline."""

    jobs: int
    nodes: int
    decision: str
    seconds: float
    baseline_seconds: float

    @property
    def ratio(self) -> float:
        """The time of the policy over that of the baseline."""
        return self.seconds / self.baseline_seconds


def measured(group: str, policy: Any, baseline: Any, *, jobs: int, nodes: int) -> Times:
    """Return the times of a policy and its baseline, which take turns so that both see the same machine."""
    decision, prepare = WORLDS[group]
    first, second = prepare(policy, jobs, nodes), prepare(baseline, jobs, nodes)
    for decide in (first, second):
        decide()  # fills caches
    pairs = [(_seconds(first), _seconds(second)) for _ in range(ROUNDS)]
    own, others = (median(times) for times in zip(*pairs, strict=True))
    return Times(jobs, nodes, decision, own, others)


def _seconds(decide: Decide) -> float:
    """Return the time of one decision."""
    began = time.perf_counter()
    count = decide()
    return max(1e-9, time.perf_counter() - began) / count


def _queue(policy: Any, jobs: int, nodes: int) -> Decide:
    """Order a queue: as many jobs run as the nodes hold, the others wait."""
    draw = np.random.default_rng(SEED)
    table, now = JobTable(jobs), 1e6
    table.capacity = Capacity(1000 * GPUS * nodes, CORES * nodes)
    left = GPUS * nodes
    for number in range(jobs):
        gpus = int(draw.choice([1, 1, 1, 2, 4, 8]))
        job_id = f"job{number}"
        arrival = float(draw.uniform(0, now))
        deadline = arrival + 1e5
        table.add(JobRow(job_id, arrival, number, 1000 * gpus, 4 * gpus, tenant=number % 7, deadline_seconds=deadline))
        table.attain(job_id, float(draw.exponential(1000)))
        table.update(job_id, remaining_seconds=float(draw.exponential(3600)), confidence=0.9)
        if gpus <= left:
            table.start(job_id, now - 10)
            left -= gpus
    columns = table.jobs(now)

    def decide() -> int:
        policy.order(columns, now)
        return 1

    return decide


def _placement(policy: Any, jobs: int, nodes: int) -> Decide:
    """Place gangs, one at a time, on nodes of which the jobs hold about two thirds."""
    draw = np.random.default_rng(SEED)
    ledger = Ledger([NodeShape(GPUS, CORES)] * nodes, ids=[f"n{number}" for number in range(nodes)])
    for _ in range(min(jobs, 2 * GPUS * nodes // 3)):
        try:
            ledger.take(int(draw.integers(nodes)), Demand(1000, 4))
        except Overcommitted:
            continue
    sizes = [int(draw.choice([1, 1, 2, 4, 8, 16])) for _ in range(GANGS)]
    gangs = [Gang(f"job{number}", (Part("worker", size, Demand(1000, 4)),)) for number, size in enumerate(sizes)]
    if view := capability_of(policy, UsesClusterView):
        view.begin_cycle(EmptyClusterView())

    def decide() -> int:
        for gang in gangs:
            policy.place(gang, ledger, np.random.default_rng(SEED))
        return len(gangs)

    return decide


def _allocator(policy: Any, jobs: int, nodes: int) -> Decide:
    """Size jobs for a cluster of a few kinds of nodes."""
    kinds = [NodeShape(gpus, cores, count=max(1, nodes // 3)) for gpus, cores in ((8, 64), (4, 32), (0, 96))]
    roles = [Role("worker", 1 + number % 4, Request(1000 * (number % 5))) for number in range(min(jobs, QUESTIONS))]

    def decide() -> int:
        for role in roles:
            policy.size(JobSpec(roles=(role,)), UNKNOWN, kinds)
        return len(roles)

    return decide


def _predictor(policy: Any, jobs: int, nodes: int) -> Decide:
    """Estimate jobs after all jobs have reported a rate, and ended."""
    draw = np.random.default_rng(SEED)
    for number in range(jobs):
        cores = int(draw.integers(1, 9))
        policy.observe(
            Observation(
                f"user{number % 20}",
                f"model{number % MODELS}",
                "",
                1000,
                1,
                Candidate(cores, 1000),
                rate_per_second=2.0 * cores,
                run_seconds=float(draw.exponential(3600)),
                succeeded=True,
                job_id=f"job{number}",
                step=100,
                loss=1.0,
            )
        )
    trains = capability_of(policy, Trains)
    if trains and (task := trains.training_task()):
        trains.adopt(task.train())
    queries = [
        Query(f"user{number % 20}", f"model{number % MODELS}", "", 1000, 1, cores=4, steps_total=1000)
        for number in range(min(jobs, QUESTIONS))
    ]

    def decide() -> int:
        for query in queries:
            policy.estimate(query)
        return len(queries)

    return decide


def _contention(policy: Any, jobs: int, nodes: int) -> Decide:
    """Judge one window of each node, on which all jobs run."""
    windows = iter(list(islice(_windows(jobs, nodes), 1 + ROUNDS)))

    def decide() -> int:
        at = next(windows)
        for window in at:
            policy.judge(window)
        return len(at)

    return decide


def _windows(jobs: int, nodes: int) -> Iterator[Sequence[NodeWindow]]:
    """Yield one window after the other of all nodes; every other job is a CPU job."""
    draw, now, each = np.random.default_rng(SEED), 0.0, max(2, jobs // nodes)
    while True:
        now += 5.0
        slow = draw.uniform(0.7, 1.0, size=(nodes, each)).tolist()
        yield [
            NodeWindow(
                f"n{node}",
                now,
                5.0,
                tuple(
                    AttemptWindow(f"job{node}-{number}", 1, number % 2 == 1, 4.0, 10 * slow[node][number], cores=4)
                    for number in range(each)
                ),
                cpu_some_percent=50.0,
            )
            for node in range(nodes)
        ]


WORLDS: Mapping[str, tuple[str, Callable[[Any, int, int], Decide]]] = {
    "queue": ("order of all jobs", _queue),
    "placement": ("place for a gang", _placement),
    "allocator": ("cores of a job", _allocator),
    "predictor": ("estimate of a job", _predictor),
    "contention": ("directives for a node", _contention),
}
