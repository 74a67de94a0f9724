"""Tenants beside a tenant with very many tasks: fair shares, forecasts, and the cost of adding the tasks."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import replace
from typing import Any

import pytest
from tests.support.gc_defaults import untune_gc
from tests.unit.services.mesh import BACKFILL, Mesh, running, spec, until
from tests.unit.services.queue.test_loading import largest
from tests.verification.fuzz import loop_lag

from cotenant.cli import views
from cotenant.codec.specs import duration, seconds
from cotenant.core.model.job import JobSpec, Role
from cotenant.core.model.job_array import read_array
from cotenant.core.scheduling.admission import RULES
from cotenant.rpc import gc_tuning
from cotenant.services.queue.jobs.job_arrays import JobArrays
from cotenant.services.queue.jobs.job_store import IdempotencyKey, JobStore
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.scheduling.wait_metrics import WaitMetrics
from cotenant.store.memory import MemoryStore
from cotenant.v1 import array_service_pb2 as array_pb
from cotenant.v1 import job_service_pb2 as pb
from cotenant.v1 import tenant_service_pb2 as tenant_pb2

PIECE_SECONDS_MAX = loop_lag.STEP_SECONDS_MAX  # unsliced it takes 0.3
COUNT_SECONDS_MAX = 0.05
ATTEMPTS = 3  # other processes may slow a slice down, but hardly each time


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    async with running() as mesh:
        await mesh.agent("n1", gpus=4, cores=24)
        yield mesh


async def explained(mesh: Mesh, job_id: str) -> pb.ExplainJobResponse:
    told: pb.ExplainJobResponse = await mesh.jobs.ExplainJob(pb.ExplainJobRequest(id=job_id))
    return told


async def array(mesh: Mesh, count: int, running_max: int = 0, **fields: Any) -> str:
    asked = spec(cores=1, **fields)
    asked.array.ranges.add(first=0, last=count - 1)
    asked.array.running_max = running_max
    created = await mesh.arrays.CreateArray(array_pb.CreateArrayRequest(spec=asked))
    return str(created.array.id)


async def ordered(mesh: Mesh, job_id: str) -> pb.ExplainJobResponse:
    """Return the explanation of a job once a cycle has ordered all waiting jobs."""
    state = mesh.parts["queue"].service.state

    def known() -> bool:
        return job_id in set(state.ranked) and len(state.ranked) == len(state.table.ids) - len(state.held)

    await until(known)
    return await explained(mesh, job_id)


async def test_a_job_of_another_tenant_starts_before_the_tasks_of_a_large_array(mesh: Mesh) -> None:
    tasks = await array(mesh, 300, tenant="large", expected_duration=duration(60))
    await mesh.reach(f"{tasks}_3", "RUNNING")
    other = await mesh.submit(cores=1, tenant="small")
    told = await ordered(mesh, other)
    assert told.position == 1
    assert views.wait_of(told.job) == "capacity"
    assert 50 < seconds(told.forecast.start) < 75, "the first of the running tasks ends then"
    mesh.agents["n1"].finish((f"{tasks}_0", 1))
    await mesh.reach(other, "RUNNING")


async def test_a_waiting_task_names_its_tenants_fair_share(mesh: Mesh) -> None:
    tasks = await array(mesh, 20, tenant="large")
    await mesh.reach(f"{tasks}_3", "RUNNING")
    other = await mesh.submit(cores=1, tenant="small")
    await ordered(mesh, other)
    told = await explained(mesh, f"{tasks}_4")
    assert views.wait_of(told.job) == "fair_share"
    assert "tenant large holds 100% of the GPUs, its fair share is 50%" in told.summary
    assert told.job.refusal.numbers["tenant_share"] == 1.0
    assert told.job.refusal.numbers["tenant_fair_share"] == 0.5


async def test_fair_shares_follow_weights(mesh: Mesh) -> None:
    tasks = await array(mesh, 20, tenant="large")
    await mesh.reach(f"{tasks}_3", "RUNNING")
    weighed = tenant_pb2.Tenant(id="small", weight=3)
    await mesh.tenants.CreateTenant(tenant_pb2.CreateTenantRequest(tenant=weighed))
    await mesh.submit(cores=1, tenant="small")
    told = await ordered(mesh, f"{tasks}_4")
    assert "its fair share is 25%" in told.summary


async def test_without_fair_share_the_policy_alone_orders_all_jobs() -> None:
    async with running(queue_config=replace(BACKFILL, rules=RULES)) as mesh:
        await mesh.agent("n1", gpus=4, cores=24)
        tasks = await array(mesh, 20, tenant="large")
        await mesh.reach(f"{tasks}_3", "RUNNING")
        told = await ordered(mesh, await mesh.submit(cores=1, tenant="small"))
        assert told.position == 17


# Forecasts -----------------------------------------------------------------------------------------------------


async def test_tasks_held_back_by_their_array_count_as_ahead() -> None:
    async with running() as mesh:
        await mesh.agent("n1", gpus=1, cores=24)
        tasks = await array(mesh, 50, running_max=1, expected_duration=duration(60))
        await mesh.reach(f"{tasks}_0", "RUNNING")
        other = await mesh.submit(cores=1)
        told = await ordered(mesh, other)
        assert seconds(told.forecast.start) == pytest.approx(50 * 60, rel=0.1)
        assert told.ahead_count == 49


async def test_an_array_below_its_limit_delays_no_job() -> None:
    async with running() as mesh:
        await mesh.agent("n1", gpus=2, cores=24)
        tasks = await array(mesh, 50, running_max=1, expected_duration=duration(60))
        await mesh.reach(f"{tasks}_0", "RUNNING")
        long = await mesh.submit(cores=1, expected_duration=duration(600))
        await mesh.reach(long, "RUNNING")
        told = await ordered(mesh, await mesh.submit(cores=1))
        assert seconds(told.forecast.start) == pytest.approx(600, rel=0.1)


async def test_a_job_behind_very_many_is_forecast_from_the_backlog(mesh: Mesh) -> None:
    tasks = await array(mesh, 1504, expected_duration=duration(40))
    await mesh.reach(f"{tasks}_3", "RUNNING")
    other = await mesh.submit(cores=1)
    told = await ordered(mesh, other)
    assert told.ahead_count == 1500
    assert seconds(told.forecast.start) == pytest.approx(1504 * 40 / 4, rel=0.1)
    assert "estimated from the 1,500 jobs ahead of it" in told.outlook


async def test_a_job_before_its_first_cycle_has_no_forecast(mesh: Mesh) -> None:
    waits = await mesh.submit(gpus=4)
    await mesh.reach(waits, "RUNNING")
    other = await mesh.submit(cores=1)
    await ordered(mesh, other)
    mesh.parts["queue"].service.state.ranked = ()
    told = await explained(mesh, other)
    assert told.outlook == "start time unknown until the next scheduling cycle"


# What it costs others ------------------------------------------------------------------------------------------


async def longest_piece(work: Coroutine[Any, Any, object]) -> float:
    """Await some work; return the longest callback of the event loop in between, in CPU seconds.

    The thread's own CPU time, without garbage collection and scaled to a machine of the usual speed: neither a loaded
    machine nor other data of the process counts.
    """
    lag = loop_lag.LoopLag()
    with lag.watching():
        await asyncio.create_task(work)  # its steps are separate callbacks
    return lag.take().seconds * loop_lag.STEP_SECONDS_MAX / loop_lag.bound_seconds()


@pytest.fixture
def settled() -> Iterator[None]:
    """Move long-lived objects out of the garbage collector's reach, as servers do."""
    thresholds = gc.get_threshold()
    gc_tuning.tune_gc()
    yield
    untune_gc(thresholds)


