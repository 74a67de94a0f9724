"""Reading what Slurm says."""

from __future__ import annotations

import json

import pytest
from tests.unit.services.slurm.pictures import newer_text, recorded, sample

from cotenant.services.slurm.hostlist import BadList, hosts, tasks
from cotenant.services.slurm.reader import BadAnswer, read
from cotenant.services.slurm.records import MIB, Placed


def test_a_recorded_cluster_has_all_jobs_with_slurms_ids() -> None:
    jobs = recorded().jobs
    assert [*jobs] == [
        *("1", "2", "3", "4", "5", "6_0", "9", "11", "12+0", "12+1"),
        *(f"6_{index}" for index in range(2, 10)),
    ]
    assert {jobs[one].state for one in ("1", "2", "6_0")} == {"RUNNING"}
    assert jobs["9"].state == "CANCELLED"
    assert jobs["9"].ended
    assert jobs["6_3"].tasks_running_max == 2
    assert jobs["3"].held
    assert jobs["5"].dependency == "afterok:1(unfulfilled)"
    assert jobs["1"].time_limit_seconds == 1800
    assert jobs["2"].required_nodes == ("n3",)
    assert jobs["4"].exclusive
    assert jobs["1"].placed == (Placed("n1", (0, 1, 2, 3), (0, 1)), Placed("n2", (0, 1, 2, 3), (0, 1)))


def test_a_recorded_node_has_its_cores_memory_and_gpus() -> None:
    node = recorded().nodes["n1"]
    assert (node.cores, node.sockets, node.gpus, node.gpu_type) == (16, 2, 4, "a100")
    assert node.memory_bytes == 65536 * MIB
    assert node.open


def test_newer_versions_forms_mean_the_same() -> None:
    assert read(newer_text("squeue")).jobs == read(sample("squeue")).jobs


def test_a_missing_field_is_named_once_with_the_version() -> None:
    answer = json.loads(sample("squeue"))
    for job in answer["jobs"]:
        del job["cpus"]
    assert read(json.dumps(answer)).problems == ("Slurm 22.05.8: jobs have no field 'cpus'",)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"jobs": 3}', "null", "not JSON"])
def test_what_is_no_answer_is_refused(text: str) -> None:
    with pytest.raises(BadAnswer, match="Slurm's answer"):
        read(text)


def test_an_empty_answer_with_an_error_does_not_mean_that_there_are_no_jobs() -> None:
    with pytest.raises(BadAnswer, match="Failed while looking for jobs"):
        read('{"errors": [{"description": "Failed while looking for jobs", "error_number": -1}], "jobs": []}')


@pytest.mark.parametrize("text", ["n[1-", "n[1-1000000000]", "n[1-3]x[1-99999]", "n[a]", "n]1["])
def test_a_list_of_hosts_is_bounded_and_checked(text: str) -> None:
    with pytest.raises(BadList):
        hosts(text)


def test_a_shortened_list_of_tasks_is_refused() -> None:
    with pytest.raises(BadList):
        tasks("0-9,12,...")
