"""The contention servicer: receives samples and sends directives. It stores nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import structlog

from cotenant import plugins, telemetry
from cotenant.agent.v1 import sample_service_pb2, sample_service_pb2_grpc
from cotenant.codec import errors
from cotenant.codec.errors import Problem
from cotenant.core.model.validation import Violation, name_error
from cotenant.rpc.paging import PageRequest, page_of_messages
from cotenant.rpc.policy_service import PolicyServicer
from cotenant.rpc.server import Server
from cotenant.security.identity import check_node
from cotenant.services.contention.api.directive_queue import DirectiveQueue
from cotenant.services.contention.incidents.incident_log import IncidentLog
from cotenant.services.contention.incidents.migration_requests import MigrationRequests
from cotenant.services.contention.incidents.policy_runner import PolicyRunner
from cotenant.services.contention.sampling.sample_buffer import SampleBuffer, TooManyNodes
from cotenant.services.contention.sampling.sample_decoding import window_of
from cotenant.v1 import contention_service_pb2 as pb
from cotenant.v1 import contention_service_pb2_grpc as pb_grpc

log = structlog.get_logger()

SERVICE = "cotenant.v1.ContentionService"
SAMPLE_SERVICE = "cotenant.agent.v1.SampleService"
GROUP = "cotenant.contention_policies"
MESSAGE_SAMPLES_MAX = 1_000
STREAM_DEAD_SECONDS = 30.0  # after which a stream's agent counts as dead and another agent may replace it

samples_taken = telemetry.counter("cotenant.contention.samples", "{sample}", "Samples received")
samples_dropped = telemetry.counter("cotenant.contention.dropped", "{sample}", "Invalid samples dropped")
directives_given = telemetry.counter("cotenant.contention.directives", "{directive}", "Directives sent")


@dataclass(frozen=True, slots=True)
class Config:
    """The contention policy with its options, and the limits of the sample buffer."""

    policy: str = "none"
    options: Mapping[str, str] = field(default_factory=dict)
    samples_max: int = 12  # per node: one minute
    nodes_max: int = 20_000
    silent_seconds_max: float = 900.0  # after which a node is dropped


DEFAULTS = Config()


@dataclass(slots=True)
class Stream:
    """One agent's stream and its count of dropped samples."""

    node_id: str
    incarnation: str
    directive_queue: DirectiveQueue
    heard: float  # time of the last message, in unix seconds
    dropped: int = 0


