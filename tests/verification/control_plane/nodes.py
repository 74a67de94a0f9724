"""A simulated agent without processes that uses the real agent's fence, and records its orders and actions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import grpc
from benchmarks.agents import SimulatedAgent
from tests.verification.control_plane.virtual_time import Process

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.history.events import Began, Came, Event, Left, Over, Rebooted, Resized, Told, Welcomed
from cotenant.history.stored import holds_of
from cotenant.node_agent.control.epoch_fence import EpochFence
from cotenant.v1 import job_pb2

RECONNECT_SECONDS = 0.2  # as a real agent does at first
FAILURE_SHARE, RESIZE_FAILURE_SHARE = 0.15, 0.15

Key = tuple[str, int]


class MemoryFence(EpochFence):
    """The agent's fence; its disk is this object, which survives the agent."""

    def __init__(self) -> None:
        super().__init__(Path("/nowhere"))

    def _load(self) -> None:
        """Start without a state."""


class StaleTerm(Exception):
    """The placement that welcomed this agent has been deposed."""


class FencedAgent(SimulatedAgent):
    """Obeys like the node agent: no term or epoch older than the newest seen, and no attempt twice."""

    def __init__(
        self, process: Process, channel: Any, record: Callable[[Event], None], rng: Random, **fields: Any
    ) -> None:
        super().__init__(process.name, channel, **fields)
        self.fence = MemoryFence()
        self.refusing = ""  # why this node refuses launches; "" if it does not
        self.is_off = False  # its node, to be forgotten by an operator: it is not restarted until then
        self._process, self._record, self._rng = process, record, rng
        self._had: set[Key] = set()
        self._stopping: dict[Key, bool] = {}  # whether as superseded
        self._heard: list[tuple[int, agent_pb2.ConnectResponse]] = []  # with their placements' terms
        self.on_report = self._reported
        self.cannot_launch = lambda order: self.refusing
        self.cannot_resize = lambda order: "its cgroup is read-only" if rng.random() < RESIZE_FAILURE_SHARE else ""

    def start(self) -> None:
        """Connect, as part of the current process."""
        self._task = self._process.start(self._run())

    def is_stopped(self) -> bool:
        """Return whether it is stopped for good."""
        return self._task is None or self._task.done()

    async def _run(self) -> None:
        while True:
            self._out = asyncio.Queue()
            hello = agent_pb2.Hello(node_id=self.node_id, inventory=self.inventory, incarnation=self.incarnation)
            hello.attempts.extend(self.attempts.values())
            self._out.put_nowait(agent_pb2.ConnectRequest(hello=hello))
            stream: Any = self._stub.Connect(self._requests(self._out))
            try:
                async for message in stream:
                    self._take(message)
            except (grpc.aio.AioRpcError, StaleTerm):
                stream.cancel()
            self.leave()
            await asyncio.sleep(RECONNECT_SECONDS)

    def leave(self) -> None:
        """Note that the connection is gone."""
        self._record(Left(self.node_id, asyncio.get_running_loop().time()))

    def reboot(self) -> None:
        """Lose all attempts."""
        self._record(Rebooted(self.node_id))
        self._stopping.clear()
        self.forget()

    def _take(self, message: agent_pb2.ConnectResponse) -> None:
        if message.HasField("welcome"):
            if not self.fence.raise_term(message.welcome.term):
                raise StaleTerm
            self._record(Welcomed(self.node_id, message.welcome.term))
            self._record(Came(self.node_id))
        welcome = message.welcome if message.HasField("welcome") else self.welcomes[-1]
        self._heard.append((welcome.term, message))
        obeyed = agent_pb2.ConnectResponse()
        obeyed.CopyFrom(message)
        del obeyed.assignments[:], obeyed.stops[:]
        super()._take(obeyed)
        for assignment in message.assignments:
            self._assign(assignment)
        for order in message.stops:
            self._stop(order)

    def redeliver(self) -> None:
        """Process orders of a connection that arrive late, perhaps from a deposed placement."""
        if not self._heard:
            return
        term, message = self._rng.choice(self._heard)
        if self.fence.raise_term(term):
            self._record(Welcomed(self.node_id, term))
            for assignment in message.assignments:
                self._assign(assignment)

    def finish(self, key: Key, code: int | None = None) -> None:
        """End a process; some fail."""
        super().finish(key, int(self._rng.random() < FAILURE_SHARE) if code is None else code)

    def _assign(self, assignment: agent_pb2.Assignment) -> None:
        key = (assignment.job_id, assignment.number)
        obeys = self.fence.raise_epoch(assignment.job_id, assignment.epoch)
        self._record(Told(self.node_id, assignment.job_id, assignment.epoch))
        if known := self.attempts.get(key):
            self._out.put_nowait(agent_pb2.ConnectRequest(reports=[known]))
        elif not obeys or key in self._had:
            self._report_refused(key, assignment.epoch)
        else:
            self._had.add(key)
            super()._take(agent_pb2.ConnectResponse(assignments=[assignment]))

    def _report_refused(self, key: Key, epoch: int) -> None:
        report = agent_pb2.AttemptReport(job_id=key[0], number=key[1], epoch=epoch, message="refused")
        if key in self._had:
            report.state = job_pb2.ATTEMPT_STATE_FAILED
        else:
            report.state, report.launch_cause = job_pb2.ATTEMPT_STATE_NOT_LAUNCHED, job_pb2.LAUNCH_CAUSE_ORDER
        report.time.GetCurrentTime()
        self._out.put_nowait(agent_pb2.ConnectRequest(reports=[report]))

    def _stop(self, order: agent_pb2.StopOrder) -> None:
        """Stop after a part of the grace period, as a real process would."""
        key = (order.job_id, order.number)
        self.fence.raise_epoch(order.job_id, order.epoch)
        known = self.attempts.get(key)
        if known is not None and known.state == job_pb2.ATTEMPT_STATE_RUNNING:
            if order.epoch < known.epoch:
                self._out.put_nowait(agent_pb2.ConnectRequest(reports=[known]))
                return
            self._stopping.setdefault(key, order.reason == job_pb2.STOP_REASON_SUPERSEDED)
        loop = asyncio.get_running_loop()
        loop.call_later(self._rng.random() * 0.3, super()._take, agent_pb2.ConnectResponse(stops=[order]))

    def _reported(self, report: agent_pb2.AttemptReport) -> None:
        key = (report.job_id, report.number)
        if report.state == job_pb2.ATTEMPT_STATE_RUNNING:
            holds = holds_of([self.assignments[key].allocation])
            self._record(Began(self.node_id, *key, report.epoch, holds))
        elif report.state != job_pb2.ATTEMPT_STATE_NOT_LAUNCHED:
            self._record(Over(self.node_id, *key, superseded=self._stopping.pop(key, False)))

    def answer_resize(self, order: agent_pb2.ResizeOrder) -> None:
        """Resize an attempt, unless the order is stale."""
        key = (order.job_id, order.number)
        obeys = self.fence.raise_epoch(order.job_id, order.epoch)
        self._record(Told(self.node_id, order.job_id, order.epoch))
        if not obeys:
            report = agent_pb2.ResizeReport(job_id=key[0], number=key[1], epoch=order.epoch, error="refused")
            self._out.put_nowait(agent_pb2.ConnectRequest(resized=[report]))
            return
        super().answer_resize(order)
        known = self.attempts.get(key)
        runs = known is not None and known.state == job_pb2.ATTEMPT_STATE_RUNNING
        if runs and self.assignments[key].epoch == order.epoch:
            self._record(Resized(self.node_id, *key, order.epoch, holds_of([self.assignments[key].allocation])))
