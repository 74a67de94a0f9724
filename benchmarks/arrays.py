"""The cost of arrays in the queue: submission, a cycle while most of the array waits, the end of a job, a restart.

Three sizes, with an array limit of ten jobs at once. The parts of the queue are measured on a store on disk, without
RPCs and without placement. The references are as many single jobs, or ten. All times are CPU time.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import harness  # noqa: E402 - the root of the checkout has to be on the path first

from cotenant import plugins  # noqa: E402 - likewise
from cotenant.codec import specs  # noqa: E402 - likewise
from cotenant.core.model.dependencies import Dependency  # noqa: E402 - likewise
from cotenant.core.model.job import JobKind, JobSpec, Request, Role  # noqa: E402 - likewise
from cotenant.core.model.job_array import read_array  # noqa: E402 - likewise
from cotenant.core.model.job_table import Capacity  # noqa: E402 - likewise
from cotenant.core.model.lifecycle import Phase  # noqa: E402 - likewise
from cotenant.core.scheduling.admission import RULES, choose  # noqa: E402 - likewise
from cotenant.services.queue.jobs.job_arrays import JobArrays  # noqa: E402 - likewise
from cotenant.services.queue.jobs.job_store import IdempotencyKey as Call  # noqa: E402 - likewise
from cotenant.services.queue.jobs.job_store import JobStore  # noqa: E402 - likewise
from cotenant.services.queue.jobs.queue_state import State  # noqa: E402 - likewise
from cotenant.services.queue.jobs.transitions import Record  # noqa: E402 - likewise
from cotenant.store.sqlite import SqliteStore  # noqa: E402 - likewise

SIZES = (100, 1_000, 10_000)
AT_ONCE = 10
ONE_CORE = (Role(request=Request(cores=1)),)
SPEC = JobSpec(name="sweep", kind=JobKind.CPU, roles=ONE_CORE, command=("python3", "sweep.py"))
SINGLES = 200  # single jobs submitted for comparison
ONCE = Call("CreateArray", "", b"")
SUBMIT_SECONDS, STEP_MS, CYCLE_RATIO = 5.0, 10.0, 2.0


async def _array(store: SqliteStore, size: int, **fields: object) -> tuple[State, float]:
    """Submit an array; return the state and the seconds."""
    state = State()
    spec = replace(SPEC, array=read_array(f"0-{size - 1}%{AT_ONCE}"), **fields)  # type: ignore[arg-type]  # of a spec
    arrays = JobArrays(JobStore(store, state))
    began = time.process_time()
    await arrays.create(spec, "bench", "", ONCE)
    return state, time.process_time() - began


async def _singles(store: SqliteStore) -> float:
    """Return the seconds to submit a single job."""
    job_store = JobStore(store, State())
    began = time.process_time()
    for _ in range(SINGLES):
        await job_store.create(SPEC, "bench", "", ONCE)
    return (time.process_time() - began) / SINGLES


async def _few(store: SqliteStore) -> State:
    """Return a state with as many single jobs as the array limit."""
    state = State()
    job_store = JobStore(store, state)
    for _ in range(AT_ONCE):
        await job_store.create(SPEC, "bench", "", ONCE)
    return state


def _cycles_per_second(state: State) -> float:
    """Return how many times per second ordering and admission can run."""
    policy = plugins.load("cotenant.queue_policies", "las", {})
    state.capacity = Capacity(0, 8, 2**40)

    def cycle() -> None:
        jobs = state.table.jobs(time.time())
        choose(jobs, policy, policy.order(jobs, time.time()), state.capacity, now=time.time(), rules=RULES)

    return harness.rate_per_second(cycle, seconds=0.2)


def _end(state: State, record: Record) -> float:
    """Return the seconds in which the queue processes the end of a job."""
    record.job.phase = specs.PHASES.to_wire(Phase.SUCCEEDED)
    began = time.process_time()
    state.sync(record)
    return time.process_time() - began


async def _measure(size: int, directory: Path) -> list[harness.Row]:
    single = await _singles(SqliteStore(directory / f"singles-{size}"))
    store = SqliteStore(directory / f"array-{size}")
    state, submit = await _array(store, size)
    rows = [
        harness.Row(
            f"taking in an array of {size:,}",
            submit,
            "s",
            single * size,
            "one by one",
            f"≤ {SUBMIT_SECONDS:g} s" if size == max(SIZES) else "",
            submit <= SUBMIT_SECONDS if size == max(SIZES) else None,
        )
    ]
    few = await _few(SqliteStore(directory / f"few-{size}"))
    cycle, reference = 1e3 / _cycles_per_second(state), 1e3 / _cycles_per_second(few)
    name = f"order and choice with an array of {size:,}, {AT_ONCE} at once"
    bar = f"≤ {CYCLE_RATIO:g} ×"
    rows.append(harness.Row(name, cycle, "ms", reference, f"{AT_ONCE} jobs", bar, cycle <= CYCLE_RATIO * reference))
    again = State()
    began = time.process_time()
    await JobStore(store, again).load()
    rows.append(harness.Row(f"reading an array of {size:,} at the start", time.process_time() - began, "s"))
    ends = [_end(state, state.records[next(iter(state.table.ids))]) * 1e3 for _ in range(50)]
    slowest = harness.percentile(ends, 95)
    name = f"the end of one job of {size:,}, p95"
    rows.append(harness.Row(name, slowest, "ms", bar=f"≤ {STEP_MS:g} ms", holds=slowest <= STEP_MS))
    return [*rows, await _released(SqliteStore(directory / f"released-{size}"), size)]


async def _released(store: SqliteStore, size: int) -> harness.Row:
    """Measure the end of a job that a whole array depends on."""
    state = State()
    job_store = JobStore(store, state)
    first = await job_store.create(SPEC, "bench", "", ONCE)
    spec = replace(SPEC, array=read_array(f"0-{size - 1}"), dependencies=(Dependency(first.id),))
    await JobArrays(job_store).create(spec, "bench", "", ONCE)
    seconds = _end(state, first)
    assert len(state.table.ids) == size
    return harness.Row(f"the end of what an array of {size:,} without a limit waits for", seconds, "s")


def measure(quick: bool) -> Iterator[harness.Row]:
    """Measure all sizes, or the smaller two."""
    with tempfile.TemporaryDirectory() as directory:
        for size in SIZES[: 2 if quick else 3]:
            yield from asyncio.run(_measure(size, Path(directory)))


if __name__ == "__main__":
    harness.main(lambda quick: list(measure(quick)), __doc__ or "")
