"""Real jobs are resized while they run: cores are removed, lent and reclaimed in the kernel."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.end_to_end.meshes import Mesh
from tests.end_to_end.waiting import until

from cotenant.codec.job_events import kind_of
from cotenant.core.model.lifecycle import Phase

# The pace follows from the CPUs that the kernel lets the process have, not from how busy they are: a process that was
# kept waiting catches up. It writes down which they are whenever they change.
PROGRAM = """
import json, os, sys, time
from cotenant import progress
seconds = {"level": lambda cpus: 0.02, "steep": lambda cpus: 0.04 / cpus}[sys.argv[1]]
due, last = time.monotonic(), None
while True:
    now = sorted(os.sched_getaffinity(0))
    if now != last:
        with open(sys.argv[2] + ".new", "w") as file:
            json.dump(now, file)
        os.replace(sys.argv[2] + ".new", sys.argv[2])
        last = now
    due += seconds(len(now))
    time.sleep(max(0.0, due - time.monotonic()))
    progress.step()
"""


def two_cores() -> set[int]:
    """Return two CPUs that are not hyperthreads of one core."""
    siblings: dict[str, int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        file = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        siblings.setdefault(file.read_text() if file.exists() else str(cpu), cpu)
    return set(list(siblings.values())[:2])


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """A node with two cores and two GPUs, regardless of the machine."""
    cpus, allowed = two_cores(), os.sched_getaffinity(0)
    if len(cpus) < 2:
        pytest.skip("a job has to hold two cores for there to be fewer")
    options = ("warm_up_seconds=0.3", "measure_seconds=1", "noise=0.1")
    flags = (flag for option in options for flag in ("--option", f"allocator.{option}"))
    mesh = Mesh(tmp_path_factory.mktemp("mesh"), "--gpus", "fake:2", "--allocator", "coda-adaptive", *flags)
    os.sched_setaffinity(0, cpus)
    try:
        mesh.start()
    finally:
        os.sched_setaffinity(0, allowed)
    yield mesh
    mesh.close()


def submit(mesh: Mesh, gpus: int, kind: str, reported: Path) -> str:
    job_id = mesh.cli.submit(
        "--gpus", str(gpus), "--cpus", "auto", "--model", f"never-seen-{kind}",
        "--", sys.executable, "-c", PROGRAM, kind, reported,
    )  # fmt: skip
    mesh.client.wait_for(job_id, Phase.RUNNING)
    return job_id


def on_cpus(reported: Path, count: int) -> list[int]:
    """Wait until a job reports this many CPUs."""

    def there() -> list[int]:
        cpus: list[int] = json.loads(reported.read_text()) if reported.exists() else []
        return cpus if len(cpus) == count else []

    return until(there, f"run on {count} CPUs")


def held(mesh: Mesh, job_id: str) -> list[tuple[int, int]]:
    """Return the number of cores of each task, and how many of these are its own (0: all)."""
    tasks = [task for part in mesh.client.job(job_id).attempt.allocations for task in part.tasks]
    return [(len(task.core_ids), task.own_cores) for task in tasks]


def end(mesh: Mesh, *job_ids: str) -> None:
    for job_id in job_ids:
        mesh.client.cancel(job_id)
    for job_id in job_ids:
        mesh.client.wait_for(job_id, Phase.CANCELLED)


def test_a_job_shrinks_to_its_useful_core_and_the_freed_core_starts_a_waiting_job(mesh: Mesh, tmp_path: Path) -> None:
    reported = tmp_path / "cpus"
    level = submit(mesh, 2, "level", reported)
    on_cpus(reported, 2)
    waiting = mesh.cli.submit("--gpus", "0", "--cpus", "1", "--", "sleep", "600")
    assert mesh.client.phase(waiting) is Phase.QUEUED
    mesh.client.wait_for(waiting, Phase.RUNNING)
    (cpu,) = on_cpus(reported, 1)
    assert held(mesh, level) == [(1, 1)]
    other = mesh.client.job(waiting).attempt.allocations[0].tasks[0]
    assert cpu not in other.cpu_ids
    assert "resized" in [kind_of(event) for event in mesh.client.explain(level).events]
    slimmed_at = mesh.client.job(level).progress.step
    until(lambda: mesh.client.job(level).progress.step > slimmed_at + 150, "rate on one core, for 2.5 s")
    end(mesh, level, waiting)

    def starts_with_useful_cores() -> bool:
        again = submit(mesh, 2, "level", reported)
        cores = held(mesh, again)
        end(mesh, again)
        return cores == [(1, 0)]

    until(starts_with_useful_cores, "what the job showed is learned, and the next of its class starts with it")


def test_a_spare_core_is_lent_and_reclaimed_when_a_job_arrives(mesh: Mesh, tmp_path: Path) -> None:
    reported = tmp_path / "cpus"
    steep = submit(mesh, 1, "steep", reported)
    on_cpus(reported, 2)
    until(lambda: held(mesh, steep) == [(2, 1)], "core that is lent")
    comes = mesh.cli.submit("--gpus", "0", "--cpus", "1", "--", "sleep", "600")
    mesh.client.wait_for(comes, Phase.RUNNING)
    on_cpus(reported, 1)
    assert held(mesh, steep) == [(1, 1)]
    assert mesh.client.job(steep).preemptions == 0
    end(mesh, comes)
    on_cpus(reported, 2)
    end(mesh, steep)
