"""Invalid input yields one clear error and no partial effects, and the mesh accepts the next job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from tests.end_to_end.commands import TRACEBACK, Cli, Outcome
from tests.end_to_end.meshes import Mesh

from cotenant.codec.errors import from_error
from cotenant.core.model.lifecycle import Phase
from cotenant.v1.job_pb2 import JobSpec
from cotenant.v1.job_service_pb2 import CreateJobRequest
from cotenant.v1.job_service_pb2_grpc import JobServiceStub

BAD_JOB = """\
gpu: 1
kind: cpu
gpus: 2
replicas: 0
cpus: 1e99
memory: -5GiB
priority: 99999999999
steps: -1
grace: -3s
env: {COTENANT_JOB_ID: mine}
command: ["true"]
"""
MISTAKES = (
    "1:1: unknown job field 'gpu'; did you mean gpus?",
    "4:11: replicas: must be from 1 to 4096, not 0",
    "5:7: cpus: must be a whole number of cores or auto, not '1e99'",
    "6:9: memory: must be a size",
    "7:11: priority: must be from -1000000 to 1000000, not 99999999999",
    "8:8: steps: must not be negative, not -1",
    "9:8: grace: must be a duration",
    "this variable is set by the node agent",
)
HOSTILE_NAMES = {
    "a path": "../../etc/passwd",
    "a terminal's control characters": "a\x1b[31mred\x07",
    "a line break": "a\nb",
    "10,000 characters": "a" * 10_000,
}


@pytest.fixture(autouse=True)
def _assert_mesh_still_works(mesh: Mesh) -> Iterator[None]:
    """Check after each test that the mesh accepts a job and has printed no traceback."""
    yield
    mesh.client.wait_for(mesh.cli.submit("--cpus", "1", "--", "true"), Phase.SUCCEEDED)
    assert TRACEBACK not in mesh.log.read_text()


def refused(mesh: Mesh, *arguments: str | Path, code: int = 2) -> Outcome:
    """Run a command that must be rejected with one error and change nothing."""
    before = [job.id for job in mesh.client.jobs()]
    outcome = mesh.cli(*arguments, code=code)
    assert outcome.error
    assert outcome.out == ""
    assert [job.id for job in mesh.client.jobs()] == before
    return outcome


def test_every_mistake_in_a_job_file_is_reported_with_its_position(mesh: Mesh, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(BAD_JOB)
    reported = refused(mesh, "submit", path).err
    assert [mistake for mistake in MISTAKES if mistake not in reported] == []


def test_fields_that_contradict_each_other_are_refused(mesh: Mesh, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("kind: cpu\ngpus: 2\ncommand: ['true']\n")
    assert (
        f"{path}:1:7: kind: a cpu job must not ask for GPUs; this job asks for 2" in refused(mesh, "submit", path).err
    )


def test_a_file_with_one_bad_job_submits_none_of_them(mesh: Mesh, tmp_path: Path) -> None:
    path = tmp_path / "jobs.yaml"
    path.write_text("cpus: 1\ncommand: ['true']\n---\ncpus: 1\ngpus: 9\ncommand: ['true']\n")
    assert "NEVER_FITS" in refused(mesh, "submit", path, code=1).err
    path.write_text("cpus: 1\ncommand: ['true']\n---\ncpus: none at all\ncommand: ['true']\n")
    assert f"{path}:4:7: cpus" in refused(mesh, "submit", path).err


def test_invalid_yaml_is_rejected_with_line_and_column(mesh: Mesh, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("gpus: 1\ncommand: [true\nname: x\n")
    assert f"{path}:3:5: invalid YAML" in refused(mesh, "submit", path).err


def test_a_job_file_of_two_mebibytes_is_refused(mesh: Mesh, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"cpus: 1\ncommand: ['echo', '{'x' * 2**21}']\n")
    assert "larger than 1 MiB" in refused(mesh, "submit", path).error


def test_a_spec_of_two_mebibytes_is_refused_by_the_service_too(mesh: Mesh) -> None:
    spec = JobSpec(command=["echo", "x" * 2**21])
    token = (mesh.state_dir / "token").read_text().strip()
    with grpc.insecure_channel(mesh.address) as channel, pytest.raises(grpc.RpcError) as raised:
        JobServiceStub(channel).CreateJob(
            CreateJobRequest(spec=spec), timeout=10, metadata=(("authorization", f"Bearer {token}"),)
        )
    problem = from_error(raised.value)
    assert problem.code == grpc.StatusCode.INVALID_ARGUMENT
    assert "bytes" in problem.violations[0].description


@pytest.mark.parametrize("name", HOSTILE_NAMES.values(), ids=HOSTILE_NAMES)
def test_a_hostile_name_is_refused_and_shown_harmless(mesh: Mesh, name: str) -> None:
    reported = refused(mesh, "submit", "--cpus", "1", "--name", name, "--", "true").err
    assert "--name" in reported
    assert "\x1b" not in reported
    assert len(reported) < 500


def test_a_hostile_id_finds_nothing(mesh: Mesh) -> None:
    for command in ("show", "cancel", "logs"):
        assert "not found" in refused(mesh, command, "../../etc/passwd").error
    assert "not found" in refused(mesh, "drain", "../..").error


def test_a_missing_command_fails_with_that_reason(cli: Cli) -> None:
    reported = cli("submit", "--cpus", "1", "--wait", "--", "/no/such/program", code=1).error
    assert "command not found: /no/such/program" in reported


def test_a_missing_working_directory_fails_with_that_reason(cli: Cli) -> None:
    reported = cli("submit", "--cpus", "1", "--workdir", "/no/such/place", "--wait", "--", "true", code=1).error
    assert "the working directory /no/such/place does not exist" in reported
