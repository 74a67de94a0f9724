"""Simulated agents with the real stream but without processes: load for placement, and a fake for its tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import grpc.aio

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.agent.v1 import agent_service_pb2_grpc
from cotenant.v1 import job_pb2, node_capabilities_pb2, resources_pb2

RECONNECT_SECONDS = 0.05
ENDED = (
    job_pb2.ATTEMPT_STATE_SUCCEEDED,
    job_pb2.ATTEMPT_STATE_FAILED,
    job_pb2.ATTEMPT_STATE_STOPPED,
    job_pb2.ATTEMPT_STATE_NOT_LAUNCHED,
)


def inventory(gpus: int, cores: int, *, memory_bytes: int = 2**39, node_id: str = "") -> resources_pb2.Inventory:
    """Return a node with two NUMA nodes, each with half of the GPUs and cores."""
    half = max(1, cores // 2)
    return resources_pb2.Inventory(
        cores=[resources_pb2.Core(id=n, cpus=[n], numa_node=min(1, n // half)) for n in range(cores)],
        gpus=[
            resources_pb2.Gpu(
                uuid=f"GPU-{node_id}-{n}", model="declared", numa_node=min(1, n // max(1, gpus // 2)), declared=True
            )
            for n in range(gpus)
        ],
        memory_bytes=memory_bytes,
        address=node_id,
    )


class SimulatedAgent:
    """The agent of one node. A job runs for `run_seconds`, or until it is stopped if that is None."""

    def __init__(
        self,
        node_id: str,
        channel: grpc.aio.Channel,
        *,
        gpus: int = 8,
        cores: int = 24,
        run_seconds: float | None = None,
        on_assigned: Callable[[str], None] = lambda job_id: None,
        output: Mapping[str, bytes] = MappingProxyType({}),
        capabilities: node_capabilities_pb2.NodeCapabilities | None = None,
    ) -> None:
        self.capabilities = capabilities
        self.node_id, self.run_seconds, self._on_assigned = node_id, run_seconds, on_assigned
        self.inventory = inventory(gpus, cores, node_id=node_id)
        self.attempts: dict[tuple[str, int], agent_pb2.AttemptReport] = {}
        self.assignments: dict[tuple[str, int], agent_pb2.Assignment] = {}
        self.stops: list[agent_pb2.StopOrder] = []
        self.acked: list[tuple[str, int]] = []
        self.released: list[str] = []
        self.welcomes: list[agent_pb2.Welcome] = []
        self.resizes: list[agent_pb2.ResizeOrder] = []
        self.time_limits: list[agent_pb2.TimeLimitOrder] = []
        self.profiles: list[agent_pb2.ProfileOrder] = []
        self.cannot_launch: Callable[[agent_pb2.Assignment], str] = lambda order: ""  # the reason, or empty if it can
        self.launch_cause = job_pb2.LAUNCH_CAUSE_CGROUP
        self.answers_assignments = True
        self.cannot_resize: Callable[[agent_pb2.ResizeOrder], str] = lambda order: ""  # the reason, or empty if it can
        self.answers_resizes = True
        self.answers: dict[tuple[str, int, int], str] = {}
        self.refuses_to_stop = False
        self.silent = False  # connected, but without heartbeats
        self.exit_code = 0
        self.incarnation = "one"
        self.output = dict(output)  # by job, for readers of logs
        self.reads: list[agent_pb2.ReadOutput] = []
        self.answers_reads = True
        self.errors: list[str] = []
        self._stub = cast(
            "agent_service_pb2_grpc.AgentServiceAsyncStub", agent_service_pb2_grpc.AgentServiceStub(channel)
        )
        self._out: asyncio.Queue[agent_pb2.ConnectRequest] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._background: list[asyncio.Task[None]] = []
        self._beat_seconds = 1.0
        self.on_report: Callable[[agent_pb2.AttemptReport], None] = lambda report: None
        self.on_resize: Callable[[tuple[str, int]], None] = lambda key: None
        self.on_forget: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Connect, and stay connected until `stop`."""
        self._task = asyncio.create_task(self._run(), name=self.node_id)

    async def stop(self) -> None:
        """Disconnect; running jobs continue and are reported after the next `start`."""
        left = {*self._background, *([self._task] if self._task else [])}
        while left:  # a stream that ends at this moment may swallow the cancellation and raise an error
            for task in left:
                task.cancel()
            _, left = await asyncio.wait(left, timeout=RECONNECT_SECONDS)
        self._background.clear()

    async def _run(self) -> None:
        while True:
            self._out = asyncio.Queue()
            hello = agent_pb2.Hello(
                node_id=self.node_id,
                inventory=self.inventory,
                incarnation=self.incarnation,
                capabilities=self.capabilities,
            )
            hello.attempts.extend(self.attempts.values())
            self._out.put_nowait(agent_pb2.ConnectRequest(hello=hello))
            try:
                async for message in self._stub.Connect(self._requests(self._out)):
                    self._take(message)
            except grpc.aio.AioRpcError as error:
                self.errors.append(error.details() or "")
            await asyncio.sleep(RECONNECT_SECONDS)

    async def _requests(self, out: asyncio.Queue[agent_pb2.ConnectRequest]) -> AsyncIterator[agent_pb2.ConnectRequest]:
        while True:
            try:
                async with asyncio.timeout(self._beat_seconds):
                    message = await out.get()
            except TimeoutError:
                if self.silent:
                    continue
                message = agent_pb2.ConnectRequest()
            while not out.empty() and not message.HasField("hello"):  # a hello is sent alone
                message.MergeFrom(out.get_nowait())
            yield message

    def _take(self, message: agent_pb2.ConnectResponse) -> None:
        if message.HasField("welcome"):
            self.welcomes.append(message.welcome)
            self._beat_seconds = message.welcome.heartbeat_interval.ToMicroseconds() / 1e6
        for assignment in message.assignments:
            key = (assignment.job_id, assignment.number)
            if key not in self.attempts:
                self.assignments[key] = assignment
                self._on_assigned(assignment.job_id)
                if reason := self.cannot_launch(assignment):
                    self.refuse(key, reason)
                    continue
                if not self.answers_assignments:
                    continue
                self.report(key, job_pb2.ATTEMPT_STATE_RUNNING)
                if self.run_seconds is not None:
                    asyncio.get_running_loop().call_later(self.run_seconds, self.finish, key)
        for resize in message.resizes:
            self.resizes.append(resize)
            if self.answers_resizes:
                self.answer_resize(resize)
        self.profiles += message.profiles
        self.released += message.released_gpus
        self.time_limits.extend(message.time_limits)
        for order in message.stops:
            self.stops.append(order)
            if not self.refuses_to_stop:
                self.end((order.job_id, order.number), job_pb2.ATTEMPT_STATE_STOPPED, stop_reason=order.reason)
        for ack in message.acks:
            self.acked.append((ack.job_id, ack.number))
            self.attempts.pop((ack.job_id, ack.number), None)

        for read in message.reads:
            self.reads.append(read)
            if self.answers_reads and not read.cancel:
                self._background.append(asyncio.create_task(self._upload(read)))

    def answer_resize(self, order: agent_pb2.ResizeOrder) -> None:
        """Apply a resize and report it, or report why it is impossible."""
        key = (order.job_id, order.number)
        known = self.assignments.get(key)
        answered = self.answers.get((*key, order.epoch))  # a repeated order gets the same answer
        error = answered if answered is not None else self.cannot_resize(order)
        error = error or ("" if known else "unknown attempt")
        self.answers[(*key, order.epoch)] = error
        if known and not error:
            known.allocation.CopyFrom(order.allocation)
            known.epoch = order.epoch
            self.on_resize(key)
        report = agent_pb2.ResizeReport(job_id=key[0], number=key[1], epoch=order.epoch, error=error)
        self._out.put_nowait(agent_pb2.ConnectRequest(resized=[report]))

    def send(self, **fields: Any) -> None:
        """Send any other message, such as `profiled` or `progress`."""
        self._out.put_nowait(agent_pb2.ConnectRequest(**fields))

    async def _upload(self, order: agent_pb2.ReadOutput) -> None:
        """Send a job's output in two chunks, or report that there is none."""
        text = self.output.get(order.job_id)
        half = len(text or b"") // 2
        pieces = (
            [agent_pb2.UploadOutputRequest(read_id=order.read_id, error="there is no output")]
            if text is None
            else [
                agent_pb2.UploadOutputRequest(read_id=order.read_id, rank=order.rank, data=part)
                for part in (text[:half], text[half:])
            ]
        )
        await self._stub.UploadOutput(iter(pieces))

    def end(
        self,
        key: tuple[str, int],
        state: job_pb2.AttemptState.ValueType,
        code: int = 0,
        stop_reason: job_pb2.StopReason.ValueType = job_pb2.STOP_REASON_UNSPECIFIED,
    ) -> None:
        """Report the end of an attempt; an attempt that had already ended is reported unchanged."""
        known = self.attempts.get(key)
        if known is None:  # report without keeping it: the attempt may still be assigned
            known = agent_pb2.AttemptReport(job_id=key[0], number=key[1], state=state, message="it is not known here")
            known.time.GetCurrentTime()
        elif known.state not in ENDED:
            self.report(key, state, code, stop_reason)
            return
        self._out.put_nowait(agent_pb2.ConnectRequest(reports=[known]))

    def forget(self) -> None:
        """Know nothing of what runs, as after a reboot."""
        self.attempts.clear()
        self.assignments.clear()
        self.on_forget()

    def change_inventory(self) -> None:
        """Tell what the node is made of now."""
        self._out.put_nowait(agent_pb2.ConnectRequest(inventory=self.inventory))

    def finish(self, key: tuple[str, int], code: int | None = None) -> None:
        """End the process of an attempt if it is still running."""
        known = self.attempts.get(key)
        if known and known.state == job_pb2.ATTEMPT_STATE_RUNNING:
            code = self.exit_code if code is None else code
            state = job_pb2.ATTEMPT_STATE_FAILED if code else job_pb2.ATTEMPT_STATE_SUCCEEDED
            self.end(key, state, code)

    def refuse(
        self,
        key: tuple[str, int],
        reason: str,
        cause: job_pb2.LaunchCause.ValueType = job_pb2.LAUNCH_CAUSE_UNSPECIFIED,
    ) -> None:
        """Report that an attempt could not be launched."""
        self.report(key, job_pb2.ATTEMPT_STATE_NOT_LAUNCHED, message=reason, launch_cause=cause or self.launch_cause)

    def fail(self, key: tuple[str, int], tail: str, code: int = 1, signs: Sequence[str] = ()) -> None:
        """Fail the process of an attempt with a tail of output."""
        self.report(key, job_pb2.ATTEMPT_STATE_FAILED, code, output_tail=tail, signs=signs)

    def report(
        self,
        key: tuple[str, int],
        state: job_pb2.AttemptState.ValueType,
        code: int = 0,
        stop_reason: job_pb2.StopReason.ValueType = job_pb2.STOP_REASON_UNSPECIFIED,
        **fields: Any,
    ) -> None:
        """Report the state of an attempt."""
        assignment = self.assignments.get(key)
        report = agent_pb2.AttemptReport(
            job_id=key[0], number=key[1], epoch=assignment.epoch if assignment else 0, state=state, **fields
        )
        report.stop_reason = stop_reason
        report.time.GetCurrentTime()
        report.exit.code = code
        before = self.attempts.get(key)
        if state == job_pb2.ATTEMPT_STATE_RUNNING:
            report.start_time.CopyFrom(report.time)
        elif before is not None and before.HasField("start_time"):
            report.start_time.CopyFrom(before.start_time)
        self.attempts[key] = report
        self.on_report(report)
        self._out.put_nowait(agent_pb2.ConnectRequest(reports=[report]))
