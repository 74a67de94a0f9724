"""A replaced or late queue starts nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import grpc
import pytest
from benchmarks.agents import SimulatedAgent
from tests.unit.services.mesh import Mesh, again, reason, running, spec, until

from cotenant.internal.v1 import placement_service_pb2 as pb
from cotenant.store.port import Put
from cotenant.v1 import job_pb2

LEADER = "queue/leader"


async def lead(mesh: Mesh) -> int:
    """Make a queue lead; return its term."""
    result = await mesh.store.transact([], [Put(LEADER, b"a queue")])
    return result.revision


async def keep(mesh: Mesh, job_id: str) -> int:
    """Store a job as the queue does; return the record's revision."""
    result = await mesh.store.transact([], [Put(f"queue/jobs/{job_id}", b"a job")])
    return result.revision


def plan(job_id: str, term: int = 0, number: int = 1, revision: int = 0) -> pb.PlanPlacementRequest:
    candidate = pb.Candidate(job_id=job_id, number=number, spec=spec(), revision=revision)
    return pb.PlanPlacementRequest(candidates=[candidate], term=term)


def forget(job_id: str, term: int = 0) -> pb.ForgetAttemptsRequest:
    return pb.ForgetAttemptsRequest(attempts=[pb.Victim(job_id=job_id, number=1)], term=term)


async def ended(mesh: Mesh) -> tuple[SimulatedAgent, int, int]:
    """Run attempt 1 of job `a` to its end; return the queue's term and the job's revision at its plan."""
    await mesh.kill("queue")
    agent = await mesh.agent("n1")
    term, before = await lead(mesh), await keep(mesh, "a")
    await mesh.plans.PlanPlacement(plan("a", term, revision=before))
    agent.finish(("a", 1))
    await until(lambda: ("a", 1) in agent.acked)
    return agent, term, before


async def test_a_retried_plan_returns_the_evidence_about_a_failure() -> None:
    """Its caller may classify the failure from this answer, before the watch sends the attempt."""
    async with running() as mesh:
        await mesh.kill("queue")
        agent = await mesh.agent("n1")
        await mesh.plans.PlanPlacement(plan("a"))
        await until(lambda: ("a", 1) in agent.attempts)
        agent.fail(("a", 1), "giving up\n", signs=["xid 79 on GPU-1"])
        await until(lambda: ("a", 1) in agent.acked)
        (standing,) = (await mesh.plans.PlanPlacement(plan("a"))).placed
        assert standing.attempt.state == job_pb2.ATTEMPT_STATE_FAILED
        assert (standing.evidence.output_tail, list(standing.evidence.signs)) == ("giving up\n", ["xid 79 on GPU-1"])


async def test_a_former_leader_queue_starts_nothing() -> None:
    async with running() as mesh:
        agent = await mesh.agent("n1")
        old = await lead(mesh)
        assert (await mesh.plans.PlanPlacement(plan("a", old))).placed
        new = await lead(mesh)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await mesh.plans.PlanPlacement(plan("b", old), timeout=3)
        assert reason(refused.value) == "OLD_TERM"
        assert await mesh.records_left("placement/attempts/") == ["placement/attempts/a"]
        assert (await mesh.plans.PlanPlacement(plan("b", new))).placed, "it holds nothing, and placement goes on"
        assert len(agent.welcomes) == 1, "placement had no reason to doubt what it knows"


async def test_a_former_leader_queue_forgets_nothing() -> None:
    """It does not know jobs submitted to its successor, which has yet to learn how their attempts ended."""
    async with running() as mesh:
        await mesh.kill("queue")
        agent = await mesh.agent("n1")
        old = await lead(mesh)
        await mesh.plans.PlanPlacement(plan("a", old))
        agent.finish(("a", 1))
        await until(lambda: ("a", 1) in agent.acked)
        new = await lead(mesh)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await mesh.plans.ForgetAttempts(forget("a", old))
        assert reason(refused.value) == "OLD_TERM"
        assert await mesh.records_left("placement/attempts/") == ["placement/attempts/a"]
        (standing,) = (await mesh.plans.PlanPlacement(plan("a", new))).placed
        assert standing.attempt.state == job_pb2.ATTEMPT_STATE_SUCCEEDED, "placement remembers it too"
        await mesh.plans.ForgetAttempts(forget("a", new))
        assert await mesh.records_left("placement/attempts/") == []


async def test_a_former_leader_queue_stops_nothing() -> None:
    """It may know of a suspension, but not that the job was resumed since."""
    async with running() as mesh:
        await mesh.kill("queue")
        agent = await mesh.agent("n1", gpus=1)
        old = await lead(mesh)
        await mesh.plans.PlanPlacement(plan("a", old))
        await until(lambda: ("a", 1) in agent.assignments)
        new = await lead(mesh)
        for late in (stop("a", old), instead_of_a("b", old)):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await late(mesh)
            assert reason(refused.value) == "OLD_TERM"
        assert not agent.stops
        await instead_of_a("b", new)(mesh)
        await until(lambda: bool(agent.stops))


