"""Starts a supervisor for an attempt: its directory, control groups, spec and process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cotenant import file_descriptors
from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.core.model.lifecycle import LaunchCause
from cotenant.folders.chunk_files import ChunkDamaged
from cotenant.history.events import Began
from cotenant.history.recording import record
from cotenant.history.stored import holds_of
from cotenant.node_agent.containers.cdi import NO_EDITS, ContainerEdits
from cotenant.node_agent.containers.container_config import (
    HOST_FILES,
    Bind,
    ContainerPlace,
    Image,
    container_environment,
    container_spec,
    variables_of,
)
from cotenant.node_agent.containers.container_gpus import ContainerGpus, NoDevice
from cotenant.node_agent.containers.container_runtime import Runtime
from cotenant.node_agent.enforcement.core_changes import task_group
from cotenant.node_agent.enforcement.hook import NewAttempt
from cotenant.node_agent.enforcement.hooks import Hooks, end_hook, make_hooks, variables
from cotenant.node_agent.probes.outer_job import Nesting
from cotenant.node_agent.runtime.assignment_checks import command_of, warning_signal_of
from cotenant.node_agent.runtime.attempt_directory import AttemptDirectory
from cotenant.node_agent.runtime.node_cgroup import NodeCgroup
from cotenant.node_agent.runtime.node_identity import paths_to_hide
from cotenant.node_agent.runtime.run_as import User, UserMapping, UserNotAllowed
from cotenant.node_agent.runtime.runtime_port import RuntimeContext
from cotenant.node_agent.runtime.secret_files import NO_SECRETS, VARIABLE, SecretFiles, WrittenSecrets
from cotenant.node_agent.runtime.socket_paths import make_private_directory
from cotenant.node_agent.runtime.supervisor_start import SupervisorProcess, SupervisorStarter
from cotenant.node_agent.runtime.task_environment import clean_environment, environment_of_user, task_environment
from cotenant.node_agent.supervisor.cgroups import Group, GroupError
from cotenant.node_agent.supervisor.container import FOLDER, LAYER, ROOT_FILES
from cotenant.node_agent.supervisor.launch_faults import cause_of
from cotenant.node_agent.supervisor.lease import LEASE, boot_seconds, read_lease
from cotenant.v1 import job_pb2, resources_pb2

BUNDLES = "containers"  # directory of an attempt's directory
IMAGE = "image"  # file in it: the digest of the image
BuildFolder = Callable[[Path, tuple[int, int] | None], None]
GRACE_SECONDS_DEFAULT = 30.0
UNCONFINED = Group(1, {}, ())  # no controllers and no directories


class CannotLaunch(Exception):
    """An attempt cannot be started for this reason; `cause` is its `LaunchCause`."""

    def __init__(self, reason: str, cause: LaunchCause) -> None:
        super().__init__(reason)
        self.cause = cause


@contextmanager
def launch_step(cause: LaunchCause) -> Iterator[None]:
    """Raise `CannotLaunch` for an error within, with this cause unless the error has a more specific one."""
    try:
        yield
    except (OSError, GroupError, UserNotAllowed, ChunkDamaged) as error:
        raise CannotLaunch(str(error), LaunchCause(cause_of(error, cause.value))) from error


@dataclass(frozen=True, slots=True)
class LaunchContext:
    """What all attempts of a node share.

    `hooks` enforce their limits. `home` is the group that supervisors move to, None if they stay in the agent's.
    `hidden` are paths that namespaces hide from jobs; if it is empty, jobs have no namespaces of their own. `starter`
    starts their supervisors. `containers` runs those that have an image, `container_gpus` gives these their GPUs; they
    mount only what is in `mounts_allowed`, None: anything but `private`. `secrets` keeps secrets. `nesting` describes
    the outer job, if the agent runs in one.
    """

    node_group: Group | None
    all_cpus: tuple[int, ...]
    notify_path: str
    lease_path: str
    output_bytes_max: int
    base_environment: Mapping[str, str]
    hooks: Hooks = field(default_factory=make_hooks)
    home: Group | None = None
    users: UserMapping = field(default_factory=UserMapping)
    hidden: tuple[str, ...] = ()
    starter: SupervisorStarter = field(default_factory=SupervisorStarter)
    containers: Runtime | None = None
    secrets: SecretFiles = field(default_factory=lambda: SecretFiles(Path("/nonexistent")))
    nesting: Nesting | None = None
    container_gpus: ContainerGpus | None = None
    mounts_allowed: tuple[str, ...] | None = None
    private: tuple[str, ...] = ()


def launch_context(
    context: RuntimeContext,
    place: NodeCgroup,
    notify_path: str,
    hidden: tuple[str, ...],
    secrets: SecretFiles,
    containers: Runtime | None = None,
) -> LaunchContext:
    """Return what a node's attempts share, with hooks that are still to be opened."""
    return LaunchContext(
        node_group=place.node_group,
        all_cpus=tuple(sorted(cpu for core in context.inventory.cores for cpu in core.cpus)),
        notify_path=notify_path,
        lease_path=str(context.state_dir / LEASE),
        output_bytes_max=context.output_bytes_max,
        base_environment=clean_environment(os.environ),
        home=place.home,
        users=UserMapping(context.users, shared=context.shared_identity),
        hidden=hidden,
        containers=containers,
        secrets=secrets,
        nesting=context.nesting,
        container_gpus=ContainerGpus(context.inventory, context.gpu_minors, context.cdi_directories),
        mounts_allowed=context.mounts_allowed,
        private=tuple(map(str, paths_to_hide([context.state_dir, secrets.root, *context.hidden]))),
    )


