"""The CPUs of GPU jobs, learned from how long earlier runs took."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.services.slurm.pictures import picture

from cotenant.services.slurm.core_choice import (
    TABLE_BYTES_MAX,
    CoreChoice,
    JobKind,
    RunHistory,
    TableRules,
    cpus_max,
    kind_of,
    table_text,
)
from cotenant.services.slurm.records import SlurmJob, SlurmNode

NODE = SlurmNode("n1", cores=16, gpus=4, partitions=frozenset({"main"}))
CLUSTER = picture([NODE, replace(NODE, name="n2")])
JOB = SlurmJob(
    "17", 17, "COMPLETED", name="train", user_id=1000, partitions=("main",), gpus_total=2, cpus=1, started_seconds=100.0
)


def ran(job: SlurmJob, seconds: float, cpus: int) -> SlurmJob:
    """Return a job that ran for some seconds on some CPUs."""
    return replace(job, cpus=cpus, ended_seconds=job.started_seconds + seconds)


def learned(theta: int, runs: int, *, first: int = 1) -> tuple[RunHistory, list[int]]:
    """Return what was learned from jobs that get quicker up to θ cores, and the cores that each run had."""
    history, cpus, given = RunHistory(), first, list[int]()
    for _ in range(runs):
        given.append(cpus)
        history.add(ran(JOB, round(20.0 * 8 / min(cpus, theta)), cpus), CLUSTER)
        choices = history.choices(CLUSTER)
        cpus = choices[0].cpus if choices else first
    return history, given


@pytest.mark.parametrize("theta", [1, 2, 3, 5, 6, 8])
def test_the_fewest_cores_at_full_speed_are_found_within_ten_runs(theta: int) -> None:
    history, given = learned(theta, 10)
    (choice,) = history.choices(CLUSTER)
    assert choice.cpus == theta
    assert choice.found
    assert max(given) <= 8  # two of four GPUs: half of the cores
    assert given[:2] == [1, 1]  # two runs before the first trial


def test_the_length_on_cores_that_were_never_tried_is_known() -> None:
    history = RunHistory()
    history.add(ran(JOB, 20.0, 4), CLUSTER)
    lengths = [history.expected_seconds(replace(JOB, cpus=cpus), CLUSTER) for cpus in (2, 4, 8)]
    assert lengths == [40.0, 20.0, 20.0]
    assert history.expected_seconds(replace(JOB, name="other"), CLUSTER) is None


def test_a_job_with_too_many_cores_is_slimmed_and_needs_room_in_its_time_limit() -> None:
    history, _ = learned(3, 10, first=8)
    (choice,) = history.choices(CLUSTER)
    assert choice.cpus == 3
    assert choice.limit_seconds_min == pytest.approx(1.5 * round(160 / 3), rel=0.01)


def test_nothing_is_learned_where_runs_differ_on_the_same_cores() -> None:
    history = RunHistory()
    for seconds in (20.0, 60.0, 30.0):
        history.add(ran(JOB, seconds, 1), CLUSTER)
    assert history.choices(CLUSTER) == []


@pytest.mark.parametrize(
    "job",
    [
        replace(JOB, state="FAILED"),
        replace(JOB, suspended_seconds=110.0),
        replace(JOB, gpus_total=0),
        replace(JOB, nodes_min=2),
        replace(JOB, processes=2),
        replace(JOB, name="wrap"),
        replace(JOB, name="two\nlines"),
        replace(JOB, exclusive=True),
        replace(JOB, het=17),
        replace(JOB, user_id=None),
    ],
)
def test_some_jobs_are_left_alone(job: SlurmJob) -> None:
    assert RunHistory().add(ran(JOB, 20.0, 1), CLUSTER)
    assert not RunHistory().add(ran(job, 20.0, 1), CLUSTER)


def test_no_job_gets_more_than_every_node_that_may_hold_it_has() -> None:
    kind = kind_of(JOB)
    assert kind
    small = SlurmNode("small", cores=4, gpus=4, partitions=frozenset({"main"}))
    tiny = SlurmNode("tiny", cores=2, gpus=1, partitions=frozenset({"main"}))
    other = SlurmNode("other", cores=1, gpus=4, partitions=frozenset({"other"}))
    assert cpus_max(kind, picture([NODE, tiny, other]), None) == 8
    assert cpus_max(kind, picture([NODE, small]), None) == 2
    assert cpus_max(kind, picture([NODE, small]), 8) == 4
    assert cpus_max(kind, picture([replace(NODE, threads=2)]), None) == 16
    assert cpus_max(kind, picture([]), None) == 0


def test_a_history_survives_its_file() -> None:
    history, _ = learned(6, 10)
    again = RunHistory.load(history.dump())
    assert again.choices(CLUSTER) == history.choices(CLUSTER)
    bad = '{"version": 1, "kinds": [["x"], [1, "main", 2, "a\\nb", {"1": [0.1]}], [1, "m", 2, "t", {"0": [0.1]}]]}'
    assert len(RunHistory.load(bad)) == 0
    for text in ("", "[]", '{"version": 2, "kinds": []}', "[" * 100_000):
        with pytest.raises(ValueError, match=r".+"):
            RunHistory.load(text)


def test_a_table_is_never_larger_than_the_script_reads() -> None:
    choices = [CoreChoice(JobKind(n, "main", 1, "x" * 300), 6, 1, 90.0, True, "y" * 300) for n in range(3000)]
    text = table_text(choices, TableRules(), 1e9)
    assert len(text) < TABLE_BYTES_MAX
    assert text.endswith("\nend\n")
