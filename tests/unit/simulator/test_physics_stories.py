"""Small worlds whose figures can be computed by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cotenant import plugins
from cotenant.core.capacity.ledger import Ledger, Offer
from cotenant.core.model.gang import Gang
from cotenant.core.model.job import JobKind, Request, Role
from cotenant.core.model.node import NodeShape
from cotenant.core.model.refusal import Code, Refusal
from cotenant.core.policy.options import BadOption, parse
from cotenant.core.policy.protocols import Directive, NodeWindow
from cotenant.policies.fifo import Fifo
from cotenant.policies.first_fit import FirstFit
from cotenant.policies.requested import Requested
from cotenant.simulator import Cluster, Outcome, Result, Trace, TraceJob, simulate
from cotenant.simulator.engine import Simulation
from cotenant.simulator.physics import failures
from cotenant.simulator.physics.failures import Fate
from cotenant.simulator.physics.outages import Outages
from cotenant.simulator.physics.settings import Settings
from cotenant.simulator.physics.world import World
from cotenant.simulator.policy_set import Policies
from cotenant.simulator.prediction_arms import NoPrediction
from cotenant.simulator.traces import workers
from cotenant.simulator.traces.trace_job import Ended

LM = "LM (batch size 5)"
POLICIES = Policies(Fifo(), FirstFit(), Requested())
HALVES = Cluster("halves", (NodeShape(1, 8, gpu_type="V100", shareable=True),), ("",), (100e9,))


def job(name: str, at: float, seconds: float, gpus: int = 1, **more: Any) -> TraceJob:
    return TraceJob(name, at, seconds, more.pop("roles", None) or workers(gpus), **more)


def run(*jobs: TraceJob, cluster: Cluster | str = "1x4", queue: str = "fifo", **options: str) -> Result:
    return simulate(Trace("made up", "none", jobs), cluster, queue=queue, options={"simulator": options})


def one(result: Result, name: str) -> Outcome:
    return next(outcome for outcome in result.outcomes if outcome.id == name)


def half(cores: int = 1) -> tuple[Role, ...]:
    return (Role("worker", 1, Request(gpu_milli=500, cores=cores)),)


def test_a_neighbor_on_the_same_gpu_slows_a_job_while_it_runs() -> None:
    # Beside itself this model keeps 0.622 of its speed on a V100: a does 100 alone, then shares until b is done.
    result = run(job("a", 0, 400, roles=half(), model=LM), job("b", 100, 50, roles=half(), model=LM), cluster=HALVES)
    assert [one(result, name).finished_seconds for name in "ab"] == [400, 150]
    result = run(
        job("a", 0, 400, roles=half(), model=LM),
        job("b", 100, 50, roles=half(), model=LM),
        cluster=HALVES,
        speed="colocation",
    )
    shared = (one(result, "b").finished_seconds or 0) - 100
    assert shared == pytest.approx(50 / 0.622)
    assert one(result, "a").finished_seconds == pytest.approx(400 + shared - 50)


def test_a_cpu_job_takes_memory_bandwidth_from_a_training_job_and_from_itself() -> None:
    cpu = (Role("worker", 1, Request(cores=4)),)
    result = run(
        job("dnn", 0, 90),
        job("cpu", 0, 60, roles=cpu, kind=JobKind.CPU, memory_bandwidth_bytes_per_second=200e9),
        cluster=Cluster("one", (NodeShape(1, 8),), ("",), (100e9,)),
        speed="bandwidth",
        bandwidth_sensitivity="0.5",
    )
    assert one(result, "cpu").finished_seconds == 120  # at half its speed
    assert one(result, "dnn").finished_seconds == pytest.approx(130)  # 80 of its 90 s of work were done by then


def test_a_contention_policy_can_judge_what_each_node_sees() -> None:
    cpu = (Role("worker", 1, Request(cores=4)),)
    cluster = Cluster("one", (NodeShape(1, 8), NodeShape(1, 8)), ("", ""), (100e9, 0.0))
    jobs = (
        job("dnn", 0, 90),
        job("cpu", 0, 60, roles=cpu, kind=JobKind.CPU, memory_bandwidth_bytes_per_second=200e9),
    )
    settings = Settings(speed=("bandwidth",), bandwidth_sensitivity=0.5, utilisation="philly", sample_noise=0.0)
    simulation = Simulation(Trace("t", "none", jobs), cluster, POLICIES, NoPrediction(), world=World(cluster, settings))
    simulation.step()
    (window,) = simulation.world.windows(simulation.now, 5.0)
    dnn, other = window.attempts
    assert (window.node_id, window.seconds, window.memory_bandwidth_bytes_per_second) == ("node-0", 5.0, 100e9)
    assert (other.job_id, other.cpu_job, other.cores_used, other.rate_per_second) == ("cpu", True, 4.0, 0.5)
    assert other.memory_bandwidth_bytes_per_second == 100e9
    assert (window.memory_bandwidth_peak_bytes_per_second, window.bandwidth_enforced) == (100e9, True)
    assert (other.cores, other.tasks, other.throttle.free, other.expected_rate_per_second) == (4, 1, True, None)
    assert (dnn.expected_rate_per_second, dnn.steady) == (1.0, False)
    assert dnn.rate_per_second == pytest.approx(2 / 3)
    assert dnn.gpu_utilisation_percent == pytest.approx(53.51 * 2 / 3)
    policy = plugins.load("cotenant.contention_policies", "none")
    assert list(policy.judge(window)) == []


class Throttle:
    """Suspends the job without GPUs at 10 s and resumes it at 50 s."""

    name, api_version = "throttle", 1

    def judge(self, window: NodeWindow) -> list[Directive]:
        cpu = next(attempt for attempt in window.attempts if attempt.cpu_job)
        share = {10.0: 0.0, 50.0: 1.0}.get(window.now)
        return [] if share is None else [Directive(cpu.job_id, cpu.number, share, "told to")]


def test_directives_of_a_contention_policy_are_applied() -> None:
    cpu = (Role("worker", 1, Request(cores=4)),)
    result = simulate(
        Trace(
            "t",
            "none",
            (
                job("dnn", 0, 100),
                job("cpu", 0, 60, roles=cpu, kind=JobKind.CPU, memory_bandwidth_bytes_per_second=200e9),
            ),
        ),
        Cluster("one", (NodeShape(1, 8),), ("",), (100e9,)),
        contention=Throttle(),
        options={"simulator": {"speed": "bandwidth", "bandwidth_sensitivity": "0.5"}},
    )
    # For 10 s one job does 2/3 and the other half of its work; for 40 s the training job is alone; then as before.
    assert one(result, "dnn").finished_seconds == pytest.approx(50 + (100 - 10 * 2 / 3 - 40) * 1.5)
    assert one(result, "cpu").finished_seconds == pytest.approx(50 + (60 - 5) * 2)
    assert result.policies["contention"] == "throttle"


def test_a_contention_policy_is_queried_at_multiples_of_its_interval() -> None:
    asked: list[float] = []

    class Listens(Throttle):
        def judge(self, window: NodeWindow) -> list[Directive]:
            asked.append(window.now)
            return []

    cpu = (Role("worker", 1, Request(cores=4)),)
    jobs = (job("dnn", 0, 10), job("cpu", 0.25, 5, roles=cpu, kind=JobKind.CPU), job("late", 1.7, 1))
    options = {"simulator": {"speed": "bandwidth", "contention_interval_seconds": "0.3"}}
    simulate(Trace("t", "none", jobs), "1x2x8", contention=Listens(), options=options)
    assert asked == pytest.approx([0.3 * number for number in range(1, 34)])


def test_a_contention_policy_is_of_no_use_where_jobs_do_not_slow_each_other_down() -> None:
    with pytest.raises(BadOption, match=r"simulator\.speed: must include bandwidth or colocation"):
        simulate(Trace("t", "none", (job("a", 0, 1),)), "1x1", contention=Throttle())


def test_a_permanently_suspended_job_does_not_prolong_the_simulation() -> None:
    class Cruel(Throttle):
        def judge(self, window: NodeWindow) -> list[Directive]:
            return [Directive(one.job_id, one.number, 0.0, "cruel") for one in window.attempts if one.cpu_job]

    cpu = (Role("worker", 1, Request(cores=4)),)
    jobs = (job("dnn", 0, 100), job("cpu", 0, 60, roles=cpu, kind=JobKind.CPU))
    options = {"simulator": {"speed": "bandwidth", "contention_interval_seconds": "50"}}
    result = simulate(Trace("t", "none", jobs), "1x1x8", contention=Cruel(), options=options)
    assert [job_id for job_id, _ in result.unschedulable] == ["cpu"]


def test_the_node_whose_gpu_is_slowest_sets_the_pace_of_a_gang() -> None:
    two = Cluster("two", (NodeShape(1, 8, gpu_type="V100"), NodeShape(1, 8, gpu_type="K80")), ("", ""))
    trace = Trace("t", "none", (job("a", 0, 100, 2, model="ResNet-18 (batch size 64)", gpu_type="V100"),))
    result = simulate(trace, two, placement="first-fit", options={"simulator": {"speed": "gpu-type"}})
    assert result.makespan_seconds == pytest.approx(100 * 74.14 / 12.5, rel=1e-3)


def test_two_cores_per_gpu_slow_a_job_as_measured_and_no_request_does_not() -> None:
    few = (Role("worker", 2, Request(gpu_milli=1000, cores=2)),)
    result = run(job("a", 0, 66, roles=few, model="alexnet"), job("b", 0, 66, 2, model="alexnet"), speed="cores")
    assert [one(result, name).finished_seconds for name in "ab"] == [pytest.approx(100), 66]


def test_unknown_models_run_at_full_speed_without_a_default_model_with_a_note() -> None:
    few = (Role("worker", 1, Request(gpu_milli=1000, cores=1)),)
    result = run(job("a", 0, 40, roles=few), job("b", 0, 40, roles=few, model="mine"), speed="cores")
    assert result.makespan_seconds == 40
    assert "2 of 2 jobs have no known model" in result.notes[0]
    result = run(job("a", 0, 40, roles=few), speed="cores", model_default="ResNet-50")
    assert result.makespan_seconds == pytest.approx(100)
    assert result.notes == ()


class OneOutage(Outages):
    """Node 0 is down from 100 to 150."""

    def __init__(self) -> None:
        super().__init__(0, 0)
        self._left = [(100.0, 0, False), (150.0, 0, True)]

    def next_seconds(self, *, idle: bool = False) -> float:
        return self._left[0][0] if self._left else float("inf")

    def due(self, now: float, *, idle: bool = False) -> Iterator[tuple[int, bool]]:
        while self._left and self._left[0][0] <= now:
            _, node, back = self._left.pop(0)
            yield node, back


@pytest.mark.parametrize(
    ("options", "finish", "lost"),
    [
        ({"checkpoint_interval_seconds": "none"}, 350, 100),
        ({"checkpoint_interval_seconds": "40"}, 270, 20),
        ({"checkpoint_interval_seconds": "none", "preemption_cost_seconds": "30"}, 380, 100),
        ({"checkpoint_interval_seconds": "40", "preemption_cost_seconds": "model"}, 270 + 19.3907194, 20),
    ],
)
def test_a_crash_costs_what_was_not_saved_and_the_restart(
    options: dict[str, str], finish: float, lost: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cotenant.simulator.physics.world.Outages", lambda *_: OneOutage())
    result = run(job("a", 0, 200), **options)
    assert result.makespan_seconds == pytest.approx(finish)
    assert (result.crashes, result.lost_work_seconds, result.preemptions) == (1, lost, 0)
    assert result.waits_seconds["capacity"] == 50
    assert json.loads(json.dumps(result.as_json()))["crashes"] == 1


def test_a_preemption_without_grace_loses_what_was_not_saved() -> None:
    jobs = (job("long", 0, 1000), job("short", 100, 10))
    for options, finish in (
        ({}, 1010),
        ({"preemption_grace": "false", "checkpoint_interval_seconds": "60"}, 1050),
        ({"preemption_grace": "false", "checkpoint_interval_seconds": "none"}, 1110),
    ):
        result = simulate(
            Trace("t", "none", jobs),
            "1x1",
            queue="las",
            options={"queue": {"thresholds": "50"}, "simulator": options},
        )
        assert one(result, "long").finished_seconds == finish
        assert result.preemptions == 1


def fated(monkeypatch: pytest.MonkeyPatch, **fates: Fate) -> None:
    monkeypatch.setattr(World, "fate", lambda _, job, __: fates.get(job.id, Fate()))


BY_NAME = {one.name: one for one in failures.CLASSES}


def test_a_failed_job_backs_off_is_tried_again_and_in_the_end_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    fated(monkeypatch, a=Fate(Ended.FAILED, failure=BY_NAME["mpi_error"], trials_seconds=(10, 20, 30)))
    result = run(job("a", 0, 1000), job("b", 5, 1000, 4), retry_backoff_seconds="4", checkpoint_interval_seconds="none")
    a = one(result, "a")
    # 10 s, 4 s of back-off; b has all the GPUs until then, and a runs again after it
    assert one(result, "b").finished_seconds == 1010
    assert a.waits_seconds == (0.0, 0.0, 1010.0 - 14, 4.0 + 8)
    assert (a.finished_seconds, a.run_seconds, a.ended, a.failures) == (1010 + 20 + 8 + 30, 60, Ended.FAILED, 3)
    assert result.failures == {"mpi_error": 3}
    assert result.ends == {"passed": 1, "killed": 0, "failed": 1}
    assert result.waits_seconds["dependency"] == 12
    shares = result.ends_gpu_time
    assert shares["failed"] == pytest.approx(60 / 4060)


def test_a_killed_job_ends_early_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    fated(monkeypatch, a=Fate(Ended.KILLED, work_share=0.25))
    result = run(job("a", 0, 100))
    assert (result.avg_jct_seconds, result.ends["killed"], result.finished) == (25, 1, 1)


def test_utilization_is_reported_separately_from_occupancy() -> None:
    result = run(job("a", 0, 100, 4), utilisation="philly")
    assert result.gpu_occupancy == 1.0
    assert result.gpu_utilisation == pytest.approx(0.5113)
    few = (Role("worker", 4, Request(gpu_milli=1000, cores=1)),)
    slow = run(job("a", 0, 100, roles=few, model="res50"), utilisation="philly", speed="cores")
    assert slow.gpu_utilisation == pytest.approx(0.5113 * 0.4)
    plain = run(job("a", 0, 100, roles=few, model="res50"), speed="cores")
    assert plain.gpu_utilisation == plain.gpu_occupancy == 1.0


def test_qos_counts_what_was_done_in_time_and_leaves_out_what_users_killed() -> None:
    jobs = (
        job("met", 0, 10, deadline_seconds=10.0),
        job("late", 0, 11, deadline_seconds=10.0),
        job("failed", 0, 5, deadline_seconds=10.0, ended=Ended.FAILED),
        job("killed", 0, 5, deadline_seconds=10.0, ended=Ended.KILLED),
        job("too large", 0, 5, 9, deadline_seconds=10.0),
        job("none", 0, 5),
    )
    assert run(*jobs).qos_guarantee_percent == 25
    assert run(*jobs).objectives == {"met": 1, "missed": 3, "unknown": 1}
    assert run(jobs[-1]).qos_guarantee_percent is None
    assert run(jobs[-1]).objectives == {"met": 0, "missed": 0, "unknown": 0}


def test_a_biased_oracle_takes_jobs_for_longer_by_that_factor() -> None:
    from cotenant.simulator.prediction_arms import NoisyOracle

    options = parse(NoisyOracle.Options, {"predictable": "1", "spread": "0.5", "bias": "2"})
    arm = NoisyOracle(options, 1001, seed=4)
    told = sorted(arm.submitted(number, job("a", 0, 10)).remaining_seconds or 0 for number in range(1001))
    assert told[500] == pytest.approx(20, rel=0.1)


class Picky(FirstFit):
    """Refuses nodes on which anything ran before."""

    name = "picky"

    def place(self, gang: Gang, ledger: Ledger, rng: np.random.Generator) -> Offer | Refusal:
        if gang.job_id == "b" and len(ledger.shapes) and int(ledger.free_gpus.sum()) < 12:
            self.seen = True
        if gang.job_id == "b" and getattr(self, "seen", False):
            return Refusal(Code.FRAGMENTED, "picky")
        return super().place(gang, ledger, rng)


def test_a_job_that_finds_no_place_does_not_keep_a_breaking_cluster_going_forever() -> None:
    often = {"node_mtbf_hours": "0.1", "checkpoint_interval_seconds": "10"}
    result = run(job("a", 0, 1000), job("b", 0, 50, 4), job("c", 1, 9, 2), cluster="3x4", **often)
    assert result.finished == 3
    stuck = simulate(
        Trace("t", "none", (job("a", 0, 1000), job("b", 0, 9))),
        "3x4",
        placement=Picky(),
        options={"simulator": often},
    )
    assert [job_id for job_id, _ in stuck.unschedulable] == ["b"]


def test_contradicting_options_are_named_together() -> None:
    with pytest.raises(BadOption) as bad:
        parse(
            Settings,
            {
                "speed": "all,cores",
                "interference": "philly",
                "model_default": "mine",
                "failed_percent": "90",
                "preemption_cost_seconds": "-1",
                "bandwidth_sensitivity": "2",
            },
        )
    named = {violation.field for violation in bad.value.violations}
    assert named == {"speed", "interference", "model_default", "killed_percent", "preemption_cost_seconds"} | {
        "bandwidth_sensitivity"
    }
    with pytest.raises(BadOption, match="must be a number, not 'modle', or model"):
        parse(Settings, {"preemption_cost_seconds": "modle"})
    assert parse(Settings, {"preemption_cost_seconds": "model"}) == replace(Settings(), preemption_cost_seconds="model")


EVERYTHING = (
    "speed=all",
    "interference=philly",
    "model_default=resnet50",
    "utilisation=philly",
    "preemption_cost_seconds=model",
    "failures=philly",
    "retries=philly",
    "node_mtbf_hours=50",
)


@pytest.mark.deep
def test_with_everything_on_two_processes_with_other_hash_seeds_print_the_same() -> None:
    printed = []
    for hash_seed in ("1", "2"):
        options = [part for option in EVERYTHING for part in ("--option", f"simulator.{option}")]
        command = [sys.executable, "-c", "from cotenant.cli.main import main; main()", "simulate", "--json"]
        done = subprocess.run(
            [*command, "--trace", "sample", "--cluster", "2x8", "--queue", "las", *options],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        printed.append([line for line in done.stdout.splitlines() if '"wall_seconds"' not in line])
    assert printed[0] == printed[1]
    assert any('"crashes": ' in line and '"crashes": 0' not in line for line in printed[0])