def grace_seconds_of(assignment: agent_pb2.Assignment) -> float:
    """Return a job's grace period between warning and kill, unless the stop order sets another."""
    spec = assignment.spec
    return spec.grace.ToMicroseconds() / 1e6 if spec.HasField("grace") else GRACE_SECONDS_DEFAULT


def disconnect_limit_of(assignment: agent_pb2.Assignment, lease_path: str) -> dict[str, object] | None:
    """Return how long the attempt may run without the control plane, for the spec; None if forever."""
    if not assignment.spec.HasField("stop_after_disconnected"):
        return None
    allowed_seconds = assignment.spec.stop_after_disconnected.ToMicroseconds() / 1e6
    half_ago = boot_seconds() - allowed_seconds / 2  # the assignment itself proves contact
    return {
        "path": lease_path,
        "allowed_seconds": allowed_seconds,
        "heard_seconds": max(read_lease(lease_path), half_ago),
    }


def time_limit_seconds_of(assignment: agent_pb2.Assignment) -> float | None:
    """Return how long the attempt may run, grace included; None if forever."""
    spec = assignment.spec
    return spec.time_limit.ToMicroseconds() / 1e6 if spec.HasField("time_limit") else None


def outer_process_spec(nesting: Nesting | None) -> dict[str, object] | None:
    """Return what a supervisor knows of the outer job; None if there is none."""
    if nesting is None:
        return None
    pid, ticks = nesting.job.process or (None, None)
    return {"name": nesting.job.name, "pid": pid, "start_ticks": ticks}


def attempt_group(surroundings: LaunchContext, directory: AttemptDirectory) -> Group | None:
    """Return an attempt's control group, which may not exist yet.

    A launched attempt keeps its group wherever new ones are created now.
    """
    if (recorded := directory.recorded_group()) is not None and recorded.exists():
        return recorded
    return surroundings.node_group.child(directory.path.name) if surroundings.node_group else None


