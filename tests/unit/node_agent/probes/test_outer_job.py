"""What an agent finds out about the job of another system that it runs in: never more than that was given."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.node_agent.enforcement.cgroup_mounts import Mount, within_own
from cotenant.node_agent.probes.outer_job import (
    OuterJob,
    ask_slurm,
    find_outer_job,
    given_by_process,
    remaining_seconds,
    select_gpus,
)

SLURM = {"SLURM_JOB_ID": "12"}
SHOWN = """JobId=12 JobName=a
   JOB_GRES=gpu:a100:2
     Nodes=n1 CPU_IDs=4-5,8 Mem=0 GRES=gpu:a100:2(IDX:1,3)
"""


def found(**environment: str) -> OuterJob:
    job = find_outer_job({**SLURM, **environment})
    assert job is not None
    return job


def test_without_a_word_of_another_system_there_is_no_outer_job() -> None:
    assert find_outer_job({"HOME": "/root", "SLURM_JOB_ID": "x", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}) is None


@pytest.mark.parametrize(
    ("environment", "cpus"),
    [
        ({}, None),
        ({"SLURM_CPUS_ON_NODE": "4"}, 4),
        ({"SLURM_CPUS_ON_NODE": "8", "SLURM_JOB_CPUS_PER_NODE": "4"}, 4),
        ({"SLURM_JOB_CPUS_PER_NODE": "16(x2),8", "SLURM_NODEID": "2"}, 8),
        ({"SLURM_JOB_CPUS_PER_NODE": "16(x2),8", "SLURM_NODEID": "7"}, None),
        ({"SLURM_CPUS_ON_NODE": "many"}, None),
    ],
)
def test_cores_are_the_smallest_of_what_slurm_says(environment: dict[str, str], cpus: int | None) -> None:
    assert found(**environment).cpus_max == cpus


@pytest.mark.parametrize(
    ("environment", "gpus"),
    [
        ({}, ()),
        ({"SLURM_JOB_GPUS": "2,3"}, ("2", "3")),
        ({"SLURM_JOB_GPUS": "2,3", "SLURM_STEP_GPUS": "3"}, ("3",)),
        ({"SLURM_JOB_GPUS": "2,3", "CUDA_VISIBLE_DEVICES": "0,1"}, ("0", "1")),
        ({"SLURM_JOB_GPUS": "2,3", "CUDA_VISIBLE_DEVICES": "NoDevFiles"}, ()),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1a, GPU-2b"}, ("GPU-1a", "GPU-2b")),
    ],
)
def test_gpus_are_those_that_are_named(environment: dict[str, str], gpus: tuple[str, ...]) -> None:
    assert found(**environment).gpus == gpus


def test_memory_is_that_of_the_node_or_of_its_cores() -> None:
    assert found(SLURM_MEM_PER_NODE="2048").memory_bytes == 2 << 30
    assert found(SLURM_MEM_PER_CPU="1024", SLURM_CPUS_ON_NODE="3").memory_bytes == 3 << 30
    assert found(SLURM_MEM_PER_CPU="1024").memory_bytes is None


def test_slurms_commands_tell_the_rest() -> None:
    def query(command: Sequence[str]) -> str:
        return {"squeue": "1-00:00:10\n", "scontrol": SHOWN if "job" in command else "KillWait   = 7 sec\n"}[command[0]]

    job = ask_slurm(found(SLURM_CPUS_ON_NODE="3"), SLURM, query)
    assert (job.cpus, job.gpus, job.kill_wait_seconds) == ((4, 5, 8), ("1", "3"), 7.0)
    assert job.end_time is not None
    assert 86_405 < job.end_time - time.time() < 86_415
    assert ask_slurm(found(SLURM_JOB_END_TIME="99"), SLURM, query).end_time == 99.0


def test_where_slurm_does_not_answer_only_the_environment_counts() -> None:
    job = found(SLURM_CPUS_ON_NODE="3", SLURM_JOB_GPUS="1")
    assert ask_slurm(job, SLURM, lambda command: "") == job


@given(st.text(max_size=20))
def test_a_time_is_read_or_unknown(text: str) -> None:
    left = remaining_seconds(text)
    assert left is None or left >= 0


@given(st.sets(st.integers(0, 63), min_size=1), st.none() | st.integers(1, 64), st.lists(st.integers(0, 99)))
def test_never_more_cpus_than_given(usable: set[int], most: int | None, named: list[int]) -> None:
    job = OuterJob("slurm/1", "", cpus_max=most, cpus=tuple(sorted(set(named))))
    cpus = job.select_cpus(usable)
    assert set(cpus) <= usable
    assert len(set(cpus)) == len(cpus) == min(len(usable), most or len(usable))


@given(st.lists(st.sampled_from(["0", "1", "7", "GPU-a", "GPU-", "MIG-x"])))
def test_never_more_gpus_than_given(names: list[str]) -> None:
    chosen = select_gpus(["a", "b"], ["GPU-a", "GPU-b"], tuple(names))
    assert set(chosen) <= {"a", "b"}
    assert names or not chosen


def test_lsf_names_the_slots_of_each_host() -> None:
    here = os.uname().nodename
    job = find_outer_job({"LSB_JOBID": "5", "LSB_MCPU_HOSTS": f"other 8 {here} 3"})
    assert job is not None
    assert (job.id, job.name, job.cpus_max, job.gpus) == ("lsf/5", "LSF job 5", 3, ())


def test_a_quota_of_cpu_time_bounds_the_cores(tmp_path: Path) -> None:
    (tmp_path / "pod").mkdir()
    (tmp_path / "pod" / "cpu.max").write_text("250000 100000\n")
    (tmp_path / "cpu.max").write_text("max 100000\n")
    job = find_outer_job(SLURM, [Mount(2, (), str(tmp_path), str(tmp_path / "pod"))])
    assert job is not None
    assert job.cpus_max == 2


def test_the_watched_process_is_slurms_own(tmp_path: Path) -> None:
    step = tmp_path / "slurmstepd"
    step.symlink_to(sys.executable)
    program = (
        "import subprocess, sys; print(subprocess.run(['sh', '-c', sys.argv[1] + '; true'], "
        "capture_output=True, text=True).stdout); import os; print(os.getpid())"
    )
    child = (
        f"{sys.executable} -c 'from cotenant.node_agent.probes.outer_job import *; print(find_outer_job({SLURM!r}))'"
    )
    child = child.replace("'SLURM_JOB_ID'", '"SLURM_JOB_ID"').replace("'12'", '"12"')
    said = subprocess.run([step, "-c", program, child], capture_output=True, text=True, check=True).stdout.split()
    assert f"process=({said[-1]}," in " ".join(said)


def test_asked_for_anywhere_the_parent_stands_for_the_outer_job() -> None:
    job = given_by_process({})
    assert (job.id, job.gpus) == (f"process/{os.getppid()}", None)
    assert job.process is not None


def test_a_nested_agent_sees_nothing_above_its_own_group() -> None:
    mount = within_own(Mount(1, ("freezer",), "/f", "/f"))
    assert mount.controllers == ("freezer",)  # a group of its own is not there: the other system does not use it
    assert within_own(Mount(2, (), "/c", "/c/job")) == Mount(2, (), "/c/job", "/c/job")
