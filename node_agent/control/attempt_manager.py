"""Obeys placement: what to run, what to stop, what to forget. Every order may come twice, late, or never.

An attempt is kept until placement has acknowledged its end. Nothing is stopped or forgotten on our own authority.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import structlog

from cotenant import fail_points, telemetry
from cotenant.core.failures.classifier import SIGNS_MAX
from cotenant.node_agent.control.epoch_fence import Fence
from cotenant.node_agent.control.live_profiling import Profiles
from cotenant.node_agent.control.node_guard import NodeGuard
from cotenant.node_agent.control.progress_reader import ProgressReader
from cotenant.node_agent.runtime.attempt_status import AttemptKey, Status, report, stop_reason_name
from cotenant.node_agent.runtime.launch import grace_seconds_of
from cotenant.node_agent.runtime.output_tail import tail_of
from cotenant.node_agent.runtime.runtime_port import Found, Runtime
from cotenant.node_agent.supervisor.launch_faults import NOT_LAUNCHED, cause_of
from cotenant.rpc.task_group import Background
from cotenant.v1 import node_service_pb2

log = structlog.get_logger()


@dataclass(slots=True)
class Attempt:
    """An attempt as the agent knows it. Times are seconds since 1970."""

    assignment: node_service_pb2.Assignment
    status: Status
    received: float
    stop_grace_seconds: float | None = None
    launched: bool = False
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    started: asyncio.Event = field(default_factory=asyncio.Event)
    resizes_waiting: int = 0
    resized: node_service_pb2.ResizeReport | None = None  # the last answer
    began: float = field(default_factory=time.monotonic)  # it, or its taking up by this agent; a monotonic clock
    changed: float = field(default_factory=time.monotonic)  # what it holds, on the same clock


class Orders:
    """All attempts that are known here, and what becomes of them."""

    def __init__(
        self,
        node_id: str,
        runtime: Runtime,
        fence: Fence,
        progress: ProgressReader,
        profiles: Profiles,
        tell: Callable[[node_service_pb2.AttemptReport], None],
        tell_resized: Callable[[node_service_pb2.ResizeReport], None],
        guard: Callable[[], NodeGuard],
        held_back: Callable[[AttemptKey], bool] = lambda key: False,
    ) -> None:
        self.attempts: dict[AttemptKey, Attempt] = {}
        self._node_id = node_id
        self._runtime = runtime
        self._fence = fence
        self._progress = progress
        self._profiles = profiles
        self._tell_placement = tell
        self._tell_resized = tell_resized
        self._guard = guard
        self._held_back = held_back
        self._background = Background()
        self.signs_of: Callable[[AttemptKey], Sequence[str]] = lambda key: ()  # set by whoever watches the GPUs

    def take_up(self, found: Found) -> None:
        """Know an attempt that was there before us."""
        key = found.status.key
        epoch = max(found.status.epoch, found.assignment.epoch)
        self.attempts[key] = Attempt(found.assignment, replace(found.status, epoch=epoch), time.time(), launched=True)
        self._fence.raise_epoch(key.job_id, epoch)
        if found.status.state != "STARTING":
            self.attempts[key].started.set()
        if found.status.ended:
            self._record_spans(self.attempts[key], found.status)
        else:
            self._watch_progress(found.assignment)

    def reports(self) -> list[node_service_pb2.AttemptReport]:
        """All that is known, for a Hello."""
        return [self._report(attempt.status) for _, attempt in sorted(self.attempts.items())]

    def patience_seconds(self) -> float:
        """How long the most impatient job that is here runs on without the control plane; infinite without any."""
        specs = [each.assignment.spec for each in self.attempts.values() if not each.status.ended]
        leashes = [spec.stop_after_disconnected for spec in specs if spec.HasField("stop_after_disconnected")]
        return min((leash.ToMicroseconds() / 1e6 for leash in leashes), default=math.inf)

    def _tell(self, status: Status) -> None:
        self._tell_placement(self._report(status))

    def _report(self, status: Status) -> node_service_pb2.AttemptReport:
        told = report(status, self._node_id)
        if status.state in ("FAILED", "STOPPED"):  # why, as far as it can be told here
            told.signs.extend(self.signs_of(status.key)[:SIGNS_MAX])
        directory = self._runtime.output_directory(status.key) if status.state == "FAILED" else None
        if directory is not None and status.exit is not None:
            told.output_tail = tail_of(directory, status.exit.rank)
        return told

    # Assignments.

    def assign(self, assignment: node_service_pb2.Assignment) -> None:
        """Run an attempt, unless it is known already or the order is older than one that was seen."""
        key = AttemptKey(assignment.job_id, assignment.number)
        if not self._fence.raise_epoch(key.job_id, assignment.epoch):
            self._refuse(key, assignment.epoch, "assignment")
            return
        known = self.attempts.get(key)
        if known is None and self._runtime.output_directory(key) is not None:
            self._tell(self._status(key, "FAILED", "it has run here before, and its end was acknowledged"))
        elif known is None:
            attempt = Attempt(assignment, self._status(key, "STARTING"), time.time())
            self.attempts[key] = attempt
            self._background.start(self._launch(key, attempt))
        elif assignment.epoch > known.status.epoch and not known.status.ended:
            self._background.start(self._adopt(known, assignment))
        else:
            self._tell(known.status)

    async def _launch(self, key: AttemptKey, attempt: Attempt) -> None:
        async with attempt.changing:
            await self._launch_alone(key, attempt)

    async def _launch_alone(self, key: AttemptKey, attempt: Attempt) -> None:
        lacking = await self._guard().room(lambda: attempt.stop_grace_seconds is not None)
        try:
            await self._fence.flush()
        except OSError as error:
            why = f"its epoch cannot be recorded: {error.strerror}"
            self.changed(self._not_launched(key, why, cause_of(error, "disk")))
            return None
        busy = await self._guard().busy(attempt.assignment)
        if attempt.stop_grace_seconds is not None:
            return self.changed(self._status(key, "STOPPED", "stopped before it was started"))
        if lacking:
            return self.changed(self._not_launched(key, lacking, "limit"))
        if busy:
            return self.changed(self._not_launched(key, busy, "device"))
        attempt.launched = True
        self._watch_progress(attempt.assignment)
        try:
            await self._runtime.launch(attempt.assignment)
        except Exception as error:  # a stranger's runtime may raise whatever it likes
            log.exception("runtime_failed", attempt=str(key))
            failed = f"the runtime failed: {type(error).__name__}: {error}"
            self.changed(self._not_launched(key, failed, cause_of(error, "other")))

    def _watch_progress(self, assignment: node_service_pb2.Assignment) -> None:
        key = AttemptKey(assignment.job_id, assignment.number)
        regex = assignment.spec.progress.regex
        try:
            self._progress.watch(key, regex, lambda: self._runtime.output_directory(key))
        except OSError as error:  # a job is worth more than its progress
            log.warning("progress_not_heard", attempt=str(key), error=str(error))

    async def _adopt(self, known: Attempt, assignment: node_service_pb2.Assignment) -> None:
        async with known.changing:
            reason = await self._change(known, assignment)
        if reason is None:
            log.info("assignment_changed", attempt=str(known.status.key), epoch=assignment.epoch)
        else:
            log.error("assignment_not_changed", attempt=str(known.status.key), epoch=assignment.epoch, why=reason)
        known.status = replace(known.status, epoch=assignment.epoch, message=reason or known.status.message)
        self._tell(known.status)

    async def _change(self, known: Attempt, assignment: node_service_pb2.Assignment) -> str | None:
        """Let a running attempt go on under a newer assignment; a reason where it cannot."""
        key = known.status.key
        await self._profiles.end(key, "its cores are changed by an order")
        reason = await self._runtime.adopt(assignment)
        if reason is None:
            await fail_points.reach("agent.resized")
            known.assignment = assignment
            known.status = replace(known.status, epoch=assignment.epoch)
            known.changed = time.monotonic()
            self._progress.forget_rate(key)
        return reason

    # Resizes and profiles.

    def resize(self, order: node_service_pb2.ResizeOrder) -> None:
        """Change the cores of a running attempt, and answer; an order that comes again is answered again."""
        key = AttemptKey(order.job_id, order.number)
        known = self.attempts.get(key)
        if known is not None and known.resized is not None and known.resized.epoch == order.epoch:
            self._tell_resized(known.resized)
        elif not self._fence.raise_epoch(key.job_id, order.epoch):
            self._answer(order, f"refused: epoch {order.epoch} is older than {self._fence.epoch_of(key.job_id)}")
        elif known is None:
            self._answer(order, "it is not known on this node")
        else:
            known.resizes_waiting += 1
            self._background.start(self._resize(known, order))

    def _answer(self, order: node_service_pb2.ResizeOrder, error: str) -> node_service_pb2.ResizeReport:
        attempt = f"{order.job_id}/{order.number}"
        if error:
            log.warning("resize_refused", attempt=attempt, epoch=order.epoch, why=error)
        else:
            log.info("attempt_resized", attempt=attempt, epoch=order.epoch)
        answer = node_service_pb2.ResizeReport(job_id=order.job_id, number=order.number, epoch=order.epoch, error=error)
        self._tell_resized(answer)
        return answer

    async def _resize(self, known: Attempt, order: node_service_pb2.ResizeOrder) -> None:
        try:
            await known.started.wait()
            async with known.changing:
                if known.resized is not None and known.resized.epoch == order.epoch:
                    error = known.resized.error
                else:
                    error = await self._resize_alone(known, order)
                known.resized = self._answer(order, error)
        finally:
            known.resizes_waiting -= 1

    async def _resize_alone(self, known: Attempt, order: node_service_pb2.ResizeOrder) -> str:
        """Do it; why not, or nothing where it was done, perhaps before a restart."""
        if order.epoch <= known.assignment.epoch:
            same = order.epoch == known.assignment.epoch and order.allocation == known.assignment.allocation
            return "" if same else f"refused: epoch {order.epoch} is not newer than {known.assignment.epoch}"
        if known.status.ended:
            return "it has ended"
        if known.stop_grace_seconds is not None or known.status.state == "STOPPING":
            return "it is being stopped"
        assignment = node_service_pb2.Assignment()
        assignment.CopyFrom(known.assignment)
        assignment.allocation.CopyFrom(order.allocation)
        assignment.epoch = order.epoch
        assignment.expected_rate_per_second = order.expected_rate_per_second
        try:
            await self._fence.flush()
            return await self._change(known, assignment) or ""
        except OSError as error:
            return f"its epoch cannot be recorded: {error.strerror}"
        except Exception as error:  # a stranger's runtime may raise whatever it likes
            log.exception("runtime_failed", attempt=str(known.status.key))
            return f"the runtime failed: {type(error).__name__}: {error}"

    def profile(self, order: node_service_pb2.ProfileOrder) -> None:
        """Measure a running attempt's rate on some core counts; without any, end a profile that is under way."""
        key = AttemptKey(order.job_id, order.number)
        if not order.cores and self._profiles.under_way(key):
            self._background.start(self._profiles.end(key, "an order ended it"))
        elif not order.cores:
            self._profiles.refuse(order, "there is no profile under way")
        elif why := self._no_profile(self.attempts.get(key), order):
            self._profiles.refuse(order, why)
        else:
            self._profiles.begin(order)

    def _no_profile(self, known: Attempt | None, order: node_service_pb2.ProfileOrder) -> str:
        if known is None:
            return "it is not known on this node"
        if order.epoch < known.status.epoch:
            return f"refused: epoch {order.epoch} is older than {known.status.epoch}"
        if known.status.state != "RUNNING" or known.stop_grace_seconds is not None:
            return "it is not running"
        if known.resizes_waiting:
            return "its cores are being changed"
        if self._held_back(known.status.key):
            return "it is held back"
        if len(known.assignment.allocation.tasks) != known.assignment.world_size:
            return "its replicas are on several nodes"
        return ""

    def _refuse(self, key: AttemptKey, epoch: int, what: str) -> None:
        """Say that an order is older than one that was obeyed; of a known attempt, say where it stands."""
        seen = self._fence.epoch_of(key.job_id)
        log.warning("old_epoch_refused", attempt=str(key), order=what, epoch=epoch, seen=seen)
        if known := self.attempts.get(key):
            self._tell(known.status)
        else:
            self._tell(self._not_launched(key, f"refused: epoch {epoch} is older than {seen}", "order"))

    def _not_launched(self, key: AttemptKey, reason: str, cause: str) -> Status:
        return replace(self._status(key, NOT_LAUNCHED, reason), launch_cause=cause)

    def _status(self, key: AttemptKey, state: str, message: str = "") -> Status:
        return Status(key, self._fence.epoch_of(key.job_id), state, time.time(), message)

    # Stops and ends.

    def stop(self, order: node_service_pb2.StopOrder) -> None:
        """End an attempt with its grace."""
        key = AttemptKey(order.job_id, order.number)
        known = self.attempts.get(key)
        self._fence.raise_epoch(key.job_id, order.epoch)
        if known is None:
            self._tell(self._status(key, "STOPPED", "it is not known on this node"))
        elif known.status.ended:
            self._tell(known.status)
        elif order.epoch < known.status.epoch:
            self._refuse(key, order.epoch, "stop")
        else:
            asked = order.HasField("grace")
            grace = order.grace.ToMicroseconds() / 1e6 if asked else grace_seconds_of(known.assignment)
            log.info("attempt_stopping", attempt=str(key), grace_seconds=grace, reason=stop_reason_name(order.reason))
            known.stop_grace_seconds = grace
            self._background.start(self._profiles.end(key, "the attempt is being stopped"))
            if known.launched:
                self._runtime.stop(key, grace)

    def acknowledge(self, ack: node_service_pb2.AttemptAck) -> None:
        """Forget an attempt whose end placement has committed."""
        key = AttemptKey(ack.job_id, ack.number)
        known = self.attempts.get(key)
        if known is None:
            return
        if not known.status.ended:
            log.error("end_acknowledged_too_early", attempt=str(key), state=known.status.state)
            return
        del self.attempts[key]
        self._background.start(self._runtime.forget(key))

    def changed(self, status: Status) -> None:
        """The runtime tells of an attempt."""
        attempt = self.attempts.get(status.key)
        if attempt is None:
            return
        status = replace(status, epoch=max(status.epoch, attempt.status.epoch))
        if status.ended:
            self._background.start(self._ended(attempt, status))
        else:
            self._running(attempt, status)

    def _running(self, attempt: Attempt, status: Status) -> None:
        before, attempt.status = attempt.status, status
        if status.state == "STARTING":
            return
        attempt.started.set()
        if status.state == "RUNNING" and before.state == "STARTING":
            log.info("attempt_running", attempt=str(status.key), epoch=status.epoch)
            attempt.began = time.monotonic()
            self._record_launch(attempt, status)
        self._tell(status)

    async def _ended(self, attempt: Attempt, status: Status) -> None:
        """Tell the last progress, then the end."""
        attempt.started.set()
        await self._profiles.end(status.key, "the attempt has ended")
        if self._held_back(status.key):
            self._progress.tell(status.key)  # that it is not any more
        await self._progress.finish(status.key)
        if attempt.launched:
            await self._guard().settle(attempt.assignment)
        before, attempt.status = attempt.status, status
        log.info("attempt_ended", attempt=str(status.key), state=status.state, message=status.message)
        if before.state == "STARTING" and status.start_time:
            self._record_launch(attempt, status)
        self._record_spans(attempt, status)
        self._tell(status)

    def _record_launch(self, attempt: Attempt, status: Status) -> None:
        telemetry.record(
            "launch",
            attempt.assignment.trace_parent,
            attempt.received,
            status.start_time,
            job=status.key.job_id,
            attempt=status.key.number,
        )

    def _record_spans(self, attempt: Attempt, status: Status) -> None:
        told = status.exit
        telemetry.record(
            "exit",
            attempt.assignment.trace_parent,
            status.start_time or attempt.received,
            status.end_time or status.time,
            job=status.key.job_id,
            attempt=status.key.number,
            state=status.state,
            code=told.code if told else 0,
            signal=told.signal if told else 0,
        )

    async def close(self) -> None:
        """Let go of what is under way."""
        await self._background.close()
