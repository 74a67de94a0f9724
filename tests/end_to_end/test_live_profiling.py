"""A real job is profiled on its node, once per job class, and again when its rate changes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.end_to_end.meshes import Mesh
from tests.end_to_end.waiting import until

from cotenant.codec.job_events import kind_of
from cotenant.core.model.lifecycle import Phase
from cotenant.v1.job_service_pb2 import ExplainJobResponse

# The accelerator takes a step at its own pace, whatever the processor does: more cores than one make it no faster. A
# process that was kept waiting catches up, so that a busy machine makes no difference either. The file makes it slower.
PROGRAM = """
import os, sys, time
from cotenant import progress
due = time.monotonic()
while True:
    due += 0.07 if os.path.exists(sys.argv[1]) else 0.03
    time.sleep(max(0.0, due - time.monotonic()))
    progress.step()
"""


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Mesh]:
    config = tmp_path / "config.toml"
    config.write_text('predictor = "xiao-piecewise,history"\ngpus = "fake:1"\nwindow_seconds = 1.0\n')
    mesh = Mesh(tmp_path, "--config", str(config))
    mesh.start()
    yield mesh
    mesh.close()


def submit(mesh: Mesh, slow: Path) -> str:
    job_id = mesh.cli.submit(
        "--gpus", "1", "--cpus", "auto", "--model", "never-seen", "--steps", "1000000",
        "--", sys.executable, "-c", PROGRAM, slow,
    )  # fmt: skip
    mesh.client.wait_for(job_id, Phase.RUNNING)
    return job_id


def reported(explained: ExplainJobResponse, what: str) -> list[str]:
    return [event.detail for event in explained.events if kind_of(event) == what]


def test_a_job_class_is_profiled_once_and_again_when_its_rate_changes(mesh: Mesh, tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    first = submit(mesh, slow)
    held = sum(len(task.core_ids) for part in mesh.client.job(first).attempt.allocations for task in part.tasks)
    if held < 2:
        pytest.skip("a job has to hold two cores for there to be fewer")
    known = when_profiled(mesh, first)
    assert known.estimate.cores_useful == 1
    assert "stale" not in known.estimate.source
    mesh.client.cancel(first)
    mesh.client.wait_for(first, Phase.CANCELLED)

    second = submit(mesh, slow)
    at_once = mesh.client.explain(second)
    assert at_once.estimate.cores_useful == 1, "it is remembered"
    slow.touch()
    renewed = when_profiled(mesh, second)
    (why,) = reported(renewed, "profiling")
    assert "stale" in why
    assert renewed.estimate.cores_useful == 1
    assert "stale" not in renewed.estimate.source
    fast, slower = (explained.estimate.remaining.ToSeconds() for explained in (known, renewed))
    assert slower > 1.5 * fast, "the rest of it takes longer now"


def when_profiled(mesh: Mesh, job_id: str) -> ExplainJobResponse:
    until(lambda: reported(mesh.client.explain(job_id), "profiled"), f"profile of {job_id}")
    return mesh.client.explain(job_id)
