"""Runs attempts as processes under supervisors that outlive the agent.

The agent holds nothing that a job needs. It starts a supervisor per attempt, hears from it by datagrams, and waits
for its end on a pidfd; after a restart it finds the directories, sees by their locks which supervisors live, and
waits on those again. A supervisor that died before its attempt takes its direct children along; the rest is killed
here, and the attempt has failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import structlog

from cotenant import fail_points
from cotenant.core.model.lifecycle import LaunchCause
from cotenant.core.model.throttle import Throttle
from cotenant.node_agent.enforcement import gpu_devices
from cotenant.node_agent.enforcement.core_changes import CoresRefused
from cotenant.node_agent.enforcement.resctrl import Resctrl
from cotenant.node_agent.runtime import (
    assignment_checks,
    attempt_directory,
    node_cgroup,
    orphan_attempts,
    orphan_processes,
)
from cotenant.node_agent.runtime import launch as launch_module
from cotenant.node_agent.runtime.attempt_cores import AttemptCores
from cotenant.node_agent.runtime.attempt_directory import AttemptDirectory
from cotenant.node_agent.runtime.attempt_status import AttemptKey, Status, parse_status
from cotenant.node_agent.runtime.attempt_throttle import AttemptThrottle
from cotenant.node_agent.runtime.node_identity import find_identity
from cotenant.node_agent.runtime.output_retention import Keeper
from cotenant.node_agent.runtime.running_attempt import Supervised, first_status, open_pidfd
from cotenant.node_agent.runtime.runtime_port import Found, Held, RuntimeContext, Usage
from cotenant.node_agent.runtime.socket_paths import NOTIFY, progress_socket, socket_directory, stand_together
from cotenant.node_agent.runtime.systemd_scope import reach_systemd
from cotenant.node_agent.supervisor.kernel_files import online_cpus
from cotenant.node_agent.supervisor.launch_faults import NOT_LAUNCHED
from cotenant.node_agent.supervisor.process_table import open_process
from cotenant.rpc.task_group import Background
from cotenant.v1 import node_service_pb2

log = structlog.get_logger()

DATAGRAM_BYTES_MAX = 1 << 18


class ProcessRuntime:
    """Attempts as processes of this machine, in control groups where they can be had."""

    api_version: ClassVar[int] = 1
    name: ClassVar[str] = "process"

    def __init__(self) -> None:
        self._attempts: dict[AttemptKey, Supervised] = {}
        self._background = Background()
        self._not_enforced: list[str] = []
        self._seen_gpus: set[str] = set()

    async def open(self, context: RuntimeContext, changed: Callable[[Status], None]) -> Sequence[Found]:
        """Bind the socket that supervisors tell, then look at what they have recorded."""
        self._context = context
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        self._attempts_root, self._kept_root = (context.state_dir / name for name in ("attempts", "kept"))
        for root in (self._attempts_root, self._kept_root):
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._keeper = Keeper(self._kept_root, keep_max=context.kept_max, seconds_max=context.kept_seconds_max)
        self._sockets = socket_directory(context.state_dir)
        self._resctrl = Resctrl.open()
        place = await asyncio.to_thread(node_cgroup.open_place, context.node_id, reach_systemd())
        identity = await asyncio.to_thread(find_identity, context.users, [context.state_dir, *context.hidden])
        self._surroundings = launch_module.surroundings_of(context, place, str(self._sockets / NOTIFY), identity.hidden)
        context.inventory.shared_user = identity.user
        self._not_enforced = [*place.not_enforced, *identity.not_enforced, *await self._look_at_gpus()]
        self._listen()
        found = [await self._find(directory) for directory in attempt_directory.find_directories(self._attempts_root)]
        return [each for each in found if each] + self._take_in_strays()

    def not_enforced(self) -> Sequence[str]:
        """What could not be had of control groups."""
        return self._not_enforced

    def _confine(self, attempt: Supervised, directory: AttemptDirectory) -> None:
        attempt.group = launch_module.attempt_group(self._surroundings, directory)
        attempt.cores = AttemptCores(attempt.group, directory)
        attempt.throttle = AttemptThrottle(attempt.group, directory, attempt.cores, self._resctrl)

    def _listen(self) -> None:
        path = self._surroundings.notify_path
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._listener.bind(path)
        self._loop.add_reader(self._listener, self._hear)

    # What supervisors tell.

    def _hear(self) -> None:
        """Take in one datagram: a supervisor's whole state."""
        try:
            status = parse_status(self._listener.recv(DATAGRAM_BYTES_MAX))
        except BlockingIOError:
            return
        except ValueError as error:
            log.warning("supervisor_not_understood", error=str(error))
            return
        if attempt := self._attempts.get(status.key):
            if attempt.directory is None and attempt.stop_grace_seconds is not None and status.ended:
                status = replace(status, state="STOPPED")  # a stray's supervisor does not know that we ended it
            self._tell(attempt, status)

    def _tell(self, attempt: Supervised, status: Status) -> None:
        """Pass a status on unless it is no news; nothing is news after the end."""
        status = attempt.as_ordered(status)
        if attempt.live and status != attempt.status:
            attempt.status = status
            self._changed(status)

    def _watch(self, attempt: Supervised, pidfd: int) -> None:
        attempt.pidfd = pidfd
        self._loop.add_reader(pidfd, self._supervisor_ended, attempt)
        if attempt.stop_grace_seconds is not None:
            self._order_stop(attempt)

    def _supervisor_ended(self, attempt: Supervised) -> None:
        self._loop.remove_reader(attempt.pidfd)
        with contextlib.suppress(ChildProcessError):  # an earlier agent's child: init has reaped it
            os.waitid(os.P_PIDFD, attempt.pidfd, os.WEXITED | os.WNOHANG)
        os.close(attempt.pidfd)
        attempt.pidfd = -1
        attempt.gone.set()
        self._background.start(self._conclude(attempt))

    async def _conclude(self, attempt: Supervised) -> None:
        """The supervisor is gone: what it recorded is the end, or else it was killed and the attempt has failed."""
        assert attempt.directory is not None
        status = attempt.directory.status()
        if status is None or not status.ended:
            status = attempt.status if not attempt.live else await attempt.end_orphans(self._marker(attempt.key))
        await attempt.remove_group(patience_seconds=1.0)
        if attempt.throttle is not None:
            attempt.throttle.close()
        assert status is not None
        self._tell(attempt, status)

    # What was there before.

    async def _find(self, directory: AttemptDirectory) -> Found | None:
        """Take one attempt up again; None where it never began."""
        status = await first_status(directory)
        supervised = directory.supervised()
        if status is None and not supervised and not directory.was_begun():
            await self._forget_stillborn(directory)
            return None
        key = directory.key
        assignment = directory.assignment() or node_service_pb2.Assignment(
            job_id=key.job_id, number=key.number, epoch=status.epoch if status else 0
        )
        attempt = Supervised(key, assignment, directory)
        self._confine(attempt, directory)
        attempt.status = status or attempt.new_status("STARTING")
        self._attempts[key] = attempt
        if attempt.live:
            pidfd = open_process(attempt.status.pid, attempt.status.pid_start_ticks) if supervised else None
            if pidfd is None:
                self._background.start(self._conclude(attempt))
            else:
                self._watch(attempt, pidfd)
                await attempt.restore_cores()
        return Found(assignment, attempt.status)

    def _take_in_strays(self) -> list[Found]:
        if (node_group := self._surroundings.node_group) is None:
            return []
        known = {directory.path.name for directory in attempt_directory.find_directories(self._attempts_root)}
        taken = orphan_attempts.take_in(node_group, known, self._marker, self._context.inventory, self._context.node_id)
        for attempt in taken:
            self._attempts[attempt.key] = attempt
            self._background.start(self._conclude_stray(attempt))
        return [Found(attempt.assignment, attempt.status) for attempt in taken if attempt.status]

    async def _conclude_stray(self, attempt: Supervised) -> None:
        self._tell(attempt, await orphan_attempts.end_of(attempt, self._marker(attempt.key)))

    async def _forget_stillborn(self, directory: AttemptDirectory) -> None:
        """No supervisor was ever started: see to it that nothing of it is left."""
        log.info("attempt_never_began", attempt=str(directory.key))
        group = launch_module.attempt_group(self._surroundings, directory)
        await asyncio.to_thread(orphan_processes.end_remains, group, self._marker(directory.key), patience_seconds=1.0)
        if group is None or await asyncio.to_thread(group.remove):
            directory.remove()

    def _marker(self, key: AttemptKey) -> str:
        """A variable that all processes of an attempt have, and no others."""
        return f"COTENANT_PROGRESS={progress_socket(self._sockets, key)}"

    # What the agent asks for.

    async def launch(self, assignment: node_service_pb2.Assignment) -> None:
        """Check, then start a supervisor. Cores and GPUs are held from the first moment on."""
        key = AttemptKey(assignment.job_id, assignment.number)
        attempt = Supervised(key, assignment, None)
        wrong, fault = assignment_checks.spec_fault(assignment), self._fault(assignment)
        self._attempts[key] = attempt
        if assignment_checks.job_id_is_safe(key.job_id) and key.number > 0:
            attempt.directory = AttemptDirectory(self._attempts_root, key)
        if (wrong or fault) and attempt.directory is not None:
            with contextlib.suppress(OSError, RuntimeError):  # then its end is told, and not kept
                await asyncio.to_thread(attempt.directory.create, assignment)
        if wrong is not None:
            status = attempt.new_status("FAILED", wrong)
        elif fault is not None:
            status = attempt.new_status(NOT_LAUNCHED, fault, assignment_checks.cause_of(fault))
        else:
            try:
                await self._launch(attempt)
                return
            except Exception as error:  # whatever of ours failed, the program was not executed
                status = attempt.not_launched(error)
        await attempt.record_end(status)
        self._tell(attempt, status)

    def _fault(self, assignment: node_service_pb2.Assignment, changing: Supervised | None = None) -> str | None:
        others = [other for other in self._attempts.values() if other.live and other is not changing]
        live = [(str(other.key), held) for other in others for held in other.held]
        inventory, allocation = self._context.inventory, assignment.allocation
        return (
            assignment_checks.first_fault(assignment, inventory, self._context.node_id)
            or assignment_checks.offline(allocation, online_cpus())
            or assignment_checks.overlap(allocation, live, inventory)
        )

    async def _have_a_place(self) -> None:
        """Make the group of all attempts anew where it is gone: systemd ends a scope that nothing is in.

        And know the device files of GPUs that have come since: NVML may have been silent when we began.
        """
        group = self._surroundings.node_group
        if group is not None and not group.exists():
            place = await asyncio.to_thread(node_cgroup.open_place, self._context.node_id, reach_systemd())
            log.warning("node_group_was_gone", group=group.paths()[0])
            self._surroundings = dataclasses.replace(self._surroundings, node_group=place.node_group, home=place.home)

        if {gpu.uuid for gpu in self._context.inventory.gpus} != self._seen_gpus:
            self._context.inventory.not_enforced.extend(await self._look_at_gpus())

    async def _look_at_gpus(self) -> list[str]:
        """Find the device files by which tasks are kept apart; why they are not, where that is so."""
        gpus, group = self._context.inventory.gpus, self._surroundings.node_group
        self._seen_gpus = {gpu.uuid for gpu in gpus}
        devices = gpu_devices.gpu_devices(gpus, self._context.gpu_minors())
        advisory = await asyncio.to_thread(gpu_devices.why_advisory, group, gpus, devices)
        self._surroundings = dataclasses.replace(self._surroundings, gpu_devices={} if advisory else devices)
        return [advisory] if advisory else []

    async def _launch(self, attempt: Supervised) -> None:
        """Start a supervisor and watch it. Raises an error only where none was started."""
        assert attempt.directory is not None
        with launch_module.hook(LaunchCause.CGROUP):
            await self._have_a_place()
        self._confine(attempt, attempt.directory)
        progress_path = str(progress_socket(self._sockets, attempt.key))
        pid = await asyncio.to_thread(
            launch_module.launch, self._surroundings, attempt.directory, attempt.assignment, progress_path
        )
        await fail_points.reach("agent.launched")
        self._watch(attempt, await open_pidfd(pid))

    def stop(self, key: AttemptKey, grace_seconds: float) -> None:
        """Order the supervisor to end the attempt; while it is being started, as soon as it is."""
        if (attempt := self._attempts.get(key)) and attempt.live:
            attempt.stop_grace_seconds = grace_seconds
            attempt.stop_asked.set()
            self._order_stop(attempt)

    def _order_stop(self, attempt: Supervised) -> None:
        if attempt.throttle is not None and attempt.throttle.may_stand_still:
            self._background.start(attempt.wake_and_order_stop())
        else:
            attempt.order_stop()

    async def adopt(self, assignment: node_service_pb2.Assignment) -> str | None:
        """Take a newer assignment of a running attempt: its cores may differ, and are changed at once.

        Until the kernel and the record have them, it holds those of before and of after.
        """
        attempt = self._attempts[AttemptKey(assignment.job_id, assignment.number)]
        fault = self._fault(assignment, attempt) or assignment_checks.cannot_become(attempt.assignment, assignment)
        if fault is not None or attempt.cores is None:
            return fault
        attempt.promised = assignment.allocation
        try:
            await asyncio.to_thread(attempt.cores.resize, attempt.assignment, assignment)
            attempt.assignment = assignment
            if attempt.throttle is not None:
                await asyncio.to_thread(attempt.throttle.hold_again, assignment, self._context.inventory)
        except CoresRefused as error:
            return str(error)
        finally:
            attempt.promised = None
        return None

    async def heal(self) -> None:
        """CPUs have come or gone: let each attempt use all of its own that are on line now."""
        for attempt in [each for each in self._attempts.values() if each.live and each.cores is not None]:
            await attempt.heal_cores()

    async def narrow(self, key: AttemptKey, cores: int | None) -> str | None:
        """Let each task of an attempt use only so many of its cores for a while."""
        attempt = self._attempts.get(key)
        if attempt is None or attempt.cores is None or not attempt.live:
            return None if cores is None else "it is not running"
        try:
            await asyncio.to_thread(attempt.cores.narrow, attempt.assignment.allocation, self._context.inventory, cores)
        except CoresRefused as error:
            return str(error)
        return None

    async def throttle(self, key: AttemptKey, throttle: Throttle) -> Held:
        """Hold an attempt back so and not otherwise."""
        attempt = self._attempts.get(key)
        if attempt is None or attempt.throttle is None or not attempt.live:
            return Held(refused=() if throttle.free else ("it is not running",))
        return await asyncio.to_thread(attempt.throttle.hold, attempt.assignment, self._context.inventory, throttle)

    def held(self, key: AttemptKey) -> Held:
        """How an attempt is held back."""
        attempt = self._attempts.get(key)
        return (
            attempt.throttle.held if attempt is not None and attempt.live and attempt.throttle is not None else Held()
        )

    async def usage(self, key: AttemptKey) -> Usage | None:
        """Read the account of the control group, or without one of the processes."""
        attempt = self._attempts.get(key)
        return await attempt.usage() if attempt is not None and attempt.live else None

    def output_directory(self, key: AttemptKey) -> Path | None:
        """Where the output lies, wherever the attempt is in its life."""
        if not assignment_checks.job_id_is_safe(key.job_id):
            return None
        for root in (self._attempts_root, self._kept_root):
            path = AttemptDirectory(root, key).path
            if path.is_dir():
                return path
        return None

    async def forget(self, key: AttemptKey) -> None:
        """Keep the output for a while and drop the rest, once the group is gone: these files are how it is known."""
        attempt = self._attempts.pop(key, None)
        if attempt is None or attempt.directory is None:
            return
        stand_together(progress_socket(self._sockets, key))
        if attempt.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):  # it may be trying to record the end on a full disk
                signal.pidfd_send_signal(attempt.pidfd, signal.SIGTERM)
            await attempt.gone.wait()
        await self._keeper.keep(attempt, attempt.directory)

    async def close(self) -> None:
        """Stop listening and watching; supervisors go on and tell the next agent."""
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for attempt in self._attempts.values():
            if attempt.pidfd >= 0:
                self._loop.remove_reader(attempt.pidfd)
                os.close(attempt.pidfd)
                attempt.pidfd = -1
        await self._background.close()
