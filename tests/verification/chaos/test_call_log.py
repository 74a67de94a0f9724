"""Clients record violations, and nothing else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from tests.verification.chaos.call_log import ALREADY_ENDED, ANSWERS, NO_CODES, CallLog
from tests.verification.chaos.isolation_probe import IsolationProbe
from tests.verification.chaos.operator import Operator

from cotenant.v1 import job_pb2, tenant_service_pb2
from cotenant.v1 import job_service_pb2 as pb
from cotenant.v1 import node_service_pb2 as node_pb2


def refusal(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "no")


def returning(*answers: Any) -> Callable[..., Any]:
    """Return a method that returns these answers in turn, the last one forever."""
    left = list(answers)

    async def method(request: Any, **_: float) -> Any:
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, grpc.StatusCode):
            raise refusal(answer)
        return answer

    return method


def recorded(directory: Path) -> list[dict[str, Any]]:
    path = directory / ANSWERS
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def call_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CallLog]:
    monkeypatch.setattr("tests.verification.chaos.call_log.RETRY_SECONDS", 0.0)
    call_log = CallLog(tmp_path, "test")
    call_log.quiescing.set()
    yield call_log
    call_log.quiescing.clear()


async def test_a_call_is_retried_until_answered(call_log: CallLog) -> None:
    away, over = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.FAILED_PRECONDITION
    assert await call_log.call(returning(away, None, over, "yes"), "?") == "yes"
    assert await call_log.call_unless(ALREADY_ENDED, returning(away, over, "yes"), "?") is None
    assert call_log.refusals == {"UNAVAILABLE": 2, "unreadable": 1, "FAILED_PRECONDITION": 1}
    with pytest.raises(grpc.aio.AioRpcError):
        await call_log.call_unless(NO_CODES, returning(grpc.StatusCode.NOT_FOUND), "?")
    assert ["NOT_FOUND" in one["wrong"] for one in recorded(call_log.directory)] == [True]


async def stream(*jobs: job_pb2.Job) -> AsyncIterator[pb.WatchJobsResponse]:
    for job in jobs:
        yield pb.WatchJobsResponse(jobs=[job])


class Stream:
    """A watch."""

    def __init__(self, *jobs: job_pb2.Job) -> None:
        self._jobs = jobs

    def __aiter__(self) -> AsyncIterator[pb.WatchJobsResponse]:
        return stream(*self._jobs)

    def cancel(self) -> None:
        pass


def a_job(job_id: str, tenant: str) -> job_pb2.Job:
    return job_pb2.Job(id=job_id, spec=job_pb2.JobSpec(tenant=tenant))


@pytest.mark.parametrize("leaks", [False, True])
async def test_a_user_who_sees_another_tenants_job_is_recorded(call_log: CallLog, leaks: bool) -> None:
    seen = [a_job("mine", "red"), *([a_job("theirs", "blue")] if leaks else [])]
    hidden = pb.GetJobResponse(job=seen[-1]) if leaks else grpc.StatusCode.NOT_FOUND
    jobs = SimpleNamespace(
        ListJobs=returning(pb.ListJobsResponse(jobs=seen)),
        WatchJobs=lambda request, timeout: Stream(*seen),
        GetJob=returning(hidden),
        CancelJob=returning(hidden),
    )
    isolation_probe = IsolationProbe(call_log, {"red": jobs}, {"mine": "red", "theirs": "blue"})
    rng = Random(1)
    for _ in range(40):
        await isolation_probe._probe("red", rng)
    wrong = {one["wrong"] for one in recorded(call_log.directory) if "wrong" in one}
    assert len(wrong) == (3 if leaks else 0), wrong
    assert len(recorded(call_log.directory)) >= 40


def operator(call_log: CallLog, nodes: Any, weight: int) -> Operator:
    tenant = tenant_service_pb2.GetTenantResponse(tenant=tenant_service_pb2.Tenant(id="red", weight=weight))
    tenants = SimpleNamespace(
        CreateTenant=returning("made"), UpdateTenant=returning("changed"), GetTenant=returning(tenant)
    )

    async def submit(request_id: str, rng: Random) -> str:
        return "a-job"

    return Operator(call_log, nodes, cast("Any", tenants), submit)


@pytest.mark.deep
async def test_an_acknowledged_weight_must_take_effect(call_log: CallLog) -> None:
    await operator(call_log, None, 3)._set_weight("red", 3)
    await operator(call_log, None, 3)._set_weight("red", 4)
    wrong = [one["wrong"] for one in recorded(call_log.directory) if "wrong" in one]
    assert wrong == ["that red has weight 3.0, after 4 was set"]


async def test_an_operator_closes_nodes_and_forgets_disconnected_ones(call_log: CallLog) -> None:
    held, away = node_pb2.Node(id="n", attempts=["a/1"]), node_pb2.Node(id="m", state=node_pb2.NODE_STATE_AWAY)
    nodes = SimpleNamespace(
        ListNodes=returning(node_pb2.ListNodesResponse(nodes=[held, away])),
        GetNode=returning(node_pb2.GetNodeResponse(node=held), node_pb2.GetNodeResponse(node=node_pb2.Node(id="n"))),
        ForgetNode=returning("forgotten"),
        **{f"{deed}Node": returning("done") for deed in ("Drain", "Cordon", "Uncordon")},
    )
    call_log.quiescing.clear()
    one = operator(call_log, nodes, 1)
    await one._close_node("n", Random(1), drain=True)
    call_log.quiescing.set()
    await one._close_node("n", Random(1), drain=False)
    call_log.quiescing.clear()
    await one._forget(Random(1))
    nodes.DrainNode = returning(grpc.StatusCode.NOT_FOUND)
    await one._close_node("m", Random(1), drain=True)  # which was forgotten
    with suppress(grpc.aio.AioRpcError):
        await asyncio.wait_for(one._close_node("n", Random(1), drain=True), 5.0)
    facts = [{name: value for name, value in line.items() if name != "at"} for line in recorded(call_log.directory)]
    assert facts[:4] == [
        {"drained": "n", "since": "a-job"},
        {"cordoned": "n", "since": "a-job"},
        {"forgetting": "m"},
        {"forgot": "m", "done": True},
    ]
    assert ["wrong" in fact for fact in facts[4:]] == [True]
