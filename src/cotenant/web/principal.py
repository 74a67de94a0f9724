"""What the mesh shows one principal, kept once for all of its open pages.

However many pages are open, there is one watch of jobs, one reader of nodes, and one of the mesh's state. They start
with the first page and end some time after the last, so that the rates of running jobs go on being recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import grpc
import grpc.aio

from cotenant import telemetry
from cotenant.cli.connection import Mesh, command_error, is_unreachable
from cotenant.cli.jobs.explain import explanation_view
from cotenant.cli.mesh.status import look
from cotenant.cli.name_lookup import all_nodes
from cotenant.cli.watch import JobChanges, Removed
from cotenant.client.errors import CotenantError, PermissionDenied, as_api_errors
from cotenant.codec.errors import from_error
from cotenant.rpc.access import Access
from cotenant.v1.job_pb2 import Job, JobSpec
from cotenant.v1.job_service_pb2 import (
    ExplainJobRequest,
    ExplainJobResponse,
    UpdateJobRequest,
    WatchJobsRequest,
)
from cotenant.v1.node_service_pb2 import Node
from cotenant.web import cluster_board, incident_board, lab_board, prediction_board, queue_board, tenant_board
from cotenant.web.boards import Board, BoardKind
from cotenant.web.changes import Changes
from cotenant.web.node_fit import node_fits, scheduler_words
from cotenant.web.occupancy import Occupancy
from cotenant.web.rows import Row, Sample, capacity, held, job_row, node_row, ranks, sample, to_json

T = TypeVar("T")
log = telemetry.logger()

IDLE_SECONDS = 15 * 60.0  # without any page; then what it keeps is dropped
FLUSH_SECONDS = 0.25
NODES_SECONDS = 2.0
MESH_SECONDS = 5.0
EXPLAIN_SECONDS = 2.0
FORECAST_SECONDS = 5.0
RETRY_SECONDS = 2.0
SAMPLES_MAX = 600  # per job
FORECASTS_AT_ONCE = 4
BOARDS: Mapping[str, BoardKind] = {  # by page
    "cluster": cluster_board.KIND, "queue": queue_board.KIND, "tenants": tenant_board.KIND,
    "incidents": incident_board.KIND, "predictions": prediction_board.KIND,
    "lab": lab_board.KIND,
}  # fmt: skip

MeshOf = Callable[[Callable[[str], None]], Mesh]


class Principal:
    """The jobs, nodes and the state of the mesh, as one API token may see them."""

    def __init__(self, connect: MeshOf, on_refused: Callable[[], None]) -> None:
        self.mesh = connect(self._report)
        self.jobs = Changes()
        self.nodes = Changes()
        self.meta = Changes()  # the state of the watch, what the nodes have, and the problems of the mesh
        self._nodes: dict[str, Node] = {}
        self._dirty: set[str] = set()  # nodes whose row is to be written again
        self._jobs: dict[str, Job] = {}
        self._held: dict[str, dict[str, Row]] = {}  # by node and job
        self.occupancy = Occupancy()
        self._samples: dict[str, deque[Sample]] = {}
        self._stories: dict[str, Story] = {}
        self._explained: dict[str, tuple[float, ExplainJobResponse]] = {}
        self._boards: dict[str, Board] = {}
        self._asking = asyncio.Semaphore(FORECASTS_AT_ONCE)
        self._trouble = "connecting"
        self._on_refused = on_refused
        self._tasks: list[asyncio.Task[None]] = []
        self._readers, self._left = 0, time.monotonic()
        self._watch = JobChanges(self.mesh, WatchJobsRequest())

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Keep it up to date inside the context: an open page."""
        self._readers += 1
        if not self._tasks:
            works = (self._follow_jobs, self._flush, self._read_nodes, self._read_mesh)
            self._tasks = [asyncio.create_task(work()) for work in works]
        try:
            yield
        finally:
            self._readers -= 1
            self._left = time.monotonic()

    @property
    def is_idle(self) -> bool:
        """Whether no page has been open for some time."""
        return not self._readers and time.monotonic() - self._left > IDLE_SECONDS

    async def close(self) -> None:
        """End the watch, and close the connections."""
        for board in self._boards.values():
            board.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self.mesh.close()

    async def call(self, work: Callable[[Mesh], Awaitable[T]]) -> T:
        """Return what `work` returns; errors are those of `cotenant.client`. A restarted mesh is found again, once."""
        with as_api_errors():
            try:
                return await work(self.mesh)
            except grpc.aio.AioRpcError as error:
                if not is_unreachable(error.code()):
                    raise
                await self.mesh.find_again()
                return await work(self.mesh)

    # Jobs -----------------------------------------------------------------------------------------------------------

    async def _follow_jobs(self) -> None:
        """Watch all jobs, for as long as it takes."""
        while True:
            try:
                async for change in self._watch.changes():
                    self._remove(change.id) if isinstance(change, Removed) else self._put(change)
            except grpc.aio.AioRpcError as error:
                self._trouble = command_error(from_error(error)).message
                if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                    self._on_refused()
            await asyncio.sleep(RETRY_SECONDS)

    def _put(self, job: Job) -> None:
        before, now = self._jobs.get(job.id), held(job)
        self._jobs[job.id] = job
        for node in held(before) if before else ():
            self._held.get(node, {}).pop(job.id, None)
            self._dirty.add(node)
        for node, part in now.items():
            self._held.setdefault(node, {})[job.id] = part
            self._dirty.add(node)
        self.occupancy.put(job)
        self.jobs.put(job.id, to_json(job_row(job)))
        if reported := sample(job, time.time()):
            self._record(job.id, reported)
        if story := self._stories.get(job.id):
            story.wake()

    def _record(self, job_id: str, reported: Sample) -> None:
        """Keep a report of a running job; one that only repeats the last is none."""
        kept = self._samples.setdefault(job_id, deque(maxlen=SAMPLES_MAX))
        if not kept or kept[-1][1:] != reported[1:]:
            kept.append(reported)
            if story := self._stories.get(job_id):
                story.add_sample(reported)

    def _remove(self, job_id: str) -> None:
        before = self._jobs.pop(job_id, None)
        for node in held(before) if before else ():
            self._held.get(node, {}).pop(job_id, None)
            self._dirty.add(node)
        self._samples.pop(job_id, None)
        self.occupancy.remove(job_id)
        self.jobs.remove(job_id)

    def samples(self, job_id: str) -> list[Sample]:
        """Return the reports of a job since it has been watched."""
        return list(self._samples.get(job_id, ()))

    # Nodes and the mesh ---------------------------------------------------------------------------------------------

    def _report(self, words: str) -> None:
        self._trouble = words

    async def _flush(self) -> None:
        """Pass on what concerns nodes and the watch, some times per second."""
        while True:
            if self._watch.synced:
                self._trouble = ""
            self.meta.put("watch", to_json({"id": "watch", "trouble": self._trouble, "synced": self._watch.synced}))
            dirty, self._dirty = self._dirty, set()
            for node_id in dirty:
                if node := self._nodes.get(node_id):
                    self.nodes.put(node_id, to_json(node_row(node, self._held.get(node_id, {}).values())))
                else:
                    self.nodes.remove(node_id)
            await asyncio.sleep(FLUSH_SECONDS)

    async def _read_nodes(self) -> None:
        while True:
            try:
                nodes = await self.call(_nodes)
                self._take_nodes({node.id: node for node in nodes})
                self.meta.put("capacity", to_json({"id": "capacity", **capacity(nodes), "trouble": ""}))
            except CotenantError as error:
                self.meta.put("capacity", to_json({"id": "capacity", "trouble": str(error)}))
            await asyncio.sleep(NODES_SECONDS)

    def _take_nodes(self, nodes: dict[str, Node]) -> None:
        """Remember the nodes; those that have changed are written again."""
        before, self._nodes = self._nodes, nodes
        self._dirty |= before.keys() - nodes.keys()
        for node_id, node in nodes.items():
            if node_id not in before or _shown(before[node_id]) != _shown(node):
                self._dirty.add(node_id)

    async def _read_mesh(self) -> None:
        while True:
            if self._readers:
                try:
                    self.meta.put("mesh", to_json({"id": "mesh", **await self.call(_mesh_state)}))
                except CotenantError as error:
                    self.meta.put("mesh", to_json({"id": "mesh", "trouble": str(error)}))
            await asyncio.sleep(MESH_SECONDS)

    # One job --------------------------------------------------------------------------------------------------------

    async def explain(self, job_id: str) -> Row:
        """Return all that the API tells of a job.

        Raises:
            CotenantError: also if it is another tenant's.
        """
        answer = await self.call(lambda mesh: mesh.jobs.ExplainJob(ExplainJobRequest(id=job_id)))
        if reported := sample(answer.job, time.time()):  # fresher than the watch, which waits for other changes
            self._record(job_id, reported)
        view = explanation_view(answer, time.time())
        waits = view["job"]["phase"] == "queued"
        view["nodes"] = [fit._asdict() for fit in node_fits(answer.job, list(self._nodes.values()))] if waits else []
        view["scheduler"] = scheduler_words(answer.job.refusal) if answer.job.HasField("refusal") and waits else []
        requested_types = {role.resources.gpu_type for role in answer.job.spec.roles}
        view["curve"] = [
            {"cores": one.allocation.cores, "rate": one.rate_per_second, "confidence": one.confidence}
            for one in answer.estimate.candidates
            if one.rate_per_second and one.allocation.cores and one.allocation.gpu_type in requested_types
        ]
        view["ranks"] = ranks(answer.job)
        view["trace_parent"] = answer.job.trace_parent
        view["read_at"] = time.time()
        return view

    async def may_change(self, job_id: str, priority: int) -> bool:
        """Return whether the principal may change a job; nothing is changed."""
        request = UpdateJobRequest(job=Job(id=job_id, spec=JobSpec(priority=priority)), validate_only=True)
        request.update_mask.paths.append("spec.priority")
        request.request_id = uuid.uuid4().hex
        try:
            await self.call(lambda mesh: mesh.jobs.UpdateJob(request))
        except PermissionDenied:
            return False
        except CotenantError:
            return True  # a refusal for another reason, which the action itself will show
        return True

    @contextlib.asynccontextmanager
    async def story(self, job_id: str) -> AsyncIterator[Story]:
        """Yield the story of a job, kept up to date for all pages that show it."""
        story = self._stories.get(job_id)
        if story is None:
            story = self._stories[job_id] = Story(self, job_id)
        story.readers += 1
        try:
            yield story
        finally:
            story.readers -= 1
            if not story.readers:
                self._stories.pop(job_id, None)
                story.close()

    async def forecast(self, job_id: str) -> Row:
        """Return when a job will probably start or finish; at most some seconds old."""
        if (answer := await self._explanation(job_id)) is None:
            return {}
        view = explanation_view(answer, time.time())
        return {"forecast": view["forecast"], "estimate": view["estimate"], "read_at": self._read_at(job_id)}

    async def place(self, job_id: str) -> Row:
        """Return a waiting job's place in the order, and what decides it; at most some seconds old."""
        if (answer := await self._explanation(job_id)) is None:
            return {}
        return {**queue_board.place_of(answer, time.time()), "read_at": self._read_at(job_id)}

    def _read_at(self, job_id: str) -> float:
        return self._explained[job_id][0] if job_id in self._explained else time.time()

    async def _explanation(self, job_id: str) -> ExplainJobResponse | None:
        """Return the API's explanation of a job, at most some seconds old; None without one."""
        known = self._explained.get(job_id)
        if known and time.time() - known[0] < FORECAST_SECONDS:
            return known[1]
        answer: ExplainJobResponse
        async with self._asking:
            try:
                answer = await self.call(lambda mesh: mesh.jobs.ExplainJob(ExplainJobRequest(id=job_id)))
            except CotenantError:
                return None
        if len(self._explained) > SAMPLES_MAX:
            self._explained.clear()
        self._explained[job_id] = time.time(), answer
        return answer

    # Pages of their own ---------------------------------------------------------------------------------------------

    def board(self, name: str) -> Board:
        """Return the board of a page."""
        if name not in self._boards:
            self._boards[name] = Board(self.call, BOARDS[name])
        return self._boards[name]


