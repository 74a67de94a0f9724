"""Services are killed at random under a load of short jobs, and the store loses requests and answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import grpc
import pytest
from tests.support.properties import amount
from tests.unit.services.allocators import ScriptedAllocator
from tests.unit.services.histories import History
from tests.unit.services.mesh import BACKFILL, QUICK, Mesh, eventually, running, spec, without

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.core.sizing.resize import changeable
from cotenant.services.placement.attempts import resizes
from cotenant.store.keyspace import HistoryLimit
from cotenant.store.memory import MemoryStore
from cotenant.store.sqlite import SqliteStore
from cotenant.v1 import job_pb2
from cotenant.v1 import job_service_pb2 as pb

NODES, JOBS, CALLERS = 10, amount(80, deep=240), 8
# How much happens between two kills depends on how quick the machine is: rounds go on until it is enough.
ROUNDS_MAX, MOVED_MIN, RESIZED_MIN, REGENERATED_MIN = 8, 2, 12, 12
AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
WHOLE = HistoryLimit(revisions=1_000_000)
Disturb = Callable[[Mesh, Random], Awaitable[None]]
Story = Callable[[Random, int], job_pb2.JobSpec]


async def kill_queue(mesh: Mesh, rng: Random) -> None:
    await mesh.restart("queue")


async def kill_placement(mesh: Mesh, rng: Random) -> None:
    await mesh.restart("placement")


async def kill_both(mesh: Mesh, rng: Random) -> None:
    await mesh.restart(*rng.sample(["queue", "placement"], 2))


async def kill_agents(mesh: Mesh, rng: Random) -> None:
    """Agents disconnect and reconnect; their jobs run on."""
    for agent in rng.sample(sorted(mesh.agents.values(), key=lambda agent: agent.node_id), 3):
        await agent.stop()
        agent.start()


async def kill_nobody(mesh: Mesh, rng: Random) -> None:
    """The store's failures are enough."""


def story(rng: Random, number: int) -> job_pb2.JobSpec:
    """A short job of random shape; a few fail and are retried, a few are gangs."""
    gpus, replicas = rng.choice([(1, 1)] * 6 + [(2, 1), (4, 1), (1, 4), (4, 3), (0.0, 1)])
    cores = rng.choice([None, 1, 2]) if gpus else 1
    return spec(gpus=gpus, cores=cores, replicas=replicas, name=f"job {number}", retries_max=2)


def some_elastic(rng: Random, number: int) -> job_pb2.JobSpec:
    """A short job: an elastic one that is resized as others come and go, or a gang."""
    elastic = rng.random() < 0.5
    replicas = 1 if elastic else rng.choice([1, 2, 4])
    made = spec(gpus=1, cores=1, replicas=replicas, name=f"job {number}")
    if elastic:
        made.resize = job_pb2.RESIZE_MODE_RESTART
        made.roles[0].elastic.min, made.roles[0].elastic.max = 1, rng.choice([2, 4, 8])
    return made


def close_together(rng: Random, number: int) -> job_pb2.JobSpec:
    """A short job: a single one, or a gang that takes most of a small node and waits for one."""
    replicas = rng.choice([1, 1, 3])
    locality = job_pb2.LOCALITY_SERVER if replicas > 1 else job_pb2.LOCALITY_UNSPECIFIED
    return spec(gpus=1, cores=2, replicas=replicas, locality=locality, name=f"job {number}")


async def submit(mesh: Mesh, rng: Random, number: int, tell: Story) -> str:
    """Submit as a client does: retry the same call until it is acknowledged."""
    request = pb.CreateJobRequest(spec=tell(rng, number), request_id=f"request-{number}")
    while True:
        try:
            response: pb.CreateJobResponse = await mesh.jobs.CreateJob(request, timeout=5)
        except grpc.aio.AioRpcError as error:
            if error.code() not in AWAY:
                raise
            await asyncio.sleep(0.02)
        else:
            return response.job.id


