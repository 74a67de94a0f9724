"""Advice over the wire: the plan of a snapshot, one error for bad input, and a process that ends with its call."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.unit.services.mesh import until
from tests.unit.simulator.test_snapshot_plan import BUSY

from cotenant.rpc.channel import connect
from cotenant.rpc.server import Server
from cotenant.services.predictor.api import advice
from cotenant.simulator.snapshot_plan import plan_snapshot
from cotenant.v1 import advice_service_pb2 as pb
from cotenant.v1 import advice_service_pb2_grpc


class Served:
    """A server with nothing but advice."""

    def __init__(self) -> None:
        self.servicer = advice.AdviceServicer()
        self.stub: Any = None


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    found, server = Served(), Server("127.0.0.1:0")
    port = server.bind()
    server.add(advice_service_pb2_grpc.add_AdviceServiceServicer_to_server, found.servicer, advice.SERVICE)
    await server.start()
    async with connect(f"127.0.0.1:{port}") as channel:
        found.stub = advice_service_pb2_grpc.AdviceServiceStub(channel)
        yield found
    await server.stop(0)


SNAPSHOT = BUSY.dump().encode()


async def test_a_plan_over_the_wire_is_that_of_the_function(served: Served) -> None:
    response = await served.stub.PlanJobs(pb.PlanJobsRequest(snapshot=SNAPSHOT, seed=3))
    plan = plan_snapshot(BUSY, seed=3)
    assert [(job.job_id, job.order, bool(job.places)) for job in response.jobs] == [
        (job.id, job.order, job.starts) for job in plan.jobs
    ]
    assert response.jobs[0].places[0].node_id == "a"
    assert response.jobs[1].refusal.code == "CAPACITY"
    assert response.jobs[1].start.start.seconds == 30
    assert dict(response.policies) == dict(plan.policies)


@pytest.mark.parametrize(
    ("request_", "field", "what"),
    [
        (pb.PlanJobsRequest(), "snapshot", "snapshot:1:1: invalid JSON"),
        (pb.PlanJobsRequest(snapshot=b"{}"), "snapshot", "is not a snapshot"),
        (pb.PlanJobsRequest(snapshot=SNAPSHOT, profile="fulll"), "profile", "did you mean full"),
        (pb.PlanJobsRequest(snapshot=SNAPSHOT, policies={"queue": "fifoo"}), "policies", "did you mean fifo"),
        (pb.PlanJobsRequest(snapshot=SNAPSHOT, options={"queue.moed": "strict"}), "options", "queue.moed"),
        (pb.PlanJobsRequest(snapshot=SNAPSHOT, options={"mode": "strict"}), "options", "must be written group.key"),
    ],
)
async def test_bad_input_is_one_error_that_names_the_field(
    served: Served, request_: pb.PlanJobsRequest, field: str, what: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await served.stub.PlanJobs(request_)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field in (refused.value.details() or "")
    assert what in (refused.value.details() or "")


async def test_a_snapshot_above_the_limits_is_told_which(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "JOBS_MAX", 3)
    with pytest.raises(grpc.aio.AioRpcError, match="jobs: 4, more than 3"):
        await served.stub.PlanJobs(pb.PlanJobsRequest(snapshot=SNAPSHOT))


async def test_a_plan_ends_with_its_call_and_a_caller_has_one_at_a_time(served: Served, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    script = f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    served.servicer._command = (sys.executable, "-c", script)
    call = served.stub.PlanJobs(pb.PlanJobsRequest(snapshot=SNAPSHOT))
    waiting = asyncio.ensure_future(call)
    await until(lambda: note.exists() and bool(note.read_text()))
    with pytest.raises(grpc.aio.AioRpcError, match="a plan of yours is being made"):
        await served.stub.PlanJobs(pb.PlanJobsRequest(snapshot=SNAPSHOT))
    call.cancel()
    await until(lambda: not Path(f"/proc/{note.read_text()}").exists())
    await asyncio.gather(waiting, return_exceptions=True)
