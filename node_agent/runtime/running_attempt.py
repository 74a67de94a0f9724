"""One attempt as the runtime manages it, including the cleanup after its supervisor has died."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

import structlog

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.node_agent.enforcement.core_changes import CoresRefused
from cotenant.node_agent.probes.pressure import pressure_within
from cotenant.node_agent.runtime import orphan_processes
from cotenant.node_agent.runtime.attempt_cores import AttemptCores
from cotenant.node_agent.runtime.attempt_directory import AttemptDirectory
from cotenant.node_agent.runtime.attempt_status import AttemptKey, Status, duration
from cotenant.node_agent.runtime.attempt_throttle import AttemptThrottle
from cotenant.node_agent.runtime.launch import CannotLaunch
from cotenant.node_agent.runtime.runtime_port import Usage
from cotenant.node_agent.runtime.supervisor_start import SupervisorProcess
from cotenant.node_agent.supervisor.cgroups import Group, GroupError
from cotenant.node_agent.supervisor.launch_faults import LIMIT_ERRORS, NOT_LAUNCHED, cause_of
from cotenant.node_agent.supervisor.process_table import open_process
from cotenant.node_agent.supervisor.stop_order import STOPPED_EXTERNALLY
from cotenant.v1 import resources_pb2

log = structlog.get_logger()

FIRST_STATE_SECONDS_MAX = 10.0
REMAINS_SECONDS_MAX = 30.0
PIDFD_RETRY_SECONDS = 0.2
CONCLUDE_SECONDS_FIRST, CONCLUDE_SECONDS_MAX = 0.2, 5.0  # between two tries to conclude an attempt
MESSAGE_LENGTH_MAX = 1_000  # messages may contain users' texts
REBOOTED = "the node was rebooted"
ERROR_NUMBER = re.compile(r"\[Errno (\d{1,4})\]")
SUPERVISOR_DIED = "its supervisor died; the job's remaining processes were killed"


@dataclass(slots=True)
class RunningAttempt:
    """An attempt as the runtime manages it. `directory` is None if its id is not a safe file name."""

    key: AttemptKey
    assignment: agent_pb2.Assignment
    directory: AttemptDirectory | None
    group: Group | None = None
    status: Status | None = None
    pidfd: int = -1
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    stop_grace_seconds: float | None = None
    stop_reason: str = ""  # of the first order
    stop_order_lost: bool = False
    stop_asked: asyncio.Event = field(default_factory=asyncio.Event)
    cores: AttemptCores | None = None
    throttle: AttemptThrottle | None = None
    promised: resources_pb2.NodeAllocation | None = None
    image_digest: str = ""  # of its image, if that is in the cache

    @property
    def held(self) -> list[resources_pb2.NodeAllocation]:
        """The allocations it holds: while its cores change, the old and the new one."""
        return [self.assignment.allocation, *([self.promised] if self.promised else [])]

    @property
    def live(self) -> bool:
        """Whether it holds cores and GPUs."""
        return self.status is None or not self.status.ended

    def new_status(self, state: str, message: str = "", launch_cause: str = "") -> Status:
        """Return a status for an attempt without one from a supervisor."""
        if len(message) > MESSAGE_LENGTH_MAX:
            message = message[: MESSAGE_LENGTH_MAX - 1] + "…"
        return Status(self.key, self.assignment.epoch, state, time.time(), message, launch_cause=launch_cause)

    def not_launched(self, error: Exception) -> Status:
        """Return the final status of an attempt that could not be launched because of this error."""
        if self.directory is not None:
            with contextlib.suppress(OSError):  # then its end is reported, but not kept
                self.directory.path.mkdir(exist_ok=True)
        if isinstance(error, CannotLaunch):
            return self.new_status(NOT_LAUNCHED, str(error), error.cause.value)
        log.error("launch_failed", attempt=str(self.key), exc_info=error)
        return self.new_status(NOT_LAUNCHED, f"the agent failed: {error}", cause_of(error, "other"))

    async def end_orphans(self, marker: str) -> Status:
        """Kill the processes that a dead supervisor left, identified by `marker`, and record the failure."""
        assert self.directory is not None
        rebooted = self.directory.from_earlier_boot()
        log.warning("supervisor_lost", attempt=str(self.key), rebooted=rebooted)
        while not await asyncio.to_thread(
            orphan_processes.kill_orphans, self.group, marker, timeout_seconds=REMAINS_SECONDS_MAX
        ):
            log.error("process_kill_failed", attempt=str(self.key), seconds=REMAINS_SECONDS_MAX)
        last_line = "" if rebooted else self.directory.last_log_line()
        cause = "" if self.directory.was_executed() else cause_in_message(last_line)
        status = replace(
            self.status or self.new_status("FAILED"),
            state=NOT_LAUNCHED if cause else "FAILED",
            launch_cause=cause,
            time=time.time(),
            end_time=time.time(),
            message=REBOOTED if rebooted else SUPERVISOR_DIED + (f" ({last_line})" if last_line else ""),
            cpu_seconds=self.group.cpu_seconds() if self.group else 0.0,
            memory_peak_bytes=self.group.memory_peak_bytes() if self.group else 0,
        )
        await self.record_end(status)
        return status

    async def remove_group(self, timeout_seconds: float) -> bool:
        """Remove its empty control group; return False if the kernel still keeps it after the timeout."""
        if self.group is None or not self.group.exists():
            return True
        removed = await asyncio.to_thread(self.group.remove, timeout_seconds)
        if not removed:
            log.error("cgroup_removal_failed", attempt=str(self.key), group=self.group.paths()[0])
        return removed

    async def record_end(self, status: Status) -> None:
        """Record an end that no supervisor records, if the disk allows it."""
        if self.directory is None:
            return
        try:
            await asyncio.to_thread(self.directory.write_end, status)
        except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
            log.error("end_write_failed", attempt=str(self.key), error=str(error))

    def order_stop(self) -> None:
        """Order the supervisor to stop with the set grace period; no effect while the supervisor is being started."""
        if self.pidfd < 0 or self.directory is None or self.stop_grace_seconds is None:
            return
        try:
            self.directory.write_stop_order(self.stop_grace_seconds, self.stop_reason)
        except OSError as error:  # the supervisor uses the job's grace and takes it for an external stop
            self.stop_order_lost = True
            log.warning("stop_order_write_failed", attempt=str(self.key), error=str(error))
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGTERM)

    def order_time_limit(self, limit_seconds: float | None) -> str | None:
        """Order the supervisor, which has started, to keep another time limit; return why not, or None."""
        if self.pidfd < 0 or self.directory is None:
            return "its supervisor does not run"
        changed = agent_pb2.Assignment()
        changed.CopyFrom(self.assignment)
        changed.spec.ClearField("time_limit")
        if limit_seconds is not None:
            changed.spec.time_limit.CopyFrom(duration(limit_seconds))
        try:
            self.directory.write_time_limit(limit_seconds)
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGUSR1)
            self.directory.replace_assignment(changed)
        except OSError as error:
            return f"the limit cannot be written: {error.strerror}"
        self.assignment = changed
        return None

    def as_ordered(self, status: Status) -> Status:
        """Return the status as STOPPED if the supervisor took the agent's unreadable stop order for an external one.

        The disk may be read-only; a stopped attempt must not count as the job's failure because of that.
        """
        if self.stop_order_lost and status.state == "FAILED" and status.message == STOPPED_EXTERNALLY:
            return self.stopped(replace(status, message=""))
        return status

    def stopped(self, status: Status) -> Status:
        """Return the status as the end of an attempt that stopped as ordered."""
        return replace(status, state="STOPPED", stop_reason=self.stop_reason)

    async def resume_and_order_stop(self) -> None:
        """Resume a suspended attempt, which could not handle the warning, then order the stop."""
        assert self.throttle is not None
        try:
            await asyncio.to_thread(self.throttle.resume)
        except GroupError as error:
            log.error("attempt_resume_failed", attempt=str(self.key), error=str(error))
        self.order_stop()

    async def usage(self) -> Usage | None:
        """Return the usage from the control group or the processes, with the hardware's counters."""
        if self.group is not None:
            usage: Usage | None = Usage(
                self.group.cpu_seconds(),
                self.group.memory_bytes(),
                cpu_pressure=pressure_within(self.group, "cpu"),
                memory_pressure=pressure_within(self.group, "memory"),
            )
        else:
            pid = self.status.pid if self.status else 0
            usage = await asyncio.to_thread(orphan_processes.usage_of_descendants, pid)
        if usage is None or self.throttle is None or not self.throttle.has_counters:
            return usage
        return await asyncio.to_thread(self.throttle.with_counters, usage)

    async def restore_cores(self) -> None:
        """Give the attempt its recorded cores: an agent may have been killed during a change."""
        assert self.cores is not None
        try:
            if await asyncio.to_thread(self.cores.restore, self.assignment.allocation):
                log.info("cores_restored", attempt=str(self.key))
        except CoresRefused as error:
            log.error("cores_restore_failed", attempt=str(self.key), error=str(error))

    async def heal_cores(self) -> None:
        """Let the attempt use all of its online CPUs: the kernel may have removed some permanently."""
        assert self.cores is not None
        try:
            if await asyncio.to_thread(self.cores.heal, self.assignment.allocation):
                log.info("online_cores_restored", attempt=str(self.key))
        except CoresRefused as error:
            log.warning("online_cores_not_restored", attempt=str(self.key), error=str(error))


