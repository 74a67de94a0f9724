"""The cost of looking up how an archived job ended, by the size of the archive.

The queue reads the archive if a job depends on a job that has left the queue. The reference is the bare SQLite query on
an open connection.
"""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from random import Random
from time import process_time

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.harness import Row, main  # noqa: E402 - the root of the checkout has to be on the path first

from cotenant.services.queue.jobs.archive import Archive  # noqa: E402 - likewise
from cotenant.v1 import job_pb2  # noqa: E402 - likewise

SIZES, SIZES_QUICK = (1_000, 10_000, 100_000), (1_000, 10_000)
LOOKUPS, BATCH, ARRAY = 500, 5_000, 1_000
GROWTH_MAX = 2.0


def measure(quick: bool) -> Sequence[Row]:
    """Query archives of several sizes."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as directory:
        for size in SIZES_QUICK if quick else SIZES:
            rows += asyncio.run(_of(Path(directory) / f"{size}.sqlite", size, rows))
    return rows


async def _of(path: Path, size: int, before: Sequence[Row]) -> list[Row]:
    archive, rng = Archive(path), Random(size)
    for start in range(0, size, BATCH):
        await archive.add([_job(number) for number in range(start, min(size, start + BATCH))])
    ids = [_id(rng.randrange(size)) for _ in range(LOOKUPS)]
    begin = process_time()
    for job_id in ids:
        assert await archive.find([job_id])
    lookup = (process_time() - begin) / LOOKUPS * 1000
    with closing(sqlite3.connect(path)) as connection:
        begin = process_time()
        for job_id in ids:
            connection.execute("SELECT job FROM jobs WHERE id = ?", (job_id,)).fetchone()
        raw = (process_time() - begin) / LOOKUPS * 1000
    begin = process_time()
    for number in range(20):
        array_id = f"array{number % (size // ARRAY):06}"
        assert sum((await archive.find([array_id]))[array_id].phases.values()) == ARRAY
    array = (process_time() - begin) / 20 * 1000
    bare = "bare query"
    grown = lookup / before[0].value if before else 1.0
    return [
        Row(
            f"how one of {size:,} jobs ended",
            lookup,
            "ms of processor",
            raw,
            bare,
            f"at most {GROWTH_MAX:g} times that of {SIZES[0]:,}",
            grown <= GROWTH_MAX,
        ),
        Row(f"how an array of {ARRAY:,} ended, of {size:,} jobs", array, "ms of processor", raw, bare),
    ]


def _id(number: int) -> str:
    return f"array{number // ARRAY:06}_{number % ARRAY}"


def _job(number: int) -> job_pb2.Job:
    job = job_pb2.Job(id=_id(number), phase=job_pb2.JOB_PHASE_SUCCEEDED, submitter="eve")
    job.spec.kind, job.spec.name, job.spec.tenant = job_pb2.JOB_KIND_TRAINING, "nightly", "vision"
    job.spec.command.extend(["python3", "train.py", "--data", "/data/imagenet" * 10])
    return job


if __name__ == "__main__":
    main(measure, __doc__ or "")
