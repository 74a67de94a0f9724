"""Resizes of running jobs: ordered, answered, rolled back, and reclaimed for waiting jobs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest
from benchmarks.agents import SimulatedAgent
from tests.unit.services.allocators import ScriptedAllocator
from tests.unit.services.histories import History
from tests.unit.services.mesh import Mesh, eventually, running, until

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.codec.job_events import kind_of
from cotenant.core.sizing.resize import ResizableJob
from cotenant.internal.v1 import placement_service_pb2 as placement_pb2
from cotenant.services.placement.attempts import resizes
from cotenant.storage.v1 import records_pb2
from cotenant.store.keyspace import HistoryLimit
from cotenant.store.memory import MemoryStore
from cotenant.v1 import job_pb2, predictor_service_pb2
from cotenant.v1 import job_service_pb2 as pb
from cotenant.v1 import node_service_pb2 as node_pb2

READ_ONLY = "its cgroup is read-only"


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> ScriptedAllocator:
    allocator = ScriptedAllocator()
    allocator.use(monkeypatch)
    return allocator


@pytest.fixture
async def mesh(allocator: ScriptedAllocator) -> AsyncIterator[Mesh]:
    """A mesh that checks every commit."""
    history = History()
    store = MemoryStore(limit=HistoryLimit(revisions=1_000_000))
    async with running(store) as mesh:
        history.follow(mesh.store)
        made = mesh.agent

        async def watched(node_id: str, **fields: object) -> SimulatedAgent:
            agent = await made(node_id, **fields)
            history.watch(agent)
            return agent

        mesh.agent = watched  # type: ignore[method-assign]  # so that each agent is looked at too
        yield mesh
        await history.stop()
        assert history.wrong == []


def tasks(job: job_pb2.Job) -> list[tuple[int, int, int]]:
    """Return each task's cores, own cores and target cores."""
    return [
        (len(task.core_ids), task.own_cores, task.target_cores)
        for part in job.attempt.allocations
        for task in part.tasks
    ]


def holds(*cores: int) -> Callable[[job_pb2.Job], bool]:
    return lambda job: [held for held, _, _ in tasks(job)] == list(cores) and not any(t for _, _, t in tasks(job))


async def stored(mesh: Mesh, job_id: str) -> records_pb2.StoredAttempt:
    entry = await mesh.store.get(f"placement/attempts/{job_id}")
    assert entry
    return records_pb2.StoredAttempt.FromString(entry.value)


async def changed(mesh: Mesh, job_id: str, *cores: int) -> job_pb2.Job:
    """Wait until a job's tasks hold so many cores and no resize is in progress."""
    return await mesh.reach(job_id, "RUNNING", holds(*cores))


async def test_a_job_grows_and_shrinks_while_it_runs(mesh: Mesh, allocator: ScriptedAllocator) -> None:
    agent = await mesh.agent("n1", gpus=8, cores=24)
    job_id = await mesh.submit()
    before = await mesh.reach(job_id, "RUNNING")
    held = before.attempt.allocations[0].tasks[0].core_ids
    allocator.wishes[job_id] = (5,)
    job = await changed(mesh, job_id, 5)
    (order,) = agent.resizes
    assert order.epoch == job.attempt.epoch > before.attempt.epoch
    (task,) = job.attempt.allocations[0].tasks
    assert set(held) < set(task.core_ids)
    assert (task.own_cores, order.allocation.tasks[0].core_ids) == (3, task.core_ids)
    assert job.attempt.sizing == "(5,) were wished for"
    assert (await mesh.node("n1")).used_cores == 5
    allocator.wishes[job_id] = (2,)
    job = await changed(mesh, job_id, 2)
    assert set(job.attempt.allocations[0].tasks[0].core_ids) < set(task.core_ids)
    assert (await mesh.node("n1")).used_cores == 2
    assert not (await stored(mesh, job_id)).resizing
    explained: pb.ExplainJobResponse = await mesh.jobs.ExplainJob(pb.ExplainJobRequest(id=job_id))
    assert explained.sizing == "(2,) were wished for"
    assert [event.detail for event in explained.events if kind_of(event) == "resized"] == [
        "from 3 cores to 5: (5,) were wished for",
        "from 5 cores to 2: (2,) were wished for",
    ]


