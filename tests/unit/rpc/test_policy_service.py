from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest

from cotenant.codec.errors import from_error
from cotenant.plugins import Plugin
from cotenant.rpc.channel import connect
from cotenant.rpc.policy_service import SERVICE, PolicyServicer, serve_policies
from cotenant.rpc.server import Server
from cotenant.v1 import policy_service_pb2 as pb
from cotenant.v1 import policy_service_pb2_grpc as pb_grpc

QUEUE, PREDICTORS = "cotenant.queue_policies", "cotenant.predictors"


class Discovery:
    """Returns the test's policies, and counts its calls."""

    def __init__(self, *found: Plugin) -> None:
        self.found, self.count = found, 0

    def __call__(self) -> Sequence[Plugin]:
        self.count += 1
        return self.found


GOOD = Plugin(QUEUE, "good", "acme", "1.2", api_version=1, healthy=True, summary="Good.", options={"depth": "3"})
BROKEN = Plugin(QUEUE, "broken", "acme", "1.2", error="cannot be imported: ImportError: no acme")
OTHER = Plugin(PREDICTORS, "other", "cotenant", "0.1", api_version=1, healthy=True)


@asynccontextmanager
async def serving(policies: PolicyServicer) -> AsyncIterator[Any]:
    server = Server()
    server.add(pb_grpc.add_PolicyServiceServicer_to_server, policies, SERVICE)
    port = await server.start()
    try:
        async with connect(f"127.0.0.1:{port}") as channel:
            yield pb_grpc.PolicyServiceStub(channel)
    finally:
        await server.stop(0)


async def listed(stub: Any, group: str = "") -> Sequence[pb.Policy]:
    response: pb.ListPoliciesResponse = await stub.ListPolicies(pb.ListPoliciesRequest(group=group))
    return response.policies


async def test_a_policy_is_listed_with_all_its_fields() -> None:
    policies = PolicyServicer(Discovery(GOOD))
    policies.use(QUEUE, "good")
    async with serving(policies) as stub:
        (policy,) = await listed(stub)
    assert policy == pb.Policy(
        group=QUEUE,
        name="good",
        package="acme",
        version="1.2",
        api_version=1,
        healthy=True,
        active=True,
        summary="Good.",
        options={"depth": "3"},
    )


async def test_only_groups_in_use_are_listed_and_services_of_one_server_share_the_list() -> None:
    policies = PolicyServicer(Discovery(GOOD, BROKEN, OTHER))
    policies.use(QUEUE, "good")
    async with serving(policies) as stub:
        assert [policy.name for policy in await listed(stub)] == ["broken", "good"]
        policies.use(PREDICTORS, "other")
        assert [policy.name for policy in await listed(stub) if policy.active] == ["other", "good"]
        assert [policy.name for policy in await listed(stub, PREDICTORS)] == ["other"]
        assert [policy.name for policy in await listed(stub, "cotenant.runtimes")] == []


async def test_policies_are_listed_page_by_page_in_order_of_group_and_name() -> None:
    policies = PolicyServicer(Discovery(GOOD, replace(GOOD, name="good-too"), BROKEN, OTHER))
    policies.use(QUEUE, "good")
    policies.use(PREDICTORS, "other")
    async with serving(policies) as stub:
        names, request = [], pb.ListPoliciesRequest(page_size=1)
        while True:
            page = await stub.ListPolicies(request)
            names += [policy.name for policy in page.policies]
            assert len(page.policies) == 1
            request.page_token = page.next_page_token
            if not request.page_token:
                break
            last = request.page_token
        assert names == ["other", "broken", "good", "good-too"]
        for bad in ({"page_size": -1}, {"page_token": "?"}, {"page_token": last, "group": QUEUE}):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.ListPolicies(pb.ListPoliciesRequest(**bad))
            assert from_error(refused.value).violations[0].field in bad


async def test_a_broken_policy_says_why_and_is_never_active() -> None:
    policies = PolicyServicer(Discovery(BROKEN))
    policies.use(QUEUE, "broken")
    async with serving(policies) as stub:
        (policy,) = await listed(stub)
    assert (policy.healthy, policy.active) == (False, False)
    assert policy.error == "cannot be imported: ImportError: no acme"


async def test_policies_are_discovered_once_for_all_callers() -> None:
    discovery = Discovery(GOOD)
    policies = PolicyServicer(discovery)
    policies.use(QUEUE)
    await asyncio.gather(*(policies.ListPolicies(pb.ListPoliciesRequest(), None) for _ in range(10)))
    assert discovery.count == 1


async def test_an_unknown_group_is_rejected_with_a_suggestion() -> None:
    async with serving(PolicyServicer(Discovery())) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await listed(stub, "cotenant.queue_policy")
    problem = from_error(refused.value)
    assert problem.code is grpc.StatusCode.INVALID_ARGUMENT
    assert problem.violations[0].field == "group"
    assert "did you mean cotenant.queue_policies" in problem.message


def test_a_service_cannot_use_an_unknown_group() -> None:
    with pytest.raises(ValueError, match="unknown group 'queues'"):
        PolicyServicer().use("queues", "fifo")


async def test_installed_policies_are_listed_by_a_server() -> None:
    server = Server()
    serve_policies(server).use(QUEUE, "fifo")
    port = await server.start()
    try:
        async with connect(f"127.0.0.1:{port}") as channel:
            found = await listed(pb_grpc.PolicyServiceStub(channel))
    finally:
        await server.stop(0)
    assert "fifo" in [policy.name for policy in found if policy.active]
