"""Connections without a token: even in large numbers they fail no job, drain no node and lock no client out."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import grpc
import pytest
from tests.end_to_end.clients import AWAY
from tests.end_to_end.flooding import Flood, many_descriptors
from tests.end_to_end.meshes import Mesh
from tests.end_to_end.waiting import until
from tests.support.properties import amount

from cotenant.codec import specs
from cotenant.core.model.job import JobKind, JobSpec, Request, Role
from cotenant.core.model.lifecycle import ENDED, Phase

JOBS = amount(20, deep=150)
LIMIT = 256
SECONDS_TO_GET_IN = 1.0  # average per job: each submission has its own connection
NOFILE = resource.RLIMIT_NOFILE


def submit_all(mesh: Mesh) -> list[str]:
    role = Role("worker", request=Request(cores=1))
    spec = JobSpec(name="short", kind=JobKind.CPU, command=("true",), roles=(role,))
    return [mesh.client.submit(spec, f"request-{number}") for number in range(JOBS)]


def all_succeed(mesh: Mesh, job_ids: list[str]) -> None:
    def ended() -> dict[str, Phase]:
        try:
            jobs = mesh.client.jobs()
        except grpc.RpcError as error:  # a rejected client retries
            if error.code() not in AWAY:
                raise
            return {}
        phases = {job.id: specs.PHASES.from_wire(job.phase) for job in jobs if job.id in job_ids}
        return phases if set(phases) == set(job_ids) and set(phases.values()) <= ENDED else {}

    phases = until(ended, "end of all jobs", seconds=120.0)
    assert set(phases.values()) == {Phase.SUCCEEDED}


def nothing_is_held(mesh: Mesh) -> None:
    (node,) = mesh.cli.json("nodes")
    assert (node["state"], node["problems"]) == ("ready", [])


def problems(mesh: Mesh) -> list[str]:
    reported = mesh.cli.json_of_any_end("status")
    return [one["what"] for one in reported["problems"]]


@pytest.fixture
def small(tmp_path: Path) -> Mesh:
    """A mesh started with a small soft descriptor limit, as in a login shell."""
    mesh = Mesh(tmp_path)
    soft, hard = resource.getrlimit(NOFILE)
    resource.setrlimit(NOFILE, (LIMIT, hard))
    try:
        mesh.start()
    finally:
        resource.setrlimit(NOFILE, (soft, hard))
    return mesh


@pytest.mark.deep
@pytest.mark.timeout(300)  # 150 jobs on a busy machine
def test_1300_idle_connections_fail_no_job_and_drain_no_node(small: Mesh) -> None:
    mesh = small
    try:
        with many_descriptors(), Flood(mesh.address, 1300) as flood:
            flood.wait_until_tried()
            until(lambda: "unauthenticated connections were closed" in str(problems(mesh)), "word of the flood")
            job_ids = submit_all(mesh)
            all_succeed(mesh, job_ids)
            nothing_is_held(mesh)
            until(lambda: flood.left == 0, "end of all connections that make no call")
    finally:
        mesh.close()


@pytest.mark.deep
@pytest.mark.timeout(300)  # the same
def test_a_connection_flood_at_the_hard_descriptor_limit_locks_no_client_out(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path)
    mesh.cli.descriptors_max = LIMIT
    mesh.start()
    try:
        with many_descriptors(), Flood(mesh.address, 600, again=True) as flood:
            flood.wait_until_tried()
            until(lambda: "file descriptors" in str(problems(mesh)), "word of the shortage")
            began = time.monotonic()
            job_ids = submit_all(mesh)
            assert time.monotonic() - began < JOBS * SECONDS_TO_GET_IN
            all_succeed(mesh, job_ids)
        nothing_is_held(mesh)
        assert flood.lost > flood.opened / 2
        until(lambda: problems_of_descriptors(mesh) == [], "recovery")
    finally:
        mesh.close()


def problems_of_descriptors(mesh: Mesh) -> list[str]:
    return [problem for problem in problems(mesh) if "file descriptors" in problem]


def test_a_job_gets_the_original_limit_of_descriptors_not_the_raised_one(small: Mesh, tmp_path: Path) -> None:
    mesh = small
    try:
        assert mesh.process is not None
        soft, hard = resource.prlimit(mesh.process.pid, NOFILE)
        assert (soft, hard) == (resource.getrlimit(NOFILE)[1],) * 2
        reported = mesh.cli("submit", "--cpus", "1", "--wait", "--", "sh", "-c", "ulimit -Sn").out
        assert reported.strip() == str(LIMIT)
    finally:
        mesh.close()