def launch(
    surroundings: LaunchContext,
    directory: AttemptDirectory,
    assignment: agent_pb2.Assignment,
    progress_path: str,
    build_folder: BuildFolder | None = None,
    image: Image | None = None,
    secrets: Mapping[str, bytes] = MappingProxyType({}),
) -> SupervisorProcess:
    """Start the supervisor; `build_folder` fills the working directory, `secrets` are by name. Blocks.

    With an image, tasks run in containers.

    Raises:
        CannotLaunch: a step fails.
        FetchStopped: the attempt was stopped while its folder was built.
    """
    group = attempt_group(surroundings, directory)
    devices = devices_of(surroundings, assignment) if image is not None else {}
    if image is None:  # otherwise the directory is in the container
        check_working_directory(assignment.spec.working_directory)
    with launch_step(LaunchCause.USER):
        user = surroundings.users.of(assignment.submitter)
    with ExitStack() as undo:
        with launch_step(LaunchCause.DIRECTORY):
            directory.create(assignment)
            if user is not None:
                directory.grant_to(user.uid, user.gid)
                restrict_socket(progress_path, user.uid)
        if group is not None:
            undo.callback(_remove, group)
            make_group(group)
        owner = (user.uid, user.gid) if user else None
        new = NewAttempt(directory.path.name, directory.path, group or UNCONFINED, assignment, owner)
        enforce(surroundings.hooks, new, undo)
        with launch_step(LaunchCause.DIRECTORY):
            if build_folder is not None:
                build_folder(directory.path / "work", owner)
            written = write_secrets(surroundings.secrets, new, secrets, undo)
            spec = supervisor_spec(surroundings, directory, new, progress_path, user, image, written, devices)
            if build_folder is not None:
                start_in_copy(spec)
            if image is not None:
                put_in_containers(spec, surroundings, directory, image, progress_path, written.files, devices)
                mount_in_containers(spec, surroundings, assignment.spec)
            directory.write_spec(spec)
        with launch_step(LaunchCause.PROCESS):
            record(_begins(assignment))
            supervisor = surroundings.starter.start(directory, surroundings.home)
        if supervisor is None:
            raise CannotLaunch("another supervisor still runs this attempt", LaunchCause.ORDER)
        undo.pop_all()
        return supervisor


def devices_of(surroundings: LaunchContext, assignment: agent_pb2.Assignment) -> dict[int, ContainerEdits]:
    """Return what containers need for the GPUs of their tasks, by rank. Raises `CannotLaunch`."""
    found = {}
    for task in assignment.allocation.tasks:
        if task.gpus:
            assert surroundings.container_gpus is not None  # as there is an image
            try:
                found[task.rank] = surroundings.container_gpus.edits(share.uuid for share in task.gpus)
            except NoDevice as error:
                raise CannotLaunch(str(error), LaunchCause.DEVICE) from error
    return found


def mount_in_containers(spec: dict[str, Any], surroundings: LaunchContext, job: job_pb2.JobSpec) -> None:
    """Let each container mount what its job names, as far as this node allows it."""
    wanted = [{"source": one.source, "target": one.target, "read_only": one.read_only} for one in job.container.mounts]
    allowed = surroundings.mounts_allowed
    for task in spec["tasks"]:
        task["container"]["mounts"] = {
            "wanted": wanted,
            "allowed": None if allowed is None else list(allowed),
            "hidden": [*surroundings.private, *surroundings.secrets.places()],
        }


def write_secrets(
    files: SecretFiles, attempt: NewAttempt, secrets: Mapping[str, bytes], undo: ExitStack
) -> WrittenSecrets:
    """Write an attempt's secrets; `undo` gets how to remove them. Raises `OSError`, or `CannotLaunch`."""
    undo.callback(files.remove, attempt.name)
    try:
        return files.write(attempt.name, attempt.assignment.spec, secrets, attempt.owner)
    except ValueError as error:
        raise CannotLaunch(str(error), LaunchCause.SECRET) from None


def _remove(group: Group) -> None:
    with suppress(OSError, GroupError):
        group.remove(timeout_seconds=0)


def _begins(assignment: agent_pb2.Assignment) -> Began:
    held = assignment.allocation
    return Began(held.node_id, assignment.job_id, assignment.number, assignment.epoch, holds_of([held]))


def check_working_directory(path: str) -> None:
    """Check that the working directory exists. Raises `CannotLaunch`."""
    if path and not os.path.isdir(path):
        problem = "is not a directory" if os.path.exists(path) else "does not exist"
        raise CannotLaunch(f"the working directory {path} {problem}", LaunchCause.WORKING_DIRECTORY)


def restrict_socket(path: str, uid: int) -> None:
    """Allow only this user to report an attempt's progress."""
    with suppress(FileNotFoundError):
        os.chown(path, uid, -1)
        os.chmod(path, 0o600)
    Path(path).parent.chmod(0o711)  # entries in it are private to their owners


@launch_step(LaunchCause.CGROUP)
def make_group(group: Group) -> None:
    """Create an attempt's group."""
    if group.pids():
        raise CannotLaunch(
            f"the control group {group.paths()[0]} is in use: does a second agent use this node's id?",
            LaunchCause.CGROUP,
        )
    group.remove(timeout_seconds=0)  # left by an earlier try, perhaps frozen
    group.create()


