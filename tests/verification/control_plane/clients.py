"""Clients that submit and change jobs, and clients that watch and read; what they are told is recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from random import Random
from typing import Any

import grpc
from google.protobuf.field_mask_pb2 import FieldMask
from tests.support.queue_stub import change_of, creation_of, queue_stub
from tests.unit.services.mesh import spec
from tests.verification.control_plane.simulated_rpc import Network
from tests.verification.control_plane.virtual_time import Process

from cotenant.codec import specs
from cotenant.core.model.lifecycle import ENDED, Phase
from cotenant.history.events import Acknowledged, Cancelled, Event, Listed, Prioritized, Watched
from cotenant.history.stored import phase_of
from cotenant.leadership.replica import REVISION
from cotenant.v1 import job_pb2, job_service_pb2_grpc
from cotenant.v1 import job_service_pb2 as pb

QUEUES = ("queue-0", "queue-1")
CALL_SECONDS, RETRY_SECONDS, LOOK_SECONDS = 3.0, 0.2, 1.5
PAGE = 1000
ELASTIC_SHARE = 0.3  # of the jobs with one GPU per replica
OVER = [specs.PHASES.to_wire(phase) for phase in sorted(ENDED)]
TRANSIENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
INVALID_STATE = (grpc.StatusCode.FAILED_PRECONDITION,)
CONDITIONS = [number for number in job_pb2.DependencyCondition.values() if number]


class Clients:
    """All clients of the queue. `failures` are answers that should never occur."""

    def __init__(self, network: Network, rng: Random, events: list[Event], failures: list[str]) -> None:
        self.acknowledged: list[str] = []  # jobs and arrays
        self.unanswered: dict[str, str] = {}  # requests, and what came instead of an answer
        self.seen: dict[str, dict[str, Phase]] = {}  # by watcher: phases according to its last stream
        self._numbers = count()
        self._network, self._rng, self._events, self._failures = network, rng, events, failures

    def stub(self, name: str) -> Any:
        """Return a client's stub of the queue, on any replica."""
        return queue_stub(self._network.channel(Process(name), QUEUES))

    async def call_until_answered(
        self, call: Any, request: Any, *, refused: Sequence[grpc.StatusCode] = INVALID_STATE
    ) -> Any:
        """Retry a call until it is answered; return None if the request has become pointless."""
        repeatable = "request_id" in request.DESCRIPTOR.fields_by_name
        if repeatable and not request.request_id:
            request.request_id = f"asked-{next(self._numbers)}"
        asked = f"{type(request).__name__} {request.request_id if repeatable else request.id}"
        while True:
            try:
                answer = await call(request, timeout=CALL_SECONDS)
            except grpc.aio.AioRpcError as error:
                self.unanswered[asked] = f"{error.code()} {error.details()}"
                if error.code() not in TRANSIENT:
                    if error.code() not in refused:
                        self._failures.append(f"{asked}: {error.code()} {error.details()}")
                    answer = None
                else:
                    await asyncio.sleep(RETRY_SECONDS * (0.5 + self._rng.random()))
                    continue
            self.unanswered.pop(asked, None)
            return answer

    # Submitters ----------------------------------------------------------------------------------------------

    async def submit(self, number: int, within_seconds: float) -> None:
        """Submit a job or an array until it is acknowledged, and change it; some requests are sent twice."""
        stub = self.stub(f"client-{number}")
        await asyncio.sleep(self._rng.random() * within_seconds)
        wanted, request_id = self._run_job(number), f"request-{number}"
        array, times = wanted.HasField("array"), self._rng.choice([1, 1, 2])
        call, request = creation_of(stub, wanted, request_id)
        answers = await asyncio.gather(*(self.call_until_answered(call, request) for _ in range(times)))
        if not (made := [answer.array.id if array else answer.job.id for answer in answers if answer]):
            return
        indices = range(wanted.array.ranges[0].last + 1) if array else ()
        ids = [f"{made[0]}_{index}" for index in indices] or [made[0]]
        for one in made:
            self._events.append(Acknowledged(request_id, f"{one}_0" if array else one))
        self._events.extend(Acknowledged(f"{request_id} {one}", one) for one in ids[1:])
        self.acknowledged.append(made[0])
        await self._change(stub, made[0], ids)

    def _run_job(self, number: int) -> job_pb2.JobSpec:
        rng = self._rng
        gpus, replicas = rng.choice([(1, 1)] * 4 + [(2, 1), (1, 2), (1, 3), (0, 1)])
        made = spec(
            gpus=gpus,
            cores=rng.choice([1, 2, None]) if gpus else 1,
            replicas=replicas,
            name=f"job {number}",
            retries_max=3,
        )
        if gpus == 1 and Random(f"elastic {number} {made}").random() < ELASTIC_SHARE:
            made.resize = job_pb2.RESIZE_MODE_RESTART
            made.roles[0].elastic.min, made.roles[0].elastic.max = 1, replicas + 3
        if replicas == 1 and not made.resize and rng.random() < 0.15:
            made.array.ranges.add(first=0, last=rng.randint(1, 3))
            made.array.running_max = rng.randint(0, 2)
        if self.acknowledged and rng.random() < 0.3:
            made.dependencies.add(id=rng.choice(self.acknowledged), condition=rng.choice(CONDITIONS))
        return made

    async def _change(self, stub: Any, thing_id: str, job_ids: list[str]) -> None:
        """Change a job or an array a random number of times."""
        array = job_ids[0] != thing_id
        while self._rng.random() < 0.55:
            await asyncio.sleep(3 * self._rng.random() ** 2)
            (wish,) = self._rng.choices(["cancel", "suspend", "resume", "move", "update"], [2, 1, 1, 2, 4])
            if wish == "cancel":
                if await self.call_until_answered(*change_of(stub, "Cancel", thing_id, array=array)):
                    self._events.extend(Cancelled(job_id) for job_id in job_ids)
            elif wish == "suspend":
                await self.call_until_answered(*change_of(stub, "Suspend", thing_id, array=array))
            elif wish == "resume":
                await self.call_until_answered(*change_of(stub, "Resume", thing_id, array=array))
            elif wish == "move":
                await self._move(stub, self._rng.choice(job_ids))
            else:
                job_id, priority = self._rng.choice(job_ids), self._rng.randint(-5, 5)
                changed = job_pb2.Job(id=job_id, spec=job_pb2.JobSpec(priority=priority))
                request = pb.UpdateJobRequest(job=changed, update_mask=FieldMask(paths=["spec.priority"]))
                if await self.call_until_answered(stub.UpdateJob, request):
                    self._events.append(Prioritized(job_id, priority))

    async def _move(self, stub: Any, job_id: str) -> None:
        """Migrate a job, if it has started."""
        job = (await self.call_until_answered(stub.GetJob, pb.GetJobRequest(id=job_id))).job
        if job.attempt.number:
            request = pb.MoveJobRequest(id=job_id, number=job.attempt.number, reason="test")
            request.avoid.FromSeconds(self._rng.randint(0, 3))
            await self.call_until_answered(stub.MoveJob, request)

    # Watchers and readers ------------------------------------------------------------------------------------

    async def watch(self, name: str) -> None:
        """Watch all jobs forever; resume whenever the watch ends."""
        stub, stream = self.stub(name), 0
        while True:
            stream += 1
            seen = self.seen[name] = {}
            with suppress(grpc.aio.AioRpcError):
                async for response in stub.WatchJobs(pb.WatchJobsRequest()):
                    for job in response.jobs:
                        seen[job.id] = phase = phase_of(job.phase)
                        self._events.append(Watched(name, stream, job.id, phase))
            await asyncio.sleep(RETRY_SECONDS)

    async def hold_watches(self, name: str, count: int, seconds: float) -> None:
        """Open watches of all jobs, never read them, and close them after a while."""
        stub = self.stub(name)
        watches = [stub.WatchJobs(pb.WatchJobsRequest()) for _ in range(count)]
        await asyncio.sleep(seconds)
        for watch in watches:
            watch.cancel()

    async def read(self, address: str) -> None:
        """Read ended jobs from one replica repeatedly; its own answers carry a revision."""
        name = f"reader of {address}"
        stub: Any = job_service_pb2_grpc.JobServiceStub(self._network.forwarding_channel(Process(name), address))
        request = pb.ListJobsRequest(page_size=PAGE, filter=pb.JobFilter(phases=OVER))
        while True:
            await asyncio.sleep(LOOK_SECONDS * (0.5 + self._rng.random()))
            call = stub.ListJobs(request, timeout=CALL_SECONDS)
            with suppress(grpc.aio.AioRpcError):
                jobs = (await call).jobs
                trailers = dict(await call.trailing_metadata() or ())
                if REVISION in trailers:
                    phases = {job.id: phase_of(job.phase) for job in jobs}
                    self._events.append(Listed(name, int(trailers[REVISION]), phases))