async def call(mesh: Mesh, rng: Random, numbers: list[int], made: dict[int, str], tell: Story) -> None:
    """One caller: submits, and now and then cancels what it has submitted."""
    for number in numbers:
        made[number] = await submit(mesh, rng, number, tell)
        if rng.random() < 0.05:
            try:
                await mesh.jobs.CancelJob(pb.CancelJobRequest(id=made[number]), timeout=5)
            except grpc.aio.AioRpcError as error:
                if error.code() not in AWAY:
                    raise
        await asyncio.sleep(rng.random() * 0.05)


async def disturbed(mesh: Mesh, rng: Random, disturb: Disturb, done: asyncio.Event) -> None:
    while not done.is_set():
        await asyncio.sleep(0.05 + rng.random() * 0.5)
        await disturb(mesh, rng)


async def ended(mesh: Mesh, ids: list[str]) -> bool:
    jobs: list[job_pb2.Job] = []
    for begin in range(0, len(ids), 100):
        try:
            page = await mesh.jobs.ListJobs(
                pb.ListJobsRequest(filter=pb.JobFilter(ids=ids[begin : begin + 100]), page_size=1000), timeout=5
            )
        except grpc.aio.AioRpcError:
            return False
        jobs += page.jobs
    assert len(jobs) == len(ids), "an acknowledged job was lost"
    return all(job.phase >= job_pb2.JOB_PHASE_SUCCEEDED for job in jobs)


async def load(
    mesh: Mesh,
    rng: Random,
    disturb: Disturb,
    refuses: Callable[[agent_pb2.ResizeOrder], str] = lambda order: "",
    tell: Story = story,
    *,
    gpus: int = 8,
    slower: float = 1.0,
) -> History:
    history = History()
    history.follow(mesh.store)
    for number in range(NODES):
        agent = await mesh.agent(f"n{number}", gpus=gpus, run_seconds=slower * (0.02 + rng.random() * 0.1))
        history.watch(agent)
        agent.cannot_resize = refuses
    made: dict[int, str] = {}
    done = asyncio.Event()
    trouble = asyncio.create_task(disturbed(mesh, rng, disturb, done))
    async with asyncio.timeout(60):
        await asyncio.gather(*(call(mesh, rng, list(range(n, JOBS, CALLERS)), made, tell) for n in range(CALLERS)))
    ids = sorted(made.values())
    assert len(set(ids)) == JOBS, "one request made two jobs, or two made one"
    done.set()
    await trouble
    try:
        await eventually(lambda: ended(mesh, ids), 30)
    except TimeoutError:
        await print_left(mesh, ids)
        raise
    for part in mesh.parts.values():
        part.store.failing = 0.0
    await eventually(lambda: nothing_left(mesh), 10)
    await history.stop()
    assert history.wrong == []
    assert not [key for key, times in history.ran.items() if times > 1]
    assert len(history.numbers) > JOBS * 0.8, "too little happened to prove anything"
    stored = await mesh.records_left("queue/jobs/")
    assert [f"queue/jobs/{job_id}" for job_id in ids] == stored, "jobs that nobody acknowledged, or lost ones"
    return history


async def nothing_left(mesh: Mesh) -> bool:
    return not await mesh.records_left("placement/attempts/") and not any(a.attempts for a in mesh.agents.values())


async def print_left(mesh: Mesh, ids: list[str]) -> None:
    """Return the state of the jobs that have not ended."""
    for job_id in ids:
        job = await mesh.job(job_id)
        if job.phase < job_pb2.JOB_PHASE_SUCCEEDED:
            where = [node_id for node_id, agent in mesh.agents.items() if any(k[0] == job_id for k in agent.attempts)]
            print(job_id, job_pb2.JobPhase.Name(job.phase), job.attempt.number, job.attempt.state, where, job.refusal)
    print(await mesh.records_left("placement/attempts/"))


@pytest.mark.parametrize("seed", range(amount(1, deep=3)))
@pytest.mark.parametrize("disturb", [kill_queue, kill_placement, kill_both][amount(2, deep=0) :])
async def test_services_may_be_killed_at_any_moment(disturb: Disturb, seed: int) -> None:
    rng = Random(f"{disturb.__name__} {seed}")
    async with running(MemoryStore(limit=WHOLE), placement_config=without(QUICK, lost_after_seconds=60)) as mesh:
        await load(mesh, rng, disturb)


