"""Orders of lists: every job once, on whichever page, in the order that was asked for."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.services.mesh import Mesh, reason, running, spec
from tests.verification.fuzz.loop_lag import LoopLag

from cotenant.codec import errors, specs
from cotenant.codec.specs import spec_from_wire, timestamp
from cotenant.core.model.validation import Violation
from cotenant.rpc.paging import PageRequest
from cotenant.services.queue.api.job_order import FIELDS, KNOWN, JobOrder
from cotenant.services.queue.api.job_pages import list_jobs
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.transitions import Record
from cotenant.storage.v1 import records_pb2
from cotenant.v1 import job_pb2
from cotenant.v1 import job_service_pb2 as pb

NAMES = st.sampled_from(["", "a", "ab", "abc", "b", "é", "éa", "\U0001f600"])
TIMES = st.sampled_from([0.0, 1.5, 2.0, 1e9 + 0.25])
MANY = 50_000
ADDED_MAX = 5  # while pages are read


def record(job_id: str, **fields: Any) -> Record:
    """Return a record; `started` and `ended` are times, 0 for none."""
    job = job_pb2.Job(id=job_id, spec=spec(name=fields.get("name", ""), priority=fields.get("priority", 0)))
    job.phase = job_pb2.JOB_PHASE_SUCCEEDED if fields.get("ended") else job_pb2.JOB_PHASE_QUEUED
    job.create_time.CopyFrom(timestamp(fields.get("created", 5.0)))
    for name in ("start", "end"):
        if at := fields.get(f"{name}ed"):
            getattr(job, f"{name}_time").CopyFrom(timestamp(at))
    job.attained_gpu_seconds = fields.get("attained", 0.0)
    made = Record(records_pb2.StoredJob(schema_version=1, job=job), spec_from_wire(job.spec))
    if fields.get("compacted"):
        made.compact()
    return made


@st.composite
def populations(draw: st.DrawFn) -> list[Record]:
    count = draw(st.integers(0, 12))
    return [
        record(
            f"{place:04d}",
            name=draw(NAMES),
            priority=draw(st.integers(-1, 1)),
            started=draw(TIMES),
            ended=draw(TIMES),
            attained=draw(st.sampled_from([0.0, 1.0, 2.5])),
            compacted=draw(st.booleans()),
        )
        for place in range(count)
    ]


ORDERS = st.lists(
    st.tuples(st.sampled_from(KNOWN), st.sampled_from(["", " desc", " asc"])), unique_by=lambda one: one[0], max_size=4
)


def in_order(records: list[Record], order: list[tuple[str, str]]) -> list[str]:
    """Return the ids, by a slow comparison of two jobs at a time."""

    def compare(first: Record, second: Record) -> int:
        for name, suffix in [*order, ("create_time", " desc")]:
            values = []
            for one in (first, second):
                value = one.id if name == "create_time" else FIELDS[name](one, 0.0)
                values.append(float("inf") if value is None else value)
            if values[0] != values[1]:
                lower = values[0] < values[1]  # type: ignore[operator]  # of the same type
                return 1 if lower == (suffix == " desc") else -1
        return 0

    return [one.id for one in sorted(records, key=functools.cmp_to_key(compare))]


@given(populations(), ORDERS, st.integers(1, 4), st.randoms(use_true_random=False))
def test_pages_have_every_unchanged_job_once_in_order(
    records: list[Record], order: list[tuple[str, str]], size: int, rng: Random
) -> None:
    """Between two pages, jobs that were not listed so far may be deleted and others added."""
    text = ",".join(f"{name}{suffix}" for name, suffix in order)
    by_id = {one.id: one for one in records}
    numbers = itertools.count()
    kept = {one.id for one in records if rng.random() < 0.7}

    async def read() -> list[str]:
        seen: list[str] = []
        token = ""
        while True:
            found: list[Violation] = []
            asked = JobOrder(text, found)
            page = PageRequest.check(size, token, "jobs", found, fits=asked.fits)
            assert not found
            keys = await asked.next_keys([by_id[one] for one in sorted(by_id)], page.after, size + 1)
            filled = await page.fill(keys, lambda job_id: job_pb2.Job(id=job_id))
            seen += [job.id for job in filled.items]
            if not (token := filled.next_token):
                return seen
            if gone := [one for one in by_id if one not in kept]:
                del by_id[rng.choice(gone)]
            if (number := next(numbers)) < ADDED_MAX:
                by_id[f"new{number}"] = record(f"new{number}", name=rng.choice(["", "a", "b"]))

    seen = asyncio.run(read())
    assert len(seen) == len(set(seen))
    expected = in_order([one for one in records if one.id in kept], order)
    assert [one for one in seen if one in kept] == expected


@pytest.mark.parametrize(
    ("order", "wrong"),
    [
        ("nome", "'nome' is not a field to sort by; those are create_time, start_time, end_time, priority, name, "),
        ("name up", "'name up' must be a field, or a field and `desc`"),
        ("name,priority,name desc", "names name twice"),
        ("name,,priority", "'' is not a field to sort by"),
    ],
)
async def test_wrong_orders_are_named(mesh: Mesh, order: str, wrong: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await mesh.jobs.ListJobs(pb.ListJobsRequest(order_by=order, page_size=-1))
    found = errors.from_error(refused.value).violations
    assert [one.field for one in found] == ["order_by", "page_size"]
    assert wrong in found[0].description


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    async with running() as mesh:
        yield mesh


async def test_tokens_survive_a_restart_and_belong_to_one_list(mesh: Mesh) -> None:
    ids = [await mesh.submit(priority=number % 3, name="ab"[number % 2]) for number in range(8)]
    first = pb.ListJobsRequest(page_size=3, order_by="priority desc, name")
    page = await mesh.jobs.ListJobs(first)
    seen = [job.id for job in page.jobs]
    plain = await mesh.jobs.ListJobs(pb.ListJobsRequest(page_size=3))
    await mesh.restart("queue")
    while page.next_page_token:
        first.page_token = page.next_page_token
        page = await mesh.jobs.ListJobs(first)
        seen += [job.id for job in page.jobs]
    assert seen == [ids[place] for place in (2, 5, 4, 7, 1, 6, 0, 3)]
    again = await mesh.jobs.ListJobs(pb.ListJobsRequest(page_size=10, page_token=plain.next_page_token))
    assert [job.id for job in again.jobs] == ids[4::-1]
    for other in (
        pb.ListJobsRequest(),
        pb.ListJobsRequest(order_by="priority"),
        pb.ListJobsRequest(order_by="priority desc, name", filter=pb.JobFilter(standalone_only=True)),
    ):
        other.page_token = first.page_token
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await mesh.jobs.ListJobs(other)
        assert reason(refused.value) == "INVALID_ARGUMENT"
        assert "page_token: belongs to another list" in errors.from_error(refused.value).message


async def test_jobs_are_filtered_by_time_and_by_array(mesh: Mesh) -> None:
    await mesh.agent("n1", gpus=1, run_seconds=0.01)
    first = await mesh.submit(name="first")
    await mesh.reach(first, "SUCCEEDED")
    array = await mesh.submit_array(gpus=1, array=job_pb2.ArraySpec(ranges=[job_pb2.IndexRange(first=0, last=1)]))
    ended, task = await mesh.job(first), await mesh.job(f"{array}_0")

    async def found(**conditions: Any) -> set[str]:
        listed = await mesh.jobs.ListJobs(pb.ListJobsRequest(filter=pb.JobFilter(**conditions)))
        return {job.id for job in listed.jobs}

    tasks = {f"{task.spec.array_task.array_id}_{index}" for index in (0, 1)}
    assert await found(standalone_only=True) == {first}
    assert await found(created_since=ended.create_time, created_before=task.create_time) == {first}
    assert await found(created_since=task.create_time) == tasks
    assert first in await found(ended_since=ended.end_time)
    assert first not in await found(ended_before=ended.end_time)
    later = timestamp(specs.seconds(ended.end_time) + 1e-3)
    assert await found(ended_since=ended.end_time, ended_before=later, standalone_only=True) == {first}
    assert await found(ended_before=timestamp(1.0)) == set()


@pytest.mark.deep
async def test_sorting_very_many_jobs_does_not_hold_the_event_loop() -> None:
    state, rng, lag = State(), Random(1), LoopLag()
    records = [
        record(f"{place:012d}", name=str(rng.random()), started=rng.random() * 1e9, compacted=True)
        for place in range(MANY)
    ]
    for _ in state.load_in_slices(records):
        await asyncio.sleep(0)
    with lag.watching():
        for order in ("name", "start_time desc, name"):
            page = await list_jobs(state, pb.ListJobsRequest(order_by=order, page_size=1000))
            assert (len(page.jobs), page.total_size) == (1000, MANY)
            assert lag.finding() == "", order
    names = [job.spec.name for job in (await list_jobs(state, pb.ListJobsRequest(order_by="name"))).jobs]
    assert names == sorted(one.spec.name for one in records)[:100]
