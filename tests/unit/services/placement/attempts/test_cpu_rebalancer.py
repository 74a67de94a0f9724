"""Live CPU rebalancing matches the simulator: cores go where they gain most, by measured rates of jobs and classes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest
from benchmarks.agents import SimulatedAgent
from tests.unit.services.allocators import ScriptedAllocator
from tests.unit.services.mesh import Mesh, eventually, running, until

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.core.sizing.resize import ResizableJob
from cotenant.services.placement.api.server import PlacementConfig
from cotenant.services.placement.attempts import job_classes
from cotenant.v1 import job_pb2
from cotenant.v1 import tenant_service_pb2 as tenant_pb2

T0 = 1_000_000


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> ScriptedAllocator:
    allocator = ScriptedAllocator()
    allocator.use(monkeypatch)
    return allocator


@pytest.fixture
async def mesh(allocator: ScriptedAllocator) -> AsyncIterator[Mesh]:
    async with running() as mesh:
        yield mesh


def holds(cores: int, own: int) -> Callable[[job_pb2.Job], bool]:
    def so(job: job_pb2.Job) -> bool:
        (task,) = job.attempt.allocations[0].tasks
        return (len(task.core_ids), task.own_cores or len(task.core_ids), task.target_cores) == (cores, own, 0)

    return so


def at_most(cores: int) -> Callable[[ResizableJob], tuple[int, ...]]:
    return lambda running: (min(cores, running.most),)


def measured(agent: SimulatedAgent, job_id: str, rates: dict[int, float]) -> None:
    """Report rates as a profile does."""
    reports = [agent_pb2.ProfileReport(job_id=job_id, number=1, cores=n, rate_per_second=r) for n, r in rates.items()]
    agent.send(profiled=[*reports, agent_pb2.ProfileReport(job_id=job_id, number=1, done=True)])


def progress(job_id: str, step: int, seconds: float, phase: str = "") -> agent_pb2.ProgressReport:
    told = job_pb2.Progress(step=step, phase=phase, phase_step=step)
    told.step_time.FromNanoseconds(int((T0 + seconds) * 1e9))
    return agent_pb2.ProgressReport(job_id=job_id, number=1, progress=told)


async def test_spare_cores_go_where_they_gain_most(mesh: Mesh, allocator: ScriptedAllocator) -> None:
    agent = await mesh.agent("n1", gpus=8, cores=8)
    other = await mesh.submit(gpus=0, cores=4)
    await mesh.reach(other, "RUNNING")
    first, second = await mesh.submit(name="first"), await mesh.submit(name="second")
    for job_id in (first, second):
        await mesh.reach(job_id, "RUNNING")
    allocator.otherwise = at_most(3)  # of 4 cores each has one of its own; the other two are spare
    await mesh.reach(first, "RUNNING", holds(3, 1))  # nothing tells them apart
    measured(agent, first, {1: 10.0, 2: 10.1, 3: 10.1})
    measured(agent, second, {1: 10.0, 2: 15.0, 3: 18.0})
    await mesh.reach(second, "RUNNING", holds(3, 1))
    await mesh.reach(first, "RUNNING", holds(1, 1))
    assert agent.stops == []


async def test_a_job_owns_cores_up_to_its_share_and_the_rest_is_lent(mesh: Mesh, allocator: ScriptedAllocator) -> None:
    await mesh.agent("n1", gpus=8, cores=24)
    job_id = await mesh.submit()
    await mesh.reach(job_id, "RUNNING")
    for wish, own in ((1, 1), (2, 2), (5, 3), (3, 3), (2, 2)):
        allocator.wishes[job_id] = (wish,)
        await mesh.reach(job_id, "RUNNING", holds(wish, own))


async def test_a_job_gets_its_share_back(mesh: Mesh, allocator: ScriptedAllocator) -> None:
    await mesh.agent("n1", gpus=2, cores=4)
    slim, greedy = await mesh.submit(), await mesh.submit()
    for job_id in (slim, greedy):
        await mesh.reach(job_id, "RUNNING")
    allocator.wishes = {slim: (1,), greedy: at_most(9)}
    await mesh.reach(greedy, "RUNNING", holds(3, 2))
    allocator.wishes[slim] = (2,)
    await mesh.reach(slim, "RUNNING", holds(2, 2))
    await mesh.reach(greedy, "RUNNING", holds(2, 2))


async def test_a_window_counts_only_after_warm_up_on_one_allocation_in_training(
    mesh: Mesh, allocator: ScriptedAllocator
) -> None:
    allocator.warm_up_seconds, allocator.measure_seconds = 2.0, 3.0
    await mesh.restart("placement")
    agent = await mesh.agent("n1", gpus=8, cores=24)
    job_id = await mesh.submit()
    await mesh.reach(job_id, "RUNNING")

    def send(*steps: tuple[int, float], phase: str = "") -> None:
        agent.send(progress=[progress(job_id, step, seconds, phase) for step, seconds in steps])

    send((0, 0.0), (1, 1.0), (10, 2.0), (30, 4.0), (40, 5.0))
    await until(lambda: bool(allocator.asked.get(job_id)) and bool(allocator.asked[job_id][-1].points))
    last = allocator.asked[job_id][-1]
    assert [(point.cores, point.rate) for point in last.points] == [(3, 10.0)], "nothing of before step 10"
    assert last.rate_per_second == 10.0
    allocator.wishes[job_id] = (4,)
    await mesh.reach(job_id, "RUNNING", holds(4, 3))
    send((50, 6.0), (60, 7.0), (99, 8.0))  # the window before was of other cores
    send((0, 8.5), (1, 11.0), (2, 15.0), phase="validation")
    send((130, 16.0), (140, 18.0), (200, 21.0))
    await until(lambda: len(allocator.asked[job_id][-1].points) > 1)
    assert [(point.cores, point.rate) for point in allocator.asked[job_id][-1].points] == [(3, 10.0), (4, 20.0)]


async def test_the_next_job_of_a_class_starts_from_its_measured_rates(
    mesh: Mesh, allocator: ScriptedAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_classes, "SAVE_SECONDS", 0.05)
    await mesh.restart("placement")
    agent = await mesh.agent("n1", gpus=8, cores=24)
    first = await mesh.submit(model="never-seen")
    await mesh.reach(first, "RUNNING")
    measured(agent, first, {1: 10.0, 2: 10.0, 3: 10.0})

    async def kept() -> list[str]:
        return await mesh.records_left("placement/kinds/")

    await eventually(kept)
    await mesh.restart("placement")
    second, other = await mesh.submit(model="never-seen"), await mesh.submit(model="another")
    await until(lambda: all(allocator.asked.get(job_id) for job_id in (second, other)))
    seen = allocator.asked[second][0]
    assert [(point.cores, point.rate) for point in seen.known] == [(1, 10.0), (2, 10.0), (3, 10.0)]
    assert seen.points == ()
    assert allocator.asked[other][0].known == ()


@pytest.fixture
async def adaptive() -> AsyncIterator[Mesh]:
    options = {"coda-adaptive": {"warm_up_seconds": "0", "measure_seconds": "1"}}
    async with running(placement_config=PlacementConfig(allocator="coda-adaptive", options=options)) as mesh:
        yield mesh


async def test_a_waiting_job_is_sized_by_the_rates_of_its_class(adaptive: Mesh) -> None:
    agent = await adaptive.agent("n1", gpus=1, cores=3)
    first = await adaptive.submit(model="never-seen")
    await adaptive.reach(first, "RUNNING", holds(3, 3))
    second = await adaptive.submit(model="never-seen")
    await adaptive.refused(second, "CAPACITY")
    measured(agent, first, {1: 10.0, 2: 10.0, 3: 10.0})
    await adaptive.reach(first, "RUNNING", holds(1, 1))
    agent.finish((first, 1))
    job = await adaptive.reach(second, "RUNNING", holds(1, 1))
    assert "similar jobs need 1" in job.attempt.sizing


async def test_owned_cores_respect_the_tenants_limit(mesh: Mesh, allocator: ScriptedAllocator) -> None:
    dept = tenant_pb2.Tenant(id="dept", limit_cores=4)
    for tenant in (dept, tenant_pb2.Tenant(id="group", parent="dept")):
        await mesh.tenants.CreateTenant(tenant_pb2.CreateTenantRequest(tenant=tenant))
    await mesh.agent("n1", gpus=8, cores=24)
    allocator.otherwise = lambda running: (1,)
    first = await mesh.submit(tenant="group")
    await mesh.reach(first, "RUNNING", holds(1, 1))
    second = await mesh.submit(tenant="group")
    await mesh.reach(second, "RUNNING", holds(1, 1))
    allocator.wishes[first] = (3,)
    await mesh.reach(first, "RUNNING", holds(3, 3))
    allocator.wishes[second] = (3,)
    await mesh.reach(second, "RUNNING", holds(3, 1))  # two are lent

    async def used() -> int:
        request = tenant_pb2.GetTenantRequest(id="dept")
        tenant: tenant_pb2.Tenant = (await mesh.tenants.GetTenant(request)).tenant
        return tenant.used_cores

    assert await used() == 4
    for limit, own in ((5, 2), (9, 3)):  # nobody waits meanwhile
        raised = tenant_pb2.Tenant(id="dept", limit_cores=limit)
        await mesh.tenants.UpdateTenant(tenant_pb2.UpdateTenantRequest(tenant=raised))
        await mesh.reach(second, "RUNNING", holds(3, own))
    await mesh.restart("placement")
    lowered = tenant_pb2.Tenant(id="dept", limit_cores=5)
    await mesh.tenants.UpdateTenant(tenant_pb2.UpdateTenantRequest(tenant=lowered))
    allocator.wishes[second] = (1,)  # what it has it keeps, but it gets back no more than that
    await mesh.reach(second, "RUNNING", holds(1, 1))
    await mesh.reach(await mesh.submit(gpus=0, cores=1), "RUNNING")  # placement was told of the limits by then
    allocator.wishes[second] = (3,)
    await mesh.reach(second, "RUNNING", holds(3, 2))
