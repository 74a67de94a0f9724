"""The users of a chaos run: they submit and change jobs, and record each answer.

A separate process, on its own machine: `python -m tests.verification.chaos.load DIRECTORY QUEUE PLACEMENT SEED`. It
reads commands on standard input: `hush` (begin nothing new, and report `calm` once all acknowledged work has ended) and
`go`; it ends with its input. Unanswered calls are retried under the same request ID, and some answered ones are sent
again. With TLS there are also users of tenants, with their own certificates, who try to access other tenants' jobs.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import deque
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, cast

from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask
from tests.support.queue_stub import change_of, creation_of, queue_stub
from tests.verification.chaos.call_log import ALREADY_ENDED, ARCHIVED, PAGE, PAUSE_SECONDS, CallLog
from tests.verification.chaos.certificates import of_process, of_tenants
from tests.verification.chaos.end_watcher import EndWatcher
from tests.verification.chaos.isolation_probe import IsolationProbe
from tests.verification.chaos.jobs import LARGE_ARRAY, DrawnJob, draw_job
from tests.verification.chaos.operator import Operator

from cotenant.codec import specs
from cotenant.core.model.lifecycle import ENDED, Phase
from cotenant.history.recording import clock
from cotenant.rpc import channel
from cotenant.v1 import job_pb2
from cotenant.v1 import job_service_pb2 as pb
from cotenant.v1.node_service_pb2_grpc import NodeServiceStub
from cotenant.v1.tenant_service_pb2_grpc import TenantServiceStub

IDLE = "calm"
UNFINISHED_MAX = 14
ACTIONS = {"cancel": 12, "suspend": 10, "update": 10, "move": 12, "": 56}  # what users do with a job, in percent
ARRAY_ACTIONS = {"cancel": 40, "suspend": 30, "": 30}  # and with a whole array
REPEAT_SHARE = 0.1
SOON_SECONDS, SUSPENDED_SECONDS, SERVED_SECONDS = (0.0, 2.0), (0.2, 3.0), (0.5, 5.0)
UPDATES_MAX, PRIORITY_MAX, ARRIVALS = 3, 5, (1, 40)
AVOID_SECONDS = 29 * 86_400  # longer than any clock jump
EARLIER_MAX = 8  # candidates for dependencies
MISSING_SECONDS_MAX = 15.0  # a job missing from all lists for this long was removed, long after its end
TENANT = "default"


@dataclass(frozen=True)
class Submitted:
    """A job or an array: its id, and the ids of all its jobs."""

    whole: str
    ids: list[str]
    service: bool

    @property
    def first(self) -> str:
        """The job, or the first of the array."""
        return self.ids[0]

    @property
    def array(self) -> bool:
        """Whether it is an array."""
        return self.ids != [self.whole]


def _submitted(answer: Any, drawn: DrawnJob) -> Submitted:
    """Return what a call created."""
    if not drawn.spec.array:
        return Submitted(answer.job.id, [answer.job.id], drawn.service)
    ids = [f"{answer.array.id}_{index}" for index in drawn.spec.array.indices]
    return Submitted(answer.array.id, ids, drawn.service)


@dataclass
class Load:
    """Keeps a number of jobs unfinished, next to an operator, a watcher and, with tenants, isolation probes."""

    call_log: CallLog
    jobs: Mapping[str, Any]  # by tenant: its user's stub
    nodes: Any
    tenants: Any
    rng: Random
    open: set[str] = field(default_factory=set)
    known: dict[str, str] = field(default_factory=dict)  # by job: its tenant
    earlier: dict[str, deque[str]] = field(default_factory=dict)  # by tenant: recent jobs
    missing: dict[str, float] = field(default_factory=dict)  # jobs missing from all lists, and since when

    def __post_init__(self) -> None:
        self.end_watcher = EndWatcher(self.call_log, self.jobs[TENANT])

    async def run(self) -> None:
        """Run all clients until the end of the input."""
        loop, call_log = asyncio.get_running_loop(), self.call_log
        operator = Operator(call_log, self.nodes, self.tenants, self._submit_for_operator)
        isolation_probe = IsolationProbe(
            call_log, {name: stub for name, stub in self.jobs.items() if name != TENANT}, self.known
        )
        names = tuple(sorted({*self.jobs} - {TENANT})) or ("red",)
        works = (self._track_ended(), operator.run(names), self.end_watcher.run(), isolation_probe.run())
        endless = [loop.create_task(work) for work in works]
        endless, living = endless[: 3 + bool(isolation_probe.jobs)], set()
        while not any(task.done() for task in endless):
            if not call_log.quiescing.is_set() and len(self.open) + call_log.busy < UNFINISHED_MAX:
                living.add(task := loop.create_task(self._run_job()))
                task.add_done_callback(living.discard)
            await asyncio.sleep(PAUSE_SECONDS)
        await asyncio.gather(*endless)

    async def _run_job(self) -> None:
        """Submit a job, and perhaps change or cancel it."""
        self.call_log.busy += 1
        try:
            request_id, rng = self.call_log.request(), Random(f"{self.call_log.name} {self.call_log.requests}")
            tenant = rng.choice(sorted(self.jobs))
            made, jobs = await self._submit(tenant, request_id, rng), self.jobs[tenant]
            action = rng.choices(list(ACTIONS), list(ACTIONS.values()))[0]
            if len(made.ids) > 1:
                action = rng.choices(list(ARRAY_ACTIONS), list(ARRAY_ACTIONS.values()))[0]
            if made.service:
                await self._serve(jobs, made, request_id, action, rng)
            elif len(made.ids) > LARGE_ARRAY[0]:  # running all of it would take too long
                await self._change(jobs, made, action if action == "suspend" else "", request_id, rng)
                await self._change(jobs, made, "cancel", request_id, rng)
            else:
                await self._change(jobs, made, action, request_id, rng)
        finally:
            self.call_log.busy -= 1

    async def _change(self, jobs: Any, made: Submitted, action: str, request_id: str, rng: Random) -> None:
        match action:
            case "cancel":
                await self.call_log.pause(SOON_SECONDS, rng)
                await self._cancel(jobs, made, request_id)
            case "suspend":
                await self.call_log.pause(SOON_SECONDS, rng)
                await self._suspend(jobs, made, request_id, rng)
            case "update":
                await self._update(jobs, made.first, request_id, rng)
            case "move":
                await self._move(jobs, made.first, request_id)

    async def _submit_for_operator(self, request_id: str, rng: Random) -> str:
        made = await self._submit(TENANT, request_id, rng)
        if made.service:
            await self._cancel(self.jobs[TENANT], made, request_id)
        return made.first

    async def _submit(self, tenant: str, request_id: str, rng: Random) -> Submitted:
        """Submit a job or an array."""
        earlier = self.earlier.setdefault(tenant, deque(maxlen=EARLIER_MAX))
        answered = None
        while answered is None:
            drawn, jobs = draw_job(self.call_log.directory, rng, list(earlier)), self.jobs[tenant]
            spec = specs.spec_to_wire(replace(drawn.spec, tenant=tenant))
            create, request = creation_of(jobs, spec, request_id)
            answered = await self.call_log.call_unless(ALREADY_ENDED, create, request)
            if answered is None:  # the final phase of a dependency is in the archive of another queue
                earlier.clear()
        made = _submitted(answered, drawn)
        known = {"replicas": drawn.replicas, "alone": drawn.alone, "service": drawn.service, "after": drawn.after}
        if rng.random() < REPEAT_SHARE:
            again = _submitted(await self.call_log.call(create, request), drawn)
            self.call_log.record(request=request_id, job=again.first, **known)
        for job_id in made.ids:
            own = request_id if job_id == made.first else f"{request_id} {job_id}"
            self.call_log.record(request=own, job=job_id, **known)
        self.open |= set(made.ids)
        self.known |= dict.fromkeys(made.ids, tenant)
        earlier += made.ids
        return made

    async def _cancel(self, jobs: Any, made: Submitted, request_id: str) -> None:
        self.call_log.record(cancel=made.ids)
        cancel = change_of(jobs, "Cancel", made.whole, array=made.array, request_id=f"{request_id} cancel")
        if await self.call_log.call_unless(ARCHIVED, *cancel) is None:
            self.call_log.record(gone=made.whole)

    async def _serve(self, jobs: Any, made: Submitted, request_id: str, action: str, rng: Random) -> None:
        """Use a service for a while: it must run until it is cancelled."""
        await self._wait_for(jobs, made.first, Phase.RUNNING)
        if action == "suspend":
            await self._suspend(jobs, made, request_id, rng)
            await self._wait_for(jobs, made.first, Phase.RUNNING)
        if action == "update":
            await self._update_objective(jobs, made.first, request_id, rng)
            await self._wait_for(jobs, made.first, Phase.RUNNING)
        if action == "move":
            await self._move(jobs, made.first, request_id)
            await self._wait_for(jobs, made.first, Phase.RUNNING)
        await self.call_log.pause(SERVED_SECONDS, rng)
        await self._cancel(jobs, made, request_id)

    async def _suspend(self, jobs: Any, made: Submitted, request_id: str, rng: Random) -> None:
        """Suspend a job or an array for a while, unless it ends; attempts that begin in between must be stopped."""
        suspend = change_of(jobs, "Suspend", made.whole, array=made.array, request_id=f"{request_id} suspend")
        if await self.call_log.call_unless(ALREADY_ENDED, *suspend) is None:
            return
        some = made.ids[:2] + made.ids[2:][-2:]
        if held := [job_id for job_id in some if await self._wait_for(jobs, job_id, Phase.SUSPENDED)]:
            begin = clock()
            await self.call_log.pause(SUSPENDED_SECONDS, rng)
            for job_id in held:
                self.call_log.record(suspended=job_id, begin=begin, end=clock())
            resume = change_of(jobs, "Resume", made.whole, array=made.array, request_id=f"{request_id} resume")
            await self.call_log.call_unless(ALREADY_ENDED, *resume)
            if rng.random() < REPEAT_SHARE:
                await self.call_log.call_unless(ALREADY_ENDED, *suspend)  # a late duplicate

    async def _update(self, jobs: Any, job_id: str, request_id: str, rng: Random) -> None:
        """Update a job's priority several times; earlier values must not return."""
        sent = []
        for turn in range(rng.randint(1, UPDATES_MAX)):
            await self.call_log.pause(SOON_SECONDS, rng)
            changed = job_pb2.Job(id=job_id, spec=job_pb2.JobSpec(priority=rng.randint(-PRIORITY_MAX, PRIORITY_MAX)))
            mask = FieldMask(paths=["spec.priority"])
            sent.append(pb.UpdateJobRequest(job=changed, update_mask=mask, request_id=f"{request_id} update {turn}"))
            self.call_log.record(asked=job_id, priority=changed.spec.priority)
            if not await self.call_log.call_unless(ALREADY_ENDED, jobs.UpdateJob, sent[-1]):
                return
            self.call_log.record(updated=job_id, priority=changed.spec.priority)
        if rng.random() < 2 * REPEAT_SHARE:
            await self.call_log.call_unless(ALREADY_ENDED, jobs.UpdateJob, sent[0])

    async def _update_objective(self, jobs: Any, job_id: str, request_id: str, rng: Random) -> None:
        """Change the arrival rate of a service; the answer must contain it."""
        arrivals = float(rng.randint(*ARRIVALS))
        spec = job_pb2.JobSpec(qos=job_pb2.Qos(arrivals_per_second=arrivals))
        mask = FieldMask(paths=["spec.qos.arrivals_per_second"])
        changed = job_pb2.Job(id=job_id, spec=spec)
        request = pb.UpdateJobRequest(job=changed, update_mask=mask, request_id=f"{request_id} promise")
        if (answer := await self.call_log.call_unless(ALREADY_ENDED, jobs.UpdateJob, request)) is None:
            return
        self.call_log.record(promised=job_id)
        if answer.job.spec.qos.arrivals_per_second != arrivals:
            self.call_log.record(wrong=f"that {job_id} gets {answer.job.spec.qos}, after {arrivals} requests a second")

    async def _move(self, jobs: Any, job_id: str, request_id: str) -> None:
        """Migrate a job once it runs; it must not return to its nodes."""
        if (job := await self._wait_for(jobs, job_id, Phase.RUNNING)) is None:
            return
        avoid, number = Duration(seconds=AVOID_SECONDS), job.attempt.number
        move = pb.MoveJobRequest(id=job_id, number=number, avoid=avoid, request_id=f"{request_id} move")
        if await self.call_log.call_unless(ALREADY_ENDED, jobs.MoveJob, move):
            self.call_log.record(moved=job_id, number=number)

    # Waiting -------------------------------------------------------------------------------------------------

    async def _wait_for(self, jobs: Any, job_id: str, phase: Phase) -> job_pb2.Job | None:
        """Wait until a job is in a phase; return None if it has ended instead."""
        request = pb.ListJobsRequest(page_size=1, filter=pb.JobFilter(ids=[job_id]))
        while not self._is_forgotten(job_id):
            found = (await self.call_log.call(jobs.ListJobs, request)).jobs
            self._note_missing([job_id], found)
            for job in found:
                now = specs.PHASES.from_wire(job.phase)
                if now is phase or now.ended:
                    return job if now is phase else None
            await asyncio.sleep(PAUSE_SECONDS * 2)
        return None

    def _note_missing(self, asked: list[str], found: Any) -> None:
        there = {job.id for job in found}
        for job_id in asked:
            if job_id in there:
                self.missing.pop(job_id, None)
            else:
                self.missing.setdefault(job_id, clock())

    def _is_forgotten(self, job_id: str) -> bool:
        return clock() - self.missing.get(job_id, clock()) > MISSING_SECONDS_MAX

    async def _track_ended(self) -> None:
        """Track jobs that have ended."""
        said = False
        while True:
            if self.open or self.end_watcher.awaited:
                await self._poll_open()
            if self.call_log.quiescing.is_set() and not (self.open or self.call_log.busy or self.end_watcher.awaited):
                if not said:
                    print(json.dumps({IDLE: True, "refusals": self.call_log.refusals}), flush=True)
                said = True
            else:
                said = False
            await asyncio.sleep(PAUSE_SECONDS * 2)

    async def _poll_open(self) -> None:
        asked = sorted({*self.open, *self.end_watcher.awaited})
        request = pb.ListJobsRequest(page_size=PAGE, filter=pb.JobFilter(ids=asked))
        found = (await self.call_log.call(self.jobs[TENANT].ListJobs, request)).jobs
        self._note_missing(asked, found)
        ended = {job.id for job in found if specs.PHASES.from_wire(job.phase) in ENDED}
        self.open -= ended
        self.end_watcher.expect(ended)
        self.end_watcher.poll({job.id for job in found}, quiescing=self.call_log.quiescing.is_set())
        self.open -= {job_id for job_id in asked if self._is_forgotten(job_id)}


