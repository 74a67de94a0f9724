"""CPU jobs borrow a node's cores that are reserved for its GPU; the newest is reclaimed when a GPU job arrives."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.end_to_end.meshes import Mesh, configured_mesh, end_all

from cotenant.core.model.lifecycle import Phase
from cotenant.v1.job_pb2 import Job

CONFIG = """
gpus = "fake:1"
placement = "multi-array"
"""


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Mesh]:
    with configured_mesh(tmp_path, CONFIG) as mesh:
        yield mesh
        end_all(mesh.client)


def borrows(job: Job) -> bool:
    return any(task.reclaimable for part in job.attempt.allocations for task in part.tasks)


def test_the_newest_borrower_is_reclaimed_for_a_gpu_job_and_restarts_after_it(mesh: Mesh) -> None:
    cores = len(os.sched_getaffinity(0))
    if cores < 2:
        pytest.skip("two borrowers take two cores")
    borrowers = []
    for count in (cores - 1, 1):  # one after the other, or both may start in one cycle
        words = ("--gpus", "0", "--cpus", str(count), "--grace", "5s", "--", "sleep", "1000")
        borrowers.append(mesh.cli.submit(*words))
        assert borrows(mesh.client.wait_for(borrowers[-1], Phase.RUNNING))
    older, newest = borrowers
    assert "reclaimable" in mesh.cli("show", newest).out

    trainer = mesh.cli.submit("--gpus", "1", "--cpus", "1", "--", "sleep", "1000")
    assert not borrows(mesh.client.wait_for(trainer, Phase.RUNNING))
    gone = mesh.client.wait_for(newest, Phase.QUEUED)
    assert (gone.preemptions, gone.failures) == (1, 0)
    assert f"{trainer} needs" in mesh.cli("explain", newest).out
    assert mesh.client.job(older).attempt.number == 1

    mesh.client.cancel(trainer)
    again = mesh.client.wait_for(newest, Phase.RUNNING)
    assert (again.attempt.number, borrows(again)) == (2, True)
