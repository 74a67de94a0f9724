"""Time limits of jobs, waiting for jobs and naming them, on a real mesh that is killed meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.end_to_end.meshes import Mesh
from tests.end_to_end.waiting import until

from cotenant.core.model.lifecycle import Phase
from cotenant.v1 import job_pb2

SAVES = (
    "import signal, time; signal.signal(signal.SIGTERM, lambda *_: exit(0)); print('up', flush=True); time.sleep(600)"
)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    mesh = Mesh(tmp_path_factory.mktemp("mesh"), "--gpus", "fake:1")
    mesh.start()
    yield mesh
    mesh.close()


@pytest.mark.deep
def test_a_job_ends_at_its_time_limit_while_the_mesh_is_down(mesh: Mesh) -> None:
    options = ("--cpus", "1", "--time", "6s", "--grace", "2s", "--retries", "3", "--name", "limited")
    job_id = mesh.cli.submit(*options, "--", "python3", "-c", SAVES)
    mesh.client.wait_for(job_id, Phase.RUNNING)
    mesh.kill()
    state = mesh.state_dir.glob(f"nodes/*/attempts/{job_id}-1/state.json")
    path = next(iter(state))
    until(lambda: '"STOPPED"' in path.read_text(), "the supervisor stops the job")
    mesh.start()
    job = mesh.client.wait_for(job_id, Phase.FAILED)
    assert job.phase_reason == "reached its time limit of 6 s"
    assert (job.attempt.number, job.failures) == (1, 1)
    assert job.attempt.stop_reason == job_pb2.STOP_REASON_TIME_LIMIT
    assert (job.attempt.failure.failure_class, job.attempt.failure.blame) == ("time_limit", job_pb2.FAILURE_BLAME_USER)


def test_a_limit_within_the_grace_is_one_error_that_names_both(mesh: Mesh) -> None:
    refused = mesh.cli("submit", "--time", "20s", "--", "true", code=2)
    assert refused.err.count("must be longer than grace, 30 s, which is part of it, not 20 s") == 1


def test_waiting_ends_with_the_outcome_of_the_jobs(mesh: Mesh) -> None:
    good = mesh.cli.submit("--cpus", "1", "--", "true")
    bad = mesh.cli.submit("--cpus", "1", "--", "false")
    long = mesh.cli.submit("--cpus", "1", "--", "sleep", "600")
    assert mesh.cli("wait", good).out.startswith(f"{good} succeeded after ")
    mesh.cli("wait", good, bad, code=1)
    assert "not ended after 1s" in mesh.cli("wait", long, "--timeout", "1s", code=124).error
    mesh.cli("wait", "--any", long, good)
    mesh.cli("cancel", long)
    assert [job["phase"] for job in mesh.cli.json("jobs", "--all", "--limit", "1")] != []
    mesh.cli("wait", long, code=1)


@pytest.mark.deep
def test_waiting_survives_a_restart_of_the_mesh(mesh: Mesh) -> None:
    job_id = mesh.cli.submit("--cpus", "1", "--", "sleep", "600")
    waiting = mesh.cli.start("wait", job_id, log=mesh.directory / "wait.log")
    waiting.wait_for_output(f"{job_id} running on ")
    mesh.kill()
    mesh.start()
    mesh.cli("cancel", job_id)
    waiting.wait_for_output(f"error: {job_id} cancelled")


def test_a_job_is_found_by_its_name_and_as_the_last_one(mesh: Mesh) -> None:
    older = mesh.cli.submit("--cpus", "1", "--name", "resnet", "--", "echo", "older")
    newer = mesh.cli.submit("--cpus", "1", "--name", "resnet", "--", "echo", "newer")
    mesh.cli("wait", older, "resnet")
    assert mesh.cli("logs", "resnet").out == "newer\n"
    assert mesh.cli.json("show", "@last")["id"] == newer
    assert [job["id"] for job in mesh.cli.json("jobs", "--me", "--all", "--limit", "2")] == [newer, older]


@pytest.mark.deep
def test_the_example_runs_on_one_gpu(mesh: Mesh) -> None:
    (mesh.directory / "job.yaml").write_text(mesh.cli("submit", "--example").out)
    mesh.cli("submit", mesh.directory / "job.yaml", "--wait", seconds=120)
