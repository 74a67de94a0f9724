"""Lists: formats, ids, nodes and the folding of arrays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.cli.slurm.facts import Facts, folded
from cotenant.cli.slurm.job_ids import read_ids
from cotenant.cli.slurm.nodes import compressed, expanded
from cotenant.cli.slurm.outcome import SlurmError
from cotenant.cli.slurm.squeue import LETTERS, NAMES
from cotenant.cli.slurm.table import lines, read_format, read_long_format
from cotenant.core.model.job_array import from_indices
from cotenant.core.model.job_number import number_of
from cotenant.v1 import job_pb2 as pb

JOB = "0x9k2m3n4p5q"
NUMBER = number_of(JOB)


def job(job_id: str = JOB, phase: pb.JobPhase.ValueType = pb.JOB_PHASE_QUEUED, code: str = "CAPACITY") -> pb.Job:
    made = pb.Job(id=job_id, phase=phase, submitter="eve", spec=pb.JobSpec(name="a long name", queue="default"))
    made.spec.roles.add(replicas=1).resources.cores = 2
    if phase == pb.JOB_PHASE_QUEUED:
        made.refusal.code = code
    if "_" in job_id:
        made.spec.array_task.array_id, made.spec.array_task.running_max = JOB, 2
    return made


def listed(text: str, *jobs: pb.Job) -> list[str]:
    return list(lines(read_format(text, LETTERS, "job"), folded(jobs, 0.0), heading=False))


def test_columns_are_cut_and_padded_but_ids_are_whole() -> None:
    assert listed("%.5i|%.6j|%-6t|%8T|%R!", job()) == [f"{NUMBER}|a long|%-6t|PENDING |(Resources)!"]


def test_long_formats_have_widths_and_ends() -> None:
    cells = read_long_format("State:10,NumCPUs:.5,tres-per-node:5|", NAMES, "job")
    assert list(lines(cells, [Facts(job(), 0.0)], heading=True)) == ["STATE      CPUSTRES_|", "PENDING       2N/A  |"]


@pytest.mark.parametrize("text", ["%d", "", "no letters"])
def test_other_formats_are_refused(text: str) -> None:
    with pytest.raises(SlurmError):
        read_format(text, LETTERS, "job")


def test_waiting_tasks_of_an_array_are_one_line() -> None:
    tasks = [job(f"{JOB}_{index}") for index in (1, 2, 3, 9)]
    running = job(f"{JOB}_0", pb.JOB_PHASE_RUNNING)
    assert listed("%i %t", running, *tasks) == [f"{NUMBER}_0 R", f"{NUMBER}_[1-3,9%2] PD"]
    assert listed("%i %r", *tasks[:2], job(f"{JOB}_3", code="DEPENDENCY")) == [
        f"{NUMBER}_[1-2%2] Resources",
        f"{NUMBER}_[3%2] Dependency",
    ]


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"phase": pb.JOB_PHASE_SUSPENDED}, "PENDING"),
        ({"phase": pb.JOB_PHASE_FAILED}, "FAILED"),
        ({"phase": pb.JOB_PHASE_FAILED, "attempt": {"stop_reason": pb.STOP_REASON_TIME_LIMIT}}, "TIMEOUT"),
        ({"phase": pb.JOB_PHASE_FAILED, "attempt": {"exit": {"out_of_memory": True}}}, "OUT_OF_MEMORY"),
        ({"phase": pb.JOB_PHASE_FAILED, "attempt": {"state": pb.ATTEMPT_STATE_LOST}}, "NODE_FAIL"),
        ({"phase": pb.JOB_PHASE_CANCELLED}, "CANCELLED"),
        ({"phase": 99}, "UNKNOWN"),
    ],
)
def test_states_are_in_slurms_words(changes: dict[str, object], state: str) -> None:
    assert Facts(pb.Job(id=JOB, **changes), 0.0).state.name == state  # type: ignore[arg-type]  # fields by name


@given(st.sets(st.integers(0, 200), min_size=1, max_size=40))
def test_indices_of_an_array_are_read_back_from_its_line(indices: set[int]) -> None:
    text = f"{NUMBER}_[{from_indices(indices)}]"
    assert list(read_ids(text)) == [f"{JOB}_{index}" for index in sorted(indices)]


@pytest.mark.parametrize("text", ["x", "12x", "1_x", "1_[a]", "-4", f"{2**60 * 10**6}", "1_[1"])
def test_other_ids_are_refused(text: str) -> None:
    with pytest.raises(SlurmError, match="Invalid job id specified"):
        list(read_ids(text))


@given(st.lists(st.from_regex(r"[a-z]{1,3}-?[0-9]{0,3}", fullmatch=True), max_size=20, unique=True))
def test_a_list_of_nodes_is_read_back(names: list[str]) -> None:
    assert sorted(expanded(compressed(names))) == sorted(names)


def test_a_long_id_widens_its_column_and_its_heading() -> None:
    cells = read_format("%.4i|%.3t", LETTERS, "job")
    rows = [Facts(job(), 0.0)]
    shown = list(lines(cells, rows, heading=True))
    assert shown[0].index("|") == shown[1].index("|") > 4
