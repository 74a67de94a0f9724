"""The content of a recording, checked with a naive counter over random small worlds."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import pytest
from tests.support.properties import amount, some
from tests.unit.simulator.histories import History, Tape

from cotenant import plugins
from cotenant.core.model.job import Request, Role
from cotenant.core.model.node import NodeShape
from cotenant.core.model.tenancy import Tenant
from cotenant.plugins import POLICY_GROUPS as GROUPS
from cotenant.simulator import Cluster, Trace, TraceJob, parse_cluster, simulate
from cotenant.simulator.recording.events import Event, Kind

QUEUES = [plugin.name for plugin in plugins.discover(GROUPS["queue"]) if plugin.package == "cotenant"]
PLACEMENTS = [plugin.name for plugin in plugins.discover(GROUPS["placement"]) if plugin.package == "cotenant"]
ARMS: list[tuple[str, Mapping[str, str], str]] = [
    *((name, {}, placement) for name in QUEUES for placement in ("count", "consolidate")),
    *(("fifo", {"mode": mode}, placement) for mode in ("strict", "backfill") for placement in PLACEMENTS),
]
WORLDS = amount(2, deep=6)


def world(seed: int) -> Trace:
    rng = random.Random(seed)
    now, jobs = 0.0, []
    for number in range(rng.randint(1, 40)):
        now += rng.choice([0, 0, 1, 5, 25]) if number else 0
        gpus = rng.choice([0, 1, 1, 2, 3, 4, 6, 13])
        cores = rng.choice([0, 1, 2]) if gpus else rng.randint(1, 6)
        roles: tuple[Role, ...] = (Role("worker", gpus or 1, Request(gpu_milli=1000 if gpus else 0, cores=cores)),)
        if gpus and rng.random() < 0.2:
            roles += (Role("ps", rng.randint(1, 2), Request(cores=2)),)
        jobs.append(TraceJob(f"j{number}", now, float(rng.randint(1, 5000)), roles))
    return Trace("made up", "none", tuple(jobs))


def recorded(
    trace: Trace, queue: str, options: Mapping[str, str], placement: str, seed: int = 0, **physics: str
) -> list[Event]:
    tape, cluster = Tape(), parse_cluster("3x4x8")
    given = {"queue": options, "simulator": {"preemption_cost_seconds": "3", **physics}}
    result = simulate(trace, cluster, queue=queue, placement=placement, options=given, seed=seed, recorder=tape)
    history = History(cluster)
    for event in tape.events:
        history.take(event)
    history.agrees(result)
    alone = simulate(trace, cluster, queue=queue, placement=placement, options=given, seed=seed)
    assert alone.outcomes == result.outcomes, "to listen changed it"
    return tape.events


@pytest.mark.parametrize(("queue", "options", "placement"), some(ARMS, 9))
def test_a_recording_contains_the_history(queue: str, options: Mapping[str, str], placement: str) -> None:
    for seed in range(WORLDS):
        events = recorded(world(seed), queue, options, placement, seed)
        assert [event.as_line() for event in events] == [json_again(event) for event in events], f"seed {seed}"


BREAKING = {
    "speed": "all",
    "interference": "philly",
    "model_default": "resnet50",
    "failures": "philly",
    "failed_percent": "40",
    "retries": "philly",
    "retry_backoff_seconds": "50",
    "node_mtbf_hours": "1",
    "node_repair_hours": "0.2",
}


@pytest.mark.parametrize(("queue", "options", "placement"), some(ARMS, 9))
def test_a_recording_contains_the_history_with_failures(queue: str, options: Mapping[str, str], placement: str) -> None:
    kinds = {
        event.kind
        for seed in range(WORLDS // 2)
        for event in recorded(world(seed), queue, options, placement, seed, **BREAKING)
    }
    assert kinds > {Kind.ATTEMPT_FAILED, Kind.NODE_DOWN, Kind.NODE_UP, Kind.RATE_CHANGED}


def json_again(event: Event) -> str:
    return json.dumps(json.loads(event.as_line()), separators=(",", ":"), ensure_ascii=False)


@pytest.mark.parametrize("mode", ["strict", "backfill"])
def test_a_reason_is_recorded_once_until_it_changes(mode: str) -> None:
    for seed in range(WORLDS):
        told: dict[object, tuple[str, ...]] = {}
        for event in recorded(world(seed), "fifo", {"mode": mode}, "consolidate"):
            if event.kind is Kind.WAITING:
                who = event.job_id or event.shape
                reason = (event.code, *event.numbers)
                assert (
                    told.get(who) != reason or mode == "backfill"
                )  # a class's reason may be recorded again after its queue was empty
                told[who] = reason


def test_each_kind_of_event_speaks_for_itself() -> None:
    roles = (Role("worker", 2, Request(gpu_milli=1000, cores=0)),)
    jobs = (
        TraceJob("long", 0.0, 9000.0, roles),
        TraceJob("new", 5000.0, 10.0, roles),
        TraceJob("big", 5000.0, 1.0, (Role("worker", 9, Request(gpu_milli=1000, cores=0)),)),
    )
    tape = Tape()
    simulate(Trace("made up", "none", jobs), "1x2", queue="las", recorder=tape)
    said = [
        (event.at_seconds, event.kind.value, event.job_id) for event in tape.events if event.kind is not Kind.PLANNED
    ]
    assert said[:7] == [
        (0.0, "submitted", "long"),
        (0.0, "started", "long"),
        (5000.0, "submitted", "new"),
        (5000.0, "unschedulable", "big"),
        (5000.0, "preempted", "long"),
        (5000.0, "started", "new"),
        (5000.0, "waiting", "long"),
    ]
    preempted = next(event for event in tape.events if event.kind is Kind.PREEMPTED)
    assert (preempted.by, preempted.run, preempted.ran_seconds) == (("new",), 1, 5000.0)


def gpu_job(job_id: str, at: float, seconds: float, gpus: int, **more: Any) -> TraceJob:
    return TraceJob(job_id, at, seconds, (Role("worker", gpus, Request(gpu_milli=1000, cores=0)),), **more)


def test_a_preemption_under_a_tenants_limit_is_for_a_start_elsewhere() -> None:
    jobs = gpu_job("low", 0.0, 100.0, 1, tenant="t"), gpu_job("high", 5.0, 10.0, 2, tenant="t", priority=100)
    cluster = Cluster("two sizes", (NodeShape(1, 8), NodeShape(2, 8)), ("", ""))
    tape = Tape()
    simulate(
        Trace("made up", "none", jobs),
        cluster,
        tenants=[Tenant("t", limit_gpu_milli=2000)],
        options={"simulator": {"preemption": "priority"}},
        recorder=tape,
    )
    stopped = next(event for event in tape.events if event.kind is Kind.PREEMPTED)
    started = next(event for event in tape.events if event.kind is Kind.STARTED and event.job_id == "high")
    assert (stopped.job_id, stopped.by) == ("low", ("high",))
    assert [place.node for place in started.nodes] == [1]


def test_a_job_back_within_its_tenants_share_gets_another_reason() -> None:
    jobs = (
        gpu_job("first", 0.0, 10.0, 2, tenant="a"),
        gpu_job("stays", 0.0, 100.0, 2, tenant="b", preemptible=False),
        gpu_job("large", 1.0, 5.0, 4, tenant="a"),
    )
    tape, cluster = Tape(), parse_cluster("1x4")
    tenants = [Tenant("a", quota_gpu_milli=4000)]
    result = simulate(Trace("made up", "none", jobs), cluster, queue="las", tenants=tenants, recorder=tape)
    told = [(event.at_seconds, event.wait) for event in tape.events if event.kind is Kind.WAITING]
    assert told == [(1.0, "fair_share"), (10.0, "capacity")]
    history = History(cluster)
    for event in tape.events:
        history.take(event)
    history.agrees(result)
