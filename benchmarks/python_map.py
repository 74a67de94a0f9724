"""How many short calls a second `cotenant.map` makes on one machine, from the first submission to the last result.

The reference is a process pool of Python with as many workers, in the same run: what the calls cost without a mesh.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks import harness
from benchmarks.commands import running_mesh

import cotenant

TASKS, TASKS_QUICK = 1000, 200
PER_SECOND_MIN = 50.0
RESULT_SECONDS_MAX = 300.0


def square(number: int) -> int:
    """Return the square of a number: a call that costs nothing itself."""
    return number * number


def pooled(tasks: int, workers: int) -> float:
    """Return the calls per second of a process pool, with its start."""
    begin = time.perf_counter()
    with ProcessPoolExecutor(workers) as pool:
        assert len(list(pool.map(square, range(tasks)))) == tasks
    return tasks / (time.perf_counter() - begin)


def mapped(client: cotenant.Client, tasks: int, workers: int) -> float:
    """Return the calls per second of a map, with the start of its jobs."""
    begin = time.perf_counter()
    futures = client.map(square, range(tasks), cpus=1, workers=workers)
    assert [future.result(RESULT_SECONDS_MAX) for future in futures] == [number * number for number in range(tasks)]
    return tasks / (time.perf_counter() - begin)


def measure(quick: bool) -> list[harness.Row]:
    """Measure a map beside a process pool."""
    tasks, workers = TASKS_QUICK if quick else TASKS, max(1, (os.cpu_count() or 1) - 1)
    pool = pooled(tasks, workers)
    cotenant_command = str(Path(sys.executable).with_name("cotenant"))
    with (
        tempfile.TemporaryDirectory() as folder,
        running_mesh(cotenant_command) as environment,
        cotenant.Client(state_dir=environment["COTENANT_STATE_DIR"]) as client,
    ):
        os.chdir(folder)
        try:
            rate = mapped(client, tasks, workers)
        finally:
            os.chdir("/")
    name = f"cotenant.map of {tasks:,} calls, {workers} workers"
    bar = f"≥ {PER_SECOND_MIN:g}/s"
    return [harness.Row(name, rate, "1/s", pool, "a process pool", bar, rate >= PER_SECOND_MIN)]


if __name__ == "__main__":
    harness.main(measure, __doc__ or "")