def enforce(hooks: Hooks, attempt: NewAttempt, undo: ExitStack) -> None:
    """Let the hooks limit a new attempt, then each of its tasks, in a group of its own; `undo` gets how to undo it."""
    for hook in hooks:
        undo.callback(end_hook, hook, attempt.name)
        with launch_step(hook.launch_cause):
            hook.prepare(attempt)
    with launch_step(LaunchCause.CGROUP):
        attempt.group.delegate_controllers()
    for task in attempt.assignment.allocation.tasks:
        with launch_step(LaunchCause.CGROUP):
            child = task_group(attempt.group, task.rank)
            child.create()
        for hook in hooks:
            with launch_step(hook.launch_cause):
                hook.prepare_task(attempt, task, child)


def supervisor_spec(
    surroundings: LaunchContext,
    directory: AttemptDirectory,
    attempt: NewAttempt,
    progress_path: str,
    user: User | None = None,
    image: Image | None = None,
    secrets: WrittenSecrets = NO_SECRETS,
    devices: Mapping[int, ContainerEdits] = MappingProxyType({}),
) -> dict[str, object]:
    """Return what the supervisor needs to know, as plain types."""
    assignment, hooks = attempt.assignment, surroundings.hooks
    group = None if attempt.group is UNCONFINED else attempt.group
    working_directory = assignment.spec.working_directory or str(directory.path / "work")
    base = {**surroundings.base_environment, **environment_of_user(user)}
    if image is not None:
        base = container_environment(base, image.config, working_directory)
    isolation = isolation_of(surroundings, directory, progress_path, secrets)
    base |= {VARIABLE: secrets.files} if secrets.files else {}
    return {
        "job_id": assignment.job_id,
        "number": assignment.number,
        "epoch": assignment.epoch,
        "notify": surroundings.notify_path,
        "warning_signal": int(warning_signal_of(assignment)),
        "grace_seconds": grace_seconds_of(assignment),
        "output_bytes_max": surroundings.output_bytes_max,
        "descriptors_max": file_descriptors.original_limit(),
        "outer": outer_process_spec(surroundings.nesting),
        "leash": disconnect_limit_of(assignment, surroundings.lease_path),
        "time_limit_seconds": time_limit_seconds_of(assignment),
        "group": group.to_json() if group else None,
        "home": surroundings.home.to_json() if surroundings.home else None,
        "tasks": [
            {
                "rank": task.rank,
                "command": command_of(assignment, task),
                "environment": task_environment(
                    assignment,
                    task,
                    base={**base, **variables_of(devices.get(task.rank, NO_EDITS))},
                    enforced=variables(hooks, attempt, task),
                    progress_path=progress_path,
                ),
                "secret_environment": secrets.environment,
                "directory": working_directory,
                "directory_is_ours": not assignment.spec.working_directory,
                "submit_directory": submit_directory_of(assignment.spec),
                "python_environment": python_environment_of(assignment.spec),
                "user": user.to_spec() if user else None,
                "cpus": affinity_at_start(surroundings, task, group),
                "memory_limit_bytes": task.memory_bytes,
                "isolation": isolation,
            }
            for task in assignment.allocation.tasks
        ],
    }


def put_in_containers(
    spec: dict[str, Any],
    surroundings: LaunchContext,
    directory: AttemptDirectory,
    image: Image,
    progress_path: str,
    secrets: str | None = None,
    devices: Mapping[int, ContainerEdits] = MappingProxyType({}),
) -> None:
    """Change a supervisor's spec so that each task runs in a container of its own; `secrets` is their directory.

    Raises:
        CannotLaunch: there is no command.
        OSError: the disk refuses.
    """
    assert surroundings.containers is not None  # it has unpacked the image
    bundles, work = directory.path / BUNDLES, str((directory.path / "work").resolve())
    sockets = make_private_directory(progress_path)
    sockets.chmod(0o711)  # the socket in it belongs to the job's user
    seen = str(Path(progress_path).parent.resolve())  # namespaces show the socket there already
    shared = [Bind(work, work), Bind(seen if spec["tasks"][0]["isolation"] else str(sockets), seen)]
    shared += [Bind(path, path, read_only=True) for path in HOST_FILES if os.path.isfile(path)]
    shared += [Bind(secrets, secrets, read_only=True)] if secrets else []
    show_in_namespaces(spec, image, bundles)
    for task in spec["tasks"]:
        place = ContainerPlace(str(bundles / f"task-{task['rank']}"), str(bundles / "state"))
        for made in (place.state, *(f"{place.bundle}/{name}" for name in (ROOT_FILES, LAYER, FOLDER))):
            os.makedirs(made, mode=0o700, exist_ok=True)
        scratch = task["environment"].get("COTENANT_SCRATCH", "")
        binds = [*shared, Bind(scratch, scratch)] if scratch else shared
        edits = devices.get(task["rank"], NO_EDITS)
        task["container"] = container_spec(surroundings.containers, place, image, binds, task, edits)
        task["command"] = task["command"] or list(image.config.command)
        if not task["command"]:
            raise CannotLaunch("the job has no command, and its image has none either", LaunchCause.IMAGE)
        if task["submit_directory"]:
            task["submit_directory"]["environment"] = {}  # they are for the node's programs
        task["python_environment"] = None
    (bundles / IMAGE).write_text(image.digest)


