"""Whoever prys, operates or asks writes down what is wrong, and nothing else."""

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
from tests.verification.chaos.asking import ANSWERS, NOBODY, OVER, Asking
from tests.verification.chaos.operating import Operator
from tests.verification.chaos.prying import Prying

from cotenant.v1 import job_pb2, tenant_service_pb2
from cotenant.v1 import job_service_pb2 as pb
from cotenant.v1 import node_service_pb2 as node_pb2


def refusal(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "no")


def answering(*answers: Any) -> Callable[..., Any]:
    """A method that answers so, one after the other, and the last for ever."""
    left = list(answers)

    async def method(request: Any, **_: float) -> Any:
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, grpc.StatusCode):
            raise refusal(answer)
        return answer

    return method


def told(directory: Path) -> list[dict[str, Any]]:
    path = directory / ANSWERS
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def asking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Asking]:
    monkeypatch.setattr("tests.verification.chaos.asking.RETRY_SECONDS", 0.0)
    asking = Asking(tmp_path, "test")
    asking.hushed.set()
    yield asking
    asking.hushed.clear()


async def test_one_asks_until_there_is_an_answer(asking: Asking) -> None:
    away, over = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.FAILED_PRECONDITION
    assert await asking.call(answering(away, None, over, "yes"), "?") == "yes"
    assert await asking.unless(OVER, answering(away, over, "yes"), "?") is None
    assert asking.refusals == {"UNAVAILABLE": 2, "unreadable": 1, "FAILED_PRECONDITION": 1}
    with pytest.raises(grpc.aio.AioRpcError):
        await asking.unless(NOBODY, answering(grpc.StatusCode.NOT_FOUND), "?")
    assert ["NOT_FOUND" in one["wrong"] for one in told(asking.directory)] == [True]


async def stream(*jobs: job_pb2.Job) -> AsyncIterator[pb.WatchJobsResponse]:
    for job in jobs:
        yield pb.WatchJobsResponse(job=job)


class Stream:
    """What a watch gives."""

    def __init__(self, *jobs: job_pb2.Job) -> None:
        self._jobs = jobs

    def __aiter__(self) -> AsyncIterator[pb.WatchJobsResponse]:
        return stream(*self._jobs)

    def cancel(self) -> None:
        pass


def a_job(job_id: str, tenant: str) -> job_pb2.Job:
    return job_pb2.Job(id=job_id, spec=job_pb2.JobSpec(tenant=tenant))


@pytest.mark.parametrize("leaks", [False, True])
async def test_a_user_who_sees_anothers_job_is_told_of(asking: Asking, leaks: bool) -> None:
    seen = [a_job("mine", "red"), *([a_job("theirs", "blue")] if leaks else [])]
    hidden = pb.GetJobResponse(job=seen[-1]) if leaks else grpc.StatusCode.NOT_FOUND
    jobs = SimpleNamespace(
        ListJobs=answering(pb.ListJobsResponse(jobs=seen)),
        WatchJobs=lambda request, timeout: Stream(*seen),
        GetJob=answering(hidden),
        CancelJob=answering(hidden),
    )
    prying = Prying(asking, {"red": jobs}, {"mine": "red", "theirs": "blue"})
    rng = Random(1)
    for _ in range(40):
        await prying._pry("red", rng)
    wrong = {one["wrong"] for one in told(asking.directory) if "wrong" in one}
    assert len(wrong) == (3 if leaks else 0), wrong
    assert len(told(asking.directory)) >= 40


def operator(asking: Asking, nodes: Any, weight: int) -> Operator:
    tenant = tenant_service_pb2.GetTenantResponse(tenant=tenant_service_pb2.Tenant(id="red", weight=weight))
    tenants = SimpleNamespace(
        CreateTenant=answering("made"), UpdateTenant=answering("changed"), GetTenant=answering(tenant)
    )

    async def submit(request_id: str, rng: Random) -> str:
        return "a-job"

    return Operator(asking, nodes, cast("Any", tenants), submit)


async def test_a_weight_that_was_acknowledged_has_to_be_there(asking: Asking) -> None:
    await operator(asking, None, 3)._weigh("red", 3)
    await operator(asking, None, 3)._weigh("red", 4)
    wrong = [one["wrong"] for one in told(asking.directory) if "wrong" in one]
    assert wrong == ["that red has weight 3.0, after 4 was given"]


async def test_an_operator_closes_nodes_and_gives_up_those_that_are_away(asking: Asking) -> None:
    held, away = node_pb2.Node(id="n", attempts=["a/1"]), node_pb2.Node(id="m", state=node_pb2.NODE_STATE_AWAY)
    nodes = SimpleNamespace(
        ListNodes=answering(node_pb2.ListNodesResponse(nodes=[held, away])),
        GetNode=answering(node_pb2.GetNodeResponse(node=held), node_pb2.GetNodeResponse(node=node_pb2.Node(id="n"))),
        ForgetNode=answering("forgotten"),
        **{f"{deed}Node": answering("done") for deed in ("Drain", "Cordon", "Uncordon")},
    )
    asking.hushed.clear()
    one = operator(asking, nodes, 1)
    await one._close("n", Random(1), drain=True)
    asking.hushed.set()
    await one._close("n", Random(1), drain=False)
    asking.hushed.clear()
    await one._forget(Random(1))
    nodes.DrainNode = answering(grpc.StatusCode.NOT_FOUND)
    await one._close("m", Random(1), drain=True)  # which was given up
    with suppress(grpc.aio.AioRpcError):
        await asyncio.wait_for(one._close("n", Random(1), drain=True), 5.0)
    facts = [{name: value for name, value in line.items() if name != "at"} for line in told(asking.directory)]
    assert facts[:4] == [
        {"drained": "n", "since": "a-job"},
        {"cordoned": "n", "since": "a-job"},
        {"forgetting": "m"},
        {"forgot": "m", "done": True},
    ]
    assert ["wrong" in fact for fact in facts[4:]] == [True]
