"""Quotas, limits, priorities, learning and giving up, over the real mesh."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import structlog
from google.protobuf.timestamp_pb2 import Timestamp
from tests.unit.services.mesh import BACKFILL, Mesh, running, spec, until
from tests.unit.services.queue.api.test_tenants import made

from cotenant import plugins
from cotenant.cli import views
from cotenant.codec.specs import duration
from cotenant.core.model.job_table import Jobs
from cotenant.core.policy.protocols import EndedJob, Order
from cotenant.core.scheduling.admission import Preemption, Rules
from cotenant.policies.fifo import Fifo
from cotenant.services.queue.api import server
from cotenant.services.queue.attempts import policy_feedback
from cotenant.services.queue.scheduling import scheduler
from cotenant.v1 import job_service_pb2 as pb
from cotenant.v1 import tenant_service_pb2


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    async with running() as mesh:
        yield mesh


async def explained(mesh: Mesh, job_id: str) -> pb.ExplainJobResponse:
    response: pb.ExplainJobResponse = await mesh.jobs.ExplainJob(pb.ExplainJobRequest(id=job_id))
    return response


async def test_a_tenant_reclaims_its_quota(mesh: Mesh) -> None:
    await mesh.agent("n1", gpus=4, cores=24)
    await made(mesh, "owner", quota_gpu_milli=2000)
    first = await mesh.submit(gpus=2, tenant="guest")
    await mesh.reach(first, "RUNNING")
    second = await mesh.submit(gpus=2, tenant="guest")
    await mesh.reach(second, "RUNNING")
    mine = await mesh.submit(gpus=2, tenant="owner")
    await mesh.reach(mine, "RUNNING")
    stopped = await mesh.refused(second, "CAPACITY")
    assert stopped.preemptions == 1
    assert (await mesh.job(first)).preemptions == 0
    assert views.wait_of(stopped) == "capacity"


async def test_beyond_its_quota_a_tenant_waits_for_its_fair_share(mesh: Mesh) -> None:
    await mesh.agent("n1", gpus=2, cores=24)
    await made(mesh, "owner", quota_gpu_milli=2000)
    await mesh.reach(await mesh.submit(gpus=2, tenant="owner"), "RUNNING")
    mine, other = await mesh.submit(gpus=1, tenant="owner"), await mesh.submit(gpus=1, tenant="guest")
    await mesh.refused(other, "CAPACITY")
    told = await explained(mesh, mine)
    assert views.wait_of(told.job) == "fair_share"
    assert "for its fair share" in told.summary
    assert views.wait_of((await explained(mesh, other)).job) == "capacity"
    counts = mesh.parts["queue"].service.waits.report(1.0)
    assert dict(counts) == {("fair_share", "owner"): 1, ("capacity", "guest"): 1}


async def test_a_suspended_job_waits_for_an_external_condition(mesh: Mesh) -> None:
    held = await mesh.submit()
    await mesh.jobs.SuspendJob(pb.SuspendJobRequest(id=held))
    assert views.wait_of((await explained(mesh, held)).job) == "dependency"
    assert mesh.parts["queue"].service.waits.report(1.0) == {("dependency", "default"): 1}


async def test_a_fragmentation_refusal_names_the_topology_level(mesh: Mesh) -> None:
    for name in ("n1", "n2"):
        await mesh.agent(name, gpus=2, cores=24)
    singles = [await mesh.submit(gpus=1) for _ in range(3)]
    nodes = [(await mesh.reach(job_id, "RUNNING")).attempt.allocations[0].node_id for job_id in singles]
    paired = next(job_id for job_id, node in zip(singles, nodes, strict=True) if nodes.count(node) == 2)
    mesh.agents[nodes[singles.index(paired)]].finish((paired, 1))
    await mesh.reach(paired, "SUCCEEDED")
    wide = await mesh.submit(gpus=1, replicas=2)
    told = views.reason_view((await mesh.refused(wide, "FRAGMENTED")).refusal)
    assert (told["wait"], told["locality"]) == ("fragmentation", "server")


async def test_weights_and_their_changes_reach_the_table(mesh: Mesh) -> None:
    await made(mesh, "a", weight=3)
    job_id = await mesh.submit(tenant="a")
    table = mesh.parts["queue"].service.state.table
    assert table.jobs(0.0).tenant_weight.tolist() == [3.0]
    await mesh.tenants.UpdateTenant(
        tenant_service_pb2.UpdateTenantRequest(tenant=tenant_service_pb2.Tenant(id="a", weight=0.5))
    )
    assert table.jobs(0.0).tenant_weight.tolist() == [0.5]
    await mesh.restart("queue")
    table = mesh.parts["queue"].service.state.table
    assert table.ids == [job_id]
    assert table.jobs(0.0).tenant_weight.tolist() == [0.5]


async def test_higher_priority_preempts_lower_if_the_rule_allows() -> None:
    config = replace(BACKFILL, rules=Rules(Preemption.PRIORITY))
    async with running(queue_config=config) as mesh:
        await mesh.agent("n1", gpus=1, cores=24)
        low = await mesh.submit(gpus=1, priority=-100)
        await mesh.reach(low, "RUNNING")
        same = await mesh.submit(gpus=1, priority=-100)
        await mesh.refused(same, "CAPACITY")
        high = await mesh.submit(gpus=1, priority=100)
        await mesh.reach(high, "RUNNING")
        assert (await mesh.refused(low, "CAPACITY")).preemptions == 1


CLAIMS = replace(BACKFILL, rules=Rules(Preemption.PRIORITY))


async def test_a_tenant_at_its_limit_starts_a_job_in_place_of_one_of_its_own() -> None:
    async with running(queue_config=CLAIMS) as mesh:
        await mesh.agent("n1", gpus=4, cores=24)
        await made(mesh, "team", limit_gpu_milli=1000)
        low = await mesh.submit(gpus=1, tenant="team", priority=-100)
        await mesh.reach(low, "RUNNING")
        high = await mesh.submit(gpus=1, tenant="team", priority=100)
        await mesh.reach(high, "RUNNING")
        assert (await mesh.refused(low, "QUOTA")).preemptions == 1


async def test_what_if_knows_that_a_tenant_at_its_limit_stops_one_of_its_own() -> None:
    async with running(queue_config=CLAIMS) as mesh:
        await mesh.agent("n1", gpus=4, cores=24)
        await made(mesh, "team", limit_gpu_milli=1000)
        low = await mesh.submit(gpus=1, tenant="team", priority=-100)
        await mesh.reach(low, "RUNNING")
        same, high = [
            await mesh.jobs.SimulateJob(pb.SimulateJobRequest(spec=spec(gpus=1, tenant="team", priority=priority)))
            for priority in (-100, 100)
        ]
        assert (same.refusal.code, list(same.preempted_job_ids)) == ("QUOTA", [])
        assert (high.refusal.code, list(high.preempted_job_ids)) == ("MAKING_ROOM", [low])


async def test_the_second_job_of_a_page_takes_the_place_of_its_tenants_own_job() -> None:
    """Both are beyond the limit together, and each may have a victim: limits within a page are counted in placement."""
    async with running(queue_config=CLAIMS) as mesh:
        await mesh.agent("n1", gpus=4, cores=24)
        await made(mesh, "team", limit_gpu_milli=2000)
        low = [await mesh.submit(gpus=1, tenant="team", priority=-100) for _ in range(2)]
        for job_id in low:
            await mesh.reach(job_id, "RUNNING")
        async with held_cycles(mesh):
            high = [await mesh.submit(gpus=1, tenant="team", priority=100) for _ in range(2)]
        for job_id in high:
            await mesh.reach(job_id, "RUNNING")
        for job_id in low:
            assert (await mesh.refused(job_id, "QUOTA")).preemptions == 1


@pytest.fixture
def pages_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "PAGE_MIN", 1)
    monkeypatch.setattr(scheduler, "PAGE_MAX", 1)


@pytest.mark.usefixtures("pages_of_one")
async def test_a_place_that_is_being_freed_is_not_given_away_on_a_later_page() -> None:
    async with running(queue_config=CLAIMS) as mesh:
        agent = await mesh.agent("n1", gpus=2, cores=24)
        low = await mesh.submit(gpus=1, cores=4, priority=-100)
        await mesh.reach(low, "RUNNING")
        agent.refuses_to_stop = True
        async with held_cycles(mesh):
            high = await mesh.submit(gpus=2, cores=4, priority=100)
            other = await mesh.submit(gpus=1, cores=4, priority=-100)  # it may stop nobody, so it is on a later page
        await mesh.refused(high, "MAKING_ROOM")
        await mesh.refused(other, "CAPACITY")


@pytest.mark.usefixtures("pages_of_one")
async def test_a_job_whose_place_is_being_freed_does_not_stop_a_strict_queue() -> None:
    config = server.QueueConfig(rules=Rules(Preemption.PRIORITY))
    async with running(queue_config=config) as mesh:
        agent = await mesh.agent("n1", gpus=1, cores=24)
        await mesh.reach(await mesh.submit(gpus=1, cores=4, priority=-100), "RUNNING")
        agent.refuses_to_stop = True
        high = await mesh.submit(gpus=1, cores=4, priority=100)
        await mesh.refused(high, "MAKING_ROOM")
        await mesh.reach(await mesh.submit(gpus=0, cores=1), "RUNNING")
        assert (await mesh.job(high)).refusal.code == "MAKING_ROOM"


@asynccontextmanager
async def held_cycles(mesh: Mesh) -> AsyncIterator[None]:
    """Hold the queue's cycles, so that the next one sees all that is submitted meanwhile."""
    cycles = mesh.parts["queue"].service.scheduler
    cycle, freed = cycles.cycle, asyncio.Event()

    async def held() -> float:
        await freed.wait()
        return cast("float", await cycle())

    cycles.cycle = held
    yield
    cycles.cycle = cycle
    freed.set()


