"""Snapshots: their content, rejected input, and simulations that continue from them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.simulator.commands import cotenant

from cotenant.cli.research.anonymous import anonymize
from cotenant.core.model.tenancy import Tenant
from cotenant.simulator import Result, simulate
from cotenant.simulator.scenario import Scenario
from cotenant.simulator.snapshots import BadSnapshot, Ended, Held, InUse, Job, Known, Node, Part, Snapshot, read

TWO_GPUS = (Part(gpu_milli=1000, cores=1, replicas=2),)


def running(job_id: str, at: float, since: float, total: float, node: str = "a", **more: Any) -> Job:
    """A job on two GPUs of a node since some time, with a known total run time."""
    held = (Held(node, gpus=2, cores=2),)
    known = Known(total, 0.9)
    return Job(job_id, at, TWO_GPUS, running_since_seconds=since, held=held, cores=(1,), known=known, **more)


def waiting(job_id: str, at: float, seconds: float, **more: Any) -> Job:
    return Job(job_id, at, TWO_GPUS, expected_seconds=seconds, **more)


def snapshot(*jobs: Job, nodes: tuple[Node, ...] = (Node("a", 4, 8),), **more: Any) -> Snapshot:
    return Snapshot(1000.0, nodes, jobs, **more)


def saved(tmp_path: Path, taken: Snapshot) -> Path:
    path = tmp_path / "taken.json"
    path.write_text(taken.dump())
    return path


def ended(tmp_path: Path, taken: Snapshot, **choices: str) -> tuple[Result, dict[str, float | None]]:
    """Simulate it; finishes are in seconds after the snapshot."""
    first = min(job.submitted_seconds for job in taken.jobs)
    result = Scenario.of_snapshot(saved(tmp_path, taken)).choosing(choices, {}).run()
    return result, {
        one.id: None if one.finished_seconds is None else one.finished_seconds + first - taken.taken_seconds
        for one in result.outcomes
    }


def test_a_queue_policy_has_learned_from_the_jobs_that_ended_before(tmp_path: Path) -> None:
    """If all jobs ran for equally long, the one that ran most ends first; the prior is least attained service."""
    old = waiting("old", at=100, seconds=100_000, attained_seconds=90_000.0)
    full = snapshot(waiting("new", at=50, seconds=100_000), old, nodes=(Node("a", 2, 8),))
    history = tuple(Ended(100_000.0, gpu_milli=2000, cores=2, replicas=2) for _ in range(200))
    firsts = []
    for taken in (full, replace(full, ended=history)):
        _, finishes = ended(tmp_path, taken, queue="borda-mlfq", predictor="none")
        firsts.append(min(finishes, key=lambda job_id: finishes[job_id] or 0.0))
    assert firsts == ["new", "old"]


def test_ended_jobs_of_a_snapshot_are_checked(tmp_path: Path) -> None:
    taken = snapshot(waiting("w", at=960, seconds=30))
    for wrong in (Ended(0.0), Ended(10.0, gpu_milli=-1), Ended(10.0, replicas=0)):
        with pytest.raises(BadSnapshot, match="ended 1: run_seconds must be above 0"):
            read(saved(tmp_path, replace(taken, ended=(Ended(5.0), wrong))))


def test_jobs_run_on_for_what_they_have_left_and_others_start_on_what_is_free(tmp_path: Path) -> None:
    taken = snapshot(
        running("r", at=900, since=950, total=100),
        running("s", at=910, since=970, total=100, attained_seconds=20),
        waiting("w", at=960, seconds=30),
    )
    result, finish = ended(tmp_path, taken)
    assert finish == pytest.approx({"r": 50, "s": 50, "w": 80})
    assert result.finished == 3
    assert {one.id: one.jct_seconds for one in result.outcomes}["r"] == pytest.approx(150)


def test_a_waiting_job_that_fits_starts_at_the_time_of_the_snapshot(tmp_path: Path) -> None:
    _, finish = ended(tmp_path, snapshot(running("r", 900, 950, 100), waiting("w", 960, 30)))
    assert finish["w"] == pytest.approx(30)


def test_a_closed_node_takes_nothing_new_but_lets_its_jobs_finish(tmp_path: Path) -> None:
    nodes = (Node("a", 4, 8, open=False), Node("b", 2, 8))
    taken = snapshot(
        running("r", 900, 950, 100), running("s", 900, 950, 200, node="b"), waiting("w", 960, 30), nodes=nodes
    )
    _, finish = ended(tmp_path, taken)
    assert finish == pytest.approx({"r": 50, "s": 150, "w": 180})


def test_policies_and_rules_come_from_the_snapshot_unless_overridden(tmp_path: Path) -> None:
    taken = snapshot(
        waiting("w", 960, 30),
        policies={"queue": InUse("fifo", {"mode": "strict"}), "predictor": InUse("history")},
        rules={"run_seconds_min": "60"},
        tenants=(Tenant("vision", quota_gpu_milli=2000),),
    )
    scenario = Scenario.of_snapshot(saved(tmp_path, taken))
    assert (scenario.queue, scenario.predictor, scenario.tenants) == ("fifo", "recorded", taken.tenants)
    assert scenario.options == {"queue": {"mode": "strict"}, "simulator": {"run_seconds_min": "60"}}
    other = scenario.choosing({"queue": "srsf"}, {"simulator": {"reclaim": "false"}})
    assert other.options == {"simulator": {"run_seconds_min": "60", "reclaim": "false"}}


def test_a_policy_decides_by_what_was_known_not_by_what_will_be_true(tmp_path: Path) -> None:
    """The job with a short prediction goes first, although its user expects it to be long."""
    taken = snapshot(
        running("r", 900, 950, 60),
        running("s", 900, 950, 60),
        Job("long", 960, (Part(gpu_milli=4000, cores=1),), known=Known(500, 1.0)),
        Job("short", 970, (Part(gpu_milli=4000, cores=1),), known=Known(5, 1.0), expected_seconds=5000),
    )
    _, finish = ended(tmp_path, taken, queue="srsf")
    assert finish["short"] == pytest.approx(15)


def test_a_waiting_job_keeps_the_service_that_it_has_attained(tmp_path: Path) -> None:
    """The job that came first has run for long before: a policy by attained service puts the other one first."""
    taken = snapshot(
        running("r", 900, 950, 60),
        running("s", 900, 950, 60),
        Job("old", 960, (Part(gpu_milli=4000, cores=1),), expected_seconds=50_000, attained_seconds=20_000),
        Job("new", 970, (Part(gpu_milli=4000, cores=1),), expected_seconds=5),
    )
    _, finish = ended(tmp_path, taken, queue="las")
    assert finish["new"] == pytest.approx(15)


def test_of_unknown_jobs_it_is_said_how_long_they_are_taken_to_be(tmp_path: Path) -> None:
    taken = snapshot(
        replace(running("r", 900, 950, 1), known=None), Job("w", 960, TWO_GPUS), waiting("x", 970, seconds=77)
    )
    totals, guessed = taken.total_seconds()
    assert (totals, guessed) == ({"r": 100, "w": 77, "x": 77}, 2)
    result, _ = ended(tmp_path, taken)
    assert any("the run time of 2 of 3 jobs is unknown" in note for note in result.notes)


def test_names_can_be_left_out_and_all_goes_as_before(tmp_path: Path) -> None:
    taken = snapshot(
        running("r", 900, 950, 100, tenant="vision", user="ann"),
        running("s", 901, 950, 120),
        waiting("w", 960, 30, tenant="vision", name="secret", model="gpt", refusal="BEHIND: waits behind r"),
        tenants=(Tenant("vision", limit_gpu_milli=2000),),
    )
    bare = anonymize(taken)
    for name in ("vision", "ann", "secret", "gpt", "behind"):
        assert name not in bare.dump()
    told = [outcome.finished_seconds for outcome in ended(tmp_path, taken)[0].outcomes]
    assert told == [outcome.finished_seconds for outcome in ended(tmp_path, bare)[0].outcomes]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"cotenant_snapshot": 2}, "is a snapshot of version 2"),
        ({"nodes": []}, "nodes: there are none"),
        ({"nodes": [{"id": "a", "gpu": 4}]}, "nodes[0].gpu: unknown field; did you mean gpus?"),
        ({"nodes": [{"id": "a"}, {"id": "a"}]}, "nodes: 'a' occurs twice"),
        ({"taken_seconds": "now"}, "taken_seconds: must be a finite number, not 'now'"),
        ({"jobs": [{"id": "r", "submitted_seconds": 1.0, "roles": []}]}, "jobs r: needs at least one role"),
        ({"jobs": [{"id": "r"}]}, "jobs[0].submitted_seconds: is missing"),
        ({"jobs": {}}, "jobs: must be a list"),
    ],
)
def test_what_cannot_be_is_refused_with_its_place(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    plain = json.loads(snapshot(waiting("w", 960, 30)).dump()) | change
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(plain))
    with pytest.raises(BadSnapshot, match=r"bad\.json") as refused:
        read(path)
    assert told in str(refused.value)


def test_all_errors_are_reported_at_once_and_overcommitment_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text('{"cotenant_snapshot": 1, "taken_seconds": null, "nodes": [{"id": 7}], "jobs": [{}]}')
    with pytest.raises(BadSnapshot) as refused:
        read(path)
    for place in ("taken_seconds", "nodes[0].id", "jobs[0].id", "jobs[0].roles"):
        assert f"{place}: " in str(refused.value)
    both = snapshot(*(running(name, 900, 950, 100) for name in "rst"))
    with pytest.raises(BadSnapshot, match="jobs t: holds what does not exist"):
        read(saved(tmp_path, both))
    strange = snapshot(running("r", 900, 950, 100, node="elsewhere"))
    with pytest.raises(BadSnapshot, match="'elsewhere', which is not a node"):
        read(saved(tmp_path, strange))


def test_a_file_that_is_no_snapshot_is_named_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text('{"cotenant_snapshot": 1,\n "nodes": [}')
    told = cotenant("simulate", "--from-snapshot", path)
    assert told.exit_code == 2
    assert "bad.json:2:" in told.stderr
    assert "Traceback" not in told.stderr
    assert cotenant("simulate", "--from-snapshot", tmp_path / "none.json").exit_code == 2
    assert "cannot be combined with" in cotenant("simulate", "--from-snapshot", path, "--trace", "sample").stderr
    assert "--from-snapshot" in cotenant("simulate", "--trace", "sample").stderr
    trace = cotenant("simulate", "--trace", "sample", "--cluster", "2x8", "--predictor", "recorded")
    assert (trace.exit_code, "snapshot" in trace.stderr) == (2, True)


def test_a_recording_of_it_is_repeated_byte_for_byte_and_arms_are_compared(tmp_path: Path) -> None:
    path = saved(tmp_path, snapshot(running("r", 900, 950, 100), running("s", 901, 950, 90), waiting("w", 960, 30)))
    events = tmp_path / "events.jsonl"
    assert cotenant("simulate", "--from-snapshot", path, "--events", events).exit_code == 0
    assert cotenant("replay", "--check", events).exit_code == 0
    compared = cotenant("compare", "--from-snapshot", path, "--arms", "fifo,srsf", "--json")
    assert compared.exit_code == 0
    assert json.loads(compared.stdout)["lower_bound"] is None


@given(st.data())
def test_what_is_written_is_read_again(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    texts = st.text(max_size=5)
    jobs = [
        Job(
            f"job{number}",
            data.draw(st.floats(0, 999)),
            (Part(data.draw(texts), data.draw(st.integers(1, 9)), cores=data.draw(st.none() | st.integers(0, 9))),),
            tenant=data.draw(texts),
            deadline_seconds=data.draw(st.none() | st.floats(0, 1e6)),
            known=data.draw(st.none() | st.builds(Known, st.floats(0, 1e6), st.floats(0, 1))),
        )
        for number in range(data.draw(st.integers(0, 4)))
    ]
    taken = snapshot(*jobs)
    path = tmp_path_factory.mktemp("taken") / "taken.json"
    path.write_text(taken.dump(), encoding="utf-8")
    assert read(path) == taken


def test_a_snapshot_can_be_given_to_simulate_as_trace_and_cluster(tmp_path: Path) -> None:
    path = str(saved(tmp_path, snapshot(running("r", 900, 950, 100))))
    assert simulate(path, path, predictor="recorded").finished == 1
