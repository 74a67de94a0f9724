from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from cotenant.core.model.dependencies import Dependency
from cotenant.core.model.job import JobSpec, ReplicaRange, Role
from cotenant.core.model.job_array import COUNT_MAX, ArrayTask, read_array
from cotenant.core.model.lifecycle import Phase
from cotenant.internal.v1 import placement_service_pb2 as placement_pb2
from cotenant.leadership.leader_handlers import LeaderHandlers
from cotenant.rpc.channel import connect
from cotenant.services.queue.api.server import JobQueue, QueueConfig
from cotenant.services.queue.attempts.attempt_watcher import TAKEN_AT_ONCE
from cotenant.services.queue.jobs.job_arrays import JobArrays
from cotenant.services.queue.jobs.job_store import JOBS, IdempotencyKey, JobStore
from cotenant.services.queue.jobs.queue_state import ADDED_AT_ONCE, LOADED_AT_ONCE, State
from cotenant.services.queue.jobs.transitions import Record, RecordLoader, load_record, new_record
from cotenant.store import schema
from cotenant.store.memory import MemoryStore
from cotenant.store.port import Entry, Put
from cotenant.v1 import job_pb2, resources_pb2

LARGE = resources_pb2.ResourceRequest(memory_bytes=2**63 - 1)


async def test_loading_many_jobs_does_not_block_other_tasks() -> None:
    """One of these tasks renews the leader's lease: it would expire before all jobs are read, forever."""
    store, state, chunks = MemoryStore(), State(), 5
    for number in range(chunks * LOADED_AT_ONCE):
        record = new_record(f"{number:06}", JobSpec(roles=(Role(),)), "eve", "")
        await store.transact([], [Put(JOBS + record.id, record.stored.SerializeToString())])
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.ensure_future(others())
    await asyncio.sleep(0)
    turns = 0
    await JobStore(store, state).load()
    task.cancel()
    assert turns >= 3 * chunks  # while records are decoded, gates updated, and jobs added
    assert len(state.records) == chunks * LOADED_AT_ONCE


class Counting(State):
    """Counts the jobs processed between two turns of other tasks."""

    def __init__(self) -> None:
        super().__init__()
        self.looked = self.most = 0
        self.seen: set[int] = set()  # numbers of jobs seen by other tasks

    def sync(self, record: Record) -> None:
        super().sync(record)
        self.looked += 1
        self.most = max(self.most, self.looked)

    async def others(self) -> None:
        while True:
            self.seen.add(len(self.records))
            self.looked = 0
            await asyncio.sleep(0)


def largest() -> JobSpec:
    return JobSpec(roles=(Role(),), command=("true",), array=read_array(f"0-{COUNT_MAX - 1}"))


async def test_adding_the_largest_array_does_not_block_other_tasks_and_is_atomic() -> None:
    state = Counting()
    others = asyncio.ensure_future(state.others())
    await JobArrays(JobStore(MemoryStore(), state)).create(largest(), "eve", "", IdempotencyKey("CreateJob", "", b""))
    others.cancel()
    assert state.most <= ADDED_AT_ONCE
    assert state.seen == {0, COUNT_MAX}
    assert len(state.table) == COUNT_MAX


async def test_an_array_is_added_completely_if_its_caller_is_cancelled() -> None:
    state = Counting()
    creating = asyncio.ensure_future(
        JobArrays(JobStore(MemoryStore(), state)).create(largest(), "eve", "", IdempotencyKey("CreateJob", "", b""))
    )
    while not state.table:  # noqa: ASYNC110  # no event tells of it
        await asyncio.sleep(0)
    assert len(state.table) < COUNT_MAX
    creating.cancel()
    await asyncio.wait([creating])
    assert len(state.table) == COUNT_MAX


def test_an_array_loads_before_its_dependency() -> None:
    """As when the clock of the leader that created the dependency was fast: its id is greater, so it loads later."""
    tasks = [
        JobSpec(roles=(Role(),), dependencies=(Dependency("b"),), array_task=ArrayTask("a", index, 2, running_max=1))
        for index in range(2)
    ]
    records = [new_record(f"a_{index}", task, "eve", "") for index, task in enumerate(tasks)]
    state = State()
    state.load([*records, new_record("b", JobSpec(roles=(Role(),)), "eve", "")])
    assert list(state.records) == ["a_0", "a_1", "b"]
    assert not any(state.dependency_gate.open(record) for record in records)
    assert list(state.table.ids) == ["b"]