class ContentionServicer(pb_grpc.ContentionServiceServicer, sample_service_pb2_grpc.SampleServiceServicer):
    """Detects contention on nodes and relieves it."""

    def __init__(
        self,
        judge: PolicyRunner,
        sample_buffer: SampleBuffer,
        incidents: IncidentLog,
        migrations: MigrationRequests,
        now: Callable[[], float],
    ) -> None:
        self._policy_runner, self._sample_buffer, self._incidents, self._migrations, self._now = (
            judge,
            sample_buffer,
            incidents,
            migrations,
            now,
        )
        self._streams: dict[str, Stream] = {}

    async def StreamSamples(
        self, requests: AsyncIterator[sample_service_pb2.StreamSamplesRequest], context: Any
    ) -> AsyncIterator[sample_service_pb2.StreamSamplesResponse]:
        """Read samples in one task and write directives in another, so that neither blocks the other."""
        directive_queue = DirectiveQueue()
        reading = asyncio.create_task(self._read_until_end(requests, directive_queue))
        try:
            async for directives in directive_queue.read():
                yield sample_service_pb2.StreamSamplesResponse(directives=directives)
        finally:
            reading.cancel()
            await asyncio.wait([reading])

    async def ListSamples(self, request: pb.ListSamplesRequest, context: Any) -> pb.ListSamplesResponse:
        """Return a page of the last samples of each node, or of one node."""
        known = [one for one in self._sample_buffer.nodes(self._now()) if request.node_id in ("", one)]
        asked = PageRequest.read(request.page_size, request.page_token, f"samples/{request.node_id}")
        page = await page_of_messages(known, self._sample_buffer.last, asked)
        return pb.ListSamplesResponse(samples=page.items, next_page_token=page.next_token)

    async def ListIncidents(self, request: pb.ListIncidentsRequest, context: Any) -> pb.ListIncidentsResponse:
        """Return a page of incidents, newest first."""
        self._incidents.forget_silent(self._now())
        return await self._incidents.page(
            request.node_id, request.page_size, request.page_token, request.job_id, open_only=request.open_only
        )

    async def close(self) -> None:
        """End all streams; the agents reconnect to the next replica."""
        for stream in self._streams.values():
            stream.directive_queue.close(errors.unavailable("contention is shutting down; connect again"))
        await self._migrations.close()

    async def _read_until_end(
        self, requests: AsyncIterator[sample_service_pb2.StreamSamplesRequest], directive_queue: DirectiveQueue
    ) -> None:
        """Process the agent's messages; an error ends the stream through its directive queue."""
        stream: Stream | None = None
        try:
            async for request in requests:
                stream = stream or self._open(request, directive_queue)
                stream.heard = self._now()
                self._take_all(stream, request)
            directive_queue.close()
        except Exception as error:
            directive_queue.close(error)
        finally:
            if stream is not None:
                self._close(stream)

    def _open(self, request: sample_service_pb2.StreamSamplesRequest, directive_queue: DirectiveQueue) -> Stream:
        """Register a node's stream, ending an earlier stream of the same agent that hangs.

        A second agent with the id of a live one is refused: they would keep ending each other's streams.
        """
        node_id = request.node_id
        if problem := name_error(node_id) or ("" if node_id else "is missing in the first message"):
            raise errors.invalid([Violation("node_id", problem)])
        check_node(node_id)
        before = self._streams.get(node_id)
        if before and self._is_another_agents(before, request.incarnation):
            log.warning("stream_refused", node=node_id, why="another agent has this node id")
            message = f"another agent streams as node {node_id!r}; give each agent its own node id"
            raise Problem(grpc.StatusCode.ALREADY_EXISTS, "NODE_EXISTS", message)
        if before:
            log.warning("stream_replaced", node=node_id)
            message = f"another stream of node {node_id!r} has begun"
            before.directive_queue.close(Problem(grpc.StatusCode.ABORTED, "STREAM_REPLACED", message))
        self._streams[node_id] = stream = Stream(node_id, request.incarnation, directive_queue, self._now())
        return stream

    def _is_another_agents(self, before: Stream, incarnation: str) -> bool:
        """Return whether a stream belongs to a live agent other than the caller."""
        known = before.incarnation and incarnation and before.incarnation != incarnation
        return bool(known) and self._now() - before.heard < STREAM_DEAD_SECONDS

    def _close(self, stream: Stream) -> None:
        if stream.dropped:
            log.warning("samples_dropped", node=stream.node_id, count=stream.dropped)
        if self._streams.get(stream.node_id) is stream:
            del self._streams[stream.node_id]
            self._policy_runner.forget(stream.node_id)

    def _take_all(self, stream: Stream, request: sample_service_pb2.StreamSamplesRequest) -> None:
        if request.node_id not in ("", stream.node_id):
            raise _of_another_node("node_id", stream.node_id, request.node_id)
        if len(request.samples) > MESSAGE_SAMPLES_MAX:
            problem = f"has {len(request.samples)} samples; at most {MESSAGE_SAMPLES_MAX} fit into one message"
            raise errors.invalid([Violation("samples", problem)])
        for index, sample in enumerate(request.samples):
            if sample.node_id not in ("", stream.node_id):
                raise _of_another_node(f"samples[{index}].node_id", stream.node_id, sample.node_id)
            self._take(stream, sample)

    def _take(self, stream: Stream, sample: pb.NodeSample) -> None:
        """Process a sample or drop it; the log shows a stream's first drop, and the count at its end."""
        sample.node_id = stream.node_id
        try:
            window = window_of(sample, self._now())
            self._sample_buffer.add(sample, window)
        except TooManyNodes as error:
            raise errors.exhausted("TOO_MANY_NODES", str(error)) from None
        except ValueError as error:
            stream.dropped += 1
            samples_dropped.add()
            if stream.dropped == 1:
                log.warning("sample_dropped", node=stream.node_id, why=str(error))
            return
        samples_taken.add()
        directives = self._policy_runner.run(window)
        directives_given.add(len(directives))
        stream.directive_queue.put(directives)


async def start(
    server: Server,
    policies: PolicyServicer,
    config: Config = DEFAULTS,
    now: Callable[[], float] = time.time,
    queue: grpc.aio.Channel | None = None,
) -> ContentionServicer:
    """Add contention to a server that has not started yet. Close it before the server stops, to end its streams.

    It asks the `queue` to migrate jobs; without one no job is migrated.

    Raises:
        UnknownPolicy: the policy is not installed, or broken.
        BadOption: an option is unknown to the policy.
    """
    policy = plugins.load(GROUP, config.policy, config.options)
    policies.use(GROUP, config.policy, options={config.policy: config.options})
    incidents = IncidentLog()
    sample_buffer = SampleBuffer(config.samples_max, config.nodes_max, config.silent_seconds_max)
    migrations = MigrationRequests(
        queue, lambda node_id, attempt, outcome: incidents.add_action(node_id, attempt, now(), outcome)
    )
    servicer = ContentionServicer(
        PolicyRunner(policy, incidents, migrations), sample_buffer, incidents, migrations, now
    )
    server.add(pb_grpc.add_ContentionServiceServicer_to_server, servicer, SERVICE)
    server.add(sample_service_pb2_grpc.add_SampleServiceServicer_to_server, servicer, SAMPLE_SERVICE)
    return servicer


def _of_another_node(field_name: str, expected: str, given: str) -> Problem:
    return errors.invalid([Violation(field_name, f"is {given!r} on a stream of node {expected!r}")])
