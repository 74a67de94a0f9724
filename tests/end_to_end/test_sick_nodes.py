"""A node that is up but cannot launch jobs does not consume the backlog, is held, and returns after repair."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.end_to_end.commands import COTENANT, Serving
from tests.end_to_end.meshes import Mesh
from tests.end_to_end.waiting import until
from tests.support.properties import amount

from cotenant.codec.job_events import kind_of
from cotenant.core.model.lifecycle import Phase
from cotenant.v1 import job_pb2

MEMORY_GROUPS = "/sys/fs/cgroup/memory"
JOBS = amount(60, deep=150)
HELD_SECONDS, RELEASED_SECONDS = 30.0, 60.0


class SickAgent:
    """An agent in its own mount namespace, where the memory control groups can be made read-only."""

    def __init__(self, mesh: Mesh, node_id: str) -> None:
        state_dir = mesh.directory / node_id
        state_dir.mkdir()
        token = (mesh.state_dir / "token").read_text().strip()
        environment = {**mesh.cli.environment, "COTENANT_STATE_DIR": str(state_dir), "COTENANT_TOKEN": token}
        command = ["unshare", "--mount", COTENANT, "serve", "agent", "--endpoints", mesh.address, "--node", node_id]
        command += ["--gpus", "fake:8", "--address", "127.0.0.1"]
        self.process = Serving(command, environment, mesh.directory / f"{node_id}.log")
        self.process.wait_for_output("placement_connected")

    def remount(self, mode: str) -> None:
        pid = str(self.process.pid)
        mount = ["mount", "-o", f"remount,bind,{mode}", MEMORY_GROUPS]
        subprocess.run(["nsenter", "--target", pid, "--mount", *mount], check=True)


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Mesh]:
    if os.getuid() != 0 or not os.path.ismount(MEMORY_GROUPS):
        pytest.skip("needs root and the memory controller of cgroup version 1")
    mesh = Mesh(tmp_path, "--gpus", "fake:8")
    mesh.start()
    try:
        yield mesh
    finally:
        mesh.close()


def node(mesh: Mesh, node_id: str) -> dict[str, Any]:
    (found,) = [one for one in mesh.cli.json("nodes") if one["id"] == node_id]
    return dict(found)


@pytest.mark.deep
@pytest.mark.root
@pytest.mark.timeout(300)
def test_a_node_that_cannot_launch_does_not_consume_the_backlog_and_returns_after_repair(mesh: Mesh) -> None:
    sick = SickAgent(mesh, "sick")
    try:
        sick.remount("ro")
        mesh.cli("submit", "--array", f"0-{JOBS - 1}", "--gpus", "1", "--cpus", "1", "--", "true")
        reported = until(
            lambda: node(mesh, "sick")["state_reason"], "word of the sick node in `nodes`", seconds=HELD_SECONDS
        )
        assert reported.startswith("unhealthy: cannot launch: ")
        assert "Read-only file system" in reported
        status = mesh.cli("status", code=1).out
        assert "sick: hold: unhealthy: cannot launch: " in status
        assert "uncordon" in status
        until(lambda: phases(mesh)[Phase.SUCCEEDED] == JOBS, "success of all jobs", seconds=120.0)
        refused = [job for job in mesh.client.jobs() if job.launch_failures]
        assert refused
        assert {(job.failures, job.attempt.state) for job in refused} == {(0, job_pb2.ATTEMPT_STATE_SUCCEEDED)}
        story = [f"{kind_of(event)} {event.detail}" for event in mesh.client.explain(refused[0].id).events]
        assert [line for line in story if line.startswith("not_launched on sick: ")]

        sick.remount("rw")
        mesh.cli("submit", "--array", "0-39", "--gpus", "1", "--cpus", "1", "--", "sleep", "1")
        until(lambda: not node(mesh, "sick")["state_reason"], "end of the hold", seconds=RELEASED_SECONDS)
        until(lambda: phases(mesh)[Phase.SUCCEEDED] == JOBS + 40, "success of all jobs", seconds=120.0)
    finally:
        sick.process.terminate()


def held_back(mesh: Mesh, job_ids: list[str]) -> list[job_pb2.Job]:
    return [job for job in map(mesh.client.job, job_ids) if job.refusal.code == "NODES_HELD"]


def phases(mesh: Mesh) -> Counter[Phase]:
    names = {number: name for name, number in job_pb2.JobPhase.items()}
    return Counter(Phase(names[job.phase].removeprefix("JOB_PHASE_").lower()) for job in mesh.client.jobs())


@pytest.mark.deep
@pytest.mark.root
@pytest.mark.timeout(300)
def test_jobs_wait_with_a_reason_while_no_node_can_launch(mesh: Mesh) -> None:
    (healthy,) = mesh.cli.json("nodes")
    mesh.cli("cordon", healthy["id"])
    sick = SickAgent(mesh, "sick")
    try:
        sick.remount("ro")
        jobs = [mesh.cli.submit("--gpus", "1", "--cpus", "1", "--", "true") for _ in range(5)]
        until(lambda: node(mesh, "sick")["state_reason"], "the hold", seconds=HELD_SECONDS)
        waiting = until(lambda: held_back(mesh, jobs), "a job that waits for a held node")
        refusal = waiting[0].refusal
        assert "sick (cannot launch: " in refusal.detail
        assert refusal.numbers["held_nodes"] == 1
        assert {mesh.client.job(job_id).phase for job_id in jobs} == {job_pb2.JOB_PHASE_QUEUED}
        launches = sum(mesh.client.job(job_id).launch_failures for job_id in jobs)
        assert launches <= 12  # no more than before the hold, and by its canaries
        sick.remount("rw")
        until(lambda: phases(mesh)[Phase.SUCCEEDED] == len(jobs), "success of all jobs", seconds=RELEASED_SECONDS)
    finally:
        mesh.cli("uncordon", healthy["id"])
        sick.process.terminate()