def mixed_records() -> list[Record]:
    """Jobs of few specs, as read from a store: most wait as they were submitted, some ran, ended, or wait for more."""
    specs = [
        JobSpec(roles=(Role(replicas=1 + number % 2),), tenant=f"t{number % 3}", priority=number % 2)
        for number in range(6)
    ]
    specs += [
        replace(specs[0], begin_seconds=4e9),
        replace(specs[1], dependencies=(Dependency("000003"),)),
        JobSpec(roles=(Role(elastic=ReplicaRange(1, 3)),)),
        replace(specs[0], pre_run_seconds=60.0),
    ]
    loader, records = RecordLoader(), []
    for number in range(60):
        stored = new_record(f"{number:06}", specs[number % len(specs)], "eve", "").stored
        stored.job.create_time.FromNanoseconds(10**18 - 10**9 * (number % 7))  # not all in the order of their ids
        for event in stored.events:
            event.time.FromNanoseconds(10**18)  # so that records take as many bytes whenever they are made
        if number % 9 == 3:
            stored.job.phase = job_pb2.JOB_PHASE_SUCCEEDED
        if number % 9 == 5:
            stored.job.attempt.number = 2
            stored.job.attempt.end_time.FromSeconds(10**9 + number)
        records.append(loader.load(Entry(JOBS + stored.job.id, stored.SerializeToString(), 1, 1 + number)))
    return records


def by_arrival(state: State) -> list[str]:
    rows = state.table.jobs(2e9).by_arrival
    assert rows is not None
    return [state.table.ids[row] for row in rows.tolist()]


def classes(state: State) -> set[frozenset[str]]:
    """Return the waiting jobs of each equivalence class."""
    codes = dict(zip(state.table.ids, state.table.codes().tolist(), strict=True))
    return {frozenset(job for job in codes if codes[job] == code) for code in codes.values()}


def test_jobs_that_are_loaded_together_are_as_if_added_one_by_one() -> None:
    together, alone = State(), State()
    together.load(mixed_records())
    records = mixed_records()
    for record in records:
        alone.dependency_gate.update(record, backs_off=alone.delayed(record))
    for record in records:
        alone.add(record)
    assert 20 < len(together.table) < 60
    assert set(together.table.ids) == set(alone.table.ids)
    columns = together.table.jobs(2e9), alone.table.jobs(2e9)
    rows = [[state.table.row(job_id) for job_id in sorted(alone.table.ids)] for state in (together, alone)]
    for name in ("sequence", "arrival_seconds", "gpu_milli", "tenant", "priority", "waiting_since", "running"):
        assert np.array_equal(*(getattr(one, name)[row] for one, row in zip(columns, rows, strict=True))), name
    assert by_arrival(together) == by_arrival(alone)
    assert classes(together) == classes(alone)
    assert list(together.unestimated) == list(alone.unestimated)
    assert together.footprint.by_tenant() == alone.footprint.by_tenant()
    assert together.job_index.counts == alone.job_index.counts
    assert together.tenant_quota.live == alone.tenant_quota.live
    assert set(together.resizable) == set(alone.resizable)
    for job_id in alone.records:
        told, expected = together.records[job_id], alone.records[job_id]
        assert together.message(told) == alone.message(expected)
        assert told.sequence == expected.sequence
        assert (told.counted_as is None) == (expected.counted_as is None)


async def test_a_placement_snapshot_does_not_block_other_tasks() -> None:
    async with connect("127.0.0.1:1") as nowhere:
        queue = JobQueue(LeaderHandlers(), MemoryStore(), QueueConfig(), nowhere, nowhere)
        picture = placement_pb2.WatchAttemptsResponse(revision=9, snapshot=True)
        for number in range(3 * TAKEN_AT_ONCE):
            queue.state.add(new_record(f"{number:06}", JobSpec(roles=(Role(),)), "eve", ""))
            attempt = picture.attempts.add().attempt
            attempt.job_id, attempt.number, attempt.epoch = f"{number:06}", 1, 3
            attempt.state = job_pb2.ATTEMPT_STATE_RUNNING
        seen = set()

        async def others() -> None:
            while True:
                seen.add(len(queue.state.held))
                await asyncio.sleep(0)

        task = asyncio.ensure_future(others())
        await queue.attempt_watcher._handle_event(picture)
        task.cancel()
        await queue.close()
    assert seen >= {TAKEN_AT_ONCE, 2 * TAKEN_AT_ONCE}
    assert {record.phase for record in queue.state.records.values()} == {Phase.RUNNING}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda spec: spec.roles.extend([job_pb2.Role(name="b", replicas=2**31 - 1, resources=LARGE)]),
        lambda spec: spec.roles.extend([job_pb2.Role(name="b", replicas=-1)]),
        lambda spec: setattr(spec.roles[0].resources, "memory_bytes", -1),
        lambda spec: spec.ClearField("roles"),
        lambda spec: spec.ClearField("roles") or spec.pre_run.FromSeconds(5),
    ],
)
def test_a_record_with_invalid_requests_is_reported_with_its_key(spoil: Callable[[job_pb2.JobSpec], None]) -> None:
    stored = new_record("000001", JobSpec(roles=(Role(),)), "eve", "").stored
    spoil(stored.job.spec)
    with pytest.raises(schema.BadRecord, match=f"{JOBS}000001 is damaged"):
        load_record(Entry(f"{JOBS}000001", stored.SerializeToString(), 1, 1))
