"""The simulator's shortcuts: a simulation without them gives the same result."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from tests.support.properties import amount, some

from cotenant import plugins
from cotenant.core.model.gang import Gang
from cotenant.core.model.job import Request, Role
from cotenant.core.model.job_table import Ints
from cotenant.core.model.tenancy import Tenancy
from cotenant.plugins import POLICY_GROUPS as GROUPS
from cotenant.simulator import Trace, TraceJob, parse_cluster
from cotenant.simulator.engine import Simulation
from cotenant.simulator.policy_set import Policies
from cotenant.simulator.prediction_arms import NoPrediction
from cotenant.simulator.scheduler import Scheduler


class Thorough(Scheduler):
    """Runs a cycle whenever a job waits, orders all jobs, and tries them."""

    def _by_front(self, tenancy: Tenancy) -> bool:
        return False

    def _may_start(self, now: float) -> bool:
        return bool(self._waiting)

    def _gangs(self, sequences: Ints, now: float) -> Iterator[Gang]:
        return (self._sim_jobs[sequence].gang(now) for sequence in sequences.tolist())


class OrderingAll(Scheduler):
    """Orders all jobs in each cycle."""

    def _by_front(self, tenancy: Tenancy) -> bool:
        return False


def workload(seed: int) -> Trace:
    rng = random.Random(seed)
    now, jobs = 0.0, []
    for number in range(rng.randint(2, 60)):
        now += rng.choice([0, 0, 1, 5.25, 25]) if number else 0
        gpus = rng.choice([0, 1, 1, 2, 3, 4, 6])
        cores = rng.choice([0, 1, 2]) if gpus else rng.randint(1, 6)
        roles: tuple[Role, ...] = (Role("worker", gpus or 1, Request(gpu_milli=1000 if gpus else 0, cores=cores)),)
        if gpus and rng.random() < 0.2:
            roles += (Role("ps", rng.randint(1, 2), Request(cores=2)),)
        jobs.append(TraceJob(f"j{number}", now, float(rng.randint(1, 60)), roles))
    return Trace("made up", "none", tuple(jobs))


def fates(trace: Trace, queue: str, mode: str, placement: str) -> list[tuple[str, float, float]]:
    options = {"mode": mode} if mode else {}
    made: list[Any] = [plugins.load(GROUPS["queue"], queue, options)]
    relaxing = {"server_seconds": "7", "rack_seconds": "11.25", "moves_max": "0"} if placement == "locality" else {}
    made += [plugins.load(GROUPS["placement"], placement, relaxing), plugins.load(GROUPS["allocator"], "requested")]
    cluster = replace(parse_cluster("3x4x8"), racks=("a", "a", "b"))
    simulation = Simulation(trace, cluster, Policies(*made), NoPrediction())
    while simulation.step():
        pass
    return [(sim_job.job.id, sim_job.finished_seconds, sum(sim_job.waited)) for sim_job in simulation.sim_jobs]


@pytest.mark.parametrize("placement", ["count", "first-fit", "consolidate", "locality"])
@pytest.mark.parametrize("mode", ["strict", "backfill"])
def test_a_simulation_without_shortcuts_gives_the_same(
    mode: str, placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(amount(4, deep=20)):
        trace = workload(seed)
        quick = fates(trace, "fifo", mode, placement)
        with monkeypatch.context() as patch:
            patch.setattr("cotenant.simulator.engine.Scheduler", Thorough)
            assert quick == fates(trace, "fifo", mode, placement), f"seed {seed}"


@pytest.mark.parametrize("placement", some(["consolidate", "random", "locality"], 1))
@pytest.mark.parametrize(
    ("queue", "mode"),
    [("fifo", "strict"), ("sjf", "backfill"), ("edf", "strict"), ("las", ""), ("srtf", ""), ("srsf", "")],
)
def test_a_simulation_that_orders_all_jobs_in_each_cycle_gives_the_same(
    queue: str, mode: str, placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(amount(2, deep=20)):
        trace = workload(seed)
        quick = fates(trace, queue, mode, placement)
        with monkeypatch.context() as patch:
            patch.setattr("cotenant.simulator.engine.Scheduler", OrderingAll)
            assert quick == fates(trace, queue, mode, placement), f"seed {seed}"
