from __future__ import annotations

import json
import os
import pwd
from pathlib import Path

import pytest
from tests.unit.node_agent.conftest import RunningAgent
from tests.unit.node_agent.jobs import assignment, shell, task
from tests.unit.node_agent.placement import Placement

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.node_agent.enforcement import hooks
from cotenant.node_agent.enforcement.hook import NewAttempt
from cotenant.node_agent.runtime.launch import UNCONFINED
from cotenant.node_agent.runtime.run_as import User
from cotenant.node_agent.runtime.task_environment import (
    PATH_OF_ROOT,
    clean_environment,
    environment_of_user,
    task_environment,
)
from cotenant.v1 import job_pb2

BASE = {"PATH": "/bin"}


def variables(job: agent_pb2.Assignment, rank: int = 0) -> dict[str, str]:
    held = next(each for each in job.allocation.tasks if each.rank == rank)
    new = NewAttempt("gang-1", Path("/nowhere"), UNCONFINED, job)
    enforced = hooks.variables(hooks.make_hooks(), new, held)
    return task_environment(job, held, base=BASE, enforced=enforced, progress_path="/run/p")


def gang() -> agent_pb2.Assignment:
    """Ranks 2 and 5 of a gang of six, on its second node."""
    job = assignment("gang", ["x"], tasks=[task(5, cpus=[4, 5], gpus=["GPU-b"]), task(2, cpus=[1], gpus=["GPU-a"])])
    job.world_size, job.node_rank, job.master_address, job.master_port = 6, 1, "first", 4000
    return job


def test_a_gang_member_knows_its_place() -> None:
    seen = variables(gang(), rank=5)
    assert (seen["RANK"], seen["WORLD_SIZE"], seen["LOCAL_RANK"], seen["NODE_RANK"]) == ("5", "6", "1", "1")
    assert (seen["MASTER_ADDR"], seen["MASTER_PORT"]) == ("first", "4000")
    assert variables(gang(), rank=2)["LOCAL_RANK"] == "0"


def test_gpus_are_named_by_uuid_and_hidden_if_none_is_held() -> None:
    assert variables(gang(), rank=5)["CUDA_VISIBLE_DEVICES"] == "GPU-b"
    assert variables(gang(), rank=5)["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert variables(gang(), rank=5)["NVIDIA_VISIBLE_DEVICES"] == "GPU-b"
    assert variables(assignment("cpu", ["x"]))["CUDA_VISIBLE_DEVICES"] == ""
    assert variables(assignment("cpu", ["x"]))["NVIDIA_VISIBLE_DEVICES"] == "void"


def test_threads_match_cores_unless_the_user_says_otherwise() -> None:
    assert variables(gang(), rank=5)["OMP_NUM_THREADS"] == "2"
    assert variables(assignment("none", ["x"]))["OMP_NUM_THREADS"] == "1"
    wish = job_pb2.JobSpec(environment={"OMP_NUM_THREADS": "7"})
    assert variables(assignment("wish", ["x"], spec=wish))["OMP_NUM_THREADS"] == "7"


def test_a_user_cannot_override_the_allocation_variables() -> None:
    spec = job_pb2.JobSpec(
        environment={"CUDA_VISIBLE_DEVICES": "all", "RANK": "9", "COTENANT_JOB_ID": "x", "MINE": "1"}
    )
    seen = variables(assignment("liar", ["x"], spec=spec))
    assert (seen["CUDA_VISIBLE_DEVICES"], seen["RANK"], seen["COTENANT_JOB_ID"], seen["MINE"]) == ("", "0", "liar", "1")


def test_a_job_of_an_array_knows_its_index() -> None:
    which = job_pb2.ArrayTask(array_id="a1", index=7, count=3, running_max=2)
    spec = job_pb2.JobSpec(array_task=which, environment={"COTENANT_ARRAY_INDEX": "0"})
    seen = variables(assignment("a1_7", ["x"], spec=spec))
    names = ("COTENANT_ARRAY_ID", "COTENANT_ARRAY_INDEX", "COTENANT_ARRAY_COUNT")
    assert [seen[name] for name in names] == ["a1", "7", "3"]
    assert "COTENANT_ARRAY_ID" not in variables(gang(), rank=5)


def test_cotenants_own_variables() -> None:
    seen = variables(gang(), rank=5)
    assert (seen["COTENANT_ATTEMPT"], seen["COTENANT_CORES"], seen["COTENANT_PROGRESS"]) == ("1", "4,5", "/run/p")


def test_only_a_pre_run_has_the_pre_run_variable() -> None:
    first = assignment("job", ["x"], spec=job_pb2.JobSpec(environment={"COTENANT_PRE_RUN": "no"}))
    first.pre_run = True
    seen = variables(first)
    assert (seen["COTENANT_PRE_RUN"], seen["RANK"], seen["WORLD_SIZE"]) == ("1", "0", "1")
    assert "COTENANT_PRE_RUN" not in variables(gang(), rank=5)


def test_parameter_servers_have_a_cluster_description_with_a_port_for_each() -> None:
    job = gang()
    job.replica_roles.extend(["ps", "worker", "worker", "ps", "worker", "worker"])
    job.replica_addresses.extend(["a", "a", "b", "b", "c", "b"])
    config = json.loads(variables(job, rank=5)["TF_CONFIG"])
    assert config["cluster"] == {
        "ps": ["a:4000", "b:4003"],
        "worker": ["a:4001", "b:4002", "c:4004", "b:4005"],
    }
    assert config["task"] == {"type": "worker", "index": 3}


def test_a_gang_without_parameter_servers_has_none() -> None:
    job = gang()
    job.replica_roles.extend(["worker"] * 6)
    assert "TF_CONFIG" not in variables(job, rank=2)


def test_jobs_inherit_only_variables_of_the_machine() -> None:
    own = {"PATH": "/venv/bin", "COTENANT_TOKEN": "secret", "AWS_SECRET": "x", "LANG": "C", "LD_LIBRARY_PATH": "/own"}
    assert clean_environment(own) == {"LANG": "C"}


def test_a_job_has_the_path_of_a_login() -> None:
    eve = environment_of_user(User("eve", 1001, 1001, (), "/people/eve", "/bin/zsh"))
    assert eve["PATH"] == "/usr/local/bin:/usr/bin:/bin:/usr/local/games:/usr/games"
    assert (eve["HOME"], eve["USER"], eve["SHELL"]) == ("/people/eve", "eve", "/bin/zsh")
    root = environment_of_user(User("root", 0, 0, (), "/root", "/bin/sh"))
    assert root["PATH"] == PATH_OF_ROOT


async def test_nothing_of_the_agents_environment_leaks_into_a_job(
    placement: Placement, agent: RunningAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    await agent.stop()
    for name in ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "HOME", "TMPDIR", "SHELL", "COTENANT_TOKEN"):
        own = f"/agents/own:{os.environ[name]}" if name == "PATH" else "/agents/own"
        monkeypatch.setenv(name, own)
    await agent.start()
    await placement.connected(2)
    placement.assign(shell("looks", "env"))
    await placement.ended("looks")
    output = (agent.config.state_dir / "attempts" / "looks-1" / "output-0.log").read_text()
    assert "/agents/own" not in output
    assert f"HOME={pwd.getpwuid(os.geteuid()).pw_dir}" in output.splitlines()
