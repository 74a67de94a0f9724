"""Watches that are cut and resumed miss nothing, in whatever order commits are made, applied or lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from random import Random
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.properties import examples

from cotenant.codec.errors import Problem
from cotenant.core.model.job import JobSpec, Role
from cotenant.core.model.job_array import read_array
from cotenant.core.model.lifecycle import Phase
from cotenant.services.queue.api import job_watch
from cotenant.services.queue.api.job_filter import JobFilter
from cotenant.services.queue.api.job_watch import JobWatch
from cotenant.services.queue.jobs.archived_jobs import ArchivedJobs
from cotenant.services.queue.jobs.complete_revision import COMPACTED
from cotenant.services.queue.jobs.grouped_store import GroupedStore
from cotenant.services.queue.jobs.job_arrays import JobArrays
from cotenant.services.queue.jobs.job_store import ARRAYS, JOBS, IdempotencyKey, JobStore
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.removal_log import RemovalLog
from cotenant.services.queue.jobs.transitions import PHASES, Record, cancel
from cotenant.services.queue.jobs.visibility import View
from cotenant.storage.v1 import records_pb2
from cotenant.store.memory import MemoryStore
from cotenant.store.port import Committed, Compare, Conflict, Operation, StoreUnavailable
from cotenant.v1 import job_service_pb2 as pb

KEPT_MAX = 3  # removals
NO_REQUEST = IdempotencyKey("CreateJob", "", b"")
FILTERS = (
    pb.JobFilter(),
    pb.JobFilter(phases=[PHASES.to_wire(Phase.QUEUED)]),
    pb.JobFilter(labels={"even": "yes"}),
    pb.JobFilter(standalone_only=True),
)


class SlowStore(MemoryStore):
    """A store whose answers come late, in any order, or not at all."""

    def __init__(self, rng: Random) -> None:
        super().__init__()
        self.rng, self.failing = rng, 0.2

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Committed | Conflict:
        await self._pause()
        lost = self.rng.random() < self.failing
        if lost and self.rng.random() < 0.5:
            raise StoreUnavailable("the request was lost")
        result = await super().transact(compares, operations)
        await self._pause()
        if lost:
            raise StoreUnavailable("the answer was lost")
        return result

    async def _pause(self) -> None:
        for _ in range(self.rng.randrange(6)):
            await asyncio.sleep(0)


class Queue:
    """A queue without placement: it creates, changes and deletes jobs."""

    def __init__(self, store: SlowStore, *, grouped: bool) -> None:
        self.store, self.rng, self.state = store, store.rng, State()
        self.job_store = JobStore(GroupedStore(store) if grouped else store, self.state)
        self.job_store.removals = RemovalLog(KEPT_MAX)
        self.arrays = JobArrays(self.job_store)
        self.archived_jobs = ArchivedJobs(store, None)
        self._settling: asyncio.Task[None] | None = None

    async def start(self) -> None:
        failing, self.store.failing = self.store.failing, 0.0
        await self.job_store.load()
        await self.arrays.discard_orphans()
        self.store.failing = failing
        self._settling = asyncio.create_task(self.job_store.settle())

    async def close(self) -> None:
        assert self._settling
        self._settling.cancel()
        await asyncio.gather(self._settling, return_exceptions=True)

    async def act(self) -> None:
        """Do one thing; it may fail."""
        ended = [one for one in self.state.records.values() if one.phase.ended and one.spec.array_task is None]
        live = [one for one in self.state.records.values() if not one.phase.ended]
        choices: list[Callable[[], Awaitable[object]]] = [self._create, self._create, self._create_array]
        if live:
            choices += [lambda: self._end(self.rng.choice(live)), lambda: self._label(self.rng.choice(live))] * 2
        if ended:
            choices += [lambda: self.job_store.purge([self.rng.choice(ended).id])] * 2
        choices += [self._purge_array]
        with suppress(StoreUnavailable, Problem, KeyError):
            await self.rng.choice(choices)()

    async def _create(self) -> None:
        labels = (("even", "yes"),) if self.rng.random() < 0.5 else ()
        spec = JobSpec(roles=(Role(),), labels=labels)
        await self.job_store.create(spec, "ann", "", NO_REQUEST)

    async def _create_array(self) -> None:
        await self.arrays.create(JobSpec(roles=(Role(),), array=read_array("0-2")), "ann", "", NO_REQUEST)

    async def _end(self, record: Record) -> None:
        await self.job_store.change(record, lambda stored: cancel(stored, "no need"))

    async def _label(self, record: Record) -> None:
        def change(stored: records_pb2.StoredJob) -> None:
            if stored.job.spec.labels.pop("even", "") == "":
                stored.job.spec.labels["even"] = "yes"

        if await self.job_store.change(record, change):
            record.spec = replace(record.spec, labels=tuple(record.job.spec.labels.items()))
            self.state.sync(record)

    async def _purge_array(self) -> None:
        for array in list(self.state.dependency_gate.arrays.values()):
            if not array.left and len(array.ids) == array.count:
                await self.arrays.purge(array)
                return

    async def settled(self) -> None:
        """Wait until no outcome is unknown."""
        self.store.failing = 0.0
        async with asyncio.timeout(60):
            while self.job_store._unknown_outcomes or self.job_store.revisions._open:  # noqa: ASYNC110  # no event
                await asyncio.sleep(0.01)

    async def check(self) -> None:
        """Check that every change up to the complete revision is applied."""
        complete = self.job_store.revisions.value
        arrays = {one.key.removeprefix(ARRAYS) for one in (await MemoryStore.list(self.store, ARRAYS)).entries}
        entries = {one.key.removeprefix(JOBS): one for one in (await MemoryStore.list(self.store, JOBS)).entries}
        for job_id, entry in entries.items():
            array_id, _, task = job_id.partition("_")
            if entry.mod_revision <= complete and (not task or array_id in arrays):
                assert job_id in self.state.records, (job_id, complete)
                assert self.state.records[job_id].revision >= entry.mod_revision
        removed = await MemoryStore.list(self.store, "queue/removals/")
        for entry in removed.entries:
            if entry.mod_revision <= complete:
                ids = {one.id for one in records_pb2.StoredRemovals.FromString(entry.value).jobs}
                assert not ids & self.state.records.keys()


class Client:
    """Watches, is cut, resumes, and keeps what it was told."""

    def __init__(self, wanted: pb.JobFilter, rng: Random) -> None:
        self.wanted, self.rng = wanted, rng
        self.known: dict[str, str] = {}
        self.revision = ""
        self.told: dict[str, str] = {}  # by job: its last state, "removed" in the end
        self.resumed = self.refused = 0

    async def watch(self, queue: Queue, *, until_synced: bool = False) -> bool:
        """Watch for a while; return whether the initial state was complete."""
        request = pb.WatchJobsRequest(filter=self.wanted, after_revision=self.revision)
        try:
            watch = JobWatch(queue.state, queue.job_store, queue.archived_jobs, request)
        except Problem as problem:
            if problem.reason != COMPACTED:
                raise
            self.revision, self.refused = "", self.refused + 1
            return False
        self.resumed += bool(self.revision)
        fresh: set[str] | None = set() if not self.revision else None
        limit = 10_000 if until_synced else self.rng.randrange(30)
        async with aclosing(watch.responses()) as responses:
            async for response in responses:
                self._take(response, fresh)
                if response.synced:
                    for job_id in self.known.keys() - fresh if fresh is not None else ():
                        del self.known[job_id]
                        self.told[job_id] = "removed"
                    fresh = None
                    if until_synced:
                        return True
                limit -= 1
                if limit < 0:
                    break
                for _ in range(self.rng.randrange(4)):
                    await asyncio.sleep(0)
        return False

    def _take(self, response: pb.WatchJobsResponse, fresh: set[str] | None) -> None:
        for job in response.jobs:
            self.known[job.id] = self.told[job.id] = job.etag
            if fresh is not None:
                fresh.add(job.id)
        for job_id in response.removed_job_ids:
            self.known.pop(job_id, None)
            self.told[job_id] = "removed"
        self.revision = response.revision or self.revision

    async def run(self, queue: Queue) -> None:
        while True:
            with suppress(TimeoutError):  # a watch in which nothing happens is cut, too
                async with asyncio.timeout(0.02):
                    await self.watch(queue)
            for _ in range(self.rng.choice((1, 1, 150))):
                await asyncio.sleep(0)


@pytest.fixture
def small_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """One job in each message."""
    monkeypatch.setattr(job_watch, "MESSAGE_BYTES", 1)


@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32), st.booleans(), st.sampled_from((1, 1, 400, job_watch.MESSAGE_BYTES)))
def test_resumed_watches_miss_nothing(seed: int, grouped: bool, message_bytes: int) -> None:
    with mock.patch.object(job_watch, "MESSAGE_BYTES", message_bytes):
        asyncio.run(misses_nothing(Random(seed), grouped=grouped))


async def misses_nothing(rng: Random, *, grouped: bool) -> Sequence[Client]:
    store = SlowStore(rng)
    clients = [Client(wanted, rng) for wanted in FILTERS]
    for _ in range(4):  # leaders
        queue = Queue(store, grouped=grouped)
        await queue.start()
        watching = [asyncio.create_task(client.run(queue)) for client in clients]
        acting: set[asyncio.Task[None]] = set()
        for _ in range(25):
            acting.add(asyncio.create_task(queue.act()))
            for _ in range(rng.randrange(8)):
                await asyncio.sleep(0)
            await queue.check()
        for task in acting:
            if rng.random() < 0.1:
                task.cancel()
        await asyncio.gather(*acting, return_exceptions=True)
        await queue.settled()
        await queue.check()
        assert queue.job_store.revisions.value == queue.job_store.revisions.newest
        for task in watching:
            task.cancel()
        for result in await asyncio.gather(*watching, return_exceptions=True):
            assert isinstance(result, asyncio.CancelledError), result
        await queue.close()
        store.failing = 0.2
    queue = Queue(store, grouped=grouped)
    await queue.start()
    for client in clients:
        while not await client.watch(queue, until_synced=True):
            pass  # it begins anew
        chosen = JobFilter(client.wanted, View(queue.state))
        expected = {one.id: str(one.revision) for one in queue.state.records.values() if chosen.matches(one)}
        assert client.known == expected
        for job_id in client.told.keys() - expected.keys():
            assert client.told[job_id] == "removed"
    await queue.close()
    return clients


@pytest.mark.usefixtures("small_messages")
async def test_the_property_exercises_what_it_is_about() -> None:
    clients: list[Client] = []
    for seed in range(30):  # how the worlds unfold depends on timers, so on a busy machine it takes more of them
        clients += await misses_nothing(Random(seed), grouped=seed % 2 == 0)
        resumed, refused = sum(one.resumed for one in clients), sum(one.refused for one in clients)
        removed = sum(told == "removed" for one in clients for told in one.told.values())
        if seed >= 5 and resumed > 50 and refused > 3 and removed > 20:
            return
    pytest.fail(f"{resumed} watches resumed, {refused} refused, {removed} jobs removed")


async def made(count: int) -> tuple[Queue, list[Record]]:
    """Return a queue with some jobs."""
    store = SlowStore(Random(1))
    store.failing = 0.0
    queue = Queue(store, grouped=False)
    await queue.start()
    spec = JobSpec(roles=(Role(),))
    return queue, [await queue.job_store.create(spec, "ann", "", NO_REQUEST) for _ in range(count)]


@pytest.mark.usefixtures("small_messages")
async def test_a_revision_covers_only_what_was_taken_together_with_it() -> None:
    queue, (first, second, third) = await made(3)
    async with aclosing(queue_watch(queue).responses()) as responses:
        while not (await anext(responses)).synced:
            pass
        for record in (first, second):
            await queue._end(record)
        assert (await anext(responses)).revision == ""
        await queue._end(third)  # after the batch of the other two was taken
        last = await anext(responses)
        assert ([job.id for job in last.jobs], last.revision) == ([second.id], f".{second.revision}")
        assert third.revision > second.revision
        assert (await anext(responses)).revision == f".{third.revision}"
    await queue.close()


async def test_many_jobs_are_in_one_message_up_to_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    queue, records = await made(20)
    async with aclosing(queue_watch(queue).responses()) as responses:
        begun = await anext(responses)
        assert ({job.id for job in begun.jobs}, begun.synced) == ({record.id for record in records}, True)
        monkeypatch.setattr(job_watch, "MESSAGE_BYTES", 300)
        for record in records:
            await queue._end(record)
        told = [await anext(responses)]
        while not told[-1].revision:
            told.append(await anext(responses))
        assert [job.id for one in told for job in one.jobs] == [record.id for record in records]
        for message in told[:-1]:
            *others, last = (job.ByteSize() for job in message.jobs)
            assert sum(others) < 300 <= sum(others) + last
    await queue.close()


@pytest.mark.usefixtures("small_messages")
async def test_a_reader_that_is_slow_costs_ids_only() -> None:
    queue, records = await made(20)
    async with aclosing(queue_watch(queue).responses()) as responses:
        await anext(responses)
        for record in records:
            await queue._end(record)
            await queue.job_store.purge([record.id])
        (watcher,) = queue.state._watchers
        assert watcher.changed == {record.id: "default" for record in records}
        for text in (one for item in watcher.changed.items() for one in item):
            assert isinstance(text, str)
    await queue.close()


async def test_a_watch_in_which_nothing_happens_is_told_newer_revisions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would be compacted while other jobs are removed."""
    monkeypatch.setattr(job_watch, "REVISION_SECONDS", 0.0)
    queue, (record,) = await made(1)
    async with aclosing(queue_watch(queue, pb.JobFilter(name="other")).responses()) as responses:
        assert (await anext(responses)).synced
        await queue._end(record)
        response = await anext(responses)
        assert response == pb.WatchJobsResponse(revision=f".{record.revision}")
    await queue.close()


def queue_watch(queue: Queue, wanted: pb.JobFilter | None = None) -> JobWatch:
    return JobWatch(queue.state, queue.job_store, queue.archived_jobs, pb.WatchJobsRequest(filter=wanted))