class Story:
    """One job on its page: its explanation, read again when the job changes and while it lives, and its samples."""

    def __init__(self, principal: Principal, job_id: str) -> None:
        self.job = Changes()
        self.samples = Changes()
        self.readers = 0
        self._principal, self._id = principal, job_id
        self._woken = asyncio.Event()
        self._number = 0
        for reported in principal.samples(job_id):
            self.add_sample(reported)
        self._reading = asyncio.create_task(self._read())

    def wake(self) -> None:
        """Read the job again at once."""
        self._woken.set()

    def add_sample(self, reported: Sample) -> None:
        """Add a report of the running job."""
        self._number += 1
        self.samples.put(str(self._number), to_json(reported))
        self.samples.remove(str(self._number - SAMPLES_MAX))

    def close(self) -> None:
        """Stop reading."""
        self._reading.cancel()

    async def _read(self) -> None:
        while True:
            self._woken.clear()
            ended = False
            try:
                view = await self._principal.explain(self._id)
                ended = view["job"]["phase"] in ("succeeded", "failed", "cancelled")
                self.job.put("job", to_json(view))
            except CotenantError as error:
                log.info("explanation_failed", job=self._id, error=str(error))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if ended else EXPLAIN_SECONDS):
                    await self._woken.wait()
            await asyncio.sleep(FLUSH_SECONDS)  # changes come in groups


