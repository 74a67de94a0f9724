"""The agents of `cotenant up` are separate processes: jobs survive crashes of the agents and of the mesh."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.end_to_end import remains
from tests.end_to_end.meshes import Mesh
from tests.end_to_end.scripts import Counter
from tests.end_to_end.waiting import until

from cotenant.core.model.lifecycle import Phase

NOFILE = resource.RLIMIT_NOFILE


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Mesh]:
    started = Mesh(tmp_path)
    started.start()
    yield started
    started.close()


def agents(mesh: Mesh) -> list[int]:
    processes = remains.processes_of(mesh.directory)
    return [pid for pid, command in processes.items() if "-m cotenant.node_agent " in command]


def ready(mesh: Mesh) -> bool:
    return [node["state"] for node in mesh.cli.json("nodes")] == ["ready"]


def running(mesh: Mesh, directory: Path) -> tuple[str, Counter]:
    counter = Counter(directory, "counter")
    job_id = mesh.cli.submit("--gpus", "1", "--cpus", "1", *counter.command)
    mesh.client.wait_for(job_id, Phase.RUNNING)
    return job_id, counter


def ends_well(mesh: Mesh, job_id: str, counter: Counter) -> None:
    counter.finish()
    job = mesh.client.wait_for(job_id, Phase.SUCCEEDED)
    assert (job.attempt.number, job.failures) == (1, 0)
    counter.assert_one_life()


def test_a_killed_agent_is_restarted_and_its_jobs_continue(mesh: Mesh, tmp_path: Path) -> None:
    job_id, counter = running(mesh, tmp_path)
    (before,) = agents(mesh)
    os.kill(before, signal.SIGKILL)
    until(lambda: agents(mesh) not in ([], [before]), "another agent")
    until(lambda: ready(mesh), "the node being back")
    assert "agent_process_ended" in mesh.log.read_text()
    ends_well(mesh, job_id, counter)


@pytest.mark.deep
def test_agents_of_a_killed_mesh_exit_and_the_next_mesh_reattaches_to_its_jobs(mesh: Mesh, tmp_path: Path) -> None:
    job_id, counter = running(mesh, tmp_path)
    (before,) = agents(mesh)
    mesh.kill()
    mesh.start()  # at once: the agent of before may still hold its directory
    until(lambda: before not in agents(mesh), "end of the agent without a parent")
    ends_well(mesh, job_id, counter)


def test_agents_of_a_killed_mesh_do_not_stay_forever(mesh: Mesh, tmp_path: Path) -> None:
    job_id, counter = running(mesh, tmp_path)
    mesh.kill()
    until(lambda: agents(mesh) == [], "end of the agents without a parent")
    assert counter.command[0]
    mesh.start()
    ends_well(mesh, job_id, counter)


def test_ctrl_c_stops_the_mesh_in_order_but_no_job(mesh: Mesh, tmp_path: Path) -> None:
    job_id, counter = running(mesh, tmp_path)
    (agent,) = agents(mesh)
    assert mesh.process
    assert os.getpgid(agent) != os.getpgid(mesh.process.pid)  # what the terminal interrupts is not the agent
    os.kill(mesh.process.pid, signal.SIGINT)
    assert mesh.process.wait() == 0
    assert agents(mesh) == []
    mesh.process = None
    mesh.start()
    ends_well(mesh, job_id, counter)


@pytest.mark.deep
def test_an_agent_out_of_descriptors_is_reported_fails_no_job_and_recovers(mesh: Mesh) -> None:
    (agent,) = agents(mesh)
    limits = resource.prlimit(agent, NOFILE)
    used = len(list(Path(f"/proc/{agent}/fd").iterdir()))
    resource.prlimit(agent, NOFILE, (used + 1, limits[1]))
    try:
        job_ids = [mesh.cli.submit("--cpus", "1", "--", "true") for _ in range(3)]
        until(lambda: "out of file descriptors" in str(problems(mesh)), "word of the shortage")
        (node,) = mesh.cli.json("nodes")
        assert {(problem["check"], problem["action"]) for problem in node["problems"]} == {("descriptors", "hold")}
    finally:
        resource.prlimit(agent, NOFILE, limits)
    for job_id in job_ids:
        assert mesh.client.wait_for(job_id, Phase.SUCCEEDED).failures == 0
    until(lambda: problems(mesh) == [], "the end of the shortage")


def problems(mesh: Mesh) -> list[str]:
    return [one["what"] for one in mesh.cli.json_of_any_end("status")["problems"]]
