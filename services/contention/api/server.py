"""Contention's side of the wire: samples in, directives out. Nothing of it enters the store."""

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
from cotenant.codec import errors
from cotenant.codec.errors import Problem
from cotenant.core.model.validation import Violation, bad_name
from cotenant.rpc.policy_service import PolicyServicer
from cotenant.rpc.server import Server
from cotenant.security.identity import check_node
from cotenant.services.contention.api.directive_queue import Mailbox
from cotenant.services.contention.incidents.incident_log import Incidents
from cotenant.services.contention.incidents.migration_requests import Moves
from cotenant.services.contention.incidents.policy_runner import Judge
from cotenant.services.contention.sampling.sample_buffer import Rings, TooManyNodes
from cotenant.services.contention.sampling.sample_decoding import window_of
from cotenant.v1 import contention_service_pb2 as pb
from cotenant.v1 import contention_service_pb2_grpc as pb_grpc

log = structlog.get_logger()

SERVICE = "cotenant.v1.ContentionService"
GROUP = "cotenant.contention_policies"
MESSAGE_SAMPLES_MAX = 1_000
SILENT_SECONDS = 30.0  # after which a stream's agent is believed to be dead: another one may take its place

samples_taken = telemetry.counter("cotenant.contention.samples", "{sample}", "Samples taken in")
samples_dropped = telemetry.counter("cotenant.contention.dropped", "{sample}", "Samples that could not be taken")
directives_given = telemetry.counter("cotenant.contention.directives", "{directive}", "Directives given")


@dataclass(frozen=True, slots=True)
class Config:
    """Which policy decides, with which options, and how much is remembered."""

    policy: str = "none"
    options: Mapping[str, str] = field(default_factory=dict)
    samples_max: int = 12  # of each node: a minute of them
    nodes_max: int = 20_000
    silent_seconds_max: float = 900.0  # then a node is forgotten


DEFAULTS = Config()


@dataclass(slots=True)
class Stream:
    """One agent's stream, and how many of its samples were dropped."""

    node_id: str
    incarnation: str
    mailbox: Mailbox
    heard: float  # when a message last came, in seconds since 1970
    dropped: int = 0


