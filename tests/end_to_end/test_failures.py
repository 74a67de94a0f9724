"""Real jobs that fail in real ways: classified by their output and exit, and retried accordingly."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from tests.end_to_end.meshes import Mesh

from cotenant.core.model.lifecycle import Phase
from cotenant.v1 import job_pb2

NCCL = "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE) ran for 1800123 ms"
OWN_RULES = """
version = 1
[[rule]]
name = "licence"
class = "licence_server"
blame = "infrastructure"
line = 'no licence left'
transient = true
"""


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """Two nodes, quick retries, and a failure rule of the operator."""
    directory = tmp_path_factory.mktemp("mesh")
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two nodes need two CPUs")
    (directory / "own.toml").write_text(OWN_RULES)
    config = directory / "config.toml"
    config.write_text(f'retry_seconds = 0.2\nfailure_rules = "{directory / "own.toml"}"\n')
    mesh = Mesh(directory, "--config", str(config), "--nodes", "2", "--gpus", "fake:1")
    mesh.start()
    yield mesh
    mesh.close()


def run(mesh: Mesh, script: str, *options: str, phase: Phase = Phase.FAILED) -> job_pb2.Job:
    job_id = mesh.cli.submit("--gpus", "1", "--cpus", "1", "--retries", "4", *options, "--", "python3", "-c", script)
    return mesh.client.wait_for(job_id, phase)


def reported(job: job_pb2.Job) -> tuple[str, int, int]:
    failure = job.attempt.failure
    return failure.failure_class, failure.blame, job.attempt.number


def test_a_missing_module_is_the_users_responsibility_and_is_not_retried(mesh: Mesh) -> None:
    job = run(mesh, "print('epoch 1'); import torhc")
    assert reported(job) == ("import_error", job_pb2.FAILURE_BLAME_USER, 1)
    assert job.attempt.failure.evidence == "ModuleNotFoundError: No module named 'torhc'"
    assert "import_error (user): ModuleNotFoundError: No module named 'torhc'" in mesh.cli("show", job.id).out


def test_an_illegal_gpu_access_is_recognized_by_its_output(mesh: Mesh) -> None:
    job = run(mesh, "raise RuntimeError('CUDA error: an illegal memory access was encountered')")
    assert reported(job) == ("invalid_memory_access", job_pb2.FAILURE_BLAME_USER, 1)


def test_a_process_killed_for_memory_is_classified_as_out_of_memory(mesh: Mesh) -> None:
    job_id = mesh.cli.submit(
        *("--gpus", "1", "--cpus", "1", "--memory", "48MiB", "--retries", "4"),
        *("--", "python3", "-c", "b = bytearray(400 * 2**20); print('it was given')"),
    )
    job = mesh.client.wait_for(job_id, Phase.FAILED, Phase.SUCCEEDED)
    if job.phase == job_pb2.JOB_PHASE_SUCCEEDED:
        pytest.skip("memory limits are not enforced here")
    assert reported(job) == ("cpu_out_of_memory", job_pb2.FAILURE_BLAME_USER, 1)


def test_a_collective_timeout_is_retried_on_the_other_node(mesh: Mesh) -> None:
    script = f"import os, sys\nif os.environ['COTENANT_ATTEMPT'] == '1': print({NCCL!r}); sys.exit(1)"
    job = run(mesh, script, "--retries", "0", phase=Phase.SUCCEEDED)
    (first,) = job.past_attempts
    assert (first.failure.rule, job.failures) == ("nccl-timeout", 0)
    assert first.allocations[0].node_id != job.attempt.allocations[0].node_id
    assert [one.node_id for one in job.avoided_nodes] == [first.allocations[0].node_id]
    (avoided,) = mesh.cli.json("show", job.id)["avoided_nodes"]
    assert avoided["node"] == first.allocations[0].node_id
    reported = mesh.cli.json("failures", "--by", "node")["failures"]
    assert (avoided["node"], "nccl_error") in [(one["group"], one["class"]) for one in reported]


def test_an_operators_rule_is_applied(mesh: Mesh) -> None:
    script = "import os, sys\nif os.environ['COTENANT_ATTEMPT'] == '1': sys.exit('no licence left')"
    job = run(mesh, script, phase=Phase.SUCCEEDED)
    assert job.past_attempts[0].failure.failure_class == "licence_server"
    assert job.failures == 0


def test_an_invalid_rules_file_is_one_error(mesh: Mesh) -> None:
    wrong = mesh.directory / "wrong.toml"
    wrong.write_text(OWN_RULES.replace("no licence left", "(no )+)"))
    config = mesh.directory / "wrong-config.toml"
    config.write_text(f'failure_rules = "{wrong}"\n')
    ended = mesh.cli("up", "--config", str(config), "--state-dir", str(mesh.directory / "other"), code=2)
    assert f"{wrong}:7: line: is not a regular expression" in ended.error