async def test_old_and_new_cores_are_held_until_the_node_answers(mesh: Mesh, allocator: ScriptedAllocator) -> None:
    agent = await mesh.agent("n1", gpus=1, cores=6)
    agent.answers_resizes = False
    job_id = await mesh.submit()  # all six
    await mesh.reach(job_id, "RUNNING")
    allocator.wishes[job_id] = (2,)
    await until(lambda: bool(agent.resizes))
    job = await mesh.reach(job_id, "RUNNING", lambda job: tasks(job) == [(6, 0, 2)])
    assert (await mesh.node("n1")).used_cores == 6
    other = await mesh.submit(gpus=0, cores=4)
    await mesh.refused(other, "MAKING_ROOM")
    agent.answer_resize(agent.resizes[0])
    job = await mesh.reach(other, "RUNNING")
    assert (await mesh.node("n1")).used_cores == 6
    given = set(job.attempt.allocations[0].tasks[0].core_ids)
    assert not given & set((await mesh.job(job_id)).attempt.allocations[0].tasks[0].core_ids)


async def gang(mesh: Mesh, allocator: ScriptedAllocator) -> tuple[str, SimulatedAgent, SimulatedAgent]:
    """A gang with a worker on each of two nodes, 4 of 8 cores each."""
    first, second = await mesh.agent("n1", gpus=2, cores=8), await mesh.agent("n2", gpus=2, cores=8)
    job_id = await mesh.submit(replicas=4)
    await changed(mesh, job_id, 4, 4, 4, 4)
    return job_id, first, second


async def test_a_gang_is_resized_or_rolled_back_on_all_nodes(mesh: Mesh, allocator: ScriptedAllocator) -> None:
    job_id, first, second = await gang(mesh, allocator)
    begun = (await mesh.job(job_id)).attempt.epoch
    second.cannot_resize = lambda order: READ_ONLY if len(order.allocation.tasks[0].core_ids) == 3 else ""
    allocator.wishes[job_id] = (3,)
    await until(lambda: bool(second.resizes))
    job = await changed(mesh, job_id, 4, 4, 4, 4)
    await until(lambda: [len(agent.resizes) for agent in (first, second)] == [2, 2])
    there, back = (order.epoch for order in first.resizes)
    assert begun < there < back
    job = await mesh.reach(job_id, "RUNNING", lambda job: job.attempt.epoch == back and holds(4, 4, 4, 4)(job))
    assert "could not be changed on n2: its cgroup is read-only" in job.attempt.sizing
    assert [len(task.core_ids) for task in first.assignments[job_id, 1].allocation.tasks] == [4, 4]
    assert len(first.resizes) == 2, "it is tried again only after a while"
    assert (await mesh.node("n1")).used_cores == 8


async def test_a_stuck_resize_holds_both_allocations(
    mesh: Mesh, allocator: ScriptedAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resizes, "RETRY_RESIZE_SECONDS", 0.3)
    job_id, _first, second = await gang(mesh, allocator)
    second.cannot_resize = lambda order: READ_ONLY
    allocator.wishes[job_id] = (3,)
    await until(lambda: len(second.resizes) == 2)
    other = await mesh.submit(gpus=0, cores=1)
    await mesh.refused(other, "CAPACITY")
    assert [(await mesh.node(node)).used_cores for node in ("n1", "n2")] == [8, 8]
    await until(lambda: len({order.epoch for order in second.resizes}) > 3)  # again and again
    del allocator.wishes[job_id]
    second.cannot_resize = lambda order: ""
    await changed(mesh, job_id, 4, 4, 4, 4)


async def test_a_reconnected_agent_gets_the_resize_again(mesh: Mesh, allocator: ScriptedAllocator) -> None:
    job_id, first, second = await gang(mesh, allocator)
    second.answers_resizes = False
    allocator.wishes[job_id] = (3,)
    await until(lambda: bool(second.resizes))
    await second.stop()
    second.answers_resizes = True
    second.start()
    await changed(mesh, job_id, 3, 3, 3, 3)
    assert len({order.epoch for order in (*first.resizes, *second.resizes)}) == 1


async def test_a_resize_continues_after_a_restart_of_placement(mesh: Mesh, allocator: ScriptedAllocator) -> None:
    job_id, first, second = await gang(mesh, allocator)
    second.answers_resizes = False
    allocator.wishes[job_id] = (3,)
    await until(lambda: bool(first.resizes and second.resizes))
    epoch = second.resizes[0].epoch
    await mesh.kill("placement")
    del allocator.wishes[job_id]
    second.answers_resizes = True
    await mesh.start("placement")
    job = await changed(mesh, job_id, 3, 3, 3, 3)
    assert {order.epoch for order in second.resizes} == {epoch} == {job.attempt.epoch}
    assert (await mesh.node("n1")).used_cores == 6


