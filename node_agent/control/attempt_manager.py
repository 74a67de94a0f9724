"""Carries out placement's orders to launch, resize, profile, stop and forget attempts.

Orders may repeat, arrive late or be lost. An attempt is kept until placement has acknowledged its end. Nothing is
stopped or forgotten here without an order; `hand_back` gives some of its own.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

import structlog

from cotenant import fail_points, telemetry
from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.core.failures.classifier import SIGNS_MAX
from cotenant.node_agent.control.attempt import Attempt, Attempts
from cotenant.node_agent.control.epoch_fence import EpochFence
from cotenant.node_agent.control.live_profiling import LiveProfiler
from cotenant.node_agent.control.node_guard import NodeGuard
from cotenant.node_agent.control.placement_outbox import PlacementOutbox
from cotenant.node_agent.control.progress_reader import ProgressReader
from cotenant.node_agent.control.throttles import Throttles
from cotenant.node_agent.runtime.attempt_status import AttemptKey, Status, report, stop_reason_name
from cotenant.node_agent.runtime.launch import grace_seconds_of
from cotenant.node_agent.runtime.output_tail import tail_of
from cotenant.node_agent.runtime.runtime_port import RecoveredAttempt, Runtime, TimeLimitRuntime
from cotenant.node_agent.supervisor.launch_faults import NOT_LAUNCHED, cause_of
from cotenant.rpc.task_group import BackgroundTasks
from cotenant.v1 import job_pb2

log = structlog.get_logger()


class AttemptManager:
    """The attempts that this node knows, and their life cycle."""

    def __init__(
        self,
        node_id: str,
        attempts: Attempts,
        outbox: PlacementOutbox,
        runtime: Runtime,
        fence: EpochFence,
        progress: ProgressReader,
        profiles: LiveProfiler,
        throttles: Throttles,
        guard: NodeGuard,
    ) -> None:
        self._node_id, self.attempts, self._outbox = node_id, attempts, outbox
        self._runtime, self._fence, self._guard = runtime, fence, guard
        self._progress, self._profiles, self._throttles = progress, profiles, throttles
        self._background = BackgroundTasks()

    def recover(self, found: RecoveredAttempt) -> None:
        """Register an attempt that was found at startup."""
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

    def reports(self) -> list[agent_pb2.AttemptReport]:
        """Return the reports of all known attempts, for a Hello."""
        return [self._report(attempt.status) for _, attempt in sorted(self.attempts.items())]

    def min_disconnect_seconds(self) -> float:
        """Return the shortest time that a job here may run without the control plane; infinity if no job sets one."""
        specs = [each.assignment.spec for each in self.attempts.values() if not each.status.ended]
        leashes = [spec.stop_after_disconnected for spec in specs if spec.HasField("stop_after_disconnected")]
        return min((leash.ToMicroseconds() / 1e6 for leash in leashes), default=math.inf)

    def _send(self, status: Status) -> None:
        self._outbox.report(self._report(status))

    def _report(self, status: Status) -> agent_pb2.AttemptReport:
        message = report(status, self._node_id)
        if status.state in ("FAILED", "STOPPED"):  # likely causes seen on this node
            message.signs.extend(self._guard.signs_of(status.key)[:SIGNS_MAX])
        directory = self._runtime.output_directory(status.key) if status.state == "FAILED" else None
        if directory is not None and status.exit is not None:
            message.output_tail = tail_of(directory, status.exit.rank)
        return message

    # Assignments.

    def assign(self, assignment: agent_pb2.Assignment) -> None:
        """Launch an attempt unless it is already known or the order has an older epoch than one already seen."""
        key = AttemptKey(assignment.job_id, assignment.number)
        if not self._fence.raise_epoch(key.job_id, assignment.epoch):
            self._refuse(key, assignment.epoch, "assignment")
            return
        known = self.attempts.get(key)
        if known is None and self._runtime.output_directory(key) is not None:
            self._send(self._status(key, "FAILED", "it already ran on this node and its end was acknowledged"))
        elif known is None:
            attempt = Attempt(assignment, self._status(key, "STARTING"), time.time())
            self.attempts[key] = attempt
            self._background.start(self._launch(key, attempt))
        elif assignment.epoch > known.status.epoch and not known.status.ended:
            self._background.start(self._adopt(known, assignment))
        else:
            self._send(known.status)

    async def _launch(self, key: AttemptKey, attempt: Attempt) -> None:
        async with attempt.changing:
            await self._launch_alone(key, attempt)

    async def _launch_alone(self, key: AttemptKey, attempt: Attempt) -> None:
        shortage = await self._guard.wait_for_resources(lambda: attempt.stop_grace_seconds is not None)
        try:
            await self._fence.flush()
        except OSError as error:
            why = f"cannot record its epoch: {error.strerror}"
            self.changed(self._not_launched(key, why, cause_of(error, "disk")))
            return None
        busy = await self._guard.busy(attempt.assignment)
        if attempt.stop_grace_seconds is not None:
            status = self._status(key, "STOPPED", "stopped before it started")
            return self.changed(replace(status, stop_reason=attempt.stop_reason))
        if shortage:
            return self.changed(self._not_launched(key, shortage, "limit"))
        if busy:
            return self.changed(self._not_launched(key, busy, "device"))
        attempt.launched = True
        self._watch_progress(attempt.assignment)
        try:
            await self._runtime.launch(attempt.assignment)
        except Exception as error:  # a third-party runtime may raise anything
            log.exception("runtime_failed", attempt=str(key))
            failed = f"the runtime failed: {type(error).__name__}: {error}"
            self.changed(self._not_launched(key, failed, cause_of(error, "other")))

    def _watch_progress(self, assignment: agent_pb2.Assignment) -> None:
        key = AttemptKey(assignment.job_id, assignment.number)
        regex = assignment.spec.progress.regex
        try:
            self._progress.watch(key, regex, lambda: self._runtime.output_directory(key))
        except OSError as error:  # the job runs without progress reports
            log.warning("progress_socket_failed", attempt=str(key), error=str(error))

    async def _adopt(self, known: Attempt, assignment: agent_pb2.Assignment) -> None:
        async with known.changing:
            reason = await self._change(known, assignment)
        if reason is None:
            log.info("assignment_changed", attempt=str(known.status.key), epoch=assignment.epoch)
        else:
            log.error("assignment_change_refused", attempt=str(known.status.key), epoch=assignment.epoch, why=reason)
        known.status = replace(known.status, epoch=assignment.epoch, message=reason or known.status.message)
        self._send(known.status)

    async def _change(self, known: Attempt, assignment: agent_pb2.Assignment) -> str | None:
        """Adopt a newer assignment of a running attempt; return why not, or None."""
        key = known.status.key
        await self._profiles.end(key, "its cores are being resized")
        reason = await self._runtime.adopt(assignment)
        if reason is None:
            await fail_points.reach("agent.resized")
            known.assignment = assignment
            known.status = replace(known.status, epoch=assignment.epoch)
            known.changed = time.monotonic()
            self._progress.forget_rate(key)
        return reason

    # Resizes and profiles.

    def resize(self, order: agent_pb2.ResizeOrder) -> None:
        """Change the cores of a running attempt and report the result; a repeated order gets the same report again."""
        key = AttemptKey(order.job_id, order.number)
        known = self.attempts.get(key)
        if known is not None and known.resized is not None and known.resized.epoch == order.epoch:
            self._outbox.report_resize(known.resized)
        elif not self._fence.raise_epoch(key.job_id, order.epoch):
            self._answer(order, f"refused: epoch {order.epoch} is older than {self._fence.epoch_of(key.job_id)}")
        elif known is None:
            self._answer(order, "unknown on this node")
        else:
            known.resizes_waiting += 1
            self._background.start(self._resize(known, order))

    def _answer(self, order: agent_pb2.ResizeOrder, error: str) -> agent_pb2.ResizeReport:
        attempt = f"{order.job_id}/{order.number}"
        if error:
            log.warning("resize_refused", attempt=attempt, epoch=order.epoch, why=error)
        else:
            log.info("attempt_resized", attempt=attempt, epoch=order.epoch)
        answer = agent_pb2.ResizeReport(job_id=order.job_id, number=order.number, epoch=order.epoch, error=error)
        self._outbox.report_resize(answer)
        return answer

    async def _resize(self, known: Attempt, order: agent_pb2.ResizeOrder) -> None:
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

    async def _resize_alone(self, known: Attempt, order: agent_pb2.ResizeOrder) -> str:
        """Resize the attempt; return why not, or "" if it has these cores now, perhaps since before a restart."""
        if order.epoch <= known.assignment.epoch:
            same = order.epoch == known.assignment.epoch and order.allocation == known.assignment.allocation
            return "" if same else f"refused: epoch {order.epoch} is not newer than {known.assignment.epoch}"
        if known.status.ended:
            return "already ended"
        if known.stop_grace_seconds is not None or known.status.state == "STOPPING":
            return "it is being stopped"
        assignment = agent_pb2.Assignment()
        assignment.CopyFrom(known.assignment)
        assignment.allocation.CopyFrom(order.allocation)
        assignment.epoch = order.epoch
        assignment.expected_rate_per_second = order.expected_rate_per_second
        try:
            await self._fence.flush()
            return await self._change(known, assignment) or ""
        except OSError as error:
            return f"cannot record its epoch: {error.strerror}"
        except Exception as error:  # a third-party runtime may raise anything
            log.exception("runtime_failed", attempt=str(known.status.key))
            return f"the runtime failed: {type(error).__name__}: {error}"

    def profile(self, order: agent_pb2.ProfileOrder) -> None:
        """Measure a running attempt's rate on several core counts; an order without core counts ends the profile."""
        key = AttemptKey(order.job_id, order.number)
        if not order.cores and self._profiles.in_progress(key):
            self._background.start(self._profiles.end(key, "cancelled by an order"))
        elif not order.cores:
            self._profiles.refuse(order, "no profile is running")
        elif why := self._no_profile(self.attempts.get(key), order):
            self._profiles.refuse(order, why)
        else:
            self._profiles.start(order)

    def _no_profile(self, known: Attempt | None, order: agent_pb2.ProfileOrder) -> str:
        if known is None:
            return "unknown on this node"
        if order.epoch < known.status.epoch:
            return f"refused: epoch {order.epoch} is older than {known.status.epoch}"
        if known.status.state != "RUNNING" or known.stop_grace_seconds is not None:
            return "it is not running"
        if known.resizes_waiting:
            return "its cores are being changed"
        if self._throttles.is_throttled(known.status.key):
            return "it is throttled"
        if len(known.assignment.allocation.tasks) != known.assignment.world_size:
            return "its replicas are on several nodes"
        return ""

    def _refuse(self, key: AttemptKey, epoch: int, what: str) -> None:
        """Refuse an order with an older epoch than one already seen; report a known attempt's status instead."""
        seen = self._fence.epoch_of(key.job_id)
        log.warning("old_epoch_refused", attempt=str(key), order=what, epoch=epoch, seen=seen)
        if known := self.attempts.get(key):
            self._send(known.status)
        else:
            self._send(self._not_launched(key, f"refused: epoch {epoch} is older than {seen}", "order"))

    def _not_launched(self, key: AttemptKey, reason: str, cause: str) -> Status:
        return replace(self._status(key, NOT_LAUNCHED, reason), launch_cause=cause)

    def _status(self, key: AttemptKey, state: str, message: str = "") -> Status:
        return Status(key, self._fence.epoch_of(key.job_id), state, time.time(), message)

    # Stops and ends.

    def limit_time(self, order: agent_pb2.TimeLimitOrder) -> None:
        """Hold a running attempt to another time limit; an order that changes nothing is ignored."""
        key = AttemptKey(order.job_id, order.number)
        known = self.attempts.get(key)
        if not self._fence.raise_epoch(key.job_id, order.epoch):
            self._refuse(key, order.epoch, "time limit")
        elif known is not None and not known.status.ended:
            self._background.start(self._limit_time(known, order))

    async def _limit_time(self, known: Attempt, order: agent_pb2.TimeLimitOrder) -> None:
        await known.started.wait()
        async with known.changing:
            if known.status.ended or _time_limit(known.assignment.spec) == _time_limit(order):
                return
            why: str | None = "the runtime cannot change time limits"
            if isinstance(self._runtime, TimeLimitRuntime):
                why = await self._runtime.limit_time(known.status.key, _time_limit(order))
            if why is not None:
                log.error("time_limit_change_refused", attempt=str(known.status.key), why=why)
                return
            changed = agent_pb2.Assignment()
            changed.CopyFrom(known.assignment)
            changed.spec.ClearField("time_limit")
            if order.HasField("time_limit"):
                changed.spec.time_limit.CopyFrom(order.time_limit)
            known.assignment = changed
        log.info("time_limit_changed", attempt=str(known.status.key), limit_seconds=_time_limit(order))

    def stop(self, order: agent_pb2.StopOrder) -> None:
        """Stop an attempt with its grace period."""
        key = AttemptKey(order.job_id, order.number)
        known = self.attempts.get(key)
        self._fence.raise_epoch(key.job_id, order.epoch)
        if known is None:
            self._send(self._status(key, "STOPPED", "unknown on this node"))
        elif known.status.ended:
            self._send(known.status)
        elif order.epoch < known.status.epoch:
            self._refuse(key, order.epoch, "stop")
        else:
            has_grace = order.HasField("grace")
            grace = order.grace.ToMicroseconds() / 1e6 if has_grace else grace_seconds_of(known.assignment)
            reason = stop_reason_name(order.reason)
            log.info("attempt_stopping", attempt=str(key), grace_seconds=grace, reason=reason)
            known.stop_grace_seconds, known.stop_reason = grace, known.stop_reason or reason
            self._background.start(self._profiles.end(key, "the attempt is being stopped"))
            if known.launched:
                self._runtime.stop(key, grace, reason)

    def acknowledge(self, ack: agent_pb2.AttemptAck) -> None:
        """Forget an attempt: placement has committed its end."""
        key = AttemptKey(ack.job_id, ack.number)
        known = self.attempts.get(key)
        if known is None:
            return
        if not known.status.ended:
            log.error("premature_acknowledgement", attempt=str(key), state=known.status.state)
            return
        del self.attempts[key]
        self._background.start(self._runtime.forget(key))

    def changed(self, status: Status) -> None:
        """Handle an attempt status from the runtime."""
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
        self._send(status)

    async def _ended(self, attempt: Attempt, status: Status) -> None:
        """Report the last progress, then the end."""
        attempt.started.set()
        await self._profiles.end(status.key, "the attempt has ended")
        if self._throttles.is_throttled(status.key):
            self._progress.report_soon(status.key)  # that it is no longer throttled
        await self._progress.finish(status.key)
        if attempt.launched:
            await self._guard.wait_for_gpus(attempt.assignment)
        before, attempt.status = attempt.status, status
        log.info("attempt_ended", attempt=str(status.key), state=status.state, message=status.message)
        if before.state == "STARTING" and status.start_time:
            self._record_launch(attempt, status)
        self._record_spans(attempt, status)
        self._send(status)

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
        exit_status = status.exit
        telemetry.record(
            "exit",
            attempt.assignment.trace_parent,
            status.start_time or attempt.received,
            status.end_time or status.time,
            job=status.key.job_id,
            attempt=status.key.number,
            state=status.state,
            code=exit_status.code if exit_status else 0,
            signal=exit_status.signal if exit_status else 0,
        )

    async def close(self) -> None:
        """Cancel background tasks."""
        await self._background.close()


def _time_limit(message: job_pb2.JobSpec | agent_pb2.TimeLimitOrder) -> float | None:
    return message.time_limit.ToMicroseconds() / 1e6 if message.HasField("time_limit") else None