def stop(job_id: str, term: int) -> Callable[[Mesh], Awaitable[object]]:
    victims = [pb.Victim(job_id=job_id, number=1)]
    reason = job_pb2.STOP_REASON_SUSPENDED
    return lambda mesh: mesh.plans.StopAttempts(pb.StopAttemptsRequest(attempts=victims, reason=reason, term=term))


def instead_of_a(job_id: str, term: int) -> Callable[[Mesh], Awaitable[object]]:
    request = plan(job_id, term)
    request.victims.add(job_id="a", number=1)
    return lambda mesh: mesh.plans.PlanPlacement(request)


@pytest.mark.parametrize("lost", [False, True])
async def test_a_late_plan_for_a_forgotten_attempt_starts_nothing(lost: bool) -> None:
    async with running() as mesh:
        await mesh.kill("queue")  # which would have it stopped, for it knows no such job
        agent = await mesh.agent("n1")
        await mesh.plans.PlanPlacement(plan("a"))
        agent.finish(("a", 1))
        await until(lambda: ("a", 1) in agent.acked)
        mesh.parts["placement"].store.lose_answer = lost
        with suppress(grpc.aio.AioRpcError):  # forgotten all the same
            await mesh.plans.ForgetAttempts(forget("a"))
        answer = await again(lambda: mesh.plans.PlanPlacement(plan("a")))
        assert not answer.placed
        (refused,) = answer.refused  # with a hint when to retry
        assert (refused.job_id, refused.refusal.code) == ("a", "NOT_YET_CONSIDERED")
        assert 0 < refused.refusal.holds.ToMilliseconds() <= 1000
        await until(lambda: mesh.parts["placement"].service.cluster.nodes["n1"].open)  # its agent has come back
        assert [placed.attempt.number for placed in (await mesh.plans.PlanPlacement(plan("a", number=2))).placed] == [2]


async def test_a_late_plan_at_a_new_leader_starts_nothing() -> None:
    """It is from the leading queue; only the job's record, which has stored the end since, shows that it is late."""
    async with running() as mesh:
        agent, term, before = await ended(mesh)
        after = await keep(mesh, "a")
        await mesh.plans.ForgetAttempts(forget("a", term))
        await mesh.restart("placement")
        await until(lambda: len(agent.welcomes) == 2)
        late = plan("a", term, revision=before)
        late.candidates.add(job_id="b", number=1, spec=spec(), revision=await keep(mesh, "b"))
        answer = await again(lambda: mesh.plans.PlanPlacement(late))
        assert [placed.attempt.job_id for placed in answer.placed] == ["b"], "no other job suffers from it"
        (refused,) = answer.refused
        assert (refused.job_id, refused.refusal.code) == ("a", "NOT_YET_CONSIDERED")
        assert await mesh.records_left("placement/attempts/") == ["placement/attempts/b"]
        next_one = plan("a", term, number=2, revision=after)
        assert [placed.attempt.number for placed in (await mesh.plans.PlanPlacement(next_one)).placed] == [2]
        assert len(agent.welcomes) == 2, "placement had no reason to doubt what it knows"


async def test_the_previous_attempt_is_restored_if_the_next_start_fails() -> None:
    """Its record still exists; the queue has stored its end but has not yet asked to forget it."""
    async with running() as mesh:
        _, term, before = await ended(mesh)
        await keep(mesh, "a")  # as when it was cancelled
        late = plan("a", term, number=2, revision=before)
        assert not (await mesh.plans.PlanPlacement(late)).placed
        await mesh.plans.ForgetAttempts(forget("a", term))
        assert await mesh.records_left("placement/attempts/") == []


async def test_a_retried_plan_returns_no_uncommitted_end() -> None:
    """The end may never be committed: then the reloaded state has the attempt running."""
    async with running() as mesh:
        await mesh.kill("queue")
        agent = await mesh.agent("n1")
        store = mesh.parts["placement"].store
        await mesh.plans.PlanPlacement(plan("a"))
        await until(
            lambda: mesh.parts["placement"].service.events.committed("a").attempt.state == job_pb2.ATTEMPT_STATE_RUNNING
        )
        store.held_back = asyncio.Event()
        agent.finish(("a", 1))
        await until(lambda: mesh.parts["placement"].service.cluster.attempts["a"].state.ended)
        (standing,) = (await mesh.plans.PlanPlacement(plan("a"))).placed
        assert standing.attempt.state == job_pb2.ATTEMPT_STATE_RUNNING
        store.held_back.set()
        await until(lambda: ("a", 1) in agent.acked)
        (standing,) = (await mesh.plans.PlanPlacement(plan("a"))).placed
        assert standing.attempt.state == job_pb2.ATTEMPT_STATE_SUCCEEDED