@pytest.mark.deep
@pytest.mark.usefixtures("settled")
async def test_arrays_are_added_in_slices() -> None:
    pieces: list[float] = []
    while len(pieces) < ATTEMPTS and not (pieces and pieces[-1] < PIECE_SECONDS_MAX):
        state = State()
        arrays = JobArrays(JobStore(MemoryStore(), state))
        longest = [
            await longest_piece(arrays.create(largest(), "eve", "", IdempotencyKey("CreateJob", "", b"")))
            for _ in range(3)
        ]
        assert len(state.table) == 3 * len(largest().array.indices)  # type: ignore[union-attr]  # it has one
        pieces.append(max(longest))
    assert min(pieces) < PIECE_SECONDS_MAX


@pytest.mark.deep
@pytest.mark.usefixtures("settled")
async def test_counting_waiting_jobs_holds_up_no_other_call() -> None:
    state = State()
    await JobArrays(JobStore(MemoryStore(), state)).create(largest(), "eve", "", IdempotencyKey("CreateJob", "", b""))

    async def count() -> None:
        assert sum(WaitMetrics(state).report(1.0).values()) == len(state.records)

    assert min([await longest_piece(count()) for _ in range(ATTEMPTS)]) < COUNT_SECONDS_MAX


async def test_a_repeated_call_adds_an_array_once() -> None:
    state, store = State(), MemoryStore()
    arrays = JobArrays(JobStore(store, state))
    several_commits = JobSpec(roles=(Role(),), command=("true",), array=read_array("0-999"))
    made = await arrays.create(several_commits, "eve", "", IdempotencyKey("CreateJob", "", b""))
    task = made.spec.array_task
    assert task
    other = State()
    again = JobStore(store, other).array_recovery
    await asyncio.gather(again.settle(task.array_id), again.settle(task.array_id))
    assert len(other.records) == len(other.ids) == len(other.table) == task.count
