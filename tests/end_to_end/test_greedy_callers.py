"""A caller with read-only access cannot block a mesh or end another user's job."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from tests.end_to_end.meshes import Mesh
from tests.end_to_end.waiting import until

from cotenant.core.model.job import JobKind, JobSpec, Request, Role
from cotenant.v1 import job_pb2
from cotenant.v1 import job_service_pb2 as pb
from cotenant.v1.job_service_pb2_grpc import JobServiceStub

NASTY = "(?i)(" + r"[\x00-\U0010fffe]" * 59 + "{})"  # Python's engine takes more than a second to compile it
JOBS, ROUNDS = 40, 12
STOP_AFTER_SECONDS = 15.0
HELD_SECONDS_MAX = 0.1
BLOCKED = re.compile(r"loop_blocked.*cpu_seconds\W+([\d.]+)")


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Mesh]:
    made = Mesh(tmp_path)
    made.start()
    yield made
    made.close()


def request() -> pb.SimulateJobRequest:
    """Return an observed request: forty jobs with patterns that are slow to compile, in one call of some 40 KB."""
    asked = pb.SimulateJobRequest()
    for number, spec in enumerate([asked.spec, *(asked.more.add() for _ in range(JOBS - 1))]):
        spec.name, spec.progress.regex = f"j{number}", NASTY.format(number)
        spec.command.append("true")
        spec.kind = job_pb2.JOB_KIND_TRAINING
        role = spec.roles.add(name="worker", replicas=1)
        role.resources.gpu_milli = 1000
    asked.spec.progress.regex = r"(\d+)"
    return asked


def test_a_viewers_patterns_neither_block_the_mesh_nor_end_a_leased_job(mesh: Mesh) -> None:
    roles = (Role(request=Request(cores=1)),)
    leashed = JobSpec(
        kind=JobKind.CPU, command=("sleep", "600"), roles=roles, stop_after_disconnected_seconds=STOP_AFTER_SECONDS
    )
    job_id = mesh.client.submit(leashed, "leashed")
    until(lambda: mesh.client.job(job_id).attempt.HasField("start_time"), "start of the job")
    token = mesh.cli("tokens", "create", "--name", "eye", "--role", "viewer", "--tenant", "*").out.split()[-1]
    with grpc.insecure_channel(mesh.address) as channel, ThreadPoolExecutor(4) as pool:
        stub = JobServiceStub(channel)

        def ask(_: int) -> str:
            try:
                stub.SimulateJob(request(), metadata=(("authorization", f"Bearer {token}"),), timeout=60)
            except grpc.RpcError as error:
                return str(error.details())
            return ""

        answers = pool.map(ask, range(ROUNDS))
        for _ in range(ROUNDS):
            assert mesh.client.job(job_id).id == job_id
        reported = list(answers)
    assert all("progress.regex" in one or "processing" in one for one in reported), reported
    held = [float(seconds) for seconds in BLOCKED.findall(mesh.log.read_text())]
    assert not [seconds for seconds in held if seconds >= HELD_SECONDS_MAX], held
    job = mesh.client.job(job_id)
    assert (job.failures, job.attempt.number) == (0, 1)
    assert not job.attempt.HasField("end_time")