class Remembers(Fifo):
    """Records every end."""

    def __init__(self) -> None:
        super().__init__(Fifo.Options("backfill"))
        self.ends: list[EndedJob] = []

    def learn(self, ended: EndedJob) -> None:
        self.ends.append(ended)


class Patience(Fifo):
    """Gives up jobs past their deadline."""

    def __init__(self) -> None:
        super().__init__(Fifo.Options("backfill"))
        self.seen: list[float] = []

    def order(self, jobs: Jobs, now: float) -> Order:
        late = jobs.deadline_seconds < now
        self.seen += jobs.deadline_seconds[np.isfinite(jobs.deadline_seconds)].tolist()
        ahead = jobs.deadline_seconds[jobs.deadline_seconds >= now] - now
        return replace(super().order(jobs, now), given_up=late, valid_seconds=float(ahead.min(initial=np.inf)) + 0.001)


@pytest.fixture
def ordered_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[type[Fifo]], None]:
    """Order the queue by a policy that is not installed."""
    load = plugins.load

    def use(policy: type[Fifo]) -> None:
        def made_here(group: str, name: str, options: Any) -> Any:
            return policy() if group == server.QUEUES else load(group, name, options)

        monkeypatch.setattr(plugins, "load", made_here)

    return use


async def test_a_policy_learns_from_ended_jobs_also_after_a_restart(ordered_by: Callable[[type[Fifo]], None]) -> None:
    ordered_by(Remembers)
    async with running() as mesh:
        agent = await mesh.agent("n1", gpus=4, cores=24)
        for gpus in (2, 1):
            job_id = await mesh.submit(gpus=gpus)
            await mesh.reach(job_id, "RUNNING")
            agent.finish((job_id, 1))
            await mesh.reach(job_id, "SUCCEEDED")
        never = await mesh.submit(gpus=4, preemptible=False)
        await mesh.jobs.CancelJob(pb.CancelJobRequest(id=never))
        ends: list[EndedJob] = mesh.parts["queue"].service.policy.ends
        await until(lambda: len(ends) >= 2)
        assert [end.gpu_milli for end in ends][:2] == [2000, 1000]
        assert all(end.attained_gpu_seconds == end.attained_seconds * end.gpu_milli / 1000 for end in ends)
        await mesh.restart("queue")
        assert mesh.parts["queue"].service.policy.ends[:2] == ends[:2]


