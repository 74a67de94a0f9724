"""Nodes come, change, are drained and go; agents send anything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from benchmarks.agents import SimulatedAgent
from tests.unit.services.mesh import QUICK, Mesh, eventually, reason, running, spec, until, without

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.agent.v1 import agent_service_pb2_grpc as agent_grpc
from cotenant.core.failures.retry import RetryRules
from cotenant.internal.v1 import placement_service_pb2 as placement_pb2
from cotenant.v1 import job_pb2, resources_pb2
from cotenant.v1 import job_service_pb2 as pb
from cotenant.v1 import node_service_pb2 as node_pb2

OPERATOR, HEALTH = node_pb2.NODE_STATE_OWNER_OPERATOR, node_pb2.NODE_STATE_OWNER_HEALTH
NOBODY = node_pb2.NODE_STATE_OWNER_UNSPECIFIED
READY, CORDONED = node_pb2.NODE_STATE_READY, node_pb2.NODE_STATE_CORDONED
DRAINING, AWAY, LOST = node_pb2.NODE_STATE_DRAINING, node_pb2.NODE_STATE_AWAY, node_pb2.NODE_STATE_LOST


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    async with running() as mesh:
        mesh.parts["queue"].service.attempt_watcher.failure_classifier.retrying = RetryRules(back_off_seconds=0.05)
        yield mesh


async def in_state(mesh: Mesh, node_id: str, state: int) -> None:
    async def is_so() -> bool:
        return (await mesh.node(node_id)).state == state

    await eventually(is_so)


# Operators ---------------------------------------------------------------------------------------------------


async def test_jobs_of_a_drained_node_run_elsewhere(mesh: Mesh) -> None:
    agent = await mesh.agent("n1", gpus=2)
    job_id = await mesh.submit()
    await mesh.reach(job_id, "RUNNING")
    await mesh.agent("n2", gpus=2)
    response = await mesh.nodes.DrainNode(node_pb2.DrainNodeRequest(id="n1", reason="new disks"))
    assert (response.node.state, response.node.state_reason, response.node.state_owner) == (
        DRAINING,
        "new disks",
        OPERATOR,
    )
    job = await mesh.reach(job_id, "RUNNING", lambda job: job.attempt.number == 2)
    assert job.attempt.allocations[0].node_id == "n2"
    assert (job.failures, job.preemptions) == (0, 0)
    assert agent.stops[0].reason == job_pb2.STOP_REASON_DRAINED
    assert (await mesh.node("n1")).used_gpu_milli == 0


async def test_a_drain_survives_a_restart_and_reaches_a_disconnected_agent(mesh: Mesh) -> None:
    agent = await mesh.agent("n1")
    job_id = await mesh.submit()
    await mesh.reach(job_id, "RUNNING")
    await agent.stop()
    await in_state(mesh, "n1", AWAY)
    await mesh.nodes.DrainNode(node_pb2.DrainNodeRequest(id="n1"))
    await mesh.restart("placement")
    agent.start()
    await mesh.reach(job_id, "QUEUED")
    await in_state(mesh, "n1", DRAINING)
    await mesh.refused(job_id, "NO_NODES")


# Health ------------------------------------------------------------------------------------------------------

HOLD, RESTART = resources_pb2.HEALTH_ACTION_HOLD, resources_pb2.HEALTH_ACTION_RESTART
QUARANTINE, DRAIN = resources_pb2.HEALTH_ACTION_QUARANTINE, resources_pb2.HEALTH_ACTION_DRAIN
INFRASTRUCTURE = job_pb2.FAILURE_BLAME_INFRASTRUCTURE


def reported_problem(
    agent: SimulatedAgent, action: resources_pb2.HealthAction.ValueType, gpu: int | None = None, since: int = 1
) -> None:
    """Make an agent report exactly one problem."""
    gpus = agent.inventory.gpus
    uuid = "" if gpu is None else gpus[gpu].uuid
    for each in gpus:
        each.unhealthy_reason = "XID 79" if each.uuid == uuid and action in (HOLD, QUARANTINE) else ""
    del agent.inventory.problems[:]
    problem = agent.inventory.problems.add(check="trial", gpu_uuid=uuid, action=action, reason="XID 79")
    problem.since.FromSeconds(since)
    agent.send(inventory=agent.inventory)


def well(agent: SimulatedAgent) -> None:
    """Make an agent report no problems."""
    for gpu in agent.inventory.gpus:
        gpu.unhealthy_reason = ""
    del agent.inventory.problems[:]
    agent.send(inventory=agent.inventory)


async def test_a_job_on_a_quarantined_gpu_is_moved_without_a_failure(mesh: Mesh) -> None:
    agent = await mesh.agent("n1", gpus=2)
    job_id = await mesh.submit()
    first = await mesh.reach(job_id, "RUNNING")
    uuid = first.attempt.allocations[0].tasks[0].gpus[0].uuid
    reported_problem(agent, QUARANTINE, [gpu.uuid for gpu in agent.inventory.gpus].index(uuid))
    job = await mesh.reach(job_id, "RUNNING", lambda job: job.attempt.number == 2)
    assert job.attempt.allocations[0].tasks[0].gpus[0].uuid != uuid
    assert (job.failures, job.preemptions) == (0, 0)
    assert agent.stops[0].reason == job_pb2.STOP_REASON_UNHEALTHY
    past = job.past_attempts[-1]
    assert past.stop_detail == f"was on {uuid} of n1: XID 79"
    assert (past.failure.failure_class, past.failure.blame) == ("gpu_hardware", INFRASTRUCTURE)
    assert past.failure.evidence.endswith(past.stop_detail)
    other = await mesh.submit()
    refusal = (await mesh.refused(other, "CAPACITY")).refusal
    assert refusal.numbers["unhealthy_gpus"] == 1
    assert "1 GPU is unhealthy and not counted" in refusal.detail
    whole = await mesh.submit(gpus=2)
    refusal = (await mesh.refused(whole, "NO_NODES")).refusal
    assert "could hold even if empty while 1 GPU is unhealthy" in refusal.detail
    well(agent)
    await mesh.reach(other, "RUNNING")


async def test_a_held_gpu_keeps_its_job_and_gets_no_other(mesh: Mesh) -> None:
    agent = await mesh.agent("n1", gpus=1)
    job_id = await mesh.submit()
    await mesh.reach(job_id, "RUNNING")
    reported_problem(agent, HOLD, 0)
    waiting = await mesh.submit()
    await mesh.refused(waiting, "NO_NODES")
    assert not agent.stops
    agent.finish((job_id, 1))
    await mesh.reach(job_id, "SUCCEEDED")
    await mesh.refused(waiting, "NO_NODES")
    well(agent)
    await mesh.reach(waiting, "RUNNING")


async def test_a_restart_stops_only_the_attempts_of_that_time(mesh: Mesh) -> None:
    agent = await mesh.agent("n1", gpus=1)
    job_id = await mesh.submit()
    await mesh.reach(job_id, "RUNNING")
    reported_problem(agent, RESTART, 0)
    await mesh.reach(job_id, "RUNNING", lambda job: job.attempt.number == 2)
    reported_problem(agent, RESTART, 0, since=2)
    job = await mesh.reach(job_id, "RUNNING", lambda job: job.attempt.number == 3)
    assert len(agent.stops) == 2
    assert job.failures == 0


async def test_a_held_node_takes_no_work_and_shows_why(mesh: Mesh) -> None:
    agent = await mesh.agent("n1", gpus=2)
    reported_problem(agent, HOLD)
    await in_state(mesh, "n1", CORDONED)
    node = await mesh.node("n1")
    assert (node.state_owner, node.state_reason) == (HEALTH, "XID 79")
    job_id = await mesh.submit()
    refusal = (await mesh.refused(job_id, "NO_NODES")).refusal
    assert (refusal.numbers["unhealthy_nodes"], "1 server is unhealthy" in refusal.detail) == (1, True)
    well(agent)
    await mesh.reach(job_id, "RUNNING")


async def test_operator_and_health_states_are_independent(mesh: Mesh) -> None:
    agent = await mesh.agent("n1", gpus=2)
    job_id = await mesh.submit()
    await mesh.reach(job_id, "RUNNING")
    reported_problem(agent, DRAIN)
    await mesh.reach(job_id, "QUEUED")
    assert agent.stops[0].reason == job_pb2.STOP_REASON_UNHEALTHY
    assert (await mesh.job(job_id)).attempt.failure.failure_class == "node_unhealthy"
    await in_state(mesh, "n1", DRAINING)
    await mesh.nodes.UncordonNode(node_pb2.UncordonNodeRequest(id="n1"))
    await in_state(mesh, "n1", DRAINING)
    assert (await mesh.node("n1")).state_owner == HEALTH
    await mesh.nodes.CordonNode(node_pb2.CordonNodeRequest(id="n1", reason="a visit"))
    well(agent)
    await eventually(lambda: is_well(mesh))
    node = await mesh.node("n1")
    assert (node.state, node.state_owner, node.state_reason) == (CORDONED, OPERATOR, "a visit")
    await mesh.nodes.UncordonNode(node_pb2.UncordonNodeRequest(id="n1"))
    await mesh.reach(job_id, "RUNNING")


async def is_well(mesh: Mesh) -> bool:
    return not (await mesh.node("n1")).inventory.problems


async def test_a_quarantine_survives_a_restart(mesh: Mesh) -> None:
    agent = await mesh.agent("n1", gpus=1)
    reported_problem(agent, QUARANTINE, 0)
    await eventually(lambda: is_unwell(mesh))
    await agent.stop()
    await mesh.restart("placement")
    job_id = await mesh.submit()
    await mesh.refused(job_id, "NO_NODES")
    agent.start()
    await in_state(mesh, "n1", READY)
    await mesh.refused(job_id, "NO_NODES")


async def is_unwell(mesh: Mesh) -> bool:
    return not await is_well(mesh)


async def test_a_release_reaches_the_agent_or_is_refused(mesh: Mesh) -> None:
    agent = await mesh.agent("n1", gpus=1)
    uuid = agent.inventory.gpus[0].uuid
    await mesh.nodes.ReleaseGpu(node_pb2.ReleaseGpuRequest(id="n1", gpu_uuid=uuid))
    await until(lambda: agent.released == [uuid])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await mesh.nodes.ReleaseGpu(node_pb2.ReleaseGpuRequest(id="n1", gpu_uuid="GPU-none"))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    await agent.stop()
    await in_state(mesh, "n1", AWAY)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await mesh.nodes.ReleaseGpu(node_pb2.ReleaseGpuRequest(id="n1", gpu_uuid=uuid))
    assert reason(caught.value) == "NODE_AWAY"


async def test_jobs_run_on_on_a_cordoned_node(mesh: Mesh) -> None:
    agent = await mesh.agent("n1", gpus=2)
    first, second = await mesh.submit(), await mesh.submit()
    await mesh.reach(first, "RUNNING")
    await mesh.reach(second, "RUNNING")
    await mesh.nodes.CordonNode(node_pb2.CordonNodeRequest(id="n1", reason="looking at it"))
    agent.finish((first, 1))
    await mesh.reach(first, "SUCCEEDED")
    third = await mesh.submit()
    await mesh.refused(third, "NO_NODES")
    assert (await mesh.job(second)).phase == job_pb2.JOB_PHASE_RUNNING
    await mesh.nodes.UncordonNode(node_pb2.UncordonNodeRequest(id="n1"))
    await mesh.reach(third, "RUNNING")
    assert (await mesh.node("n1")).state_owner == NOBODY


async def test_nodes_are_listed_by_id_and_unknown_ones_not_found(mesh: Mesh) -> None:
    for node_id in ("n2", "n1", "n3"):
        await mesh.agent(node_id)
    page = await mesh.nodes.ListNodes(node_pb2.ListNodesRequest(page_size=2))
    assert ([node.id for node in page.nodes], page.total_size) == (["n1", "n2"], 3)
    page = await mesh.nodes.ListNodes(node_pb2.ListNodesRequest(page_size=2, page_token=page.next_page_token))
    assert ([node.id for node in page.nodes], page.next_page_token) == (["n3"], "")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await mesh.nodes.DrainNode(node_pb2.DrainNodeRequest(id="n4"))
    assert reason(refused.value) == "NODE_NOT_FOUND"


# Away, back, lost --------------------------------------------------------------------------------------------


async def test_a_job_runs_on_while_its_agent_is_disconnected(mesh: Mesh) -> None:
    agent = await mesh.agent("n1")
    job_id = await mesh.submit()
    await mesh.reach(job_id, "RUNNING")
    await agent.stop()
    await in_state(mesh, "n1", AWAY)
    assert (await mesh.job(job_id)).phase == job_pb2.JOB_PHASE_RUNNING
    agent.finish((job_id, 1))  # it ends meanwhile, and nobody hears
    agent.start()
    await mesh.reach(job_id, "SUCCEEDED")


async def test_a_job_that_began_and_ended_while_its_agent_was_disconnected_has_run(mesh: Mesh) -> None:
    agent = await mesh.agent("n1")
    agent.answers_assignments = False
    job_id = await mesh.submit()
    await until(lambda: (job_id, 1) in agent.assignments)
    await agent.stop()
    agent.report((job_id, 1), job_pb2.ATTEMPT_STATE_RUNNING)
    began = agent.attempts[job_id, 1].start_time
    agent.finish((job_id, 1))
    agent.start()
    job = await mesh.reach(job_id, "SUCCEEDED")
    assert job.start_time == job.attempt.start_time == began
    assert job.run_time.ToNanoseconds() > 0


async def test_jobs_of_a_lost_node_run_elsewhere_and_returning_attempts_are_stopped() -> None:
    config = without(QUICK, heartbeat_seconds=0.1, lost_after_seconds=0.4)
    async with running(placement_config=config) as mesh:
        agent = await mesh.agent("n1", gpus=1)
        job_id = await mesh.submit()
        await mesh.reach(job_id, "RUNNING")
        await mesh.agent("n2", gpus=1)
        await agent.stop()
        await in_state(mesh, "n1", LOST)
        job = await mesh.reach(job_id, "RUNNING", lambda job: job.attempt.number == 2)
        assert job.attempt.allocations[0].node_id == "n2"
        assert job.past_attempts[0].state == job_pb2.ATTEMPT_STATE_LOST
        assert "has been away for" in job.past_attempts[0].message
        agent.refuses_to_stop = True
        agent.start()
        await until(lambda: bool(agent.stops))
        assert agent.stops[0].reason == job_pb2.STOP_REASON_SUPERSEDED
        other = await mesh.submit()
        await mesh.refused(other, "CAPACITY")  # as long as the old attempt holds the node, it gets no new work
        agent.end((job_id, 1), job_pb2.ATTEMPT_STATE_STOPPED)
        await mesh.reach(other, "RUNNING")
        await until(lambda: (job_id, 1) in agent.acked)
        assert (await mesh.job(job_id)).attempt.number == 2


async def test_an_agent_that_is_connected_but_silent_is_away() -> None:
    config = without(QUICK, heartbeat_seconds=0.1)
    async with running(placement_config=config) as mesh:
        agent = await mesh.agent("n1")
        agent.silent = True
        await until(lambda: len(agent.welcomes) > 1)


async def test_an_attempt_that_its_agent_forgot_is_retried(mesh: Mesh) -> None:
    agent = await mesh.agent("n1")
    job_id = await mesh.submit()
    await mesh.reach(job_id, "RUNNING")
    await agent.stop()
    agent.forget()
    agent.start()
    job = await mesh.reach(job_id, "RUNNING", lambda job: job.attempt.number == 2)
    assert job.past_attempts[0].state == job_pb2.ATTEMPT_STATE_LOST


async def test_an_unknown_attempt_is_stopped_and_closes_its_node_until_then(mesh: Mesh) -> None:
    agent = SimulatedAgent("n1", mesh.channel("placement"), gpus=8)
    mesh.agents["n1"] = agent
    agent.refuses_to_stop = True
    agent.attempts["ghost", 3] = agent_pb2.AttemptReport(
        job_id="ghost", number=3, epoch=7, state=job_pb2.ATTEMPT_STATE_RUNNING
    )
    agent.start()
    await until(lambda: bool(agent.stops))
    assert (agent.stops[0].reason, agent.stops[0].epoch) == (job_pb2.STOP_REASON_SUPERSEDED, 7)
    job_id = await mesh.submit()
    await mesh.refused(job_id, "NO_NODES")
    agent.end(("ghost", 3), job_pb2.ATTEMPT_STATE_STOPPED)
    await mesh.reach(job_id, "RUNNING")
    assert ("ghost", 3) in agent.acked


async def test_a_taken_node_id_is_refused_until_its_agent_is_silent(mesh: Mesh) -> None:
    agent = await mesh.agent("n1")
    other = SimulatedAgent("n1", mesh.channel("placement"))
    other.incarnation = "two"
    mesh.agents["other"] = other
    other.start()
    await until(lambda: any("node 'n1' already has a connected agent" in error for error in other.errors))
    assert not other.welcomes
    await agent.stop()
    await until(lambda: bool(other.welcomes))


async def test_a_stream_starts_with_a_hello_and_an_invalid_message_ends_it(mesh: Mesh) -> None:
    stub = agent_grpc.AgentServiceStub(mesh.channel("placement"))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.Connect(iter([agent_pb2.ConnectRequest()])).read()
    assert reason(refused.value) == "HELLO_FIRST"
    agent = await mesh.agent("n1")
    job_id = await mesh.submit()
    await mesh.reach(job_id, "RUNNING")
    agent.report((job_id, 1), job_pb2.ATTEMPT_STATE_UNSPECIFIED)  # no such state
    agent.attempts[job_id, 1].state = job_pb2.ATTEMPT_STATE_RUNNING
    await until(lambda: len(agent.welcomes) > 1)
    agent.finish((job_id, 1))
    await mesh.reach(job_id, "SUCCEEDED")


# Inventories -------------------------------------------------------------------------------------------------


async def changed(mesh: Mesh, agent: SimulatedAgent) -> None:
    agent.change_inventory()

    async def is_so() -> bool:
        return (await mesh.node(agent.node_id)).inventory == agent.inventory

    await eventually(is_so)


async def test_an_unhealthy_gpu_gets_no_new_work_and_keeps_its_job(mesh: Mesh) -> None:
    agent = await mesh.agent("n1", gpus=2, cores=8)
    first = await mesh.submit()
    job = await mesh.reach(first, "RUNNING")
    held = job.attempt.allocations[0].tasks[0].gpus[0].uuid
    (index,) = [n for n, gpu in enumerate(agent.inventory.gpus) if gpu.uuid == held]
    agent.inventory.gpus[index].unhealthy_reason = "XID 79"
    await changed(mesh, agent)
    second, third = await mesh.submit(), await mesh.submit()
    await mesh.reach(second, "RUNNING")
    await mesh.refused(third, "CAPACITY")
    assert (await mesh.job(first)).phase == job_pb2.JOB_PHASE_RUNNING
    agent.finish((first, 1))
    await mesh.reach(first, "SUCCEEDED")
    await mesh.refused(third, "CAPACITY")
    agent.inventory.gpus[index].unhealthy_reason = ""
    await changed(mesh, agent)
    await mesh.reach(third, "RUNNING")


async def test_an_overcommitted_node_gets_no_new_work_and_breaks_no_plan(mesh: Mesh) -> None:
    agent = await mesh.agent("n1", gpus=2, cores=8)
    gib = 2**30
    agent.inventory.memory_bytes = 10 * gib
    await changed(mesh, agent)
    first = await mesh.submit(memory_bytes=8 * gib)
    await mesh.reach(first, "RUNNING")
    agent.inventory.memory_bytes = 4 * gib
    del agent.inventory.cores[0]
    await changed(mesh, agent)
    await mesh.agent("n2", gpus=1)
    second, third = await mesh.submit(), await mesh.submit()
    job = await mesh.reach(second, "RUNNING")
    assert job.attempt.allocations[0].node_id == "n2"
    agent.finish((first, 1))
    await mesh.reach(first, "SUCCEEDED")
    assert (await mesh.reach(third, "RUNNING")).attempt.allocations[0].node_id == "n1"


async def test_gpu_shares_never_exceed_the_whole_gpu(mesh: Mesh) -> None:
    agent = SimulatedAgent("n1", mesh.channel("placement"), gpus=2, cores=8)
    mesh.agents["n1"] = agent
    for gpu in agent.inventory.gpus:
        gpu.shareable = True
    agent.start()
    await until(lambda: bool(agent.welcomes))
    halves = [await mesh.submit(gpus=0.5) for _ in range(3)]
    for job_id in halves:
        await mesh.reach(job_id, "RUNNING")
    whole = await mesh.submit(gpus=1)
    await mesh.refused(whole, "CAPACITY")
    used: dict[str, int] = {}
    for job_id in halves:
        (share,) = (await mesh.job(job_id)).attempt.allocations[0].tasks[0].gpus
        used[share.uuid] = used.get(share.uuid, 0) + share.milli
    assert sorted(used.values()) == [500, 1000]
    await mesh.restart("placement")
    (alone,) = [j for j in halves if used[(await mesh.job(j)).attempt.allocations[0].tasks[0].gpus[0].uuid] == 500]
    agent.finish((alone, 1))
    await mesh.reach(whole, "RUNNING")


async def test_a_core_is_allocated_with_its_siblings(mesh: Mesh) -> None:
    agent = SimulatedAgent("n1", mesh.channel("placement"), gpus=1)
    mesh.agents["n1"] = agent
    del agent.inventory.cores[:]
    agent.inventory.cores.extend(resources_pb2.Core(id=n, cpus=[n, n + 4]) for n in range(4))
    agent.start()
    job = await mesh.reach(await mesh.submit(gpus=0, cores=2), "RUNNING")
    (task,) = job.attempt.allocations[0].tasks
    assert list(task.cpu_ids) == sorted([*task.core_ids, *(core + 4 for core in task.core_ids)])


async def test_two_gangs_on_one_head_node_have_different_ports(mesh: Mesh) -> None:
    await mesh.agent("n1")
    ports = {(await mesh.reach(await mesh.submit(), "RUNNING")).attempt.master_port for _ in range(3)}
    assert len(ports) == 3


async def agent_at(mesh: Mesh, node_id: str, address: str) -> SimulatedAgent:
    agent = SimulatedAgent(node_id, mesh.channel("placement"), gpus=1, cores=4)
    agent.inventory.address = address
    agent.start()
    mesh.agents[node_id] = agent
    await until(lambda: bool(agent.welcomes))
    await until(mesh.queue_knows_all)
    return agent


async def test_gangs_on_nodes_of_one_host_have_different_ports(mesh: Mesh) -> None:
    for node_id in ("n1", "n2"):
        await agent_at(mesh, node_id, "10.0.0.1")
    first, second = [(await mesh.reach(await mesh.submit(gpus=1), "RUNNING")).attempt for _ in range(2)]
    assert first.allocations[0].node_id != second.allocations[0].node_id
    assert (first.master_address, second.master_address) == ("10.0.0.1", "10.0.0.1")
    assert first.master_port != second.master_port


async def test_parameter_servers_are_told_hosts_and_get_ports_that_no_other_gang_uses(mesh: Mesh) -> None:
    """Replica r listens on its own host, on the first port + r."""
    agents = [await agent_at(mesh, f"n{number}", f"10.0.0.{number}") for number in (1, 2)]
    wanted = spec(gpus=1, cores=3)
    wanted.roles.add(name="ps", replicas=1).resources.cores = 2
    answer = await mesh.jobs.CreateJob(pb.CreateJobRequest(spec=wanted))
    gang = (await mesh.reach(answer.job.id, "RUNNING")).attempt
    order = agents[0].assignments[answer.job.id, 1]
    assert list(order.replica_addresses) == [f"10.0.0.{part.node_id[1:]}" for part in gang.allocations]
    held = {(order.replica_addresses[rank], gang.master_port + rank) for rank in range(2)}
    for _ in range(3):
        other = (await mesh.reach(await mesh.submit(gpus=0, cores=1), "RUNNING")).attempt
        assert (other.master_address, other.master_port) not in held


async def test_a_node_takes_no_work_from_the_moment_it_is_closed(mesh: Mesh) -> None:
    """Later decisions are committed later, so nothing is allocated on a closed node."""
    await mesh.agent("n1")
    placement = mesh.parts["placement"]
    placement.store.held_back = asyncio.Event()

    async def cordon() -> None:
        await mesh.nodes.CordonNode(node_pb2.CordonNodeRequest(id="n1"))

    cordoning = asyncio.create_task(cordon())
    await until(lambda: not placement.service.cluster.nodes["n1"].open)
    assert not cordoning.done()
    request = placement_pb2.PlanPlacementRequest(
        candidates=[placement_pb2.Candidate(job_id="a", number=1, spec=spec())]
    )
    assert not (await mesh.plans.PlanPlacement(request)).placed
    placement.store.held_back.set()
    await cordoning


async def test_a_late_duplicate_node_request_changes_nothing(mesh: Mesh) -> None:
    await mesh.agent("n1")
    drain = node_pb2.DrainNodeRequest(id="n1", request_id="first")
    await mesh.nodes.DrainNode(drain)
    await mesh.restart("placement")
    await eventually(lambda: _drained(mesh))
    await mesh.nodes.UncordonNode(node_pb2.UncordonNodeRequest(id="n1", request_id="second"))
    told: node_pb2.DrainNodeResponse = await mesh.nodes.DrainNode(drain)
    assert told.node.state == READY
    again: node_pb2.DrainNodeResponse = await mesh.nodes.DrainNode(node_pb2.DrainNodeRequest(id="n1"))
    assert again.node.state == DRAINING


async def _drained(mesh: Mesh) -> bool:
    return (await mesh.node("n1")).state == DRAINING


async def test_reports_on_unassigned_jobs_are_ignored(mesh: Mesh) -> None:
    agent = await mesh.agent("n1", gpus=1)
    runs, waits = await mesh.submit(), await mesh.submit()
    await mesh.reach(runs, "RUNNING")
    await mesh.refused(waits, "CAPACITY")
    reports = [
        agent_pb2.ProgressReport(job_id=one, number=1, progress=job_pb2.Progress(step=7)) for one in (waits, runs)
    ]
    agent.send(progress=reports)

    async def told() -> bool:
        return (await mesh.job(runs)).progress.step == 7

    await eventually(told)  # by a question: who watches is woken by other things
    assert not (await mesh.job(waits)).HasField("progress")
