"""Resizing of running jobs, in small worlds with known optima."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.properties import some
from tests.unit.simulator.histories import History, Tape

from cotenant import plugins
from cotenant.core.model.estimate import Query
from cotenant.core.model.job import JobKind, Request, Role
from cotenant.core.model.node import NodeShape
from cotenant.core.model.tenancy import Tenant
from cotenant.core.policy.protocols import Predictor, Sizing
from cotenant.core.sizing.resize import ResizableJob
from cotenant.simulator import Result, Trace, TraceJob, parse_cluster, simulate
from cotenant.simulator.policy_set import PolicyFailed
from cotenant.simulator.prediction_arms import Learner
from cotenant.simulator.recording.event_file import Recording, writing
from cotenant.simulator.recording.events import Event, Kind
from cotenant.simulator.recording.replay import check
from cotenant.simulator.scenario import Scenario

RESIZING = ("coda-adaptive", "xiao", "aiturbo")
PHYSICS = {"cores": "auto", "speed": "cores"}


def job(name: str, model: str, at: float = 0.0, work: float = 7200.0, gpus: int = 1) -> TraceJob:
    return TraceJob(name, at, work, (Role("worker", gpus, Request(1000, None)),), model=model, gpu_type="V100")


def cpu_job(name: str, cores: int, at: float = 0.0, work: float = 600.0) -> TraceJob:
    return TraceJob(name, at, work, (Role("cpu", 1, Request(0, cores)),), kind=JobKind.CPU)


def run(
    jobs: list[TraceJob],
    cluster: str,
    allocator: str,
    seed: int = 0,
    queue: str = "fifo",
    placement: str = "consolidate",
    tenants: Sequence[Tenant] = (),
    **physics: str,
) -> tuple[Result, list[Event]]:
    tape = Tape()
    trace = Trace("made up", "none", tuple(sorted(jobs, key=lambda one: one.submitted_seconds)))
    how: dict[str, Any] = {"queue": queue, "placement": placement, "allocator": allocator, "tenants": tenants}
    options = {"simulator": PHYSICS | physics}
    result = simulate(trace, cluster, **how, options=options, seed=seed, recorder=tape)
    history = History(parse_cluster(cluster))
    for event in tape.events:
        history.take(event)
    history.agrees(result)
    assert simulate(trace, cluster, **how, options=options, seed=seed).outcomes == result.outcomes, (
        "to listen changed it"
    )
    return result, tape.events


def cores_of(events: list[Event], job_id: str) -> list[tuple[float, int]]:
    kinds = (Kind.STARTED, Kind.RESIZED)
    return [(event.at_seconds, event.cores or 0) for event in events if event.job_id == job_id and event.kind in kinds]


@pytest.mark.parametrize("allocator", RESIZING)
@pytest.mark.parametrize("noise", ["0", "0.02"])
def test_a_job_that_needs_one_core_is_slimmed_to_one(allocator: str, noise: str) -> None:
    result, events = run([job("a", "bert")], "1x8", allocator, rate_noise=noise)
    assert cores_of(events, "a")[-1][1] == 1
    assert result.sizing
    assert 1.9 < (result.sizing["slimmed_cores"] or 0) <= 2


@pytest.mark.parametrize("allocator", RESIZING)
def test_a_hungry_job_is_lent_what_it_can_use(allocator: str) -> None:
    _, events = run([job("a", "resnet18", work=20_000)], "1x8", allocator)
    assert 7 <= cores_of(events, "a")[-1][1] <= 10, "its rate levels off at 9 cores"
    alone = run([job("a", "resnet18", work=20_000)], "1x8", "proportional")[0]
    assert (run([job("a", "resnet18", work=20_000)], "1x8", allocator)[0].avg_jct_seconds or 0) < (
        0.5 * (alone.avg_jct_seconds or 0)
    )


@pytest.mark.parametrize("allocator", RESIZING)
def test_lent_cores_are_reclaimed_at_the_instant_of_a_start(allocator: str) -> None:
    jobs = [job("a", "resnet18", work=50_000), job("b", "resnet50", at=5000.0, gpus=7)]
    _, events = run(jobs, "1x8", allocator)
    before = [cores for at, cores in cores_of(events, "a") if at < 5000][-1]
    taken = [cores for at, cores in cores_of(events, "a") if at == 5000]
    assert before > 3
    assert taken == [3]
    assert [event.at_seconds for event in events if event.kind is Kind.STARTED] == [0, 5000]


@pytest.mark.parametrize("allocator", RESIZING)
def test_slimmed_cores_let_a_cpu_job_start_at_that_instant(allocator: str) -> None:
    jobs = [*(job(f"a{number}", "bert", work=50_000) for number in range(8)), cpu_job("c", 14, at=1.0)]
    _, events = run(jobs, "1x8", allocator)
    begun = next(event.at_seconds for event in events if event.kind is Kind.STARTED and event.job_id == "c")
    assert begun < 3600
    before, since = [
        sum([cores for at, cores in cores_of(events, f"a{number}") if at < begun + later][-1] for number in range(8))
        for later in (0, 0.001)
    ]
    assert since <= 10 < before
    assert run(jobs, "1x8", "proportional")[0].outcomes[-1].finished_seconds == 50_600


def test_requested_cores_are_kept() -> None:
    given = TraceJob("a", 0.0, 9000.0, (Role("worker", 1, Request(1000, 5)),), model="bert")
    _, events = run([given], "1x8", "coda-adaptive")
    assert cores_of(events, "a") == [(0.0, 5)]


def test_without_resizing_there_are_no_sizing_figures() -> None:
    plain = run([job("a", "bert")], "1x8", "proportional")[0].as_json()
    assert "sizing" not in plain
    assert "sizing" not in plain["about"]
    assert run([job("a", "bert")], "1x8", "xiao")[0].as_json()["sizing"]["resizes"] > 0


MODELS = ("bert", "resnet18", "alexnet", "resnet50", "deepspeech", "", "lstm")


def world(seed: int) -> list[TraceJob]:
    rng = random.Random(seed)
    now, jobs = 0.0, []
    for number in range(rng.randint(5, 30)):
        now += rng.choice([0, 0, 30, 600])
        if rng.random() < 0.3:
            jobs.append(cpu_job(f"j{number}", rng.randint(1, 6), now, float(rng.randint(60, 4000))))
        else:
            gpus = rng.choice([1, 1, 2, 4, 7])
            jobs.append(job(f"j{number}", rng.choice(MODELS), now, float(rng.randint(60, 8000)), gpus))
    return jobs


@pytest.mark.parametrize("allocator", RESIZING)
@pytest.mark.parametrize("queue", some(["srtf", "fifo"], 1))
def test_no_core_is_ever_held_twice(allocator: str, queue: str) -> None:
    for seed in range(2):
        more: Mapping[str, Any] = {"node_mtbf_hours": "2", "speed": "all"} if seed == 1 else {}
        result, events = run(world(seed), "2x4x14", allocator, seed, queue, **more)
        assert result.finished == result.jobs, f"seed {seed}"
        assert any(event.kind is Kind.RESIZED for event in events), f"seed {seed}"


def test_a_recording_with_resizes_runs_again_byte_for_byte(tmp_path: Path) -> None:
    trace = tmp_path / "jobs.csv"
    rows = "".join(f"j{number},{number * 600},{3000 + 700 * number},{1 + number % 3}\n" for number in range(8))
    trace.write_text(f"job_id,submission_time,duration,num_gpu\n{rows}")
    options = {"simulator": {"cores": "auto", "speed": "cores", "model_default": "resnet18"}}
    scenario = Scenario(str(trace), "1x8", allocator="coda-adaptive", options=options)
    file = tmp_path / "events.jsonl"
    with writing(file, scenario) as recorder:
        recorder.end(complete=scenario.run(recorder=recorder).complete)
    assert any(b'"kind":"resized"' in line for line in Recording(file).lines())
    assert check(Recording(file)).difference is None


def test_a_predictor_learns_the_useful_cores_from_the_windows_of_running_jobs() -> None:
    learnt: list[Predictor] = []

    class Watched(Learner):
        def __init__(self, predictors: Sequence[Predictor], count: int, shapes: Sequence[NodeShape] = ()) -> None:
            super().__init__(predictors, count, shapes)
            learnt.extend(predictors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cotenant.simulator.run.Learner", Watched)
        simulate(
            Trace("made up", "none", (job("a", "resnet18", work=20_000),)),
            "1x8",
            allocator="xiao",
            predictor="xiao-piecewise",
            options={"simulator": PHYSICS},
        )
    told = learnt[0].estimate(Query("default", "resnet18", "", 1000, 1))
    assert told.cores_useful is not None
    assert 7 <= told.cores_useful <= 11


@pytest.mark.deep
def test_finding_the_curves_while_jobs_run_beats_equal_shares() -> None:
    models = ["resnet18", "bert", "alexnet", "lstm", "mobilenet", "gnmt", "resnet50", "deepspeech"]
    jobs = [job(f"j{number}", model, work=14_400) for number, model in enumerate(models * 3)]
    equal = run(jobs, "2x8", "proportional")[0].avg_jct_seconds or 0
    for allocator in RESIZING:
        assert (run(jobs, "2x8", allocator)[0].avg_jct_seconds or 0) < 0.9 * equal


def test_an_allocator_that_wants_too_much_is_named() -> None:
    class Greedy:
        name, api_version = "greedy", 1
        interval_seconds, warm_up_seconds, measure_seconds = 60.0, 0.0, 60.0

        def size(self, *_: object) -> Sizing:
            return Sizing((3,), "a few")

        def resize(self, running: ResizableJob, now: float) -> Sizing:
            return Sizing((running.most + 1,), "more than all")

        def weight(self, running: ResizableJob) -> float:
            return 1.0

    trace = Trace("made up", "none", (job("a", "bert"),))
    with pytest.raises(PolicyFailed, match="allocation policy 'greedy' failed over a: BadSizing"):
        simulate(trace, "1x8", allocator=Greedy(), options={"simulator": PHYSICS})


def test_every_allocator_that_changes_cores_is_tested_here() -> None:
    found = [one.name for one in plugins.discover("cotenant.cpu_allocators") if hasattr(one.policy, "resize")]
    assert sorted(found) == sorted(RESIZING)


@pytest.mark.parametrize("queue", ["fifo", "las"])
def test_waiting_jobs_are_resized_by_what_is_learned_of_their_class(queue: str) -> None:
    jobs = [job(f"a{number}", "bert", at=float(number)) for number in range(3)]  # two initial cores, by category
    _, events = run(jobs, "1x1x3", "coda-adaptive", queue=queue, rate_noise="0")
    starts = [(event.job_id, event.cores) for event in events if event.kind is Kind.STARTED]
    assert starts[0] == ("a0", 2)
    assert {cores for _, cores in starts[1:]} == {1}
    assert not [event for event in events if event.kind is Kind.RESIZED and event.job_id != "a0"]


def test_a_gang_takes_no_core_that_is_lent_on_a_node_where_nothing_happened() -> None:
    """Two nodes, each with a hungry job, a slim one, and half of a hungry gang.

    When the hungry job of the first node ends, the gang could use its cores, but those of the second node are lent.
    """
    hungry = [job("a", "resnet18", work=5_000.0), job("d", "resnet18", work=90_000.0)]
    slim, brief = [[job(name, "bert", work=work) for name in names] for names, work in (("be", 90_000.0), ("cf", 10.0))]
    gang = job("g", "resnet18", at=1.0, work=90_000.0)
    jobs = [hungry[0], slim[0], brief[0], hungry[1], slim[1], brief[1]]
    jobs.append(replace(gang, roles=(replace(gang.roles[0], replicas=2),)))
    _, events = run(jobs, "2x3x12", "coda-adaptive", placement="first-fit", rate_noise="0")
    (start,) = [event for event in events if event.kind is Kind.STARTED and event.job_id == "g"]
    assert len({place.node for place in start.nodes}) == 2
    (ended,) = [event.at_seconds for event in events if event.kind is Kind.FINISHED and event.job_id == "a"]
    d = [cores for at, cores in cores_of(events, "d") if at <= ended][-1]
    assert d > 4, "it has cores on loan then"
    assert cores_of(events, "g")[-1][1] > 8


def test_no_job_grows_beyond_the_limits_of_its_tenant_or_its_ancestors() -> None:
    jobs = [replace(job(name, "resnet18", work=20_000), tenant="group") for name in "ab"]
    family = [Tenant("group", parent="dept"), Tenant("dept", limit_cores=14)]  # six are enough to start
    _, free = run(jobs, "1x2x24", "coda-adaptive", rate_noise="0")
    _, held = run(jobs, "1x2x24", "coda-adaptive", rate_noise="0", tenants=family)
    assert own_at_most(free) > 14
    assert 12 < own_at_most(held) <= 14
    assert [event for event in held if "lent_cores" in event.numbers], "what is beyond is lent"


def own_at_most(events: Sequence[Event]) -> int:
    """The maximum of the firm cores of all running jobs together."""
    own: dict[str, int] = {}
    most = 0
    for event in events:
        if event.kind in (Kind.STARTED, Kind.RESIZED):
            own[event.job_id] = (event.cores or 0) - int(event.numbers.get("lent_cores", 0))
        elif event.kind is Kind.FINISHED:
            own.pop(event.job_id)
        most = max(most, sum(own.values()))
    return most
