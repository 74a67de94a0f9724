"""Pre-runs with real processes: a broken job fails on one GPU, and a job that trains continues with its gang."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.end_to_end.meshes import Mesh
from tests.end_to_end.waiting import lines_of, until

from cotenant.core.model.lifecycle import Phase
from cotenant.v1 import job_pb2

TELL = "import os, sys\nprint(os.environ.get('COTENANT_PRE_RUN'), os.environ['WORLD_SIZE'], \
len(os.environ['CUDA_VISIBLE_DEVICES'].split(',')), file=open(sys.argv[1], 'a'))\n"
BREAKS = TELL + "import torhc"
TRAINS = (
    TELL
    + """
import time
step = 0
while os.environ.get('COTENANT_PRE_RUN') or step < 3:
    step += 1
    print(f'step {step}', flush=True)
    time.sleep(0.1)
"""
)
STANDS = TELL + "import time\nif os.environ.get('COTENANT_PRE_RUN'): time.sleep(600)"


def job_file(directory: Path, name: str, script: str, pre_run: str) -> str:
    """Return a job file: two GPUs in one process, steps read from its output."""
    (directory / f"{name}.py").write_text(script)
    path = directory / f"{name}.yaml"
    path.write_text(f"""
name: {name}
gpus: 2
cpus: 1
retries: 3
pre_run: {pre_run}
progress:
  regex: 'step (?P<step>[0-9]+)'
command: [python3, {directory / name}.py, {directory / name}.told]
""")
    return str(path)


def reported(directory: Path, name: str) -> list[str]:
    """Return what each attempt saw: whether it is a pre-run, the size of its gang, and its GPUs."""
    return lines_of(directory / f"{name}.told")


def held(job: job_pb2.Job) -> list[int]:
    attempts = [*job.past_attempts, job.attempt]
    return [sum(len(task.gpus) for part in one.allocations for task in part.tasks) for one in attempts]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    mesh = Mesh(tmp_path_factory.mktemp("mesh"), "--gpus", "fake:2")
    mesh.start()
    yield mesh
    mesh.close()


def test_a_job_that_breaks_on_import_fails_on_one_gpu_and_never_holds_two(mesh: Mesh, tmp_path: Path) -> None:
    job_id = mesh.cli.submit(job_file(tmp_path, "breaks", BREAKS, "5m"))
    job = mesh.client.wait_for(job_id, Phase.FAILED)
    assert reported(tmp_path, "breaks") == ["1 1 1"]
    assert (held(job), job.attempt.pre_run) == ([1], True)
    assert job.attempt.failure.failure_class == "import_error"
    shown = mesh.cli("show", job_id).out
    assert "1, failed, pre-run on one GPU" in shown
    assert "in its pre-run" in shown


def test_a_pre_run_that_trains_continues_with_its_gang(mesh: Mesh, tmp_path: Path) -> None:
    job_id = mesh.cli.submit(job_file(tmp_path, "trains", TRAINS, "5m"))
    job = mesh.client.wait_for(job_id, Phase.SUCCEEDED)
    assert reported(tmp_path, "trains") == ["1 1 1", "None 1 2"]
    assert (held(job), job.failures) == ([1, 2], 0)
    assert "superseded" not in mesh.cli("show", job_id).out.split("attempt")[0]


@pytest.mark.deep
def test_a_silent_pre_run_ends_at_its_time_limit_despite_crashes(mesh: Mesh, tmp_path: Path) -> None:
    job_id = mesh.cli.submit(job_file(tmp_path, "stands", STANDS, "2s"))
    until(lambda: reported(tmp_path, "stands"), "start of its pre-run")
    mesh.kill()
    mesh.start()
    job = mesh.client.wait_for(job_id, Phase.SUCCEEDED)
    assert reported(tmp_path, "stands") == ["1 1 1", "None 1 2"]
    assert held(job) == [1, 2]
