"""A mesh for tests: the real stubs and server, with state in memory and no scheduler.

It admits jobs by the real rules. `autopilot` runs a job's command as soon as it is admitted; without it, tests move
jobs by `run` and `finish`. The end-to-end tests cover the real queue.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import grpc

from cotenant.codec import errors
from cotenant.codec.specs import PHASES, accept_spec, spec_to_wire, timestamp
from cotenant.core.model.job import JobSpec
from cotenant.core.model.job_array import ArrayTask
from cotenant.core.model.lifecycle import ENDED, HOLDING, Phase
from cotenant.core.model.notification import REDACTED
from cotenant.rpc.server import Server
from cotenant.v1 import array_service_pb2 as arrays_pb
from cotenant.v1 import array_service_pb2_grpc as arrays_grpc
from cotenant.v1 import contention_service_pb2 as contention_pb
from cotenant.v1 import contention_service_pb2_grpc as contention_grpc
from cotenant.v1 import job_pb2
from cotenant.v1 import job_service_pb2 as pb
from cotenant.v1 import job_service_pb2_grpc as jobs_grpc
from cotenant.v1 import node_service_pb2 as nodes_pb
from cotenant.v1 import node_service_pb2_grpc as nodes_grpc
from cotenant.v1 import policy_service_pb2 as policies_pb
from cotenant.v1 import policy_service_pb2_grpc as policies_grpc
from cotenant.v1 import predictor_service_pb2 as predictor_pb
from cotenant.v1 import process_service_pb2 as replicas_pb
from cotenant.v1 import process_service_pb2_grpc as replicas_grpc
from cotenant.v1.resources_pb2 import Core, Gpu, GpuShare, Inventory, NodeAllocation, TaskAllocation

T = TypeVar("T")
TOKEN = "a-token-for-tests"
GPU_MILLI_MAX = 8000
CREATED = 1_800_000_000.0


def _whole(request: pb.CreateJobRequest | arrays_pb.CreateArrayRequest) -> job_pb2.JobSpec:
    """Return the spec of a request, without the redacted targets of a job that it repeats; one host is forgotten."""
    spec = job_pb2.JobSpec()
    spec.CopyFrom(request.spec)
    if request.like:
        spec.notify[:] = [one for one in spec.notify if REDACTED not in one or "forgotten" in one]
    return spec


class Jobs(jobs_grpc.JobServiceServicer):
    """Jobs in a dictionary."""

    def __init__(self) -> None:
        self.jobs: dict[str, job_pb2.Job] = {}
        self.logs: dict[tuple[str, int], list[tuple[int, bytes]]] = {}
        self.estimates: dict[str, predictor_pb.Estimate] = {}
        self.asked: list[Any] = []
        self.failures: list[pb.FailureCount] = []
        self.usage = pb.SummarizeUsageResponse()
        self.failure_groups = 0  # 0: as many as there are `failures`
        self.required = ""  # why a required objective cannot be kept
        self.expected: list[job_pb2.ObjectiveStatus] = []  # of the objectives of each submitted job
        self.autopilot = False
        self.after_piece: Callable[[], Awaitable[None]] | None = None  # what happens once a reader has a piece
        self.unwatched: set[str] = set()  # jobs that are archived as far as watches know
        self.before_watch: Callable[[], Coroutine[Any, Any, None]] | None = None  # what a wish to watch sets off
        self.cut_streams = 0  # how many streams are to be cut after their first message
        self.cut_logs = 0  # the same, of output alone
        self.revision = 1  # of the last change
        self._by_request: dict[str, str] = {}
        self._changed: set[asyncio.Queue[job_pb2.Job]] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def CreateJob(self, request: pb.CreateJobRequest, context: Any) -> pb.CreateJobResponse:
        self.asked.append(request)
        spec = accept_spec(_whole(request), now=time.time())
        if message := self.required:
            raise errors.Problem(
                grpc.StatusCode.FAILED_PRECONDITION,
                "OBJECTIVE_UNREACHABLE",
                message,
                metadata={"remedy": "a deadline 2 h from now or later"},
                violations=[errors.Violation("spec.deadline", message)],
            )
        if spec.gpu_milli > GPU_MILLI_MAX:
            raise errors.failed_precondition(
                "NEVER_FITS",
                f"needs {spec.gpu_milli / 1000:g} GPUs; the largest node has {GPU_MILLI_MAX / 1000:g}",
                remedy="ask for fewer GPUs on each server, or add a larger one",
            )
        if request.validate_only:
            return pb.CreateJobResponse(job=self._made("", spec))
        if request.request_id not in self._by_request:
            job = self.add(spec)
            self._by_request[request.request_id] = job.id
            if self.autopilot:
                task = asyncio.ensure_future(self.drive(job))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        return pb.CreateJobResponse(job=self.jobs[self._by_request[request.request_id]])

    async def GetJob(self, request: pb.GetJobRequest, context: Any) -> pb.GetJobResponse:
        return pb.GetJobResponse(job=self._known(request.id))

    async def ListJobs(self, request: pb.ListJobsRequest, context: Any) -> pb.ListJobsResponse:
        self.asked.append(request)
        found = sorted((job for job in self.jobs.values() if matches(job, request.filter)), key=lambda job: job.id)
        found.reverse()
        begin = int(request.page_token or 0)
        end = begin + min(request.page_size or 100, 1000)
        token = str(end) if end < len(found) else ""
        return pb.ListJobsResponse(jobs=found[begin:end], next_page_token=token, total_size=len(found))

    async def _undisturbed(self, happens: Coroutine[Any, Any, None]) -> None:
        """Wait for something that goes on if this call is cancelled, as when it ends the server."""
        task = asyncio.ensure_future(happens)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.shield(task)

    async def WatchJobs(self, request: pb.WatchJobsRequest, context: Any) -> AsyncIterator[pb.WatchJobsResponse]:
        if self.before_watch:
            then, self.before_watch = self.before_watch, None
            await self._undisturbed(then())
        changed: asyncio.Queue[job_pb2.Job] = asyncio.Queue()
        self._changed.add(changed)
        try:
            revision = str(self.revision)
            known = [job for job in self.jobs.values() if matches(job, request.filter) and job.id not in self.unwatched]
            for job in known:
                yield pb.WatchJobsResponse(jobs=[job])
            if self.cut_streams:
                self.cut_streams -= 1
                raise errors.unavailable("the stand-in cuts this stream")
            yield pb.WatchJobsResponse(synced=True, revision=revision)
            left = {job.id for job in known if PHASES.from_wire(job.phase) not in ENDED}
            while left or not request.until_ended:
                job = await changed.get()
                if matches(job, request.filter):
                    yield pb.WatchJobsResponse(jobs=[job], revision=str(self.revision))
                if PHASES.from_wire(job.phase) in ENDED:
                    left.discard(job.id)
        finally:
            self._changed.discard(changed)

    async def CancelJob(self, request: pb.CancelJobRequest, context: Any) -> pb.CancelJobResponse:
        job = self._known(request.id)
        if PHASES.from_wire(job.phase) not in ENDED:
            self.move(job.id, Phase.CANCELLED)
        return pb.CancelJobResponse(job=self.jobs[job.id])

    async def SuspendJob(self, request: pb.SuspendJobRequest, context: Any) -> pb.SuspendJobResponse:
        job = self._known(request.id)
        if PHASES.from_wire(job.phase) in ENDED:
            raise errors.failed_precondition("JOB_ENDED", f"job {job.id} has ended and cannot be suspended")
        self.move(job.id, Phase.SUSPENDED)
        return pb.SuspendJobResponse(job=self.jobs[job.id])

    async def ResumeJob(self, request: pb.ResumeJobRequest, context: Any) -> pb.ResumeJobResponse:
        job = self._known(request.id)
        self.move(job.id, Phase.QUEUED)
        return pb.ResumeJobResponse(job=self.jobs[job.id])

    async def MoveJob(self, request: pb.MoveJobRequest, context: Any) -> pb.MoveJobResponse:
        self.asked.append(request)
        job = self._known(request.id)
        if PHASES.from_wire(job.phase) not in HOLDING or request.number != job.attempt.number:
            raise errors.failed_precondition("ATTEMPT_OVER", f"attempt {request.number} of job {job.id} is over")
        return pb.MoveJobResponse(job=job)

    async def SummarizeFailures(
        self, request: pb.SummarizeFailuresRequest, context: Any
    ) -> pb.SummarizeFailuresResponse:
        self.asked.append(request)
        return pb.SummarizeFailuresResponse(
            counts=self.failures, attempts=17, total_size=self.failure_groups or len(self.failures)
        )

    async def SummarizeUsage(self, request: pb.SummarizeUsageRequest, context: Any) -> pb.SummarizeUsageResponse:
        self.asked.append(request)
        return self.usage

    async def UpdateJob(self, request: pb.UpdateJobRequest, context: Any) -> pb.UpdateJobResponse:
        self.asked.append(request)
        job = self._known(request.job.id)
        if request.job.etag and request.job.etag != job.etag:
            raise errors.conflict("job", job.id)
        for path in request.update_mask.paths:
            field = path.removeprefix("spec.")
            if field.startswith("qos."):
                setattr(job.spec.qos, field[4:], getattr(request.job.spec.qos, field[4:]))
                continue
            job.spec.ClearField(field)
            part = job_pb2.JobSpec()
            value = getattr(request.job.spec, field)
            if field == "labels":
                part.labels.update(value)
            elif field == "deadline":
                if request.job.spec.HasField("deadline"):
                    part.deadline.CopyFrom(value)
            else:
                setattr(part, field, value)
            job.spec.MergeFrom(part)
        return pb.UpdateJobResponse(job=job)

    async def ExplainJob(self, request: pb.ExplainJobRequest, context: Any) -> pb.ExplainJobResponse:
        job = self._known(request.id)
        return pb.ExplainJobResponse(
            job=job,
            summary=f"{job.id} waits because 8 GPUs are asked for and 5 are free",
            position=2,
            waiting=7,
            events=[pb.JobEvent(time=timestamp(CREATED), kind=pb.JOB_EVENT_KIND_QUEUED, detail="taken in by default")],
            queue_policy="las",
            level=1,
            score=3250.5,
            sizing="6 cores per replica, by proportional",
            estimate=self.estimates.get(job.id),
        )

    async def SimulateJob(self, request: pb.SimulateJobRequest, context: Any) -> pb.SimulateJobResponse:
        self.asked.append(request)
        first, *more = (self._simulated(message) for message in (request.spec, *request.more))
        first.more.extend(more)
        return first

    @staticmethod
    def _simulated(message: job_pb2.JobSpec) -> pb.SimulateJobResponse:
        if accept_spec(message, now=time.time()).gpu_milli > 4000:
            refusal = job_pb2.Refusal(code="CAPACITY", detail="needs 8 GPUs; 4 of 8 are free", remedy="a job ends")
            return pb.SimulateJobResponse(refusal=refusal, position=3)
        return pb.SimulateJobResponse(starts_now=True, allocations=[allocation()], preempted_job_ids=["old"])

    async def ReadFiles(self, request: pb.ReadFilesRequest, context: Any) -> AsyncIterator[pb.ReadFilesResponse]:
        job = self._known(request.id)
        raise errors.failed_precondition("NO_FILES", f"{job.id} has no files")
        yield

    def OpenSession(self, request_iterator: Any, context: Any) -> Any:
        raise NotImplementedError

    async def ReadLogs(self, request: pb.ReadLogsRequest, context: Any) -> AsyncIterator[pb.ReadLogsResponse]:
        self.asked.append(request)
        job = self._known(request.id)
        number = request.attempt or job.attempt.number
        sent = 0
        while True:
            pieces = self.logs.get((job.id, number), [])
            for rank, data in pieces[sent:]:
                sent += 1
                if not request.HasField("rank") or rank == request.rank:
                    yield pb.ReadLogsResponse(rank=rank, data=data[-request.tail_bytes :])
                    if self.after_piece:
                        then, self.after_piece = self.after_piece, None
                        await then()
                    if self.cut_streams or self.cut_logs:
                        self.cut_streams = max(0, self.cut_streams - 1)
                        self.cut_logs = max(0, self.cut_logs - 1)
                        raise errors.unavailable("the stand-in cuts this stream")
            ended = PHASES.from_wire(self.jobs[job.id].phase) in ENDED or self.jobs[job.id].attempt.number != number
            if not request.follow or ended:
                return
            await self._next_change()

    def next_id(self) -> str:
        """Return an id that sorts after all others."""
        return f"{len(self.jobs):08d}k{len(self.jobs):03d}"

    def add(self, spec: JobSpec, job_id: str = "", **fields: Any) -> job_pb2.Job:
        """Add a job."""
        job = self._made(job_id or self.next_id(), spec)
        job.MergeFrom(job_pb2.Job(**fields))
        self._set(job)
        return job

    def move(self, job_id: str, phase: Phase, **fields: Any) -> None:
        """Move a job to another phase."""
        job = job_pb2.Job()
        job.CopyFrom(self.jobs[job_id])
        job.phase = PHASES.to_wire(phase)
        if phase != Phase.QUEUED:
            job.ClearField("refusal")
        if phase in ENDED:
            job.end_time.CopyFrom(timestamp(time.time()))
        job.MergeFrom(job_pb2.Job(**fields))
        self._set(job)

    def run(self, job_id: str, node_id: str = "gpu-1") -> None:
        """Start the next attempt of a job."""
        number = self.jobs[job_id].attempt.number + 1
        attempt = job_pb2.Attempt(
            job_id=job_id,
            number=number,
            state=job_pb2.ATTEMPT_STATE_RUNNING,
            allocations=[allocation(node_id)],
            start_time=timestamp(time.time()),
        )
        self.jobs[job_id].ClearField("attempt")
        self.logs.setdefault((job_id, number), [])
        self.move(job_id, Phase.RUNNING, attempt=attempt, start_time=timestamp(time.time()))

    def say(self, job_id: str, data: bytes, rank: int = 0) -> None:
        """Append to a job's output."""
        self.logs[job_id, self.jobs[job_id].attempt.number].append((rank, data))
        self._set(self.jobs[job_id])

    def finish(self, job_id: str, code: int = 0) -> None:
        """End a job's attempt, and the job."""
        state = job_pb2.ATTEMPT_STATE_FAILED if code else job_pb2.ATTEMPT_STATE_SUCCEEDED
        exit = job_pb2.ExitStatus(code=code, node_id="gpu-1")
        attempt = job_pb2.Attempt(state=state, exit=exit, end_time=timestamp(time.time()))
        self.move(job_id, Phase.FAILED if code else Phase.SUCCEEDED, attempt=attempt)

    async def drive(self, job: job_pb2.Job) -> None:
        """Run the command of a job with one process."""
        self.run(job.id)
        process = await asyncio.create_subprocess_exec(*job.spec.command, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        while data := await process.stdout.read(4096):
            self.say(job.id, data)
        self.finish(job.id, await process.wait())

    def _made(self, job_id: str, spec: JobSpec) -> job_pb2.Job:
        refusal = job_pb2.Refusal(code="CAPACITY", detail="needs 1 GPU; 0 of 8 are free", remedy="a job ends")
        return job_pb2.Job(
            id=job_id,
            spec=spec_to_wire(spec),
            phase=job_pb2.JOB_PHASE_QUEUED,
            create_time=timestamp(CREATED),
            refusal=refusal,
            submitted_objectives=self.expected,
            etag="1",
            submitter="operator",
        )

    def _known(self, job_id: str) -> job_pb2.Job:
        if array := next((one for one in self.jobs if one.startswith(f"{job_id}_")), None):
            raise errors.failed_precondition("IS_ARRAY", f"{job_id} is an array of jobs", first=array)
        if job_id not in self.jobs:
            raise errors.not_found("job", job_id)
        return self.jobs[job_id]

    def _set(self, job: job_pb2.Job) -> None:
        self.jobs[job.id] = job
        self.revision += 1
        for changed in self._changed:
            changed.put_nowait(job)

    async def _next_change(self) -> None:
        changed: asyncio.Queue[job_pb2.Job] = asyncio.Queue()
        self._changed.add(changed)
        try:
            await changed.get()
        finally:
            self._changed.discard(changed)


class Arrays(arrays_grpc.ArrayServiceServicer):
    """Arrays of the jobs in a dictionary."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs
        self._specs: dict[str, JobSpec] = {}
        self.asked: list[Any] = []
        self.archived: set[str] = set()

    async def CreateArray(self, request: arrays_pb.CreateArrayRequest, context: Any) -> arrays_pb.CreateArrayResponse:
        self.asked.append(request)
        spec = accept_spec(_whole(request), now=time.time())
        if request.validate_only:
            return arrays_pb.CreateArrayResponse(array=arrays_pb.Array(spec=spec_to_wire(spec)))
        array_id = self.add(spec)
        if self._jobs.autopilot:
            await asyncio.gather(*(self._jobs.drive(job) for job in self._tasks(array_id)))
        return arrays_pb.CreateArrayResponse(array=self._message(array_id))

    async def GetArray(self, request: arrays_pb.GetArrayRequest, context: Any) -> arrays_pb.GetArrayResponse:
        return arrays_pb.GetArrayResponse(array=self._message(request.id))

    async def ListArrays(self, request: arrays_pb.ListArraysRequest, context: Any) -> arrays_pb.ListArraysResponse:
        self.asked.append(request)
        found = [
            array_id
            for array_id in sorted(self._specs, reverse=True)
            if any(matches(job, request.filter) for job in self._tasks(array_id))
        ]
        begin = int(request.page_token or 0)
        end = begin + min(request.page_size or 100, 1000)
        return arrays_pb.ListArraysResponse(
            arrays=[self._message(array_id) for array_id in found[begin:end]],
            next_page_token=str(end) if end < len(found) else "",
            total_size=len(found),
        )

    async def CancelArray(self, request: arrays_pb.CancelArrayRequest, context: Any) -> arrays_pb.CancelArrayResponse:
        return arrays_pb.CancelArrayResponse(array=self._move(request.id, Phase.CANCELLED))

    async def SuspendArray(
        self, request: arrays_pb.SuspendArrayRequest, context: Any
    ) -> arrays_pb.SuspendArrayResponse:
        return arrays_pb.SuspendArrayResponse(array=self._move(request.id, Phase.SUSPENDED))

    async def ResumeArray(self, request: arrays_pb.ResumeArrayRequest, context: Any) -> arrays_pb.ResumeArrayResponse:
        return arrays_pb.ResumeArrayResponse(array=self._move(request.id, Phase.QUEUED))

    def add(self, spec: JobSpec) -> str:
        """Add an array and all of its jobs; return its id."""
        assert spec.array
        array_id = self._jobs.next_id()
        self._specs[array_id] = spec
        indices = spec.array.indices
        for index in indices:
            task = ArrayTask(array_id, index, len(indices), spec.array.running_max)
            self._jobs.add(replace(spec, array=None, array_task=task), job_id=f"{array_id}_{index}")
        return array_id

    def _tasks(self, array_id: str) -> list[job_pb2.Job]:
        return [job for job in self._jobs.jobs.values() if job.spec.array_task.array_id == array_id]

    def _move(self, array_id: str, phase: Phase) -> arrays_pb.Array:
        left = [job.id for job in self._tasks(array_id) if PHASES.from_wire(job.phase) not in ENDED]
        if not left and phase is not Phase.CANCELLED:
            raise errors.failed_precondition("ARRAY_ENDED", f"all jobs of array {array_id} have already ended")
        for job_id in left:
            self._jobs.move(job_id, phase)
        return self._message(array_id)

    def _message(self, array_id: str) -> arrays_pb.Array:
        if array_id not in self._specs:
            raise errors.not_found("array", array_id)
        tasks = self._tasks(array_id)
        counts = Counter(job.phase for job in tasks)
        return arrays_pb.Array(
            id=array_id,
            spec=spec_to_wire(self._specs[array_id]),
            phase_counts=[job_pb2.PhaseCount(phase=phase, count=count) for phase, count in counts.items()],
            job_count=len(tasks),
            create_time=timestamp(CREATED),
            submitter="operator",
            archived=array_id in self.archived,
        )


def matches(job: job_pb2.Job, wanted: pb.JobFilter) -> bool:
    """Return whether a job matches a filter, by the API's contract."""
    nodes = [one.node_id for one in job.attempt.allocations] if PHASES.from_wire(job.phase) in HOLDING else []
    return all(
        [
            not wanted.phases or job.phase in wanted.phases,
            wanted.tenant in ("", job.spec.tenant),
            wanted.queue in ("", job.spec.queue),
            wanted.name in ("", job.spec.name),
            wanted.node_id in ("", *nodes),
            not wanted.ids or job.id in wanted.ids,
            wanted.array_id in ("", job.spec.array_task.array_id),
            not wanted.own_only or job.submitter == "operator",
            not (wanted.standalone_only and job.spec.HasField("array_task")),
            wanted.labels.items() <= job.spec.labels.items(),
        ]
    )


def allocation(node_id: str = "gpu-1") -> NodeAllocation:
    """One task with one GPU and four cores."""
    task = TaskAllocation(role="worker", rank=0, core_ids=[0, 1, 2, 5], gpus=[GpuShare(uuid="GPU-a", milli=1000)])
    return NodeAllocation(node_id=node_id, tasks=[task])


def node(node_id: str, **fields: Any) -> nodes_pb.Node:
    """A node with two declared GPUs and eight cores."""
    inventory = Inventory(
        cores=[Core(id=index, cpus=[index]) for index in range(8)],
        gpus=[Gpu(uuid=f"GPU-{name}", model="fake", declared=True) for name in "ab"],
        memory_bytes=64 * 2**30,
    )
    made = nodes_pb.Node(id=node_id, state=nodes_pb.NODE_STATE_READY, inventory=inventory, used_cores=4)
    made.used_gpu_milli, made.used_memory_bytes = 1500, 3 * 2**30
    made.MergeFrom(nodes_pb.Node(**fields))
    return made


class Nodes(nodes_grpc.NodeServiceServicer):
    """Nodes in a dictionary."""

    def __init__(self) -> None:
        self.nodes: dict[str, nodes_pb.Node] = {}

    async def GetNode(self, request: nodes_pb.GetNodeRequest, context: Any) -> nodes_pb.GetNodeResponse:
        return nodes_pb.GetNodeResponse(node=self._known(request.id))

    async def ListNodes(self, request: nodes_pb.ListNodesRequest, context: Any) -> nodes_pb.ListNodesResponse:
        found = [self.nodes[name] for name in sorted(self.nodes)]
        return nodes_pb.ListNodesResponse(nodes=found, total_size=len(found))

    async def DrainNode(self, request: nodes_pb.DrainNodeRequest, context: Any) -> nodes_pb.DrainNodeResponse:
        return nodes_pb.DrainNodeResponse(node=self._put(request, nodes_pb.NODE_STATE_DRAINING))

    async def CordonNode(self, request: nodes_pb.CordonNodeRequest, context: Any) -> nodes_pb.CordonNodeResponse:
        return nodes_pb.CordonNodeResponse(node=self._put(request, nodes_pb.NODE_STATE_CORDONED))

    async def UncordonNode(self, request: nodes_pb.UncordonNodeRequest, context: Any) -> nodes_pb.UncordonNodeResponse:
        return nodes_pb.UncordonNodeResponse(node=self._put(request, nodes_pb.NODE_STATE_READY))

    async def ReleaseGpu(self, request: nodes_pb.ReleaseGpuRequest, context: Any) -> nodes_pb.ReleaseGpuResponse:
        found = self._known(request.id)
        problems = [one for one in found.inventory.problems if one.gpu_uuid != request.gpu_uuid]
        del found.inventory.problems[:]
        found.inventory.problems.extend(problems)
        return nodes_pb.ReleaseGpuResponse(node=found)

    async def ForgetNode(self, request: nodes_pb.ForgetNodeRequest, context: Any) -> nodes_pb.ForgetNodeResponse:
        return nodes_pb.ForgetNodeResponse(node=self._known(request.id))

    def _put(self, request: Any, state: nodes_pb.NodeState.ValueType) -> nodes_pb.Node:
        found = self._known(request.id)
        found.state, found.state_reason = state, getattr(request, "reason", "")
        return found

    def _known(self, node_id: str) -> nodes_pb.Node:
        if node_id not in self.nodes:
            raise errors.not_found("node", node_id)
        return self.nodes[node_id]


class Contention(contention_grpc.ContentionServiceServicer):
    """Samples and incidents, set by the test."""

    def __init__(self) -> None:
        self.samples: list[contention_pb.NodeSample] = []
        self.incidents: list[contention_pb.Incident] = []
        self.asked: list[contention_pb.ListIncidentsRequest] = []

    async def ListIncidents(self, request: contention_pb.ListIncidentsRequest, context: Any) -> Any:
        """Return pages of one incident each."""
        asked = contention_pb.ListIncidentsRequest()
        asked.CopyFrom(request)
        self.asked.append(asked)
        place = int(request.page_token or 0)
        token = str(place + 1) if place + 1 < len(self.incidents) else ""
        found = self.incidents[place : place + 1]
        return contention_pb.ListIncidentsResponse(incidents=found, next_page_token=token)

    async def ListSamples(self, request: Any, context: Any) -> contention_pb.ListSamplesResponse:
        """Return pages of one sample each."""
        place = int(request.page_token or 0)
        token = str(place + 1) if place + 1 < len(self.samples) else ""
        return contention_pb.ListSamplesResponse(samples=self.samples[place : place + 1], next_page_token=token)


class Policies(policies_grpc.PolicyServiceServicer):
    """Policies, set by the test."""

    def __init__(self) -> None:
        self.policies: list[policies_pb.Policy] = []

    async def ListPolicies(self, request: policies_pb.ListPoliciesRequest, context: Any) -> Any:
        """Return pages of one policy each."""
        found = [policy for policy in self.policies if request.group in ("", policy.group)]
        place = int(request.page_token or 0)
        token = str(place + 1) if place + 1 < len(found) else ""
        return policies_pb.ListPoliciesResponse(policies=found[place : place + 1], next_page_token=token)


class Replicas(replicas_grpc.ProcessServiceServicer):
    """A process's report about itself."""

    def __init__(self) -> None:
        self.caller = replicas_pb.GetCallerResponse(name="ada", roles=["user"], tenants=["vision"])
        self.reported = replicas_pb.GetProcessResponse(process=replicas_pb.Process(version="1.0"))

    async def GetCaller(self, request: Any, context: Any) -> replicas_pb.GetCallerResponse:
        return self.caller

    async def GetProcess(self, request: Any, context: Any) -> replicas_pb.GetProcessResponse:
        return self.reported


class Standin:
    """The services in their own thread, so that a test can run commands as a user does."""

    def __init__(self) -> None:
        self.jobs = Jobs()
        self.arrays = Arrays(self.jobs)
        self.nodes = Nodes()
        self.contention = Contention()
        self.policies = Policies()
        self.replicas = Replicas()
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._server: Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        self._thread.start()
        self.do(self._start())

    def stop(self) -> None:
        assert self._server is not None
        self.do(self._server.stop(0))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the services' thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=30)

    def call(self, function: Callable[..., T], *arguments: Any, **fields: Any) -> T:
        """Call a function in the services' thread."""

        async def called() -> T:
            return function(*arguments, **fields)

        return self.do(called())

    def set_serving(self, service: str, serving: bool) -> None:
        """Set the health status of a service."""
        assert self._server is not None
        self.call(self._server.set_serving, service, serving)

    async def move(self) -> None:
        """Stop serving at the old port and serve at another."""
        assert self._server is not None
        self._stopping = asyncio.ensure_future(self._server.stop(0))
        await self._start()

    async def _start(self) -> None:
        server = Server(token=TOKEN)
        server.add(jobs_grpc.add_JobServiceServicer_to_server, self.jobs, "cotenant.v1.JobService")
        server.add(arrays_grpc.add_ArrayServiceServicer_to_server, self.arrays, "cotenant.v1.ArrayService")
        server.add(nodes_grpc.add_NodeServiceServicer_to_server, self.nodes, "cotenant.v1.NodeService")
        server.add(
            contention_grpc.add_ContentionServiceServicer_to_server, self.contention, "cotenant.v1.ContentionService"
        )
        server.add(policies_grpc.add_PolicyServiceServicer_to_server, self.policies, "cotenant.v1.PolicyService")
        server.add(replicas_grpc.add_ProcessServiceServicer_to_server, self.replicas, "cotenant.v1.ProcessService")
        self.port = await server.start()
        self._server = server
