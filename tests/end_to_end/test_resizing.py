"""Real jobs of real processes are given other cores while they run: slimmed, lent to, and asked back, in the kernel."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.end_to_end.meshes import Mesh
from tests.end_to_end.waiting import until

from cotenant.core.model.lifecycle import Phase

pytestmark = pytest.mark.calm

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
    """Two CPUs that are not threads of one core."""
    siblings: dict[str, int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        file = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        siblings.setdefault(file.read_text() if file.exists() else str(cpu), cpu)
    return set(list(siblings.values())[:2])


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """A node of two cores and two GPUs, whatever the machine has."""
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


def submit(mesh: Mesh, gpus: int, kind: str, told: Path) -> str:
    job_id = mesh.cli.submit(
        "--gpus", str(gpus), "--cpus", "auto", "--model", f"never-seen-{kind}",
        "--", sys.executable, "-c", PROGRAM, kind, told,
    )  # fmt: skip
    mesh.client.wait_for(job_id, Phase.RUNNING)
    return job_id


def on_cpus(told: Path, count: int) -> list[int]:
    """Wait until a job runs on so many CPUs, in its own eyes."""

    def there() -> list[int]:
        cpus: list[int] = json.loads(told.read_text()) if told.exists() else []
        return cpus if len(cpus) == count else []

    return until(there, f"run on {count} CPUs")


def held(mesh: Mesh, job_id: str) -> list[tuple[int, int]]:
    """Cores of each task, and its own of these."""
    tasks = [task for part in mesh.client.job(job_id).attempt.allocations for task in part.tasks]
    return [(len(task.core_ids), task.own_cores) for task in tasks]


def end(mesh: Mesh, *job_ids: str) -> None:
    for job_id in job_ids:
        mesh.client.cancel(job_id)
    for job_id in job_ids:
        mesh.client.wait_for(job_id, Phase.CANCELLED)


def test_a_job_that_needs_one_core_is_slimmed_to_it_and_the_other_goes_to_a_job_that_waited(
    mesh: Mesh, tmp_path: Path
) -> None:
    told = tmp_path / "cpus"
    level = submit(mesh, 2, "level", told)
    on_cpus(told, 2)
    waiting = mesh.cli.submit("--gpus", "0", "--cpus", "1", "--", "sleep", "600")
    assert mesh.client.phase(waiting) is Phase.QUEUED
    mesh.client.wait_for(waiting, Phase.RUNNING)
    (cpu,) = on_cpus(told, 1)
    assert held(mesh, level) == [(1, 1)]
    other = mesh.client.job(waiting).attempt.allocations[0].tasks[0]
    assert cpu not in other.cpu_ids
    assert "resized" in [event.what for event in mesh.client.explain(level).events]
    slimmed_at = mesh.client.job(level).progress.step
    until(lambda: mesh.client.job(level).progress.step > slimmed_at + 150, "rate on one core, for 2.5 s")
    end(mesh, level, waiting)

    again = submit(mesh, 2, "level", told)
    assert held(mesh, again) == [(1, 0)], "the next of its kind starts with what was enough"
    end(mesh, again)


def test_a_spare_core_is_lent_and_taken_back_when_a_job_comes(mesh: Mesh, tmp_path: Path) -> None:
    told = tmp_path / "cpus"
    steep = submit(mesh, 1, "steep", told)
    on_cpus(told, 2)
    until(lambda: held(mesh, steep) == [(2, 1)], "core that is lent")
    comes = mesh.cli.submit("--gpus", "0", "--cpus", "1", "--", "sleep", "600")
    mesh.client.wait_for(comes, Phase.RUNNING)
    on_cpus(told, 1)
    assert held(mesh, steep) == [(1, 1)]
    assert mesh.client.job(steep).preemptions == 0
    end(mesh, comes)
    on_cpus(told, 2)
    end(mesh, steep)
