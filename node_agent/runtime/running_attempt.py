"""One attempt as the runtime holds it, and what is to be done where its supervisor died before it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from dataclasses import dataclass, field, replace

import structlog

from cotenant.node_agent.enforcement.core_changes import CoresRefused
from cotenant.node_agent.probes.pressure import pressure_within
from cotenant.node_agent.runtime import orphan_processes
from cotenant.node_agent.runtime.attempt_cores import AttemptCores
from cotenant.node_agent.runtime.attempt_directory import AttemptDirectory
from cotenant.node_agent.runtime.attempt_status import AttemptKey, Status
from cotenant.node_agent.runtime.attempt_throttle import AttemptThrottle
from cotenant.node_agent.runtime.launch import CannotLaunch
from cotenant.node_agent.runtime.runtime_port import Usage
from cotenant.node_agent.supervisor.cgroups import Group, GroupError
from cotenant.node_agent.supervisor.launch_faults import LIMIT_ERRORS, NOT_LAUNCHED, cause_of
from cotenant.node_agent.supervisor.stop_order import BY_ANOTHER
from cotenant.v1 import node_service_pb2, resources_pb2

log = structlog.get_logger()

FIRST_STATE_SECONDS_MAX = 10.0
REMAINS_SECONDS_MAX = 30.0
PIDFD_RETRY_SECONDS = 0.2
MESSAGE_LENGTH_MAX = 1_000  # whatever a user wrote into what it tells of
REBOOTED = "the node was rebooted"
ERROR_NUMBER = re.compile(r"\[Errno (\d{1,4})\]")
SUPERVISOR_DIED = "its supervisor died; what was left of the job was killed"


@dataclass(slots=True)
class Supervised:
    """An attempt as the runtime holds it. `directory` is None where its id cannot name one."""

    key: AttemptKey
    assignment: node_service_pb2.Assignment
    directory: AttemptDirectory | None
    group: Group | None = None
    status: Status | None = None
    pidfd: int = -1
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    stop_grace_seconds: float | None = None
    stop_order_lost: bool = False
    stop_asked: asyncio.Event = field(default_factory=asyncio.Event)
    cores: AttemptCores | None = None
    throttle: AttemptThrottle | None = None
    promised: resources_pb2.NodeAllocation | None = None

    @property
    def held(self) -> list[resources_pb2.NodeAllocation]:
        """What nobody else may have: while its cores change, those of before and of after."""
        return [self.assignment.allocation, *([self.promised] if self.promised else [])]

    @property
    def live(self) -> bool:
        """Whether it holds cores and GPUs."""
        return self.status is None or not self.status.ended

    def new_status(self, state: str, message: str = "", launch_cause: str = "") -> Status:
        """What is known of it where no supervisor has told anything."""
        if len(message) > MESSAGE_LENGTH_MAX:
            message = message[: MESSAGE_LENGTH_MAX - 1] + "…"
        return Status(self.key, self.assignment.epoch, state, time.time(), message, launch_cause=launch_cause)

    def not_launched(self, error: Exception) -> Status:
        """Return the end of an attempt that could not be launched for this error."""
        if self.directory is not None:
            with contextlib.suppress(OSError):  # then its end is told, and not kept
                self.directory.path.mkdir(exist_ok=True)
        if isinstance(error, CannotLaunch):
            return self.new_status(NOT_LAUNCHED, str(error), error.cause.value)
        log.error("launch_failed", attempt=str(self.key), exc_info=error)
        return self.new_status(NOT_LAUNCHED, f"the agent failed: {error}", cause_of(error, "other"))

    async def end_orphans(self, marker: str) -> Status:
        """Kill what a dead supervisor left, known by `marker`, and record the failure in its place."""
        assert self.directory is not None
        rebooted = self.directory.of_earlier_boot()
        log.warning("supervisor_lost", attempt=str(self.key), rebooted=rebooted)
        while not await asyncio.to_thread(
            orphan_processes.end_remains, self.group, marker, patience_seconds=REMAINS_SECONDS_MAX
        ):
            log.error("processes_not_killed", attempt=str(self.key), seconds=REMAINS_SECONDS_MAX)
        words = "" if rebooted else self.directory.last_words()
        cause = "" if self.directory.was_executed() else cause_in_words(words)
        status = replace(
            self.status or self.new_status("FAILED"),
            state=NOT_LAUNCHED if cause else "FAILED",
            launch_cause=cause,
            time=time.time(),
            end_time=time.time(),
            message=REBOOTED if rebooted else SUPERVISOR_DIED + (f" ({words})" if words else ""),
            cpu_seconds=self.group.cpu_seconds() if self.group else 0.0,
            memory_peak_bytes=self.group.memory_peak_bytes() if self.group else 0,
        )
        await self.record_end(status)
        return status

    async def remove_group(self, patience_seconds: float) -> bool:
        """Remove what is left of its control group, once nothing is in it; False where the kernel keeps it so long."""
        if self.group is None or not self.group.exists():
            return True
        removed = await asyncio.to_thread(self.group.remove, patience_seconds)
        if not removed:
            log.error("group_not_removed", attempt=str(self.key), group=self.group.paths()[0])
        return removed

    async def record_end(self, status: Status) -> None:
        """Keep an end that no supervisor will keep, where the disk takes it."""
        if self.directory is None:
            return
        try:
            await asyncio.to_thread(self.directory.write_end, status)
        except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
            log.error("end_not_recorded", attempt=str(self.key), error=str(error))

    def order_stop(self) -> None:
        """Have the supervisor end it with the grace that is set; while it is being started, nothing happens yet."""
        if self.pidfd < 0 or self.directory is None or self.stop_grace_seconds is None:
            return
        try:
            self.directory.write_stop_order(self.stop_grace_seconds)
        except OSError as error:  # then the supervisor takes the job's own grace, and does not know that it was us
            self.stop_order_lost = True
            log.warning("stop_order_not_written", attempt=str(self.key), error=str(error))
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGTERM)

    def as_ordered(self, status: Status) -> Status:
        """Return the end as it is known here: a supervisor that could not read our stop order takes it for another's.

        The disk may be read-only; what is stopped must not count as the job's failure for that.
        """
        if self.stop_order_lost and status.state == "FAILED" and status.message == BY_ANOTHER:
            return replace(status, state="STOPPED", message="")
        return status

    async def wake_and_order_stop(self) -> None:
        """The same for one that may stand still, which would hear no warning."""
        assert self.throttle is not None
        try:
            await asyncio.to_thread(self.throttle.let_go_on)
        except GroupError as error:
            log.error("attempt_stands_still", attempt=str(self.key), error=str(error))
        self.order_stop()

    async def usage(self) -> Usage | None:
        """Read the account of the control group, or without one of the processes; and what the hardware tells."""
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
        if usage is None or self.throttle is None or not self.throttle.counts:
            return usage
        return await asyncio.to_thread(self.throttle.counted, usage)

    async def restore_cores(self) -> None:
        """See to it that the kernel has what is recorded: an agent may have been killed while it changed cores."""
        assert self.cores is not None
        try:
            if await asyncio.to_thread(self.cores.restore, self.assignment.allocation):
                log.info("cores_restored", attempt=str(self.key))
        except CoresRefused as error:
            log.error("cores_not_restored", attempt=str(self.key), error=str(error))

    async def heal_cores(self) -> None:
        """Let it use all of its CPUs that are on line: the kernel may have taken them away for good."""
        assert self.cores is not None
        try:
            if await asyncio.to_thread(self.cores.heal, self.assignment.allocation):
                log.info("cores_healed", attempt=str(self.key))
        except CoresRefused as error:
            log.warning("cores_not_healed", attempt=str(self.key), error=str(error))


async def open_pidfd(pid: int) -> int:
    """Open a descriptor for a child; waits while the agent is out of descriptors or memory, as the child runs."""
    while True:
        try:
            return os.pidfd_open(pid)
        except OSError as error:
            if error.errno not in LIMIT_ERRORS:
                raise
            log.warning("supervisor_not_watched", pid=pid, error=str(error))
            await asyncio.sleep(PIDFD_RETRY_SECONDS)


def cause_in_words(words: str) -> str:
    """Return the cause that a supervisor's last words tell of, such as a traceback's last line.

    >>> cause_in_words("OSError: [Errno 24] Too many open files"), cause_in_words("Killed")
    ('limit', 'other')
    """
    found = ERROR_NUMBER.search(words)
    return cause_of(OSError(int(found[1]), ""), "other") if found else "other"


async def first_status(directory: AttemptDirectory) -> Status | None:
    """What is recorded; a supervisor that was started a moment ago is given the time to record something."""
    deadline = time.monotonic() + FIRST_STATE_SECONDS_MAX
    while (status := directory.status()) is None and directory.supervised():
        if time.monotonic() > deadline:
            log.error("supervisor_silent", attempt=str(directory.key))
            break
        await asyncio.sleep(0.01)
    return status or directory.status()