class ContentionServicer(pb_grpc.ContentionServiceServicer):
    """Watches nodes for contention and relieves it."""

    def __init__(
        self, judge: Judge, rings: Rings, incidents: Incidents, moves: Moves, now: Callable[[], float]
    ) -> None:
        self._judge, self._rings, self._incidents, self._moves, self._now = judge, rings, incidents, moves, now
        self._streams: dict[str, Stream] = {}

    async def StreamSamples(
        self, requests: AsyncIterator[pb.StreamSamplesRequest], context: Any
    ) -> AsyncIterator[pb.StreamSamplesResponse]:
        """Read samples in one task and write directives in another, so that neither waits for the other."""
        mailbox = Mailbox()
        reading = asyncio.create_task(self._read_until_end(requests, mailbox))
        try:
            async for directives in mailbox.read():
                yield pb.StreamSamplesResponse(directives=directives)
        finally:
            reading.cancel()
            await asyncio.wait([reading])

    async def ListSamples(self, request: pb.ListSamplesRequest, context: Any) -> pb.ListSamplesResponse:
        """List the last sample of each node, or of one."""
        return pb.ListSamplesResponse(samples=self._rings.last(request.node_id, self._now()))

    async def ListIncidents(self, request: pb.ListIncidentsRequest, context: Any) -> pb.ListIncidentsResponse:
        """List incidents, newest first, page by page."""
        self._incidents.forget_silent(self._now())
        return self._incidents.page(
            request.node_id, request.page_size, request.page_token, request.job_id, open_only=request.open_only
        )

    async def close(self) -> None:
        """End all streams; agents come back to whoever serves next."""
        for stream in self._streams.values():
            stream.mailbox.close(errors.unavailable("contention is shutting down; connect again"))
        await self._moves.close()

    async def _read_until_end(self, requests: AsyncIterator[pb.StreamSamplesRequest], mailbox: Mailbox) -> None:
        """Take in what the agent sends; what goes wrong ends the stream through its mailbox."""
        stream: Stream | None = None
        try:
            async for request in requests:
                stream = stream or self._open(request, mailbox)
                stream.heard = self._now()
                self._take_all(stream, request)
            mailbox.close()
        except Exception as error:
            mailbox.close(error)
        finally:
            if stream is not None:
                self._close(stream)

    def _open(self, request: pb.StreamSamplesRequest, mailbox: Mailbox) -> Stream:
        """Begin a node's stream; one that its agent had before, and that hangs somewhere, is ended.

        An agent that takes the id of another one, which is alive, is refused: they would end each other's streams.
        """
        node_id = request.node_id
        if wrong := bad_name(node_id) or ("" if node_id else "the first message names the node"):
            raise errors.invalid([Violation("node_id", wrong)])
        check_node(node_id)
        before = self._streams.get(node_id)
        if before and self._is_another_agents(before, request.incarnation):
            log.warning("stream_refused", node=node_id, why="another agent has this node id")
            message = f"another agent streams as node {node_id!r}; give each agent a node id of its own"
            raise Problem(grpc.StatusCode.ALREADY_EXISTS, "NODE_EXISTS", message)
        if before:
            log.warning("stream_replaced", node=node_id)
            message = f"another stream of node {node_id!r} has begun"
            before.mailbox.close(Problem(grpc.StatusCode.ABORTED, "STREAM_REPLACED", message))
        self._streams[node_id] = stream = Stream(node_id, request.incarnation, mailbox, self._now())
        return stream

    def _is_another_agents(self, before: Stream, incarnation: str) -> bool:
        """Whether a stream is that of an agent which is alive and is not the one that calls."""
        known = before.incarnation and incarnation and before.incarnation != incarnation
        return bool(known) and self._now() - before.heard < SILENT_SECONDS

    def _close(self, stream: Stream) -> None:
        if stream.dropped:
            log.warning("samples_dropped", node=stream.node_id, count=stream.dropped)
        if self._streams.get(stream.node_id) is stream:
            del self._streams[stream.node_id]
            self._judge.forget(stream.node_id)

    def _take_all(self, stream: Stream, request: pb.StreamSamplesRequest) -> None:
        if request.node_id not in ("", stream.node_id):
            raise _of_another_node("node_id", stream.node_id, request.node_id)
        if len(request.samples) > MESSAGE_SAMPLES_MAX:
            problem = f"{len(request.samples)} are too many for one message; {MESSAGE_SAMPLES_MAX} are taken at most"
            raise errors.invalid([Violation("samples", problem)])
        for index, sample in enumerate(request.samples):
            if sample.node_id not in ("", stream.node_id):
                raise _of_another_node(f"samples[{index}].node_id", stream.node_id, sample.node_id)
            self._take(stream, sample)

    def _take(self, stream: Stream, sample: pb.NodeSample) -> None:
        """Judge a sample, or drop it; the log names a stream's first drop, and counts all at its end."""
        sample.node_id = stream.node_id
        try:
            window = window_of(sample, self._now())
            self._rings.keep(sample, window)
        except TooManyNodes as error:
            raise errors.exhausted("TOO_MANY_NODES", str(error)) from None
        except ValueError as error:
            stream.dropped += 1
            samples_dropped.add()
            if stream.dropped == 1:
                log.warning("sample_dropped", node=stream.node_id, why=str(error))
            return
        samples_taken.add()
        directives = self._judge.judge(window)
        directives_given.add(len(directives))
        stream.mailbox.put(directives)


async def start(
    server: Server,
    policies: PolicyServicer,
    config: Config = DEFAULTS,
    now: Callable[[], float] = time.time,
    queue: grpc.aio.Channel | None = None,
) -> ContentionServicer:
    """Add contention to a server that has not started yet. Close it before the server stops, to end its streams.

    It asks the `queue` to move jobs away; without one nobody is moved.

    Raises:
        UnknownPolicy: the policy is not installed, or broken.
        BadOption: it does not take an option.
    """
    policy = plugins.load(GROUP, config.policy, config.options)
    policies.use(GROUP, config.policy, options={config.policy: config.options})
    incidents = Incidents()
    rings = Rings(config.samples_max, config.nodes_max, config.silent_seconds_max)
    moves = Moves(queue, lambda node_id, attempt, told: incidents.told(node_id, attempt, now(), told))
    servicer = ContentionServicer(Judge(policy, incidents, moves), rings, incidents, moves, now)
    server.add(pb_grpc.add_ContentionServiceServicer_to_server, servicer, SERVICE)
    return servicer


def _of_another_node(field_name: str, expected: str, given: str) -> Problem:
    return errors.invalid([Violation(field_name, f"is {given!r} on a stream of node {expected!r}")])
