"""A watch that is cut again and again, over restarts of every service, against the history of the store."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from random import Random

import grpc
import pytest
from tests.support.properties import amount
from tests.unit.services.mesh import WAIT_SECONDS, Mesh, again, running, until

from cotenant.codec.errors import from_error
from cotenant.core.model.lifecycle import Phase
from cotenant.services.queue.api.server import QueueConfig
from cotenant.services.queue.jobs.job_store import JOBS
from cotenant.services.queue.jobs.removal_log import REMOVALS
from cotenant.services.queue.jobs.transitions import PHASES
from cotenant.store.port import Relisted
from cotenant.v1 import job_pb2
from cotenant.v1 import job_service_pb2 as pb

KEPT_REMOVALS, KEPT_JOBS = 40, 6
CUT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


class History:
    """What happened to jobs, as the store recorded it."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.last: dict[str, str] = {}  # the phase of each job that was ever stored, "removed" in the end
        self.revision = 0

    async def run(self) -> None:
        async for changes in self._mesh.store.watch(JOBS, after_revision=1):
            assert not isinstance(changes, Relisted)
            for change in changes.changes:
                job_id = change.key.removeprefix(JOBS)
                self.last[job_id] = "removed" if change.value is None else "stored"
            self.revision = changes.revision


class Watch:
    """A client that keeps what it was told, and resumes after each cut."""

    def __init__(self, mesh: Mesh, history: History, rng: Random) -> None:
        self._mesh, self._history, self._rng = mesh, history, rng
        self._anew = self.waits = False
        self.told: dict[str, str] = {}  # the phase and etag of each job, "removed" in the end
        self.revision = ""
        self.cuts = self.compacted = self.resumed = 0
        self.paused = asyncio.Event()
        self._missing: set[str] = set()  # known, and not sent by a watch that began anew

    async def run(self) -> None:
        stuck = 0  # how often it was cut before it had caught up: so each watch is twice as long as the one before
        while True:
            while self.paused.is_set():  # the test decides
                self.waits = True
                await asyncio.sleep(0.005)
            self.waits = False
            before = self.revision
            try:
                await self._watch(self._rng.randrange(1, 25) << stuck)
            except grpc.aio.AioRpcError as error:
                if from_error(error).reason == "REVISION_COMPACTED":
                    self.revision, self.compacted = "", self.compacted + 1
                elif error.code() not in CUT:
                    raise
            stuck = min(10, stuck + 1) if self.revision == before else 0
            self.cuts += 1
            await asyncio.sleep(self._rng.random() * 0.01)

    async def _watch(self, messages: int) -> None:
        self.resumed += bool(self.revision)
        if not self.revision:
            self._anew, self._missing = True, {one for one, told in self.told.items() if told != "removed"}
        stream = self._mesh.jobs.WatchJobs(pb.WatchJobsRequest(after_revision=self.revision))
        try:
            async with asyncio.timeout(0.2):
                async for response in stream:
                    self._take(response)
                    messages -= 1
                    if not messages and self.revision:
                        return
        except TimeoutError:
            pass  # nothing happens
        finally:
            stream.cancel()

    def _take(self, response: pb.WatchJobsResponse) -> None:
        for job in response.jobs:
            self.told[job.id] = f"{PHASES.from_wire(job.phase)} {job.etag}"
            self._missing.discard(job.id)
        self.told |= dict.fromkeys(response.removed_job_ids, "removed")
        if response.synced:
            self.told.update(dict.fromkeys(self._missing, "removed"))
            self._missing.clear()
            if self._anew:  # jobs that came and went since the watch was cut are not listed
                gone = (job_id for job_id, last in self._history.last.items() if last == "removed")
                self.told |= {job_id: "removed" for job_id in gone if job_id not in self.told}
            self._anew = False
        self.revision = response.revision or self.revision


@pytest.mark.parametrize("seed", range(amount(1, deep=20)))
async def test_a_watch_misses_nothing_over_restarts_of_every_service_and_compaction(seed: int) -> None:
    rng = Random(seed)
    async with running(queue_config=QueueConfig(ended_kept_max=KEPT_JOBS)) as mesh:
        watch = Watch(mesh, history := History(mesh), rng)
        tasks = [asyncio.create_task(history.run()), asyncio.create_task(watch.run())]
        for number in range(3):
            await mesh.agent(f"n{number}", run_seconds=0.02)
        for turn in range(6):
            for _ in range(6):
                await submit(mesh, rng)
                if rng.random() < 0.3:
                    await sweep(mesh)
            if turn in (1, 2, 5):  # what happens while the watch is cut: more than is kept of removals, or less
                watch.paused.set()
                await until(lambda: watch.waits)
                for _ in range(KEPT_REMOVALS + 20 if turn == 2 else 3):
                    await submit(mesh, rng)
                await mesh.all_ended()
                await sweep(mesh)
                watch.paused.clear()
            await mesh.restart(
                *rng.sample(["placement", "queue", *(["predictor"] if turn == 4 else [])], 2 + (turn == 4))
            )
        await again(lambda: mesh.all_ended())
        await sweep(mesh)
        await settled(mesh, history, watch)
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, asyncio.CancelledError), result
    assert watch.resumed > 5
    assert watch.compacted == 1
    assert sum(told == "removed" for told in watch.told.values()) > 10


async def submit(mesh: Mesh, rng: Random) -> None:
    async def create() -> job_pb2.Job:
        if rng.random() < 0.2:
            array = job_pb2.ArraySpec(ranges=[job_pb2.IndexRange(first=0, last=2)])
            return await mesh.job(f"{await mesh.submit_array(gpus=1, array=array)}_0")
        return await mesh.job(await mesh.submit(gpus=1))

    job = await again(create)
    if rng.random() < 0.2:
        await again(lambda: mesh.jobs.CancelJob(pb.CancelJobRequest(id=job.id)))


async def sweep(mesh: Mesh) -> None:
    """Delete ended jobs, and old removals."""
    service = mesh.parts["queue"].service
    service.job_store.removals._kept_max = KEPT_REMOVALS
    await service.retention.sweep(time.time())


async def settled(mesh: Mesh, history: History, watch: Watch) -> None:
    """Wait until the watch was told all: the end of each job that is left, and each removal."""
    state = mesh.parts["queue"].service.state
    await until(lambda: history.revision >= max((one.revision for one in state.records.values()), default=0))
    expected = {
        job_id: "removed" if last == "removed" else f"{state.records[job_id].phase} {state.records[job_id].revision}"
        for job_id, last in history.last.items()
    }
    assert {job_id for job_id, last in expected.items() if last != "removed"} == state.records.keys()
    assert all(one.phase is Phase.SUCCEEDED or one.phase is Phase.CANCELLED for one in state.records.values())
    assert len((await mesh.store.list(REMOVALS)).entries) <= KEPT_REMOVALS
    with suppress(TimeoutError):
        await until(lambda: expected.items() <= watch.told.items(), WAIT_SECONDS / 4)
    wrong = {
        job_id: (last, watch.told.get(job_id)) for job_id, last in expected.items() if watch.told.get(job_id) != last
    }
    assert not wrong
