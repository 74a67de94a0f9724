"""Runs attempts as processes under supervisors that outlive the agent.

The agent holds nothing that a job needs. It starts one supervisor per attempt, receives its state by datagrams, and
waits for its end on a pidfd. After a restart it finds the directories, sees by their locks which supervisors are alive,
and waits on those again. A supervisor that dies before its attempt takes its direct children along; the other processes
are killed here, and the attempt has failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import structlog

from cotenant import fail_points
from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.core.model.image_reference import InvalidReference
from cotenant.core.model.lifecycle import LaunchCause
from cotenant.core.model.throttle import Throttle
from cotenant.node_agent.containers.container_config import Image
from cotenant.node_agent.containers.container_runtime import find_runtime
from cotenant.node_agent.containers.images import CACHE, ImageStore
from cotenant.node_agent.containers.oci_layout import BadImage
from cotenant.node_agent.enforcement import hooks
from cotenant.node_agent.enforcement.core_changes import CoresRefused
from cotenant.node_agent.enforcement.hook import EnforcedNode
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
from cotenant.node_agent.runtime.output_retention import OutputRetention
from cotenant.node_agent.runtime.running_attempt import RunningAttempt, conclude_at_last, first_status, open_pidfd
from cotenant.node_agent.runtime.runtime_port import (
    RecoveredAttempt,
    RuntimeContext,
    SessionCommand,
    SessionFailed,
    ThrottleState,
    Usage,
)
from cotenant.node_agent.runtime.secret_files import open_secret_files
from cotenant.node_agent.runtime.session_process import SessionProcess, start_session
from cotenant.node_agent.runtime.socket_paths import NOTIFY, progress_socket, remove_private_directory, socket_directory
from cotenant.node_agent.runtime.supervisor_start import SupervisorProcess
from cotenant.node_agent.runtime.systemd_scope import reach_systemd
from cotenant.node_agent.runtime.uploaded_folder import CannotFetch, FetchProgress, FetchStopped, UploadedFolders
from cotenant.node_agent.supervisor.kernel_files import online_cpus
from cotenant.node_agent.supervisor.launch_faults import NOT_LAUNCHED
from cotenant.rpc.task_group import BackgroundTasks

log = structlog.get_logger()

DATAGRAM_BYTES_MAX = 1 << 18


class ProcessRuntime:
    """Runs attempts as processes of this machine, in control groups if available."""

    api_version: ClassVar[int] = 1
    name: ClassVar[str] = "process"

    def __init__(self) -> None:
        self._attempts: dict[AttemptKey, RunningAttempt] = {}
        self._background = BackgroundTasks()
        self._not_enforced: list[str] = []
        self._seen_gpus: set[str] = set()
        self._cdi_state: tuple[object, ...] = ()

    async def open(self, context: RuntimeContext, changed: Callable[[Status], None]) -> Sequence[RecoveredAttempt]:
        """Bind the supervisors' socket, then read the recorded attempts."""
        self._context = context
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        self._attempts_root, self._kept_root = (context.state_dir / name for name in ("attempts", "kept"))
        for root in (self._attempts_root, self._kept_root):
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._retention = OutputRetention(
            self._kept_root, keep_max=context.kept_max, seconds_max=context.kept_seconds_max
        )
        self._sockets = socket_directory(context.state_dir)
        self._counters = Resctrl.open()
        place = await self._open_node_cgroup()
        secrets = await asyncio.to_thread(open_secret_files, context.state_dir)
        private = [context.state_dir, secrets.root, *context.hidden]
        identity = await asyncio.to_thread(find_identity, context.users, private)
        containers = await asyncio.to_thread(find_runtime, isolated=bool(identity.hidden))
        self._surroundings = launch_module.launch_context(
            context, place, str(self._sockets / NOTIFY), identity.hidden, secrets, containers
        )
        self._images = ImageStore(context.state_dir / CACHE, context.image_cache_bytes, self._images_in_use)
        if containers is not None:
            await asyncio.to_thread(self._images.open)
        context.inventory.container_runtime = str(containers or "")
        if containers is not None:
            await asyncio.to_thread(self._find_container_gpus)
        context.inventory.shared_user = identity.user
        self._not_enforced = [*await self._open_hooks(), *place.not_enforced, *identity.not_enforced]
        await asyncio.to_thread(self._surroundings.starter.open, context.state_dir, place.home)
        self._listen()
        found = [await self._find(directory) for directory in attempt_directory.find_directories(self._attempts_root)]
        return [each for each in found if each] + self._recover_orphans()

    def not_enforced(self) -> Sequence[str]:
        """Return what hooks, control groups and identities cannot enforce here."""
        return self._not_enforced

    def _confine(self, attempt: RunningAttempt, directory: AttemptDirectory) -> None:
        group, known = launch_module.attempt_group(self._surroundings, directory), self._surroundings.hooks
        attempt.group = group
        attempt.cores = AttemptCores(group, directory, known)
        attempt.throttle = AttemptThrottle(group, directory, attempt.cores, known, self._counters)

    def _listen(self) -> None:
        path = self._surroundings.notify_path
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._listener.bind(path)
        self._loop.add_reader(self._listener, self._receive)

    # Messages from supervisors.

    def _receive(self) -> None:
        """Handle one datagram: a supervisor's complete state."""
        try:
            status = parse_status(self._listener.recv(DATAGRAM_BYTES_MAX))
        except BlockingIOError:
            return
        except ValueError as error:
            log.warning("supervisor_message_invalid", error=str(error))
            return
        if attempt := self._attempts.get(status.key):
            if attempt.directory is None and attempt.stop_grace_seconds is not None and status.ended:
                status = attempt.stopped(status)  # an orphan's supervisor does not know of the agent's stop
            self._notify(attempt, status)

    def _notify(self, attempt: RunningAttempt, status: Status) -> None:
        """Pass a status on if it changed; after the end nothing changes."""
        status = attempt.as_ordered(status)
        if attempt.live and status != attempt.status:
            attempt.status = status
            self._changed(status)

    def _watch(self, attempt: RunningAttempt, pidfd: int | None) -> None:
        """Wait for the end of a supervisor; conclude its attempt if it has ended already."""
        if pidfd is None:
            attempt.gone.set()
            self._background.start(self._conclude(attempt))
            return
        attempt.pidfd = pidfd
        self._loop.add_reader(pidfd, self._supervisor_ended, attempt)
        if attempt.stop_grace_seconds is not None:
            self._order_stop(attempt)

    def _supervisor_ended(self, attempt: RunningAttempt) -> None:
        self._loop.remove_reader(attempt.pidfd)
        with contextlib.suppress(ChildProcessError):  # the zygote's child, or an earlier agent's
            os.waitid(os.P_PIDFD, attempt.pidfd, os.WEXITED | os.WNOHANG)
        os.close(attempt.pidfd)
        attempt.pidfd = -1
        attempt.gone.set()
        self._background.start(self._conclude(attempt))

    async def _conclude(self, attempt: RunningAttempt) -> None:
        """Conclude an attempt whose supervisor is gone, once the agent has what it needs for that."""
        await conclude_at_last(lambda: self._conclude_supervised(attempt), attempt.key)

    async def _conclude_supervised(self, attempt: RunningAttempt) -> None:
        """Conclude an attempt with its recorded end, or as failed because its supervisor was killed."""
        assert attempt.directory is not None
        status = attempt.directory.status()
        if status is None or not status.ended:
            status = attempt.status if not attempt.live else await attempt.end_orphans(self._marker(attempt.key))
        self._remove_private(attempt.directory.path.name)
        await attempt.remove_group(timeout_seconds=1.0)
        assert status is not None
        self._notify(attempt, status)

    # Recovery.

    async def _find(self, directory: AttemptDirectory) -> RecoveredAttempt | None:
        """Recover one attempt; return None if it never started."""
        status = await first_status(directory)
        supervised = directory.supervised()
        if status is None and not supervised and not directory.was_started():
            await self._remove_unstarted(directory)
            return None
        key = directory.key
        assignment = directory.assignment() or agent_pb2.Assignment(
            job_id=key.job_id, number=key.number, epoch=status.epoch if status else 0
        )
        attempt = RunningAttempt(key, assignment, directory)
        self._confine(attempt, directory)
        attempt.status = status or attempt.new_status("STARTING")
        self._attempts[key] = attempt
        if attempt.live:
            known = SupervisorProcess(attempt.status.pid, attempt.status.pid_start_ticks)
            pidfd = await open_pidfd(known) if supervised else None
            self._watch(attempt, pidfd)
            if pidfd is not None:
                await attempt.restore_cores()
        else:  # it ended while no agent ran, or the last one was killed before it removed what the hooks had made
            await asyncio.to_thread(self._remove_private, directory.path.name)
        return RecoveredAttempt(assignment, attempt.status)

    def _recover_orphans(self) -> list[RecoveredAttempt]:
        if (node_group := self._surroundings.node_group) is None:
            return []
        known = {directory.path.name for directory in attempt_directory.find_directories(self._attempts_root)}
        taken = orphan_attempts.recover_orphans(
            node_group, known, self._marker, self._context.inventory, self._context.node_id
        )
        for attempt in taken:
            self._attempts[attempt.key] = attempt
            self._background.start(self._conclude_orphan(attempt))
        return [RecoveredAttempt(attempt.assignment, attempt.status) for attempt in taken if attempt.status]

    async def _conclude_orphan(self, attempt: RunningAttempt) -> None:
        async def conclude() -> None:
            status = await orphan_attempts.wait_for_end(attempt, self._marker(attempt.key))
            self._remove_private(AttemptDirectory(self._attempts_root, attempt.key).path.name)
            self._notify(attempt, status)

        await conclude_at_last(conclude, attempt.key)

    async def _remove_unstarted(self, directory: AttemptDirectory) -> None:
        """Remove everything of an attempt whose supervisor was never started."""
        log.info("attempt_never_started", attempt=str(directory.key))
        group = launch_module.attempt_group(self._surroundings, directory)
        await asyncio.to_thread(orphan_processes.kill_orphans, group, self._marker(directory.key), timeout_seconds=1.0)
        await asyncio.to_thread(self._remove_private, directory.path.name)
        if group is None or await asyncio.to_thread(group.remove):
            directory.remove()

    def _remove_private(self, name: str) -> None:
        """Remove what was made for an attempt outside of its group and its directory."""
        hooks.end(self._surroundings.hooks, name)
        self._surroundings.secrets.remove(name)

    def _marker(self, key: AttemptKey) -> str:
        """Return an environment variable that all processes of an attempt have, and no others."""
        return f"COTENANT_PROGRESS={progress_socket(self._sockets, key)}"

    # Operations for the agent.

    async def launch(self, assignment: agent_pb2.Assignment) -> None:
        """Check the assignment, then start a supervisor. Cores and GPUs are held from the start."""
        key = AttemptKey(assignment.job_id, assignment.number)
        attempt = RunningAttempt(key, assignment, None)
        wrong, fault = assignment_checks.spec_fault(assignment), self._fault(assignment)
        self._attempts[key] = attempt
        if assignment_checks.job_id_is_safe(key.job_id) and key.number > 0:
            attempt.directory = AttemptDirectory(self._attempts_root, key)
        if (wrong or fault) and attempt.directory is not None:
            with contextlib.suppress(OSError, RuntimeError):  # then its end is reported, but not kept
                await asyncio.to_thread(attempt.directory.create, assignment)
        if wrong is not None:
            status = attempt.new_status("FAILED", wrong)
        elif fault is not None:
            status = attempt.new_status(NOT_LAUNCHED, fault, assignment_checks.cause_of(fault))
        else:
            try:
                await self._launch(attempt)
                return
            except FetchStopped:
                status = attempt.stopped(attempt.new_status("STOPPED", "stopped before it started"))
            except Exception as error:  # any failure of ours: the program was not executed
                status = attempt.not_launched(error)
        await attempt.record_end(status)
        self._notify(attempt, status)

    def _fault(self, assignment: agent_pb2.Assignment, changing: RunningAttempt | None = None) -> str | None:
        others = [other for other in self._attempts.values() if other.live and other is not changing]
        live = [(str(other.key), held) for other in others for held in other.held]
        inventory, allocation = self._context.inventory, assignment.allocation
        return (
            assignment_checks.first_fault(assignment, inventory, self._context.node_id)
            or assignment_checks.offline(allocation, online_cpus())
            or assignment_checks.resource_conflict(allocation, live, inventory)
        )

    async def _open_node_cgroup(self) -> node_cgroup.NodeCgroup:
        nested, node_id = self._context.nesting is not None, self._context.node_id
        bus = None if nested else reach_systemd()
        return await asyncio.to_thread(node_cgroup.open_node_cgroup, node_id, bus, nested=nested)

    async def _ensure_node_cgroup(self) -> None:
        """Create the group of all attempts again if it is gone: systemd removes an empty scope.

        Also open the hooks again if there are new GPUs: NVML may not have answered at startup.
        """
        group = self._surroundings.node_group
        if group is not None and not group.exists():
            place = await self._open_node_cgroup()
            log.warning("node_cgroup_recreated", group=group.paths()[0])
            self._surroundings = dataclasses.replace(self._surroundings, node_group=place.node_group, home=place.home)

        if self._surroundings.containers is not None and self._context.inventory.gpus:
            await asyncio.to_thread(self._find_container_gpus)
        if {gpu.uuid for gpu in self._context.inventory.gpus} != self._seen_gpus:
            known, found = self._context.inventory.not_enforced, await self._open_hooks()
            known.extend([sentence for sentence in found if sentence not in known])

    async def _open_hooks(self) -> list[str]:
        """Let the hooks find out what can be enforced here; return what cannot be."""
        context = self._context
        self._seen_gpus = {gpu.uuid for gpu in context.inventory.gpus}
        group = self._surroundings.node_group
        node = EnforcedNode(group, context.inventory, context.gpu_minors(), context.settings, context.node_id)
        return await asyncio.to_thread(hooks.open_hooks, self._surroundings.hooks, node)

    def _find_container_gpus(self) -> None:
        """Note in the inventory whether containers get GPUs. Blocks."""
        gpus = self._surroundings.container_gpus
        why = gpus.why_none() if gpus else ""
        if why and not self._context.inventory.container_gpus_missing:
            log.warning("container_gpus_missing", why=why)
        self._context.inventory.container_gpus_missing = why

    async def refresh_container_gpus(self) -> bool:
        """Look at the CDI specs again if they have changed; return whether that changes the inventory."""
        gpus, before = self._surroundings.container_gpus, self._context.inventory.container_gpus_missing
        if self._surroundings.containers is None or gpus is None:
            return False
        state = await asyncio.to_thread(gpus.state_of_specs)
        if state == self._cdi_state:
            return False
        self._cdi_state = state
        await asyncio.to_thread(self._find_container_gpus)
        return self._context.inventory.container_gpus_missing != before

    async def _launch(self, attempt: RunningAttempt) -> None:
        """Start a supervisor and watch it. Raises an error only if none was started."""
        assert attempt.directory is not None
        with launch_module.launch_step(LaunchCause.CGROUP):
            await self._ensure_node_cgroup()
        self._confine(attempt, attempt.directory)
        image = await self._prepare_image(attempt)
        async with self._build_folder(attempt) as build_folder:
            secrets = await self._fetch_secrets(attempt)
            supervisor = await asyncio.to_thread(
                launch_module.launch,
                self._surroundings,
                attempt.directory,
                attempt.assignment,
                str(progress_socket(self._sockets, attempt.key)),
                build_folder,
                image,
                secrets,
            )
        await fail_points.reach("agent.launched")
        self._watch(attempt, await open_pidfd(supervisor))

    async def _prepare_image(self, attempt: RunningAttempt) -> Image | None:
        """Return the attempt's image, unpacked; None if it has none.

        Raises:
            CannotLaunch: there is no such image, or it cannot be used here.
            FetchStopped: the attempt was stopped meanwhile.
        """
        wanted = attempt.assignment.spec.container.image
        if not wanted:
            return None
        if self._surroundings.containers is None:
            raise launch_module.CannotLaunch("this node has no container runtime", LaunchCause.IMAGE)
        with launch_module.launch_step(LaunchCause.USER):
            user = await asyncio.to_thread(self._surroundings.users.of, attempt.assignment.submitter)
        tell = functools.partial(self._context.tell_launch, attempt.key)
        progress = FetchProgress(str(attempt.key), "image_unpacking", doing="unpacking its image", tell=tell)
        try:
            with launch_module.launch_step(LaunchCause.DIRECTORY), progress:
                rights = user.to_spec() if user else None
                image = await self._images.prepare(wanted, rights, attempt.stop_asked, progress)
        except (BadImage, InvalidReference) as error:
            raise launch_module.CannotLaunch(str(error), LaunchCause.IMAGE) from None
        if image is None:
            raise FetchStopped
        attempt.image_digest = image.digest
        return image

    def _images_in_use(self) -> list[str]:
        starting = [attempt.image_digest for attempt in list(self._attempts.values())]
        directories = attempt_directory.find_directories(self._attempts_root)
        return [*starting, *(launch_module.recorded_image(directory) for directory in directories)]

    async def _fetch_secrets(self, attempt: RunningAttempt) -> Mapping[str, bytes]:
        """Return the attempt's secrets by name.

        Raises:
            CannotLaunch: they cannot be fetched.
            FetchStopped: the attempt was stopped meanwhile.
        """
        if not attempt.assignment.spec.secrets:
            return {}
        if self._context.secrets is None:
            raise launch_module.CannotLaunch("this node cannot fetch secrets", LaunchCause.SECRET)
        try:
            return await self._context.secrets.read(attempt.assignment, attempt.stop_asked)
        except CannotFetch as error:
            raise launch_module.CannotLaunch(str(error), LaunchCause.SECRET) from None

    @contextlib.asynccontextmanager
    async def _build_folder(self, attempt: RunningAttempt) -> AsyncIterator[launch_module.BuildFolder | None]:
        """Fetch the attempt's uploaded folder, and yield how to build it; None if it needs no copy.

        Raises:
            CannotLaunch: it cannot be fetched.
            FetchStopped: the attempt was stopped meanwhile.
        """
        spec = attempt.assignment.spec
        if not spec.upload or await asyncio.to_thread(launch_module.has_submit_directory, spec):
            yield None
            return
        folders, stop_asked = self._context.folders, attempt.stop_asked
        if folders is None:
            raise launch_module.CannotLaunch("this node cannot fetch uploaded folders", LaunchCause.UPLOAD)
        progress = FetchProgress(str(attempt.key), tell=functools.partial(self._context.tell_launch, attempt.key))
        try:
            with launch_module.launch_step(LaunchCause.DIRECTORY), progress:
                folder = await folders.fetch(attempt.assignment, stop_asked, progress)
        except CannotFetch as error:
            raise launch_module.CannotLaunch(str(error), LaunchCause.UPLOAD) from None
        with folders.released(folder):
            yield lambda work, owner: folders.build(folder, work, owner, stop_asked.is_set)
        self._background.start(self._shrink_folders(folders))

    async def _shrink_folders(self, folders: UploadedFolders) -> None:
        try:
            await asyncio.to_thread(folders.shrink)
        except OSError as error:
            log.warning("folder_cache_not_shrunk", error=str(error))

    async def open_session(self, key: AttemptKey, wanted: SessionCommand) -> SessionProcess:
        """Start a process for a session, as a child of the agent that ends with it."""
        attempt = self._attempts.get(key)
        if attempt is None or attempt.directory is None or not attempt.live:
            raise SessionFailed(f"{key} is not running on this node")
        pid = attempt.directory.task_pids().get(wanted.rank)
        if pid is None:
            raise SessionFailed(f"rank {wanted.rank} of {key} has no running process on this node")
        try:
            return await asyncio.to_thread(start_session, attempt.directory.path, wanted, pid)
        except OSError as error:
            raise SessionFailed(f"no process can be started: {error.strerror}") from error

    def stop(self, key: AttemptKey, grace_seconds: float, reason: str = "") -> None:
        """Order the supervisor to stop the attempt, as soon as it has started."""
        if (attempt := self._attempts.get(key)) and attempt.live:
            attempt.stop_grace_seconds, attempt.stop_reason = grace_seconds, attempt.stop_reason or reason
            attempt.stop_asked.set()
            self._order_stop(attempt)

    async def limit_time(self, key: AttemptKey, limit_seconds: float | None) -> str | None:
        """Hold a running attempt to another time limit."""
        attempt = self._attempts.get(key)
        if attempt is None or not attempt.live:
            return "it does not run"
        return await asyncio.to_thread(attempt.order_time_limit, limit_seconds)

    def _order_stop(self, attempt: RunningAttempt) -> None:
        if attempt.throttle is not None and attempt.throttle.may_be_suspended:
            self._background.start(attempt.resume_and_order_stop())
        else:
            attempt.order_stop()

    async def adopt(self, assignment: agent_pb2.Assignment) -> str | None:
        """Adopt a newer assignment of a running attempt: its cores may differ, and are changed at once.

        Until the kernel and the record have the new cores, the attempt holds both the old and the new ones.
        """
        attempt = self._attempts[AttemptKey(assignment.job_id, assignment.number)]
        fault = self._fault(assignment, attempt) or assignment_checks.change_refusal(attempt.assignment, assignment)
        if fault is not None or attempt.cores is None:
            return fault
        attempt.promised = assignment.allocation
        try:
            await asyncio.to_thread(attempt.cores.resize, attempt.assignment, assignment)
            attempt.assignment = assignment
            if attempt.throttle is not None:
                await asyncio.to_thread(attempt.throttle.reapply, assignment, self._context.inventory)
        except CoresRefused as error:
            return str(error)
        finally:
            attempt.promised = None
        return None

    async def heal(self) -> None:
        """Let each attempt use all of its online CPUs after CPUs went offline or came online."""
        for attempt in [each for each in self._attempts.values() if each.live and each.cores is not None]:
            await attempt.heal_cores()

    async def narrow(self, key: AttemptKey, cores: int | None) -> str | None:
        """Limit each task of an attempt to `cores` of its cores for a while."""
        attempt = self._attempts.get(key)
        if attempt is None or attempt.cores is None or not attempt.live:
            return None if cores is None else "not running"
        try:
            await asyncio.to_thread(attempt.cores.narrow, attempt.assignment.allocation, self._context.inventory, cores)
        except CoresRefused as error:
            return str(error)
        return None

    async def throttle(self, key: AttemptKey, throttle: Throttle) -> ThrottleState:
        """Apply exactly this throttle to an attempt."""
        attempt = self._attempts.get(key)
        if attempt is None or attempt.throttle is None or not attempt.live:
            return ThrottleState(refused=() if throttle.free else ("not running",))
        return await asyncio.to_thread(attempt.throttle.apply, attempt.assignment, self._context.inventory, throttle)

    def held(self, key: AttemptKey) -> ThrottleState:
        """Return an attempt's throttle."""
        attempt = self._attempts.get(key)
        return (
            attempt.throttle.held
            if attempt is not None and attempt.live and attempt.throttle is not None
            else ThrottleState()
        )

    async def usage(self, key: AttemptKey) -> Usage | None:
        """Return the usage from the control group, or without one from the processes."""
        attempt = self._attempts.get(key)
        return await attempt.usage() if attempt is not None and attempt.live else None

    def output_directory(self, key: AttemptKey) -> Path | None:
        """Return the directory of an attempt's output, running or kept."""
        if not assignment_checks.job_id_is_safe(key.job_id):
            return None
        for root in (self._attempts_root, self._kept_root):
            path = AttemptDirectory(root, key).path
            if path.is_dir():
                return path
        return None

    async def forget(self, key: AttemptKey) -> None:
        """Keep the output for a while and remove everything else, the group first: the files are how it is known."""
        attempt = self._attempts.pop(key, None)
        if attempt is None or attempt.directory is None:
            return
        remove_private_directory(progress_socket(self._sockets, key))
        if attempt.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):  # it may be retrying to record the end on a full disk
                signal.pidfd_send_signal(attempt.pidfd, signal.SIGTERM)
            await attempt.gone.wait()
        await self._retention.keep(attempt, attempt.directory)

    async def close(self) -> None:
        """Stop listening and watching; supervisors continue and report to the next agent."""
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for attempt in self._attempts.values():
            if attempt.pidfd >= 0:
                self._loop.remove_reader(attempt.pidfd)
                os.close(attempt.pidfd)
                attempt.pidfd = -1
        await self._background.close()
        await asyncio.to_thread(self._surroundings.starter.close)
        if not self._attempts:  # attempts that live on hide the directory from each other
            self._surroundings.secrets.close()
        group = self._surroundings.node_group
        if (
            self._context.nesting is not None
            and group is not None
            and not any(each.live for each in self._attempts.values())
        ):
            await asyncio.to_thread(node_cgroup.remove_nested, group)
