"""A real elastic job is resized as a rigid job comes and goes, and goes on from its checkpoint each time."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.end_to_end.meshes import Mesh, configured_mesh, second_node
from tests.end_to_end.waiting import lines_of, until

from cotenant.codec.job_events import kind_of
from cotenant.core.model.lifecycle import Phase
from cotenant.v1.job_pb2 import Job

CONFIG = """
gpus = "fake:2"
allocator = "marginal-gain"
[options.allocator]
interval_seconds = "0"
"""

# Rank 0 counts steps, and saves the count when it is told to stop; each start appends the count that it begins with,
# and the number of processes, to a file.
PROGRAM = """
import os, pathlib, signal, sys, time
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
saved, starts = pathlib.Path(sys.argv[1] + ".count"), pathlib.Path(sys.argv[1] + ".starts")
count = int(saved.read_text()) if saved.exists() else 0
def save(*_):
    if rank == 0:
        saved.write_text(str(count))
    sys.exit(3)
signal.signal(signal.SIGTERM, save)
if rank == 0:
    with starts.open("a") as file:
        print(count, world, file=file)
while True:
    count += 1
    time.sleep(0.01)
"""


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Mesh]:
    """A mesh with one node of two GPUs."""
    with configured_mesh(tmp_path, CONFIG) as mesh:
        yield mesh


def runs_with(mesh: Mesh, job_id: str, replicas: int) -> Job | None:
    job = mesh.client.job(job_id)
    tasks = [task for part in job.attempt.allocations for task in part.tasks]
    return job if mesh.client.phase(job_id) is Phase.RUNNING and len(tasks) == replicas else None


def starts_of(work: Path) -> list[tuple[int, int]]:
    """Return the count and the number of processes of each start."""
    return [(int(count), int(world)) for count, world in map(str.split, lines_of(work.with_suffix(".starts")))]


def test_an_elastic_job_takes_what_is_free_and_gives_it_up(mesh: Mesh, tmp_path: Path) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two replicas on a node take two cores")
    one_gpu, work = ("--gpus", "1", "--cpus", "1"), tmp_path / "work"
    with second_node(mesh):
        first = mesh.cli.submit(*one_gpu, "--replicas", "3", "--", "sleep", "1000")
        mesh.client.wait_for(first, Phase.RUNNING)
        elastic = mesh.cli.submit(
            *one_gpu, "--replicas", "1..3", "--resize", "restart", "--", sys.executable, "-c", PROGRAM, work
        )
        until(lambda: starts_of(work), "its first start")
        mesh.client.cancel(first)
        until(lambda: runs_with(mesh, elastic, 3), "three replicas")
        until(lambda: len(starts_of(work)) == 2, "its second start")
        rigid = mesh.cli.submit(*one_gpu, "--replicas", "2", "--", "sleep", "1000")
        mesh.client.wait_for(rigid, Phase.RUNNING)
        job = until(lambda: runs_with(mesh, elastic, 2), "two replicas")
        assert job
        until(lambda: len(starts_of(work)) == 3, "its third start")

        counts, worlds = zip(*starts_of(work), strict=True)
        assert worlds == (1, 3, 2)
        assert 0 == counts[0] < counts[1] < counts[2] == int(work.with_suffix(".count").read_text())
        assert (job.attempt.number, job.failures, job.preemptions) == (3, 0, 0)
        told = [one.detail for one in mesh.client.explain(elastic).events if kind_of(one) == "resized"]
        assert [detail.partition(":")[0] for detail in told] == ["replicas 1 → 3", "replicas 3 → 2"]
        explained = mesh.cli("explain", elastic).out
        assert "replicas: 2 of 1..3; there is no room for one more" in explained
        assert "replicas 3 → 2: others need what it gives up" in explained
        shown = mesh.cli("show", elastic).out
        assert "2 (elastic, 1 to 3)" in shown
        assert "resized to 2 replicas: others need what it gives up" in shown
        view = json.loads(mesh.cli("show", elastic, "--json").out)
        assert [past["next_replicas"] for past in view["past_attempts"]] == [3, 2]