@pytest.mark.parametrize("how", ["it ends", "it is cancelled", "its node is drained"])
async def test_an_attempt_that_ends_during_a_resize_frees_everything(
    mesh: Mesh, allocator: ScriptedAllocator, how: str
) -> None:
    agent = await mesh.agent("n1", gpus=2, cores=8)
    agent.answers_resizes = False
    job_id = await mesh.submit()
    await mesh.reach(job_id, "RUNNING")
    allocator.wishes[job_id] = (6,)
    await until(lambda: bool(agent.resizes))
    if how == "it ends":
        agent.finish((job_id, 1))
        await mesh.reach(job_id, "SUCCEEDED")
    elif how == "it is cancelled":
        await mesh.jobs.CancelJob(pb.CancelJobRequest(id=job_id))
        await mesh.reach(job_id, "CANCELLED")
    else:
        await mesh.nodes.DrainNode(node_pb2.DrainNodeRequest(id="n1"))
        await mesh.reach(job_id, "QUEUED")
    assert (await mesh.node("n1")).used_cores == 0
    assert agent.stops == [] or agent.stops[0].epoch == agent.resizes[0].epoch
    agent.answer_resize(agent.resizes[0])  # too late
    if how != "its node is drained":
        other = await mesh.submit(gpus=0, cores=8)
        await mesh.reach(other, "RUNNING")


async def test_lent_cores_are_reclaimed_for_a_waiting_job_as_needed(mesh: Mesh, allocator: ScriptedAllocator) -> None:
    agent = await mesh.agent("n1", gpus=8, cores=24)
    lender = await mesh.submit()
    await mesh.reach(lender, "RUNNING")
    allocator.wishes[lender] = (20,)
    await changed(mesh, lender, 20)
    allocator.wishes[lender] = lambda running: (min(20, running.cores[0] + running.spare[0]),)  # it wants them back
    other = await mesh.submit(gpus=0, cores=10)
    await mesh.reach(other, "RUNNING")
    job = await changed(mesh, lender, 14)
    assert "lent cores per replica went to a waiting job" in job.attempt.sizing
    assert tasks(job) == [(14, 3, 0)]
    assert agent.stops == []
    last = await mesh.submit(gpus=0, cores=12)  # more than was lent
    assert "needs 12 cores" in (await mesh.refused(last, "CAPACITY")).refusal.detail


async def test_a_dry_run_reclaims_no_cores(mesh: Mesh, allocator: ScriptedAllocator) -> None:
    agent = await mesh.agent("n1", gpus=8, cores=24)
    lender = await mesh.submit()
    await mesh.reach(lender, "RUNNING")
    allocator.wishes[lender] = (24,)
    await changed(mesh, lender, 24)
    del allocator.wishes[lender]
    spec = job_pb2.JobSpec()
    spec.CopyFrom((await mesh.job(lender)).spec)
    candidate = placement_pb2.Candidate(job_id="what-if", number=1, spec=spec)
    plan = placement_pb2.PlanPlacementRequest(candidates=[candidate], validate_only=True)
    answer: placement_pb2.PlanPlacementResponse = await mesh.plans.PlanPlacement(plan)
    (refused,) = answer.refused
    assert refused.refusal.detail == "its place is chosen; it waits for 1 job to give back lent cores"
    assert len(agent.resizes) == 1


async def test_a_failing_allocator_is_logged_and_other_jobs_are_resized(
    mesh: Mesh, allocator: ScriptedAllocator, capsys: pytest.CaptureFixture[str]
) -> None:
    await mesh.agent("n1", gpus=8, cores=24)
    breaks, greedy, good = [await mesh.submit() for _ in range(3)]
    for job_id in (breaks, greedy, good):
        await mesh.reach(job_id, "RUNNING")

    def broken(running: ResizableJob) -> tuple[int, ...]:
        raise ZeroDivisionError("a bug")

    allocator.wishes |= {breaks: broken, greedy: (23,), good: (4,)}
    await changed(mesh, good, 4)
    await until(lambda: all(len(allocator.asked[job_id]) > 3 for job_id in (breaks, greedy)))
    assert tasks(await mesh.job(greedy)) == tasks(await mesh.job(breaks)) == [(3, 0, 0)]
    told = capsys.readouterr().out
    assert "sizing_invalid" in told
    assert f"{greedy} holds (3,) cores per replica and should get (23,), but no more than" in told
    assert "resizing_failed" in told


async def test_requested_cores_are_never_resized(mesh: Mesh, allocator: ScriptedAllocator) -> None:
    await mesh.agent("n1", gpus=8, cores=24)
    fixed, free = await mesh.submit(cores=2), await mesh.submit()
    for job_id in (fixed, free):
        await mesh.reach(job_id, "RUNNING")
    await until(lambda: len(allocator.asked.get(free, [])) > 3)
    assert fixed not in allocator.asked


# Advice ------------------------------------------------------------------------------------------------------


def advice(job_id: str, number: int = 1, **fields: object) -> placement_pb2.AdviseAttemptsRequest:
    one = placement_pb2.Advice(job_id=job_id, number=number, **fields)  # type: ignore[arg-type]  # either of two
    return placement_pb2.AdviseAttemptsRequest(advice=[one])


