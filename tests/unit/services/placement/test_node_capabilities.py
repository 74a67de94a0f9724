"""Nodes of executors that cannot do everything: no orders beyond that, no such jobs, and a reason for each."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

import grpc
import pytest
from benchmarks.agents import SimulatedAgent
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.services.mesh import Mesh, running, spec, until

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.codec import node_capabilities
from cotenant.core.model.node_capabilities import EVERYTHING, Capability, CoreControl, NodeCapabilities
from cotenant.internal.v1 import placement_service_pb2 as placement_pb2
from cotenant.services.placement.agents.agent_sessions import within_capabilities
from cotenant.v1 import job_pb2
from cotenant.v1 import node_capabilities_pb2 as wire

BARE = wire.NodeCapabilities(cores=wire.CORE_CONTROL_PIN)


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    async with running() as mesh:
        yield mesh


capabilities = st.builds(NodeCapabilities, st.sampled_from(CoreControl), st.frozensets(st.sampled_from(Capability)))


@given(capabilities)
def test_a_declaration_survives_the_wire(given_: NodeCapabilities) -> None:
    hello = agent_pb2.Hello(capabilities=node_capabilities.to_wire(given_))
    assert node_capabilities.declared(hello) == given_


def test_an_agent_that_declares_nothing_can_do_everything() -> None:
    assert node_capabilities.declared(agent_pb2.Hello()) == EVERYTHING


def test_a_capability_of_a_later_release_is_ignored() -> None:
    hello = agent_pb2.Hello()
    hello.capabilities.MergeFromString(wire.NodeCapabilities(able=[wire.CAPABILITY_LOGS]).SerializeToString())
    hello.capabilities.able.append(1000)  # type: ignore[arg-type]  # open enum
    assert node_capabilities.declared(hello).able == {Capability.LOGS}
    assert not list(node_capabilities.violations(hello.capabilities, "hello"))


def all_orders() -> agent_pb2.ConnectResponse:
    message = agent_pb2.ConnectResponse(
        resizes=[agent_pb2.ResizeOrder(job_id="a")],
        profiles=[agent_pb2.ProfileOrder(job_id="a")],
        sessions=[agent_pb2.SessionOrder(session_id="s")],
        reads=[
            agent_pb2.ReadOutput(read_id="logs"),
            agent_pb2.ReadOutput(read_id="files", files=job_pb2.FileSelection()),
        ],
        assignments=[agent_pb2.Assignment(job_id="a")],
    )
    message.stops.add(job_id="a").grace.FromSeconds(5)
    return message


def orders(message: agent_pb2.ConnectResponse) -> set[str]:
    reads = {read.read_id for read in message.reads}
    grace = {"grace"} if message.stops[0].HasField("grace") else set()
    return {field.name for field, _ in message.ListFields()} - {"reads"} | reads | grace


@given(capabilities)
def test_no_order_goes_beyond_what_was_declared(able: NodeCapabilities) -> None:
    """An assignment and a stop are carried out by every executor."""
    wanted = {"assignments", "stops"}
    wanted |= {"resizes"} if able.cores is CoreControl.RESIZE else set()
    for capability, order in (
        (Capability.PROFILES, "profiles"),
        (Capability.SESSIONS, "sessions"),
        (Capability.LOGS, "logs"),
        (Capability.FILES, "files"),
        (Capability.SIGNALS, "grace"),
    ):
        wanted |= {order} if able.can(capability) else set()
    before = all_orders()
    assert orders(within_capabilities(before, able)) == wanted
    assert before == all_orders()  # the same message may go to other nodes


async def test_nodes_say_what_their_executor_can_do(mesh: Mesh) -> None:
    await mesh.agent("bare", capabilities=BARE)
    await mesh.agent("full")
    assert (await mesh.node("bare")).capabilities == BARE
    assert not (await mesh.node("full")).HasField("capabilities")


@pytest.mark.parametrize(
    ("able", "cores", "what"),
    [
        ([wire.CAPABILITY_PROFILES], wire.CORE_CONTROL_PIN, "cores is pin, not resize"),
        ([wire.CAPABILITY_LOGS] * 2, wire.CORE_CONTROL_NONE, "lists logs twice"),
        ([wire.CAPABILITY_UNSPECIFIED], wire.CORE_CONTROL_NONE, "lists an unset capability"),
    ],
)
async def test_a_declaration_that_contradicts_itself_is_refused(
    mesh: Mesh, able: Iterable[wire.Capability.ValueType], cores: wire.CoreControl.ValueType, what: str
) -> None:
    declared = wire.NodeCapabilities(cores=cores, able=able)
    agent = SimulatedAgent("odd", mesh.channel("placement"), capabilities=declared)
    agent.start()
    try:
        await until(lambda: any(what in error for error in agent.errors))
    finally:
        await agent.stop()
    assert not agent.welcomes


async def test_a_job_with_a_secret_waits_for_a_node_that_can_fetch_it(mesh: Mesh) -> None:
    await mesh.agent("bare", capabilities=BARE)
    needy = spec(gpus=1)
    needy.secrets.add(name="token", variable="TOKEN")
    candidate = placement_pb2.Candidate(job_id="needy", number=1, spec=needy)
    request = placement_pb2.PlanPlacementRequest(candidates=[candidate], validate_only=True)
    [refused] = (await mesh.plans.PlanPlacement(request)).refused
    assert "reads secrets; the executor of 1 server with room cannot do that" in refused.refusal.detail
    await mesh.agent("full")
    [placed] = (await mesh.plans.PlanPlacement(request)).placed
    assert [part.node_id for part in placed.attempt.allocations] == ["full"]


async def test_a_pre_run_is_placed_where_executors_run_them(mesh: Mesh) -> None:
    await mesh.agent("bare", capabilities=BARE)
    await mesh.agent("full")
    candidates = [placement_pb2.Candidate(job_id="probe", number=1, spec=spec(gpus=1), pre_run=True)]
    request = placement_pb2.PlanPlacementRequest(candidates=candidates, validate_only=True)
    [placed] = (await mesh.plans.PlanPlacement(request)).placed
    assert [part.node_id for part in placed.attempt.allocations] == ["full"]


async def test_logs_and_sessions_of_a_node_without_them_are_refused_at_once(mesh: Mesh) -> None:
    await mesh.agent("bare", capabilities=BARE)
    job_id = await mesh.submit()
    await mesh.reach(job_id, "RUNNING")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async for _ in mesh.plans.ReadAttemptLogs(placement_pb2.ReadAttemptLogsRequest(job_id=job_id, number=1)):
            pass
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "the executor of bare keeps no output: it declares no logs" in (refused.value.details() or "")
    opening = placement_pb2.OpenAttemptSessionRequest(number=1, node_id="bare")
    opening.start.rank = 0
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async for _ in mesh.plans.OpenAttemptSession(iter([opening])):
            pass
    assert "the executor of bare carries no sessions" in (refused.value.details() or "")


async def test_cores_of_a_node_that_does_not_resize_are_never_resized(mesh: Mesh) -> None:
    await mesh.agent("bare", capabilities=BARE)
    job_id = await mesh.submit()
    await mesh.reach(job_id, "RUNNING")
    cluster = mesh.parts["placement"].service.cluster
    live = cluster.attempts[job_id]
    assert not cluster.can_resize(live)
    cluster.nodes["bare"].capabilities = EVERYTHING
    assert cluster.can_resize(live)