@pytest.mark.parametrize("seed", range(amount(1, deep=6)))
async def test_the_store_may_lose_requests_and_answers(seed: int) -> None:
    rng = Random(seed)
    async with running(MemoryStore(limit=WHOLE), rng=rng, failing=0.03) as mesh:
        await load(mesh, rng, kill_nobody)


async def test_all_faults_at_once_on_a_file_store(tmp_path: Path) -> None:
    rng = Random("file")
    store = SqliteStore(tmp_path / "state.db", limit=WHOLE)
    try:
        async with running(store, rng=rng, failing=0.02, queue_config=BACKFILL) as mesh:
            await load(mesh, rng, kill_both)
    finally:
        await store.close()


@pytest.mark.deep
@pytest.mark.parametrize("disturb", [kill_queue, kill_placement, kill_agents][amount(1, deep=0) :])
async def test_services_and_agents_may_be_killed_during_resizes(
    disturb: Disturb, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The allocator changes its mind all the time, and some resizes cannot be applied."""
    rng = Random(f"resizing {disturb.__name__}")
    allocator = ScriptedAllocator()
    allocator.otherwise = lambda running: tuple(
        rng.randint(1, cores + spare) if may else cores
        for cores, spare, may in zip(running.cores, running.spare, changeable(running.spec), strict=True)
    )
    allocator.use(monkeypatch)
    monkeypatch.setattr(resizes, "RETRY_RESIZE_SECONDS", 0.2)
    resized = 0
    for _ in range(ROUNDS_MAX):
        async with running(MemoryStore(limit=WHOLE), rng=rng, failing=0.01) as mesh:
            history = await load(
                mesh, rng, disturb, refuses=lambda order: "it is not its day" if rng.random() < 0.1 else ""
            )
        resized += history.resizes
        if resized > RESIZED_MIN:
            return
    pytest.fail(f"only {resized} resized: too little to prove anything")


@pytest.mark.deep
@pytest.mark.parametrize("disturb", [kill_both, kill_agents])
async def test_services_and_agents_may_be_killed_while_replicas_change(disturb: Disturb) -> None:
    """Elastic jobs take what is free, and give it up for the gangs that come."""
    rng = Random(f"replicas {disturb.__name__}")
    at_once = {"interval_seconds": "0", "quantum_seconds": "3600"}
    queue = replace(BACKFILL, allocator="marginal-gain", allocator_options=at_once)
    config = without(QUICK, allocator="marginal-gain", options={"marginal-gain": at_once}, lost_after_seconds=60)
    regenerated = 0
    for _ in range(ROUNDS_MAX):
        async with running(
            MemoryStore(limit=WHOLE), queue_config=queue, placement_config=config, rng=rng, failing=0.01
        ) as mesh:
            history = await load(mesh, rng, disturb, tell=some_elastic, gpus=4, slower=3)
        regenerated += len(history.regenerated)
        if regenerated >= REGENERATED_MIN:
            return
    pytest.fail(f"only {regenerated} resized: too little to prove anything")


@pytest.mark.deep
@pytest.mark.parametrize("disturb", [kill_both, kill_agents])
async def test_services_and_agents_may_be_killed_during_migrations(disturb: Disturb) -> None:
    """Every gang that waits for a node migrates other jobs as soon as it can."""
    rng = Random(f"moving {disturb.__name__}")
    options = {"locality": {"settled_seconds": "0", "gain_min": "0", "moves_max": "4"}}
    config = without(QUICK, placement="locality", options=options, lost_after_seconds=60)
    strict = replace(BACKFILL, options={"fifo": {"mode": "strict"}})
    moved = 0
    for _ in range(ROUNDS_MAX):
        async with running(
            MemoryStore(limit=WHOLE), queue_config=strict, placement_config=config, rng=rng, failing=0.01
        ) as mesh:
            history = await load(mesh, rng, disturb, tell=close_together, gpus=4, slower=5)
        moved += len(history.moved)
        if moved >= MOVED_MIN:
            return
    pytest.fail(f"only {moved} moved: too little to prove anything")