def useful(cores: int, seconds: int = 0) -> predictor_service_pb2.Estimate:
    estimate = predictor_service_pb2.Estimate(predictable=True, cores_useful=cores)
    estimate.remaining.seconds = seconds
    return estimate


async def test_a_new_estimate_is_saved_and_triggers_the_allocator(mesh: Mesh, allocator: ScriptedAllocator) -> None:
    allocator.interval_seconds = 3600.0
    await mesh.agent("n1", gpus=8, cores=24)
    job_id = await mesh.submit()
    await mesh.reach(job_id, "RUNNING")
    await until(lambda: bool(allocator.asked.get(job_id)))  # once, to begin with
    allocator.otherwise = lambda running: (running.estimate.cores_useful or running.cores[0],)
    answer: placement_pb2.AdviseAttemptsResponse = await mesh.plans.AdviseAttempts(advice(job_id, estimate=useful(7)))
    assert not answer.refused
    await changed(mesh, job_id, 7)
    entry = await mesh.store.get(f"placement/attempts/{job_id}")
    await mesh.plans.AdviseAttempts(advice(job_id, estimate=useful(7, seconds=99)))  # nothing that cores follow from
    assert await mesh.store.get(f"placement/attempts/{job_id}") == entry
    asked = len(allocator.asked[job_id])
    await mesh.restart("placement")
    assert (await stored(mesh, job_id)).estimate.cores_useful == 7
    await until(lambda: len(allocator.asked[job_id]) > asked)
    assert allocator.asked[job_id][-1].estimate.cores_useful == 7


async def test_inapplicable_advice_is_refused_with_the_reason(mesh: Mesh, allocator: ScriptedAllocator) -> None:
    job_id, _, second = await gang(mesh, allocator)
    alone = await mesh.submit(gpus=0, cores=1)
    await mesh.refused(alone, "CAPACITY")
    profile = placement_pb2.ProfilePlan(cores=[1, 2], steps=10)
    for request, why in (
        (advice("nobody", profile=profile), "nobody/1: no such attempt, or it has ended"),
        (advice(job_id, 2, profile=profile), f"{job_id}/2: no such attempt, or it has ended"),
        (advice(job_id, profile=profile), f"{job_id}/1: it runs on 2 nodes; only jobs on one node are profiled"),
    ):
        answer: placement_pb2.AdviseAttemptsResponse = await mesh.plans.AdviseAttempts(request)
        assert list(answer.refused) == [why]
    assert second.profiles == []


async def test_a_profile_reaches_the_agent_and_its_rates_the_allocator_and_watchers(
    mesh: Mesh, allocator: ScriptedAllocator
) -> None:
    agent = await mesh.agent("n1", gpus=8, cores=24)
    job_id = await mesh.submit()
    job = await mesh.reach(job_id, "RUNNING")
    watch = mesh.plans.WatchAttempts(placement_pb2.WatchAttemptsRequest())
    events = aiter(watch)
    assert (await anext(events)).snapshot
    plan = placement_pb2.ProfilePlan(cores=[1, 2], steps=10)
    plan.budget.seconds = 60
    await mesh.plans.AdviseAttempts(advice(job_id, profile=plan))
    await until(lambda: bool(agent.profiles))
    (order,) = agent.profiles
    assert (order.epoch, list(order.cores), order.steps, order.budget.seconds) == (job.attempt.epoch, [1, 2], 10, 60)
    allocator.asked.clear()
    report = agent_pb2.ProfileReport(job_id=job_id, number=1, cores=2, rate_per_second=5.0, steps=10)
    done = agent_pb2.ProfileReport(job_id=job_id, number=1, done=True)
    agent.send(profiled=[report])
    told: list[agent_pb2.ProfileReport] = []
    while not told:
        told += (await anext(events)).profiled
    assert allocator.asked == {}, "what is being measured is left alone"
    agent.send(profiled=[done])
    await until(lambda: bool(allocator.asked))
    while len(told) < 2:
        told += (await anext(events)).profiled
    assert told == [report, done]
    assert [(point.cores, point.rate) for point in allocator.asked[job_id][0].points] == [(2, 5.0)]
    watch.cancel()


async def test_the_allocator_sees_the_actual_allocation(mesh: Mesh, allocator: ScriptedAllocator) -> None:
    job_id, _, _ = await gang(mesh, allocator)
    allocator.wishes[job_id] = (3,)
    await changed(mesh, job_id, 3, 3, 3, 3)
    await mesh.agent("n3", gpus=0, cores=4)

    async def seen() -> bool:
        last = allocator.asked[job_id][-1]
        return (last.cores, last.spare, last.node_share, last.lent) == ((3,), (1,), (4,), (0,))

    await eventually(seen)