async def test_a_policy_learns_what_was_predicted_also_after_a_restart(
    ordered_by: Callable[[type[Fifo]], None],
) -> None:
    ordered_by(Remembers)
    async with running() as mesh:
        agent = await mesh.agent("n1", gpus=4, cores=24)
        job_id = await mesh.submit(gpus=1, expected_duration=duration(600.0))
        await mesh.reach(job_id, "RUNNING")
        agent.finish((job_id, 1))
        await mesh.reach(job_id, "SUCCEEDED")
        ends: list[EndedJob] = mesh.parts["queue"].service.policy.ends
        await until(lambda: len(ends) >= 1)
        assert ends[0].predicted_seconds == pytest.approx(600.0, rel=0.01)
        assert 0 < ends[0].confidence <= 1
        await mesh.restart("queue")
        assert mesh.parts["queue"].service.policy.ends[:1] == ends[:1]


async def test_a_history_from_the_future_is_ignored_and_that_is_said_once(
    ordered_by: Callable[[type[Fifo]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    ordered_by(Remembers)
    async with running() as mesh:
        agent = await mesh.agent("n1", gpus=4, cores=24)
        for _ in range(2):
            job_id = await mesh.submit(gpus=1)
            await mesh.reach(job_id, "RUNNING")
            agent.finish((job_id, 1))
            await mesh.reach(job_id, "SUCCEEDED")
        monkeypatch.setattr(policy_feedback, "AHEAD_SECONDS_MAX", -1e9)
        with structlog.testing.capture_logs() as logs:
            await mesh.restart("queue")
        assert mesh.parts["queue"].service.policy.ends == []
        ignored = [one for one in logs if one["event"] == "history_from_the_future_ignored"]
        assert [one["jobs"] for one in ignored] == [2]


async def test_a_job_given_up_by_the_policy_fails_with_a_reason(ordered_by: Callable[[type[Fifo]], None]) -> None:
    ordered_by(Patience)
    async with running() as mesh:
        await mesh.agent("n1", gpus=1, cores=24)
        await mesh.reach(await mesh.submit(gpus=1), "RUNNING")
        deadline = Timestamp()
        deadline.FromNanoseconds(int((time.time() + 0.6) * 1e9))
        late = await mesh.submit(gpus=1, deadline=deadline)
        waits = await mesh.submit(gpus=1)
        failed = await mesh.reach(late, "FAILED")
        assert "given up by the queue policy fifo" in failed.phase_reason
        assert deadline.ToJsonString()[:19] in failed.phase_reason
        assert failed.HasField("end_time")
        await mesh.refused(waits, "CAPACITY")
        policy: Patience = mesh.parts["queue"].service.policy
        assert policy.seen[0] == pytest.approx(deadline.ToNanoseconds() / 1e9)
        await mesh.restart("queue")
        assert "given up" in (await mesh.job(late)).phase_reason