class Principals:
    """The principals with open pages, by API token."""

    def __init__(self, access_of: Callable[[str], Access], on_refused: Callable[[str], None]) -> None:
        self._access_of, self._on_refused = access_of, on_refused
        self._known: dict[bytes, Principal] = {}

    def of(self, token: str) -> Principal:
        """Return the principal of an API token.

        Raises:
            AccessError: the mesh is not found, or the token has characters that no token has.
        """
        key = _key(token)
        if key not in self._known:
            self._known[key] = Principal(
                lambda report: Mesh(lambda: self._access_of(token), report=report), lambda: self._on_refused(token)
            )
        return self._known[key]

    async def forget(self, token: str) -> None:
        """Close the principal of a token that is not accepted."""
        if known := self._known.pop(_key(token), None):
            await known.close()

    async def drop_idle(self) -> None:
        """Close the principals without pages, from time to time, for as long as the dashboard runs."""
        while True:
            await asyncio.sleep(60.0)
            for key in [key for key, one in self._known.items() if one.is_idle]:
                await self._known.pop(key).close()

    async def close(self) -> None:
        """Close all of them."""
        known, self._known = list(self._known.values()), {}
        for one in known:
            await one.close()


def _key(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _shown(node: Node) -> tuple[object, ...]:
    """Return what the picture shows of a node, apart from what its jobs hold."""
    return node.inventory, node.state, node.state_reason, node.used_gpu_milli, node.used_cores


def certificates(processes: Sequence[Row], nodes: Sequence[Row]) -> list[Row]:
    """Return until when the certificates of processes and agents are valid; none in a mesh without TLS."""
    named = [(f"{one['service']} {one['address']}", one) for one in processes] + [(one["id"], one) for one in nodes]
    known = {where: one["certificate"] for where, one in named if one.get("certificate")}
    return [{"where": where, "expire_time": one["expire_time"]} for where, one in known.items()]


async def _nodes(mesh: Mesh) -> list[Node]:
    return [node async for node in all_nodes(mesh)]


async def _mesh_state(mesh: Mesh) -> Row:
    status: Any = await look(mesh)
    return {
        "trouble": "",
        "problems": [asdict(one) for one in status.problems],
        "processes": status.processes,
        "certificates": certificates(status.processes, status.nodes or []),
        "store": status.members,
        "capacity": status.capacity,
        "jobs": status.jobs,
    }
