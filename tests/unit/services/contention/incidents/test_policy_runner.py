"""Repeated directives, inherited throttles and migration requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any

import grpc
import grpc.aio
import pytest
from tests.unit.services.contention.conftest import NOW, Policy, attempt, sample, sending, serving

from cotenant.core.policy.protocols import Directive, Throttle
from cotenant.rpc.channel import connect
from cotenant.services.contention.incidents.policy_runner import INHERITED_SECONDS_MAX
from cotenant.v1 import contention_service_pb2 as pb
from cotenant.v1 import job_service_pb2, job_service_pb2_grpc

HELD = Throttle(cores=1)


def said(*directives: Directive) -> Callable[[Any], Any]:
    """Say these once."""
    waiting = [directives]
    return lambda window: waiting.pop() if waiting else ()


async def test_a_throttling_directive_is_repeated_until_the_attempt_is_unthrottled(policy: Policy) -> None:
    async with serving() as contention:
        policy.answer = said(Directive("j1", 1, 0.5, "it hurts", HELD))
        (first,) = await contention.stream(sending("n1", sample()))
        assert (first.throttle.cores, first.throttle.bandwidth_percent) == (1, 100)
        (again,) = await contention.stream(sending("n1", sample(at=NOW + 5)))  # on a new stream, too
        assert again == first
        policy.answer = said(Directive("j1", 1, 1.0, "all is well", Throttle()))
        (freed,) = await contention.stream(sending("n1", sample(at=NOW + 10)))
        assert freed.share == 1
        assert await contention.stream(sending("n1", sample(at=NOW + 15))) == []


async def test_no_directive_is_sent_for_an_attempt_that_left_the_node(policy: Policy) -> None:
    async with serving() as contention:
        policy.answer = said(Directive("j1", 1, 0.5, "it hurts", HELD))
        await contention.stream(sending("n1", sample()))
        assert await contention.stream(sending("n1", sample(at=NOW + 5, attempts=[]))) == []
        (incident,) = (await contention.incidents()).incidents
        assert incident.outcome == "it has left the node after 5 s"
        assert (await contention.incidents(open_only=True)).incidents == []


async def test_an_earlier_throttle_is_repeated_for_a_while(policy: Policy) -> None:
    clock = [NOW]

    def held(at: float) -> pb.NodeSample:
        clock[0] = at
        return sample(at=at, attempts=[attempt(throttle=pb.Throttle(bandwidth_percent=100, suspended=True))])

    async with serving(now=lambda: clock[0]) as contention:
        for at in (NOW, NOW + INHERITED_SECONDS_MAX - 1):
            (directive,) = await contention.stream(sending("n1", held(at)))
            assert directive.throttle.suspended
        assert await contention.stream(sending("n1", held(NOW + INHERITED_SECONDS_MAX))) == []
        (incident,) = (await contention.incidents(job_id="j1")).incidents
        assert incident.actions[0].endswith("it was already throttled: suspended")


async def test_an_invalid_throttle_is_not_sent(policy: Policy) -> None:
    policy.answer = said(Directive("j1", 1, 0.5, "it hurts", Throttle(bandwidth_percent=0)))
    async with serving() as contention:
        assert await contention.stream(sending("n1", sample())) == []
        assert (await contention.incidents()).incidents == []


class Queue(job_service_pb2_grpc.JobServiceServicer):
    """Answers as the test says."""

    def __init__(self, *answers: grpc.StatusCode) -> None:
        self.answers, self.asked = list(answers), asyncio.Queue[job_service_pb2.MoveJobRequest]()

    async def MoveJob(self, request: Any, context: Any) -> job_service_pb2.MoveJobResponse:
        self.asked.put_nowait(request)
        if self.answers and (code := self.answers.pop(0)) is not grpc.StatusCode.OK:
            await context.abort(code, "not now")
        return job_service_pb2.MoveJobResponse()


@pytest.mark.parametrize(
    ("answers", "asked", "told"),
    [
        ([], 1, "the queue moves it away"),
        ([grpc.StatusCode.RESOURCE_EXHAUSTED], 2, "the queue moves it away"),
        ([grpc.StatusCode.FAILED_PRECONDITION], 1, "could not be moved: not now"),
    ],
    ids=["at once", "at the second window", "never"],
)
async def test_a_migration_is_requested_until_the_queue_answers(
    answers: list[grpc.StatusCode], asked: int, told: str, policy: Policy
) -> None:
    queue, server = Queue(*answers), grpc.aio.server()  # type: ignore[abstract]  # the generated base answers the rest
    job_service_pb2_grpc.add_JobServiceServicer_to_server(queue, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    policy.answer = said(Directive("j1", 1, 0.5, "it stood still for long", HELD, move=True))
    try:
        async with connect(f"127.0.0.1:{port}") as channel, serving(queue=channel) as contention:
            ticks = count()
            for _ in range(asked):
                while queue.asked.empty():  # a window is too early until the answer to the last request has arrived
                    await contention.stream(sending("n1", sample(at=NOW + next(ticks))))
                request = await queue.asked.get()
                assert (request.id, request.number, request.reason) == ("j1", 1, "it stood still for long")
            actions: list[str] = []
            while not any(action.endswith(told) for action in actions):
                actions = list((await contention.incidents()).incidents[0].actions)
            await contention.stream(sending("n1", sample(at=NOW + next(ticks))))
            assert queue.asked.empty()
    finally:
        await server.stop(0)


async def test_without_a_queue_no_job_is_migrated_and_the_incident_records_it(policy: Policy) -> None:
    policy.answer = said(Directive("j1", 1, 0.5, "it stood still for long", HELD, move=True))
    async with serving() as contention:
        await contention.stream(sending("n1", sample()))
        (incident,) = (await contention.incidents()).incidents
        assert "and asked to move away" in incident.actions[0]
        assert incident.actions[1].endswith("could not be moved: contention has no queue")
