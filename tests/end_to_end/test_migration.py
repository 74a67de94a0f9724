"""A real job migrates so that a gang can start on its node, and continues from its checkpoint."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from tests.end_to_end.meshes import Mesh, configured_mesh, second_node
from tests.end_to_end.waiting import lines_of, until

from cotenant.codec import specs
from cotenant.core.model.lifecycle import Phase
from cotenant.v1.job_pb2 import Job

CONFIG = """
gpus = "fake:2"
placement = "locality"
checkpoint_seconds = 0.0
[options.placement]
settled_seconds = "0"
"""

# Counts, and saves the count whenever it is told to stop; each start appends the count that it begins with to a file.
PROGRAM = """
import pathlib, signal, sys, time
saved, starts = pathlib.Path(sys.argv[1] + ".count"), pathlib.Path(sys.argv[1] + ".starts")
count = int(saved.read_text()) if saved.exists() else 0
def save(*_):
    saved.write_text(str(count))
    sys.exit(3)
signal.signal(signal.SIGTERM, save)
with starts.open("a") as file:
    print(count, file=file)
while True:
    count += 1
    time.sleep(0.01)
"""


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Mesh]:
    """A mesh with one node; `second_node` joins it."""
    with configured_mesh(tmp_path, CONFIG) as mesh:
        yield mesh


def nodes_of(job: Job) -> set[str]:
    return {part.node_id for part in job.attempt.allocations}


def starts_of(work: Path) -> list[str]:
    return lines_of(work.with_suffix(".starts"))


def start_counting(mesh: Mesh, work: Path) -> str:
    job_id = mesh.cli.submit("--gpus", "1", "--cpus", "1", "--", sys.executable, "-c", PROGRAM, work)
    mesh.client.wait_for(job_id, Phase.RUNNING)
    until(lambda: starts_of(work), f"start of {job_id}")
    return job_id


def test_a_job_migrates_from_its_checkpoint_so_that_a_gang_starts(mesh: Mesh, tmp_path: Path) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("a gang of two takes two cores")
    first, gone = (start_counting(mesh, tmp_path / name) for name in ("first", "gone"))
    with second_node(mesh):
        third = start_counting(mesh, tmp_path / "third")
        singles = {first: tmp_path / "first", third: tmp_path / "third"}
        assert nodes_of(mesh.client.job(third)) == {"second"}
        mesh.client.cancel(gone)
        mesh.client.wait_for(gone, Phase.CANCELLED)
        gang = mesh.cli.submit(
            "--gpus", "1", "--cpus", "1", "--replicas", "2", "--locality", "server", "--", "sleep", "1000"
        )
        started = mesh.client.wait_for(gang, Phase.RUNNING)
        assert len(nodes_of(started)) == 1

        mover = until(lambda: moved(mesh, singles), "a job that was moved")
        assert mover is not None
        assert nodes_of(mover).isdisjoint(nodes_of(started))
        assert (mover.attempt.number, mover.failures, mover.preemptions) == (2, 0, 0)
        work = singles[mover.id]
        until(lambda: len(starts_of(work)) == 2, "its second start")
        assert int(starts_of(work)[1]) == int(work.with_suffix(".count").read_text()) > 0
        story = mesh.cli("explain", mover.id).out
        assert f"so that {gang} can start" in story


def moved(mesh: Mesh, job_ids: Iterable[str]) -> Job | None:
    """Return the job among these that runs as its second attempt."""
    jobs = [mesh.client.job(job_id) for job_id in job_ids]
    return next((job for job in jobs if job.migrations and job.phase == specs.PHASES.to_wire(Phase.RUNNING)), None)