async def open_pidfd(supervisor: SupervisorProcess) -> int | None:
    """Return a pidfd of a supervisor; None if it is gone. Wait while the agent is out of descriptors or memory."""
    pid, ticks = supervisor
    while True:
        try:
            return os.pidfd_open(pid) if ticks is None else open_process(pid, ticks)
        except OSError as error:
            if error.errno not in LIMIT_ERRORS:
                raise
            log.warning("supervisor_pidfd_failed", pid=pid, error=str(error))
            await asyncio.sleep(PIDFD_RETRY_SECONDS)


async def conclude_at_last(conclude: Callable[[], Awaitable[None]], key: AttemptKey) -> None:
    """Conclude an attempt; if the agent cannot do it now, for lack of descriptors or threads say, try again later."""
    pause = CONCLUDE_SECONDS_FIRST
    while True:
        try:
            return await conclude()
        except (OSError, RuntimeError, MemoryError, GroupError) as error:
            log.warning("conclusion_delayed", attempt=str(key), error=str(error), retry_seconds=pause)
        await asyncio.sleep(pause)
        pause = min(CONCLUDE_SECONDS_MAX, 2 * pause)


def cause_in_message(message: str) -> str:
    """Return the launch cause for a supervisor's last log line, such as the last line of a traceback.

    >>> cause_in_message("OSError: [Errno 24] Too many open files"), cause_in_message("Killed")
    ('limit', 'other')
    """
    found = ERROR_NUMBER.search(message)
    return cause_of(OSError(int(found[1]), ""), "other") if found else "other"


async def first_status(directory: AttemptDirectory) -> Status | None:
    """Return the recorded status; wait for the first one of a supervisor that has just started."""
    deadline = time.monotonic() + FIRST_STATE_SECONDS_MAX
    while (status := directory.status()) is None and directory.supervised():
        if time.monotonic() > deadline:
            log.error("supervisor_state_missing", attempt=str(directory.key))
            break
        await asyncio.sleep(0.01)
    return status or directory.status()
