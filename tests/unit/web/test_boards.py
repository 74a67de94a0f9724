"""Boards show what is there, and say what is missing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from cotenant.client.errors import CotenantError, PermissionDenied, Unavailable
from cotenant.v1.contention_service_pb2 import (
    AttemptSample,
    Incident,
    ListIncidentsResponse,
    ListSamplesResponse,
    NodeSample,
)
from cotenant.v1.job_pb2 import Job, JobSpec
from cotenant.v1.job_service_pb2 import (
    USAGE_GROUP_WEEK,
    ListJobsResponse,
    SummarizeUsageRequest,
    SummarizeUsageResponse,
    UsageCount,
)
from cotenant.v1.node_service_pb2 import ListNodesResponse, Node, NodeState
from cotenant.v1.policy_service_pb2 import ListPoliciesResponse, Policy
from cotenant.v1.resources_pb2 import Core, Gpu, Inventory
from cotenant.v1.tenant_service_pb2 import (
    ListQueuesResponse,
    ListTenantsResponse,
    ListTenantUsageResponse,
    Queue,
    Tenant,
    TenantUsage,
)
from cotenant.web import incident_board, prediction_board, queue_board, tenant_board
from cotenant.web.boards import MAY_NOT, Board, BoardKind

NO_LEADER = Unavailable("queue has no leader now")


class FakeMesh:
    """A mesh whose methods return or raise what they are given, by service and method."""

    def __init__(self, **answers: Any) -> None:
        self._answers = answers

    def __getattr__(self, service: str) -> Any:
        def method(name: str) -> Callable[[Any], Awaitable[Any]]:
            async def call(request: Any) -> Any:
                answer = self._answers.get(f"{service}_{name}", NO_LEADER)
                answer = answer(request) if callable(answer) else answer
                if isinstance(answer, CotenantError):
                    raise answer
                return answer

            return call

        return type("Stub", (), {"__getattr__": lambda _, name: method(name)})()

    async def call_contention_replicas(self, call: Callable[[Any], Awaitable[Any]]) -> Any:
        """Return what the only replica of contention answers."""
        return await call(self.contention)

    def policies(self) -> Mapping[str, Any]:
        """Return the stubs that list policies."""
        return {"contention": self.contention, "predictor": self.predictor}

    async def ask(self, work: Callable[[Any], Awaitable[Any]]) -> Any:
        """Return what `work` returns."""
        return await work(self)


def node(name: str, gpus: int, used: int, *, ill: int = 0, state: Any = NodeState.NODE_STATE_READY) -> Node:
    parts = [Gpu(uuid=f"{name}{one}", unhealthy_reason="ECC" if one < ill else "") for one in range(gpus)]
    return Node(
        id=name,
        state=state,
        inventory=Inventory(gpus=parts, cores=[Core(id=one) for one in range(8)]),
        used_gpu_milli=used,
        used_cores=3,
    )


async def test_without_a_leader_the_queue_page_still_shows_what_is_free() -> None:
    nodes = ListNodesResponse(nodes=[node("a", 4, 1500), node("b", 4, 0, ill=1)])
    found = await queue_board.read(FakeMesh(nodes_ListNodes=nodes).ask)
    assert "no leader" in found["queues"]["trouble"]
    assert "no leader" in found["shares"]["trouble"]
    assert (found["free"]["trouble"], found["free"]["rows"][0]["gpus_free"]) == ("", 5.5)


async def test_without_placement_the_queue_page_still_shows_its_rules_and_shares() -> None:
    queues = ListQueuesResponse(queues=[Queue(id="default", policy="fifo", rules={"preemption": "never"}, waiting=7)])
    usages = ListTenantUsageResponse(usages=[TenantUsage(tenant_id="vision", share=0.5)])
    mesh = FakeMesh(tenants_ListQueues=queues, tenants_ListTenantUsage=usages)
    found = await queue_board.read(mesh.ask)
    [queue] = found["queues"]["rows"]
    assert (queue["policy"], queue["rules"], queue["waiting"]) == ("fifo", {"preemption": "never"}, 7)
    assert found["shares"]["rows"][0]["tenant"] == "vision"
    assert (found["free"]["rows"], found["free"]["trouble"]) == ([], "queue has no leader now")


async def test_what_a_token_may_not_see_is_said_as_such() -> None:
    denied = PermissionDenied("viewer eve may not ListQueues")
    found = await queue_board.read(FakeMesh(tenants_ListQueues=denied).ask)
    assert found["queues"]["trouble"] == MAY_NOT


POLICIES = ListPoliciesResponse(policies=[Policy(name="coda-eliminator", active=True), Policy(name="none")])


def incident(number: int, start: float, end: float | None, *actions: str) -> Incident:
    made = Incident(id=f"{number:012d}", node_id="n1", victim_job_id="v", suspect_job_id="s", slowdown=0.4)
    made.start_time.FromNanoseconds(int(start * 1e9))
    if end is not None:
        made.end_time.FromNanoseconds(int(end * 1e9))
    made.actions.extend(actions)
    return made


async def test_incidents_have_the_times_of_their_actions_and_open_ones_their_node_as_it_is_now() -> None:
    over = incident(1, 86390.0, 86410.5, "23:59:52Z held to 2 of its cores: bandwidth", "00:00:03Z freed: it is well")
    attempt = AttemptSample(job_id="v", rate_per_second=6.0, expected_rate_per_second=10.0, cores=4)
    samples = [
        NodeSample(node_id=name, memory_bandwidth_bytes_per_second=-1, attempts=[attempt]) for name in ("n1", "n2")
    ]
    mesh = FakeMesh(
        contention_ListIncidents=ListIncidentsResponse(incidents=[incident(2, 90000.0, None), over]),
        contention_ListSamples=ListSamplesResponse(samples=samples),
        contention_ListPolicies=POLICIES,
    )
    found = await incident_board.read(mesh.ask)
    assert found["state"] == {"trouble": "", "policy": "coda-eliminator"}
    assert found["incident n1 000000000001"]["actions"] == [
        (86392.0, "held to 2 of its cores: bandwidth"), (86403.0, "freed: it is well"),
    ]  # fmt: skip
    assert found["incident n1 000000000002"]["end"] is None
    assert found["node n1"]["attempts"]["v"]["expected"] == 10.0
    assert (found["node n1"]["bandwidth_share"], "node n2" in found) == (None, False)


async def test_without_contention_the_page_of_incidents_says_so() -> None:
    found = await incident_board.read(FakeMesh().ask)
    assert found == {"state": {"trouble": "queue has no leader now", "policy": ""}}


async def test_open_incidents_are_shown_without_samples_of_their_nodes() -> None:
    mesh = FakeMesh(contention_ListIncidents=ListIncidentsResponse(incidents=[incident(2, 90000.0, None)]))
    assert set(await incident_board.read(mesh.ask)) == {"incident n1 000000000002", "state"}


def judged(name: str, promised: float, ran: float, confidence: float) -> Job:
    job = Job(id=name, spec=JobSpec(name=name, tenant="vision"), prediction_source="history")
    job.prediction_confidence = confidence
    job.run_time.FromNanoseconds(int(ran * 1e9))
    job.predicted_run_time.FromNanoseconds(int(promised * 1e9))
    return job


async def test_without_a_predictor_the_record_of_predictions_is_still_shown() -> None:
    listed = ListJobsResponse(jobs=[judged("a", 60, 60, 0.9), judged("b", 60, 240, 0.3), Job(id="unpredicted")])
    found = await prediction_board.read(FakeMesh(jobs_ListJobs=listed).ask)
    state = found["state"]
    assert (state["trouble"], state["away"], state["predictors"]) == ("", "queue has no leader now", [])
    assert (found["job b"]["promised"], found["job b"]["ran"], "job unpredicted" in found) == (60.0, 240.0, False)
    assert [(one["confidence_min"], one["within_twice"]) for one in state["calibration"]] == [(0.2, 0.0), (0.8, 1.0)]
    assert (state["overall"]["jobs"], state["records"][0]["predictor"]) == (2, "history")
    assert state["ratios"] == pytest.approx((1.3, 3.7))


async def test_without_a_leader_the_page_of_predictions_still_names_the_predictors() -> None:
    policies = ListPoliciesResponse(policies=[Policy(name="history", active=True)])
    state = (await prediction_board.read(FakeMesh(predictor_ListPolicies=policies).ask))["state"]
    assert (state["trouble"], state["predictors"], state["overall"]) == ("queue has no leader now", ["history"], None)


async def test_tenants_are_shown_without_placement_and_shares_without_tenants() -> None:
    vision = Tenant(id="vision", quota_gpu_milli=8000, used_gpu_milli=2000)
    tenants = ListTenantsResponse(tenants=[vision])
    found = await tenant_board.read(FakeMesh(tenants_ListTenants=tenants).ask)
    assert (found["tenants"]["rows"][0]["quota_gpus"], found["free"]["trouble"]) == (8, "queue has no leader now")
    nodes = ListNodesResponse(nodes=[node("a", 4, 3000)])
    found = await tenant_board.read(FakeMesh(tenants_ListTenants=tenants, nodes_ListNodes=nodes).ask)
    [row] = found["tenants"]["rows"]
    assert (row["gpus_borrowed"], row["gpus_idle"], row["gpus_lent_min"]) == (0, 6, 5)
    usages = ListTenantUsageResponse(usages=[TenantUsage(tenant_id="vision", share=0.5)])
    found = await tenant_board.read(FakeMesh(tenants_ListTenantUsage=usages).ask)
    assert (found["tenants"]["rows"], found["shares"]["rows"][0]["share"]) == ([], 0.5)


async def test_each_summary_of_usage_is_shown_without_the_others() -> None:
    def by_week(request: SummarizeUsageRequest) -> Any:
        if request.by != USAGE_GROUP_WEEK:
            return NO_LEADER
        return SummarizeUsageResponse(counts=[UsageCount(group="2026-01-05", gpu_seconds=7200, jobs=3)])

    used = await tenant_board.usage(FakeMesh(jobs_SummarizeUsage=by_week).ask, "vision")
    assert used["weeks"]["rows"] == [
        {"week": "2026-01-05", "gpu_hours": 2.0, "core_hours": 0.0, "jobs": 3, "failed_jobs": 0}
    ]
    assert [used[name]["trouble"] for name in ("tenants", "users", "decayed")] == 3 * ["queue has no leader now"]


def test_pieces_count_whole_gpus_of_healthy_nodes_that_take_work() -> None:
    lost = node("c", 8, 0, state=NodeState.NODE_STATE_LOST)
    found = queue_board.pieces([node("a", 4, 1500), node("b", 4, 0, ill=1), lost])
    names = ("nodes", "nodes_ready", "gpus_free", "gpus_free_most", "cores_free", "cores_free_most")
    assert [found[name] for name in names] == [3, 2, 5.5, 3, 10, 5]
    assert found["nodes_by_free_gpus"] == [(3, 1), (2, 1)]


async def test_a_board_is_read_while_it_has_readers_and_keeps_its_rows_through_a_failure() -> None:
    answers: list[Mapping[str, Any] | Exception] = [
        {"a": {"n": 1}, "b": {"n": 2}},
        NO_LEADER,
        KeyError("of one row"),
        {"b": {"n": 3}},
    ]
    reads = SimpleNamespace(count=0)

    async def read(_: Any) -> Mapping[str, Any]:
        reads.count += 1
        answer = answers.pop(0) if answers else {"b": {"n": 3}}
        if isinstance(answer, Exception):
            raise answer
        return answer

    board = Board(FakeMesh().ask, BoardKind(read, 0.0))
    with board.reading() as rows, board.reading():
        async with asyncio.timeout(60):
            while rows.ids() != {"b"}:
                await rows.wait(rows.position, 1.0)
            assert reads.count >= 4
    assert [json.loads(row) for row in board.rows.after("").rows] == [{"id": "b", "n": 3}]
    count = reads.count
    for _ in range(20):
        await asyncio.sleep(0)
    assert reads.count == count
