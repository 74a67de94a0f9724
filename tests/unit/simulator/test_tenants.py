"""Tenants and preemption, replayed: invariants of every instant of every simulation."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.support.properties import amount, some
from tests.unit.simulator.test_shortcuts import Thorough, workload

from cotenant import plugins
from cotenant.core.model.job import Request, Role
from cotenant.core.model.refusal import Refusal
from cotenant.core.model.tenancy import Tenancy, Tenant
from cotenant.core.scheduling.admission import Preemption, Rules
from cotenant.plugins import POLICY_GROUPS as GROUPS
from cotenant.policies.count import Count
from cotenant.simulator import Trace, TraceJob, parse_cluster, simulate
from cotenant.simulator.engine import Simulation
from cotenant.simulator.job import SimulatedJob
from cotenant.simulator.policy_set import Policies
from cotenant.simulator.prediction_arms import NoPrediction

TENANTS = Tenancy(
    [
        Tenant("a", quota_gpu_milli=6000, limit_gpu_milli=8000, limit_cores=14),
        Tenant("b", quota_gpu_milli=3000, quota_cores=8),
        Tenant("c", limit_gpu_milli=4000),
    ]
)
QUEUES = ["strict", "backfill", "las"]
SEEDS = amount(2, deep=15)
RULES = [
    Rules(),
    Rules(reclaim=False),
    Rules(Preemption.PRIORITY, run_seconds_min=7.0),
    Rules(Preemption.PRIORITY, reclaim=False),
    Rules(Preemption.NEVER),
]


def jobs_of_tenants(seed: int) -> Trace:
    rng = random.Random(seed + 1000)
    plain = workload(seed)
    jobs = [
        replace(
            job,
            tenant=rng.choice("aabbcd"),
            priority=rng.choice([0, 0, 0, 100, -100]),
            preemptible=rng.random() < 0.8,
        )
        for job in plain.jobs
    ]
    return replace(plain, jobs=tuple(jobs))


def made(queue: str, placement: str) -> Policies:
    name, options = ("fifo", {"mode": queue}) if queue in ("strict", "backfill") else (queue, {})
    loaded: list[Any] = [plugins.load(GROUPS["queue"], name, options)]
    loaded += [plugins.load(GROUPS["placement"], placement), plugins.load(GROUPS["allocator"], "requested")]
    return Policies(*loaded)


def simulation_of(seed: int, queue: str, rules: Rules, placement: str = "count", **more: Any) -> Simulation:
    cluster = parse_cluster("3x4x8")
    return Simulation(
        jobs_of_tenants(seed), cluster, made(queue, placement), NoPrediction(), rules=rules, tenancy=TENANTS, **more
    )


def steps(simulation: Simulation) -> Iterator[dict[str, int]]:
    """Yield, event by event, which jobs ran before it, and in which of their runs."""
    runs: dict[str, int] = {}
    while simulation.step():
        yield runs
        runs = {sim_job.job.id: sim_job.runs for sim_job in simulation.sim_jobs if sim_job.running}


def running(simulation: Simulation) -> list[SimulatedJob]:
    return [sim_job for sim_job in simulation.sim_jobs if sim_job.running]


def waiting(simulation: Simulation) -> list[SimulatedJob]:
    return [sim_job for sim_job in simulation.sim_jobs if not sim_job.running and not sim_job.finished]


def fits(simulation: Simulation, sim_job: SimulatedJob, without: list[SimulatedJob]) -> bool:
    """Return whether a job would find room, and be allowed it, without some other jobs."""
    held = [other for other in running(simulation) if other not in without and other.job.tenant == sim_job.job.tenant]
    tenant = next((one for one in TENANTS.tenants if one.id == sim_job.job.tenant), Tenant("d"))
    for limit, name in ((tenant.limit_gpu_milli, "gpu_milli"), (tenant.limit_cores, "cores")):
        need = getattr(sim_job.job_class, name)
        if limit is not None and need and need + sum(getattr(other.job_class, name) for other in held) > limit:
            return False
    ledger = simulation._scheduler._ledger
    with ledger.rolled_back():
        for other in without:
            for holding in other.holdings:
                ledger.release(holding)
        return not isinstance(Count().place(sim_job.job_class.gang("x"), ledger, None), Refusal)  # type: ignore[arg-type]  # draws nothing


def entitled(simulation: Simulation, ran: dict[str, int]) -> set[str]:
    """Walk the order of a first-in-first-out queue: jobs that ran before the cycle come first."""
    sim_jobs = sorted(
        [*running(simulation), *waiting(simulation)],
        key=lambda sim_job: (
            sim_job.job.id not in ran,
            -sim_job.job.priority,
            sim_job.job.submitted_seconds,
            sim_job.sequence,
        ),
    )
    left = {"a": [6000, 10**9], "b": [3000, 8]}
    found = set()
    for sim_job in sim_jobs:
        have = left.get(sim_job.job.tenant, [0, 0])
        shape = sim_job.job_class
        guaranteed = shape.gpu_milli or sim_job.job.tenant == "b"
        if guaranteed and shape.gpu_milli <= have[0] and shape.cores <= have[1]:
            have[0] -= shape.gpu_milli
            have[1] -= shape.cores
            found.add(sim_job.job.id)
    return found


@pytest.mark.parametrize("rules", some(RULES, 3), ids=str)
@pytest.mark.parametrize("queue", QUEUES)
def test_no_tenant_ever_holds_more_than_its_limit(queue: str, rules: Rules) -> None:
    for seed in range(SEEDS):
        simulation = simulation_of(seed, queue, rules)
        for _ in steps(simulation):
            for tenant in TENANTS.tenants:
                theirs = [sim_job.job_class for sim_job in running(simulation) if sim_job.job.tenant == tenant.id]
                if tenant.limit_gpu_milli is not None:
                    assert sum(shape.gpu_milli for shape in theirs) <= tenant.limit_gpu_milli
                if tenant.limit_cores is not None:
                    assert sum(shape.cores for shape in theirs) <= tenant.limit_cores
        assert not waiting(simulation)


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_no_room_is_idle_that_a_waiting_job_may_have(rules: Rules) -> None:
    for seed in range(SEEDS):
        simulation = simulation_of(seed, "backfill", rules)
        for _ in steps(simulation):
            idle = [sim_job.job.id for sim_job in waiting(simulation) if fits(simulation, sim_job, [])]
            assert idle == [], f"seed {seed} at {simulation.now}"


@pytest.mark.parametrize("run_seconds_min", [0.0, 7.0])
def test_no_job_waits_for_a_guarantee_that_borrowers_hold(run_seconds_min: float) -> None:
    waited = 0
    for seed in range(amount(15, deep=25)):
        simulation = simulation_of(seed, "backfill", Rules(run_seconds_min=run_seconds_min))
        for ran in steps(simulation):
            owners = entitled(simulation, ran)
            lent = [
                sim_job
                for sim_job in running(simulation)
                if sim_job.job.id not in owners
                and sim_job.job.preemptible
                and simulation.now - sim_job.running_since >= run_seconds_min
            ]
            for sim_job in waiting(simulation):
                if sim_job.job.id in owners:
                    waited += 1
                    assert not fits(simulation, sim_job, lent), f"seed {seed} at {simulation.now}: {sim_job.job.id}"
    assert waited > 10  # for each other's room, or for that of jobs that no job stops


@pytest.mark.parametrize("rules", [rule for rule in RULES if rule.preemption is not Preemption.NEVER], ids=str)
@pytest.mark.parametrize("queue", some(QUEUES, 1))
def test_preempted_jobs_had_run_long_enough_and_their_room_is_used(queue: str, rules: Rules) -> None:
    stopped = 0
    for seed in range(SEEDS):
        simulation = simulation_of(seed, queue, replace(rules, run_seconds_min=7.0))
        since: dict[str, tuple[float, SimulatedJob, Any]] = {}
        for _ in steps(simulation):
            for job_id, (began, sim_job, holdings) in since.items():
                if sim_job.runs and sim_job.preemptions and not sim_job.running and not sim_job.finished:
                    stopped += 1
                    assert sim_job.job.preemptible
                    assert simulation.now - began >= 7.0 - 1e-6, f"seed {seed}: {job_id}"
                    if queue == "backfill":
                        assert not fits(simulation, sim_job, [])
                    assert holdings
            since = {
                sim_job.job.id: (sim_job.running_since, sim_job, sim_job.holdings) for sim_job in running(simulation)
            }
    assert stopped or not rules.enforces(made(queue, "count").queue)


def test_two_jobs_do_not_take_each_others_room_in_turn() -> None:
    """A preempted job cannot stop the job it was preempted for, and a minimum run time allows one stop an instant."""
    for seed in range(amount(4, deep=40)):
        simulation = simulation_of(seed, "backfill", Rules(Preemption.PRIORITY, run_seconds_min=7.0))
        stops: dict[str, list[float]] = {}
        seen: dict[str, int] = {}
        for _ in steps(simulation):
            for sim_job in simulation.sim_jobs:
                if sim_job.preemptions > seen.get(sim_job.job.id, 0):
                    seen[sim_job.job.id] = sim_job.preemptions
                    stops.setdefault(sim_job.job.id, []).append(simulation.now)
        for times in stops.values():
            assert all(later - earlier >= 7.0 for earlier, later in pairwise(times))


@pytest.mark.parametrize("rules", some(RULES, 2), ids=str)
@pytest.mark.parametrize("queue", ["strict", "backfill"])
@pytest.mark.parametrize("placement", some(["consolidate", "count"], 1))
def test_a_simulation_without_shortcuts_gives_the_same_with_tenants(
    queue: str, placement: str, rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fates(seed: int) -> list[tuple[str, float, float, int]]:
        simulation = simulation_of(seed, queue, rules, placement)
        for _ in steps(simulation):
            pass
        return [
            (sim_job.job.id, sim_job.finished_seconds, sum(sim_job.waited), sim_job.preemptions)
            for sim_job in simulation.sim_jobs
        ]

    for seed in range(amount(2, deep=8)):
        quick = fates(seed)
        with monkeypatch.context() as patch:
            patch.setattr("cotenant.simulator.engine.Scheduler", Thorough)
            assert quick == fates(seed), f"seed {seed}"


def job(number: int, at: float, work: float, gpus: int, tenant: str, **more: Any) -> TraceJob:
    return TraceJob(f"j{number}", at, work, (Role("worker", gpus, Request(1000, 0)),), tenant=tenant, **more)


def replay(jobs: list[TraceJob], *tenants: Tenant, **options: str) -> dict[str, Any]:
    result = simulate(
        Trace("made up", "none", tuple(jobs)),
        "1x8",
        placement="count",
        tenants=tenants,
        options={"queue": {"mode": "backfill"}, "simulator": options},
    )
    return {one.id: one for one in result.outcomes} | {"json": result.as_json()}


GUARANTEED = Tenant("owner", quota_gpu_milli=4000)


def test_a_tenant_takes_back_what_it_lent() -> None:
    jobs = [job(0, 0, 100, 8, "guest"), job(1, 10, 20, 4, "owner")]
    taken = replay(jobs, GUARANTEED)
    assert (taken["j1"].finished_seconds, taken["j0"].preemptions) == (30.0, 1)
    kept = replay(jobs, GUARANTEED, reclaim="false")
    assert (kept["j1"].finished_seconds, kept["j0"].preemptions) == (120.0, 0)
    assert replay(jobs, GUARANTEED, preemption="never")["j0"].preemptions == 0


def test_lent_resources_are_reclaimed_after_the_minimum_run_time() -> None:
    jobs = [job(0, 0, 100, 8, "guest"), job(1, 10, 20, 4, "owner")]
    assert replay(jobs, GUARANTEED, run_seconds_min="50")["j1"].finished_seconds == 70.0


def test_beyond_its_guarantee_a_tenant_waits_for_its_fair_share_and_the_others_for_capacity() -> None:
    jobs = [
        job(0, 0, 100, 4, "owner", preemptible=False),
        job(1, 0, 100, 4, "guest", preemptible=False),
        job(2, 10, 10, 2, "owner"),
        job(3, 10, 10, 2, "guest"),
    ]
    told = replay(jobs, GUARANTEED)
    assert told["j2"].waits_seconds == (90.0, 0.0, 0.0, 0.0)
    assert told["j3"].waits_seconds == (0.0, 0.0, 90.0, 0.0)
    assert told["json"]["waits"] == {"fair_share": 1, "fragmentation": 0, "capacity": 1, "dependency": 0}


def test_a_job_over_its_tenants_limit_waits_and_holds_no_job_back() -> None:
    jobs = [job(0, 0, 50, 4, "small"), job(1, 1, 10, 2, "small"), job(2, 2, 10, 4, "other")]
    told = replay(jobs, Tenant("small", limit_gpu_milli=4000))
    assert told["j1"].waits_seconds == (49.0, 0.0, 0.0, 0.0)
    assert told["j2"].finished_seconds == 12.0


def test_a_job_larger_than_its_tenants_limit_is_unschedulable() -> None:
    [told] = replay([job(0, 0, 50, 4, "small")], Tenant("small", limit_gpu_milli=3000))["json"]["unschedulable"]
    assert told["code"] == "QUOTA"
    assert "4 GPUs of at most 3" in told["reason"]


def test_a_higher_priority_preempts_a_lower_one_under_the_priority_rule() -> None:
    jobs = [
        job(0, 0, 100, 4, "x", priority=-1),
        job(1, 0, 100, 4, "x", priority=-1, preemptible=False),
        job(2, 10, 20, 4, "x", priority=5),
        job(3, 11, 20, 4, "x"),
    ]
    by_policy, by_priority = replay(jobs), replay(jobs, preemption="priority")
    assert by_policy["j2"].finished_seconds == 120.0
    assert (by_priority["j2"].finished_seconds, by_priority["j0"].preemptions) == (30.0, 1)
    assert by_priority["j1"].preemptions == 0


def test_figures_are_given_by_tenant() -> None:
    jobs = [job(0, 0, 30, 4, "owner"), job(1, 0, 10, 2, "guest"), job(2, 0, 100, 8, "owner", preemptible=False)]
    figures = replay(jobs, GUARANTEED, Tenant("nobody"))["json"]["tenants"]
    assert list(figures) == ["owner", "nobody", "guest"]
    assert figures["owner"]["gpu_seconds"] == 920.0
    assert figures["guest"] == {
        "jobs": 1,
        "finished": 1,
        "avg_jct_seconds": 10.0,
        "avg_queue_seconds": 0.0,
        "gpu_seconds": 20.0,
        "gpu_share": 20 / 940,
    }
    assert figures["nobody"]["avg_jct_seconds"] is None
    json.dumps(figures)


def test_the_same_tenants_give_the_same_recording(tmp_path: Path) -> None:
    def story(seed: int) -> list[Any]:
        events: list[Any] = []
        recorder = type("Recorder", (), {"record": staticmethod(events.append)})()
        for _ in steps(simulation_of(seed, "backfill", Rules(Preemption.PRIORITY), recorder=recorder)):
            pass
        return events

    first = story(3)
    assert first == story(3)
    assert {"fair_share"} <= {event.wait for event in first if event.wait}
