"""Elastic jobs on a live queue and placement: starts with the target, resizes by a restart, kills in between."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
import pytest
from benchmarks.agents import SimulatedAgent
from tests.unit.services.histories import History
from tests.unit.services.mesh import BACKFILL, QUICK, Mesh, eventually, running, spec, until

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.codec.errors import from_error
from cotenant.codec.job_events import kind_of
from cotenant.core.sizing.restart_cost import ResizeCosts
from cotenant.internal.v1 import placement_service_pb2 as placement_pb2
from cotenant.policies.marginal_gain import MarginalGain
from cotenant.v1 import job_pb2, tenant_service_pb2
from cotenant.v1 import job_service_pb2 as pb

AT_ONCE = {"interval_seconds": "0"}
STOPPING = job_pb2.JOB_PHASE_STOPPING


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    queue = replace(BACKFILL, allocator="marginal-gain", allocator_options=AT_ONCE)
    placement = replace(QUICK, allocator="marginal-gain", options={"marginal-gain": AT_ONCE})
    async with running(queue_config=queue, placement_config=placement) as mesh:
        yield mesh


@pytest.fixture
async def history(mesh: Mesh) -> AsyncIterator[History]:
    """Check at every commit that nothing has two owners, and that no job runs twice."""
    history = History()
    history.follow(mesh.store)
    yield history
    await history.stop()
    assert not history.wrong


async def submit_elastic(
    mesh: Mesh, least: int, most: int, resize: job_pb2.ResizeMode.ValueType = job_pb2.RESIZE_MODE_RESTART, **fields: Any
) -> str:
    """Submit an elastic job with one GPU and one core per replica."""
    wanted = spec(gpus=1, cores=1, replicas=least, resize=resize, **fields)
    wanted.roles[0].elastic.min, wanted.roles[0].elastic.max = least, most
    response: pb.CreateJobResponse = await mesh.jobs.CreateJob(pb.CreateJobRequest(spec=wanted))
    return response.job.id


async def runs_with(mesh: Mesh, job_id: str, replicas: int) -> job_pb2.Job:
    """Wait until a job runs with this number of replicas."""
    job = await mesh.reach(job_id, "RUNNING", lambda job: _ranks(job.attempt) == list(range(replicas)))
    assert job.spec.roles[0].replicas == replicas
    return job


def _ranks(attempt: job_pb2.Attempt) -> list[int]:
    return sorted(task.rank for part in attempt.allocations for task in part.tasks)


async def explained(mesh: Mesh, job_id: str) -> pb.ExplainJobResponse:
    response: pb.ExplainJobResponse = await mesh.jobs.ExplainJob(pb.ExplainJobRequest(id=job_id))
    return response


async def watched_agent(mesh: Mesh, history: History, node_id: str, gpus: int) -> SimulatedAgent:
    agent = await mesh.agent(node_id, gpus=gpus)
    history.watch(agent)
    return agent


async def test_an_elastic_job_shrinks_for_a_rigid_one_and_grows_again(mesh: Mesh, history: History) -> None:
    agent = await watched_agent(mesh, history, "n0", 4)
    elastic = await submit_elastic(mesh, 1, 4)
    first = await runs_with(mesh, elastic, 4)  # it starts with its target, not with its minimum
    rigid = await mesh.submit(gpus=3, cores=1)
    await mesh.reach(rigid, "RUNNING")
    second = await runs_with(mesh, elastic, 1)
    agent.finish((rigid, 1))
    job = await runs_with(mesh, elastic, 4)
    assert [first.attempt.number, second.attempt.number, job.attempt.number] == [1, 2, 3]
    assert (job.failures, job.preemptions, job.migrations) == (0, 0, 0)
    assert not job.HasField("refusal")
    told = await explained(mesh, elastic)
    resized = [event.detail for event in told.events if kind_of(event) == "resized"]
    assert [detail.partition(":")[0] for detail in resized] == ["replicas 4 → 1", "replicas 1 → 4"]
    assert "replicas: 4 of 1..4" in told.summary
    assert "last resized" in told.summary
    assert "replicas 1 → 4: it is 3.64 times as fast with them" in told.summary
    orders = [agent.assignments[elastic, number] for number in (1, 2, 3)]
    assert [order.spec.roles[0].replicas for order in orders] == [4, 1, 4]  # the world of the program
    assert [order.reason for order in agent.stops] == [job_pb2.STOP_REASON_RESIZED] * 2


@pytest.mark.parametrize(
    ("resize", "why"),
    [
        (job_pb2.RESIZE_MODE_UNSPECIFIED, "it has not said that it continues from a checkpoint"),
        (job_pb2.RESIZE_MODE_IN_PLACE, "running jobs are not resized in place yet"),
    ],
)
async def test_a_job_that_may_lose_its_work_is_kept_and_says_so(
    mesh: Mesh, resize: job_pb2.ResizeMode.ValueType, why: str
) -> None:
    await mesh.agent("n0", gpus=4)
    elastic = await submit_elastic(mesh, 1, 4, resize)
    await runs_with(mesh, elastic, 4)
    rigid = await mesh.submit(gpus=3, cores=1)
    await mesh.refused(rigid, "CAPACITY")
    told = await explained(mesh, elastic)
    assert told.job.attempt.number == 1
    assert "replicas: 4 of 1..4" in told.summary
    assert why in told.summary


async def test_under_another_allocator_a_job_keeps_its_minimum() -> None:
    async with running(queue_config=replace(BACKFILL, allocator="proportional")) as mesh:
        await mesh.agent("n0", gpus=4)
        elastic = await submit_elastic(mesh, 2, 4)
        await runs_with(mesh, elastic, 2)
        told = await explained(mesh, elastic)
        assert "replicas: 2 of 2..4; the allocator proportional resizes no running jobs" in told.summary


def report_step(agent: SimulatedAgent, job_id: str, number: int, step: int) -> None:
    progress = job_pb2.Progress(step=step)
    progress.step_time.GetCurrentTime()
    agent.send(progress=[agent_pb2.ProgressReport(job_id=job_id, number=number, progress=progress)])


async def test_a_resize_costs_the_time_until_new_steps_and_is_charged_that(mesh: Mesh) -> None:
    """Steps that a program makes again, because it saved nothing when it was warned, are no new work."""
    agent, state = await mesh.agent("n0", gpus=2), mesh.parts["queue"].service.state
    elastic = await submit_elastic(mesh, 1, 2, model="bert")
    await runs_with(mesh, elastic, 2)
    await eventually(lambda: _says(mesh, elastic, "a resize is assumed to cost it 30 s"))
    report_step(agent, elastic, 1, 100)
    await until(lambda: state.records[elastic].job.progress.step == 100)
    rigid = await mesh.submit(gpus=1, cores=1)
    await mesh.reach(rigid, "RUNNING")
    await runs_with(mesh, elastic, 1)
    expected = partial(state.resize_meter.expected, state.records[elastic].spec)
    report_step(agent, elastic, 2, 90)
    await until(lambda: state.records[elastic].job.progress.step == 90)
    assert not expected().measured
    report_step(agent, elastic, 2, 101)
    await until(lambda: expected().measured == 1)
    assert expected().own
    assert 0 < expected().seconds < 30
    state.resize_meter.costs = ResizeCosts()
    state.resize_meter.costs.observe(("default", "bert"), 1e8, 9e8)  # no growth is worth that
    agent.finish((rigid, 1))
    await eventually(lambda: _says(mesh, elastic, "one more gains too little for its restart"))
    summary = (await explained(mesh, elastic)).summary
    assert "replicas: 1 of 1..2" in summary
    assert "a resize costs it 1e+09 s (median of 1): 1e+08 s to stop, 9e+08 s until new steps" in summary


async def _says(mesh: Mesh, job_id: str, words: str) -> bool:
    return words in (await explained(mesh, job_id)).summary


async def test_a_resize_that_another_end_cuts_off_is_not_measured(mesh: Mesh) -> None:
    agent, state = await mesh.agent("n0", gpus=2), mesh.parts["queue"].service.state
    elastic = await submit_elastic(mesh, 1, 2)
    await runs_with(mesh, elastic, 2)
    agent.refuses_to_stop = True
    await mesh.submit(gpus=1, cores=1)
    await mesh.reach(elastic, "STOPPING")
    await mesh.jobs.CancelJob(pb.CancelJobRequest(id=elastic))
    agent.end((elastic, 1), job_pb2.ATTEMPT_STATE_STOPPED, stop_reason=job_pb2.STOP_REASON_RESIZED)
    await mesh.reach(elastic, "CANCELLED")
    assert (state.resize_meter._resizes, state.resize_meter._running) == ({}, {})
    assert not state.resize_meter.expected(state.records[elastic].spec).measured


async def test_a_tenants_limit_bounds_the_target(mesh: Mesh) -> None:
    limited = tenant_service_pb2.Tenant(id="small", limit_gpu_milli=2000)
    await mesh.tenants.CreateTenant(tenant_service_pb2.CreateTenantRequest(tenant=limited))
    await mesh.agent("n0", gpus=4)
    elastic = await submit_elastic(mesh, 1, 4, tenant="small")
    await runs_with(mesh, elastic, 2)


async def test_a_job_that_finds_no_places_for_its_target_starts_with_fewer(mesh: Mesh) -> None:
    for number in range(3):
        await mesh.agent(f"n{number}", gpus=4)
    for _ in range(2):
        await mesh.reach(await mesh.submit(gpus=3, cores=1), "RUNNING")
    wanted = spec(gpus=2, cores=1, resize=job_pb2.RESIZE_MODE_RESTART)
    wanted.roles[0].elastic.min, wanted.roles[0].elastic.max = 1, 3
    answer: pb.CreateJobResponse = await mesh.jobs.CreateJob(pb.CreateJobRequest(spec=wanted))
    await runs_with(mesh, answer.job.id, 2)  # three by counting: six GPUs are free, two of them on full nodes


async def test_a_bad_resize_names_every_field(mesh: Mesh) -> None:
    rigid, elastic = spec(), spec(replicas=2)
    elastic.roles[0].elastic.min, elastic.roles[0].elastic.max = 1, 3
    request = placement_pb2.ResizeReplicasRequest()
    for wanted, replicas in ((rigid, 1), (elastic, 3), (elastic, 4)):
        request.resizes.add(next=placement_pb2.Candidate(job_id="a", number=2, spec=wanted), replicas=replicas)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await mesh.plans.ResizeReplicas(request)
    fields = [one.field for one in from_error(caught.value).violations]
    assert fields == [
        "resizes[0].next.spec.roles", "resizes[1].next.job_id", "resizes[1].replicas", "resizes[2].next.job_id",
        "resizes[2].replicas",
    ]  # fmt: skip


async def test_an_allocator_that_fails_keeps_sizes_and_fails_no_job(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    await mesh.agent("n0", gpus=4)
    elastic = await submit_elastic(mesh, 1, 4)
    await runs_with(mesh, elastic, 4)
    asked: list[float] = []

    def fail(self: MarginalGain, jobs: object, room: object, now: float) -> dict[str, int]:
        asked.append(now)
        if len(asked) % 2:
            raise RuntimeError("broken")
        return {elastic: 100}

    monkeypatch.setattr(MarginalGain, "targets", fail)
    rigid = await mesh.submit(gpus=3, cores=1)
    await mesh.refused(rigid, "CAPACITY")
    mesh.parts["queue"].service.scheduler.wake()
    await until(lambda: len(asked) > 1)
    assert (await mesh.job(elastic)).phase == job_pb2.JOB_PHASE_RUNNING
    monkeypatch.undo()
    mesh.parts["queue"].service.scheduler.wake()
    await mesh.reach(rigid, "RUNNING")
    await runs_with(mesh, elastic, 1)


@pytest.mark.parametrize("killed", [("queue",), ("placement",), ("queue", "placement")])
async def test_a_resize_survives_kills_and_starts_before_others(
    mesh: Mesh, history: History, killed: tuple[str, ...]
) -> None:
    agent = await watched_agent(mesh, history, "n0", 4)
    elastic = await submit_elastic(mesh, 1, 4)
    await runs_with(mesh, elastic, 4)
    agent.refuses_to_stop = True
    rigid = await mesh.submit(gpus=2, cores=1)
    job = await mesh.reach(elastic, "STOPPING")
    assert job.attempt.next_replicas == 2
    greedy = await mesh.submit(gpus=2, cores=1, priority=0)  # would fit into what the resized job goes on with
    await mesh.restart(*killed)
    await eventually(lambda: _known(mesh, elastic))
    agent.refuses_to_stop = False
    agent.end((elastic, 1), job_pb2.ATTEMPT_STATE_STOPPED, stop_reason=job_pb2.STOP_REASON_RESIZED)
    job = await mesh.reach(elastic, "RUNNING", lambda job: job.attempt.number == 2)
    assert _ranks(job.attempt) == [0, 1]
    assert (job.failures, job.preemptions) == (0, 0)
    await mesh.reach(rigid, "RUNNING")
    assert greedy


async def _known(mesh: Mesh, job_id: str) -> bool:
    """Return whether queue and placement, perhaps started anew, know that a job is stopping."""
    cluster, state = mesh.parts["placement"].service.cluster, mesh.parts["queue"].service.state
    node = cluster.nodes.get("n0")
    return bool(node and node.connected and state.records[job_id].job.phase == STOPPING)


async def test_a_job_restarts_with_what_a_lost_node_leaves(history: History, mesh: Mesh) -> None:
    agents = [await watched_agent(mesh, history, f"n{number}", 2) for number in range(2)]
    elastic = await submit_elastic(mesh, 1, 4)
    await runs_with(mesh, elastic, 4)
    agents[1].forget()
    agents[1].incarnation = "two"  # it reboots: what ran there is lost
    await agents[1].stop()
    agents[1].inventory.gpus.pop()
    agents[1].inventory.gpus.pop()
    agents[1].start()
    job = await mesh.reach(elastic, "RUNNING", lambda job: job.attempt.number > 1 and len(_ranks(job.attempt)) == 2)
    assert {part.node_id for part in job.attempt.allocations} == {"n0"}