def show_in_namespaces(spec: dict[str, Any], image: Image, bundles: Path) -> None:
    """Show the image and the bundles to tasks in namespaces: both lie below directories that namespaces hide."""
    isolation = spec["tasks"][0]["isolation"]  # one for all tasks
    if isolation is not None:
        bundles.mkdir(mode=0o700, exist_ok=True)
        shown = [str(bundles.resolve()), *([] if image.of_user else [image.root])]
        isolation["shown"] += [(path, path) for path in shown]


def recorded_image(directory: AttemptDirectory) -> str:
    """Return the digest of the image that an attempt was launched with; "" if it has none in the cache."""
    try:
        return (directory.path / BUNDLES / IMAGE).read_text()
    except OSError:
        return ""


def start_in_copy(spec: dict[str, Any]) -> None:
    """Let the tasks start in the copy of the folder, although the node may have another one at its place."""
    for task in spec["tasks"]:
        task["submit_directory"] = None


def has_submit_directory(spec: job_pb2.JobSpec) -> bool:
    """Return whether this node has the very folder that the job was submitted from. Blocks."""
    folder = spec.submit_directory
    try:
        found = os.stat(folder.path)
    except (OSError, ValueError):
        return False
    return (found.st_ino, found.st_uid) == (folder.inode, folder.owner_uid)


def submit_directory_of(spec: job_pb2.JobSpec) -> dict[str, object] | None:
    """Return the submitter's folder with the variables that the job does not set itself; None without one."""
    if not spec.HasField("submit_directory"):
        return None
    folder = spec.submit_directory
    variables = {name: value for name, value in folder.environment.items() if name not in spec.environment}
    return {"path": folder.path, "inode": folder.inode, "owner_uid": folder.owner_uid, "environment": variables}


def python_environment_of(spec: job_pb2.JobSpec) -> dict[str, object] | None:
    """Return the Python environment whose interpreter is checked, and whether it needs no folder; None without one."""
    if not spec.HasField("python_environment"):
        return None
    found = spec.python_environment
    return {"path": found.path, "interpreter": found.interpreter, "requested": found.requested}


def isolation_of(
    surroundings: LaunchContext, directory: AttemptDirectory, progress_path: str, secrets: WrittenSecrets = NO_SECRETS
) -> dict[str, object] | None:
    """Return what a job's namespaces hide, and the exceptions; None if it has no namespaces."""
    if not surroundings.hidden:
        return None
    work = str((directory.path / "work").resolve())
    sockets = make_private_directory(progress_path)
    shown = [(work, work), (str(sockets), str(Path(progress_path).parent.resolve()))]
    shown += [(secrets.files, secrets.files)] if secrets.files else []
    hidden = sorted({*surroundings.hidden, *surroundings.secrets.places()})
    return {"hidden": hidden, "shown": shown}


def affinity_at_start(
    surroundings: LaunchContext, task: resources_pb2.TaskAllocation, group: Group | None
) -> list[int]:
    """Return the CPUs that a task requests from the kernel: its own, or all if its group limits it.

    The kernel remembers the request, so a task that had requested only its first CPUs would not use those that its
    group gains later.
    """
    if task.cpu_ids and group is not None and "cpuset" in group.enforces:
        return list(range(max(os.sysconf("SC_NPROCESSORS_CONF"), *(cpu + 1 for cpu in task.cpu_ids))))
    return list(task.cpu_ids) or list(surroundings.all_cpus)