async def main(directory: Path, queue: str, placement: str, seed: str) -> None:
    """Run the load until its input ends."""
    token = os.environ["COTENANT_TOKEN"]
    channel.secure(of_process())
    async with AsyncExitStack() as stack:
        to_queue = await stack.enter_async_context(channel.connect(queue, token))
        to_placement = await stack.enter_async_context(channel.connect(placement, token))
        jobs: dict[str, Any] = {TENANT: queue_stub(to_queue)}
        for tenant, files in of_tenants(directory).items():
            own = await stack.enter_async_context(channel.connect(queue, tls=files))
            jobs[tenant] = queue_stub(own)
        nodes, tenants = cast("Any", NodeServiceStub(to_placement)), cast("Any", TenantServiceStub(to_queue))
        load = Load(CallLog(directory, f"chaos {seed}"), jobs, nodes, tenants, Random(seed))
        running = asyncio.get_running_loop().create_task(load.run())
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        listening = asyncio.get_running_loop().create_task(obey_input(reader, load.call_log))
        await asyncio.wait([running, listening], return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()


async def obey_input(reader: asyncio.StreamReader, call_log: CallLog) -> None:
    """Execute commands until the end of the input."""
    async for line in reader:
        call_log.quiescing.set() if line.strip() == b"hush" else call_log.quiescing.clear()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), *sys.argv[2:5]))
