"""The users of a mesh in trouble, and its operator: they submit jobs, change their minds, and write down each answer.

A process of its own, on its own machine: `python -m tests.chaos.load DIRECTORY QUEUE PLACEMENT SEED`. It obeys lines on
its standard input: `hush` (begin nothing more, and say `calm` once all that was acknowledged has ended), `go` and the
end of the input. Whatever is not answered is asked again under the same request id, and so is now and then what was.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, cast

import grpc
import grpc.aio
from google.protobuf.field_mask_pb2 import FieldMask
from tests.chaos.certificates import of_process
from tests.chaos.jobs import a_job

from cotenant.core.lifecycle import ENDED, Phase
from cotenant.history.recording import clock
from cotenant.rpc import channel, translate
from cotenant.v1 import job_pb2, node_service_pb2
from cotenant.v1 import job_service_pb2 as pb
from cotenant.v1.job_service_pb2_grpc import JobServiceStub
from cotenant.v1.node_service_pb2_grpc import NodeServiceStub

ANSWERS, CALM = "answers", "calm"
UNFINISHED = 14
RETRY_SECONDS, CALL_SECONDS_MAX, PAUSE_SECONDS = 0.2, 10.0, 0.1
MINDS = {"cancel": 12, "suspend": 10, "update": 10, "": 68}  # what users do with a job, in hundredths
REPEATED = 0.1
SOON_SECONDS, SUSPENDED_SECONDS, SERVED_SECONDS, DRAIN_SECONDS = (0.0, 2.0), (0.2, 3.0), (0.5, 5.0), (2.0, 8.0)
UPDATES_MAX, PRIORITY_MAX = 3, 5
EARLIER = 20  # jobs that others may come after
PAGE = 1000
WRONG = (  # what chaos is no reason for
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.OUT_OF_RANGE,
)


@dataclass
class Load:
    """Keeps some jobs unfinished, and a node drained now and then."""

    directory: Path
    jobs: Any
    nodes: Any
    rng: Random
    name: str
    open: set[str] = field(default_factory=set)
    earlier: deque[str] = field(default_factory=lambda: deque(maxlen=EARLIER))
    refusals: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    hushed: asyncio.Event = field(default_factory=asyncio.Event)
    busy: int = 0  # so many do something that is to be done before it is calm

    async def run(self) -> None:
        """Submit and drain until the end of the input."""
        loop = asyncio.get_running_loop()
        endless, living = [loop.create_task(self._follow()), loop.create_task(self._operate())], set()
        while not any(task.done() for task in endless):
            if not self.hushed.is_set() and len(self.open) + self.busy < UNFINISHED:
                living.add(task := loop.create_task(self._live()))
                task.add_done_callback(living.discard)
            await asyncio.sleep(PAUSE_SECONDS)
        await asyncio.gather(*endless)

    # Users ---------------------------------------------------------------------------------------------------

    async def _live(self) -> None:
        """Submit a job, and perhaps change one's mind."""
        self.busy += 1
        try:
            request_id, rng = self._request(), Random(f"{self.name} {self.requests}")
            job, ids, service = await self._submit(request_id, rng)
            mind = rng.choices(list(MINDS), list(MINDS.values()))[0]
            if service:
                await self._serve(job, request_id, mind, rng)
            elif mind == "cancel":
                await self._soon(SOON_SECONDS, rng)
                await self._cancel(job.spec.array_task.array_id or job.id, ids, request_id)
            elif mind == "suspend" and len(ids) == 1:
                await self._soon(SOON_SECONDS, rng)
                await self._suspend(job.id, request_id, rng)
            elif mind == "update" and len(ids) == 1:
                await self._update(job.id, request_id, rng)
        finally:
            self.busy -= 1

    def _request(self) -> str:
        self.requests += 1
        return f"{self.name} {self.requests}"

    async def _submit(self, request_id: str, rng: Random) -> tuple[job_pb2.Job, list[str], bool]:
        """Submit a job; what was answered, the ids of all jobs that it is, and whether it is a service."""
        drawn = a_job(self.directory, rng, list(self.earlier))
        known = {"replicas": drawn.replicas, "alone": drawn.alone, "service": drawn.service, "after": drawn.after}
        request = pb.CreateJobRequest(spec=translate.spec_to_wire(drawn.spec), request_id=request_id)
        answer = (await self._call(self.jobs.CreateJob, request)).job
        if rng.random() < REPEATED:
            again = (await self._call(self.jobs.CreateJob, request)).job
            self._tell(request=request_id, job=again.id, **known)
        ids = [answer.id]
        if drawn.spec.array:
            ids = [f"{answer.spec.array_task.array_id}_{index}" for index in drawn.spec.array.indices]
        for job_id in ids:
            own = request_id if job_id == answer.id else f"{request_id} {job_id}"
            self._tell(request=own, job=job_id, **known)
        self.open |= set(ids)
        self.earlier += ids
        return answer, ids, drawn.service

    async def _cancel(self, target: str, ids: list[str], request_id: str) -> None:
        self._tell(cancel=ids)
        await self._call(self.jobs.CancelJob, pb.CancelJobRequest(id=target, request_id=f"{request_id} cancel"))

    async def _serve(self, job: job_pb2.Job, request_id: str, mind: str, rng: Random) -> None:
        """Use a service for a while: it has to run, and goes on until it is cancelled."""
        await self._wait_for(job.id, Phase.RUNNING)
        if mind == "suspend":
            await self._suspend(job.id, request_id, rng)
            await self._wait_for(job.id, Phase.RUNNING)
        await self._soon(SERVED_SECONDS, rng)
        await self._cancel(job.id, [job.id], request_id)

    async def _suspend(self, job_id: str, request_id: str, rng: Random) -> None:
        """Hold a job back for a while, unless it has ended by then; what of it begins meanwhile is to be stopped."""
        suspend = pb.SuspendJobRequest(id=job_id, request_id=f"{request_id} suspend")
        if await self._unless_ended(self.jobs.SuspendJob, suspend) and await self._wait_for(job_id, Phase.SUSPENDED):
            begin = clock()
            await self._soon(SUSPENDED_SECONDS, rng)
            self._tell(suspended=job_id, begin=begin, end=clock())
            resume = pb.ResumeJobRequest(id=job_id, request_id=f"{request_id} resume")
            await self._unless_ended(self.jobs.ResumeJob, resume)
            if rng.random() < REPEATED:
                await self._unless_ended(self.jobs.SuspendJob, suspend)  # an old one, that came late

    async def _update(self, job_id: str, request_id: str, rng: Random) -> None:
        """Give a job other priorities, one after the other; what came before is not to come back."""
        sent = []
        for turn in range(rng.randint(1, UPDATES_MAX)):
            await self._soon(SOON_SECONDS, rng)
            changed = job_pb2.Job(id=job_id, spec=job_pb2.JobSpec(priority=rng.randint(-PRIORITY_MAX, PRIORITY_MAX)))
            mask = FieldMask(paths=["spec.priority"])
            sent.append(pb.UpdateJobRequest(job=changed, update_mask=mask, request_id=f"{request_id} update {turn}"))
            self._tell(asked=job_id, priority=changed.spec.priority)
            if not await self._unless_ended(self.jobs.UpdateJob, sent[-1]):
                return
            self._tell(updated=job_id, priority=changed.spec.priority)
        if rng.random() < 2 * REPEATED:
            await self._unless_ended(self.jobs.UpdateJob, sent[0])

    # The operator --------------------------------------------------------------------------------------------

    async def _operate(self) -> None:
        """Drain a node now and then, until nothing is left there."""
        rng = Random(f"{self.name} operator")
        while True:
            await self._soon(DRAIN_SECONDS, rng)
            if self.hushed.is_set():
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            self.busy += 1
            try:
                await self._drain(rng)
            finally:
                self.busy -= 1

    async def _drain(self, rng: Random) -> None:
        nodes = (await self._call(self.nodes.ListNodes, node_service_pb2.ListNodesRequest(page_size=PAGE))).nodes
        if not nodes:
            return
        node_id, request_id = rng.choice(sorted(node.id for node in nodes)), self._request()
        drain = node_service_pb2.DrainNodeRequest(id=node_id, reason="to see it empty", request_id=request_id)
        await self._call(self.nodes.DrainNode, drain)
        since, _, service = await self._submit(f"{request_id} since", Random(request_id))
        self._tell(drained=node_id, since=since.id)
        if service:
            await self._cancel(since.id, [since.id], request_id)
        await self._wait_until_empty(node_id)
        uncordon = node_service_pb2.UncordonNodeRequest(id=node_id, request_id=f"{request_id} uncordon")
        await self._call(self.nodes.UncordonNode, uncordon)

    async def _wait_until_empty(self, node_id: str) -> None:
        while True:
            node = (await self._call(self.nodes.GetNode, node_service_pb2.GetNodeRequest(id=node_id))).node
            if not node.attempts:
                return
            await asyncio.sleep(PAUSE_SECONDS * 2)

    # Calls ---------------------------------------------------------------------------------------------------

    async def _soon(self, seconds: tuple[float, float], rng: Random) -> None:
        """Let some time pass, less where all is to come to rest."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.hushed.wait(), rng.uniform(*seconds))

    async def _call(self, method: Any, request: Any) -> Any:
        """Ask until there is an answer."""
        return await self._unless_ended(method, request, always=True)

    async def _unless_ended(self, method: Any, request: Any, *, always: bool = False) -> Any:
        """Ask until there is an answer; None where the job has ended, unless there `always` has to be one."""
        while True:
            try:
                if (answer := await method(request, timeout=CALL_SECONDS_MAX)) is not None:
                    return answer
                self.refusals["unreadable"] += 1  # its bytes were garbled: gRPC gives nothing then, and says nothing
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.FAILED_PRECONDITION and not always:
                    return None
                self.refusals[error.code().name] += 1
                if error.code() in WRONG:
                    self._tell(wrong=f"{type(request).__name__}: {error.code().name}: {error.details()}")
                    raise
            await asyncio.sleep(RETRY_SECONDS)

    async def _wait_for(self, job_id: str, phase: Phase) -> bool:
        """Wait until a job is in a phase; False where it has ended instead."""
        request = pb.ListJobsRequest(page_size=1, filter=pb.JobFilter(ids=[job_id]))
        while True:
            for job in (await self._call(self.jobs.ListJobs, request)).jobs:
                now = translate.PHASES.from_wire(job.phase)
                if now is phase or now.ended:
                    return now is phase
            await asyncio.sleep(PAUSE_SECONDS * 2)

    async def _follow(self) -> None:
        """Take note of what has ended."""
        ended = [translate.PHASES.to_wire(phase) for phase in ENDED]
        said = False
        while True:
            if self.open:
                await self._look(ended)
            if self.hushed.is_set() and not self.open and not self.busy:
                if not said:
                    print(json.dumps({CALM: True, "refusals": self.refusals}), flush=True)
                said = True
            else:
                said = False
            await asyncio.sleep(PAUSE_SECONDS * 2)

    async def _look(self, ended: list[Any]) -> None:
        request = pb.ListJobsRequest(page_size=PAGE, filter=pb.JobFilter(phases=ended, ids=sorted(self.open)))
        answer = await self._call(self.jobs.ListJobs, request)
        self.open -= {job.id for job in answer.jobs}

    def _tell(self, **what: object) -> None:
        """Write down what a user knows now."""
        with (self.directory / ANSWERS).open("ab", buffering=0) as file:
            file.write(json.dumps({"at": clock(), **what}).encode() + b"\n")


async def main(directory: Path, queue: str, placement: str, seed: str) -> None:
    """Do it all."""
    token = os.environ["COTENANT_TOKEN"]
    channel.secure(of_process())
    async with channel.connect(queue, token) as to_queue, channel.connect(placement, token) as to_placement:
        stubs = cast("Any", JobServiceStub(to_queue)), cast("Any", NodeServiceStub(to_placement))
        load = Load(directory, *stubs, Random(seed), f"chaos {seed}")
        running = asyncio.get_running_loop().create_task(load.run())
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        listening = asyncio.get_running_loop().create_task(listen(reader, load))
        await asyncio.wait([running, listening], return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()


async def listen(reader: asyncio.StreamReader, load: Load) -> None:
    """Obey until the end of the input."""
    async for line in reader:
        load.hushed.set() if line.strip() == b"hush" else load.hushed.clear()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), *sys.argv[2:5]))
