"""Runs a task's program in a container: its mounts and the calls of the OCI runtime.

Theory of operation. The task's process, which is in the task's control group already, is only the container's launcher:

- It enters a mount namespace of its own and mounts the image there, read-only below a writable layer in memory. Nobody
  else has these mounts, so none can be left behind: the kernel removes them with the last process of the container,
  however that ends.
- It opens the files of others, such as an image's directory, with the rights of the job's user: a job reaches nothing
  in a container that its user cannot reach outside.
- `create` makes the container's process, which waits. The launcher reports its pid to the supervisor, calls `start`,
  and exits. The process is then the supervisor's own child (a subreaper): it is signalled, reaped and counted as a
  process without a container is, and no process of the runtime is left.
- The runtime manages no control group: the container's process stays in the task's, so that cores, memory, devices,
  throttling and suspension work as they do without containers.

The supervisor loads this file by its bare name, for jobs with an image only.
"""

from __future__ import annotations

import ctypes
import json
import os
import stat
from contextlib import contextmanager

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from cotenant.node_agent.supervisor.cgroups import Group
    from cotenant.node_agent.supervisor.output_file import OutputFile
    from cotenant.node_agent.supervisor.task_process import SubmitDirectory
if TYPE_CHECKING or __package__:
    from cotenant.node_agent.supervisor.isolation import (
        CLONE_NEWNS,
        LIBC,
        MS_BIND,
        MS_NODEV,
        MS_NOSUID,
        MS_REC,
        MS_SLAVE,
        Namespaces,
    )
    from cotenant.node_agent.supervisor.launch_faults import JOB_FAULT, cause_of
    from cotenant.node_agent.supervisor.task_process import TaskProcess, as_list, die_with_parent
else:
    from isolation import CLONE_NEWNS, LIBC, MS_BIND, MS_NODEV, MS_NOSUID, MS_REC, MS_SLAVE, Namespaces
    from launch_faults import JOB_FAULT, cause_of
    from task_process import TaskProcess, as_list, die_with_parent

MNT_DETACH = 2
PR_CAPBSET_DROP = 24
PID, STARTED = b"pid ", b"started\n"  # what the launcher tells
CAPABILITIES = 64  # more than any kernel has
HYBRID = "/sys/fs/cgroup/unified"  # runtimes refuse machines that have both versions of control groups
ROOT_FILES, LAYER, FOLDER, MOUNTS = "root", "layer", "folder", "mounts"  # directories of a bundle


class ContainerFault(Exception):
    """A container cannot be started, for this reason; `cause` is the launch cause, "" if it is the job's own fault."""

    def __init__(self, reason: str, cause: str) -> None:
        super().__init__(reason)
        self.cause = cause


class ContainerNamespaces(Namespaces):
    """The namespaces of a running container, for a command that is started beside its program."""

    def __init__(self, pid: int) -> None:
        super().__init__(pid, os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC))

    def enter(self) -> None:
        """Enter the container for good, without the capabilities that its program does not have. Raises `OSError`."""
        super().enter()
        for number in range(CAPABILITIES):  # a program of root would have all of the bounding set
            LIBC.prctl(PR_CAPBSET_DROP, number, 0, 0, 0)


class ContainerTask(TaskProcess):
    """A replica in a container. Its process is the launcher until that has told the pid of the program."""

    def __init__(self, spec: dict[str, object], group: Group | None, output: OutputFile) -> None:
        super().__init__(spec, group, output)
        container = spec["container"]
        assert isinstance(container, dict)
        self._container: dict[str, object] = container

    def _become_program(self, parent: int, exec_writer: int, output_writer: int) -> None:
        """Start the program in a container and exit."""
        try:
            self.enter_limits()
            die_with_parent(parent)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            self.doing = "container"
            launcher = ContainerLauncher(self._container, self.environment, self.command)
            launcher.launch(self.user, self.submit_directory, output_writer, exec_writer)
        except ContainerFault as fault:
            os.write(exec_writer, f"{fault.cause}\n{fault}".encode(errors="replace"))
        except BaseException as error:  # report any error
            reason = f"{cause_of(error, 'process')}\n{self.reason(error)}"
            os.write(exec_writer, reason.encode(errors="replace"))
        finally:
            os._exit(127)

    def read_exec_result(self) -> bool:
        """Read whether the program runs; return False while that is undecided."""
        if not super().read_exec_result():
            return False
        if self._told == STARTED or (not self._told and self.status is not None):
            self.launch_cause = ""  # a launcher is killed with what is left of a program that has ended already
        elif not self.exec_error:
            self.launch_cause, self.exec_error = "process", "the launcher of its container was killed"
        return True

    def _receive(self) -> bool:
        """Read from the exec pipe; return whether that was all. The program's pid comes first."""
        complete = super()._receive()
        if self._told.startswith(PID) and b"\n" in self._told:
            line, _, self._told = self._told.partition(b"\n")
            self.pid = int(line.removeprefix(PID))
        return complete

    def owns(self, pid: int) -> bool:
        """Return whether a process that has ended was the program, of which the launcher may have just told."""
        if self.exec_reader >= 0:
            self._receive()
        return super().owns(pid)


class ContainerLauncher:
    """Creates and starts the container of one task. `spec` is the task's `container`; see `container_spec`."""

    overlay_options = ""

    def __init__(self, spec: dict[str, object], environment: dict[str, str], command: list[str]) -> None:
        self._runtime = [str(word) for word in as_list(spec["runtime"])]
        self._name, self._bundle = str(spec["name"]), str(spec["bundle"])
        self._image = str(spec["image"])
        self._image_of_user = bool(spec["image_of_user"])
        self._starts_in_folder = bool(spec["starts_in_folder"])
        config = spec["config"]
        assert isinstance(config, dict)
        self._config: dict[str, Any] = config
        mounts = spec.get("mounts", {})  # none from an agent of an earlier version
        assert isinstance(mounts, dict)
        self._mounts: dict[str, Any] = mounts
        self._config["process"]["args"] = command
        self._environment, self._program = environment, command[0]

    def launch(self, user: dict[str, object] | None, folder: SubmitDirectory | None, output: int, report: int) -> None:
        """Start the container, with its output to one descriptor; write its pid and then `STARTED` to another.

        Raises:
            ContainerFault: it cannot be started.
        """
        self._mount_image(user)
        if folder is not None and (missing := self._mount_folder(user, folder)):
            os.write(output, f"cotenant: {missing}; started in an empty folder\n".encode(errors="replace"))
        self._mount_wanted(user)
        self._config["process"]["env"] = [f"{name}={value}" for name, value in self._environment.items()]
        with open(os.path.join(self._bundle, "config.json"), "w", encoding="utf-8", errors="surrogateescape") as file:
            json.dump(self._config, file)
        pid_file = os.path.join(self._bundle, "pid")
        self._call(["create", "--bundle", self._bundle, "--pid-file", pid_file, self._name], output)
        with open(pid_file, encoding="ascii") as file:
            pid = file.read().strip()
        os.write(report, PID + pid.encode() + b"\n")
        self._call(["start", self._name], output)
        os.write(report, STARTED)

    def _open_image(self, user: dict[str, object] | None) -> int:
        try:
            with as_user(user if self._image_of_user else None):
                return os.open(self._image, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ContainerFault(f"the image {self._image} cannot be opened: {error.strerror}", "image") from error

    def _mount_folder(self, user: dict[str, object] | None, folder: SubmitDirectory) -> str:
        """Mount the folder that the job was submitted from, and start there; return why this node does not have it."""
        process, staged = self._config["process"], os.path.join(self._bundle, FOLDER)
        with as_user(user):
            if missing := folder.enter():
                return missing if self._starts_in_folder else ""
            found = os.open(".", os.O_PATH)
        try:
            mount(f"/proc/self/fd/{found}", staged, "", MS_BIND | MS_REC)
        except OSError as error:
            raise ContainerFault(f"the folder {folder.path} cannot be mounted: {error}", "process") from error
        options = ["rbind", "nosuid", "nodev", "rw"]
        bind = {"destination": folder.path, "type": "none", "source": staged, "options": options}
        self._config["mounts"].append(bind)
        if self._starts_in_folder:
            process["cwd"] = folder.path
        self._environment = {**self._environment, "COTENANT_SUBMIT_DIR": folder.path}
        os.chdir("/")
        return ""

    def _mount_wanted(self, user: dict[str, object] | None) -> None:
        """Mount what the job names, as its user reaches it. Raises `ContainerFault`."""
        hidden = [str(path) for path in self._mounts.get("hidden", ())]
        allowed = self._mounts.get("allowed")
        for number, wanted in enumerate(self._mounts.get("wanted", ())):
            source, target = str(wanted["source"]), str(wanted["target"])
            try:
                with as_user(user):
                    found = os.open(source, os.O_PATH | os.O_CLOEXEC)
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", None) or str(error)
                raise ContainerFault(f"the mount {source} cannot be opened: {reason}", "mount") from error
            path = os.readlink(f"/proc/self/fd/{found}")
            if refusal := mount_refusal(path, allowed, hidden):
                raise ContainerFault(f"the mount {source} is refused: {refusal}", "mount")
            staged = self._stage(number, found)
            try:
                mount(f"/proc/self/fd/{found}", staged, "", MS_BIND | MS_REC)
            except OSError as error:
                raise ContainerFault(f"the mount {source} cannot be mounted: {error}", "mount") from error
            below = "rro" if os.path.isdir(staged) else "ro"  # crun 1.8 takes the target of "rro" for a directory
            options = ["rbind", "nosuid", "nodev", below if wanted["read_only"] else "rw"]
            bind = {"destination": target, "type": "none", "source": staged, "options": options}
            self._config["mounts"].append(bind)

    def _stage(self, number: int, found: int) -> str:
        """Make what the mount of a file or directory covers; return its path."""
        staged = os.path.join(self._bundle, MOUNTS, str(number))
        if stat.S_ISDIR(os.fstat(found).st_mode):
            os.makedirs(staged, mode=0o700, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(staged), mode=0o700, exist_ok=True)
            os.close(os.open(staged, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        return staged

    def _mount_image(self, user: dict[str, object] | None) -> None:
        """Mount the image below a writable layer in memory, in a mount namespace of this process."""
        root, layer = os.path.join(self._bundle, ROOT_FILES), os.path.join(self._bundle, LAYER)
        try:
            if LIBC.unshare(CLONE_NEWNS) != 0:
                raise _last_error("unshare")
            mount("none", "/", "", MS_REC | MS_SLAVE)
            LIBC.umount2(HYBRID.encode(), MNT_DETACH)  # only in this namespace; fails where there is none
            image = self._open_image(user)  # now: the kernel mounts nothing that belongs to another namespace
            mount("tmpfs", layer, "tmpfs", 0, "mode=0755")
            for name in ("upper", "work"):
                os.mkdir(os.path.join(layer, name), 0o755)
            below = f"lowerdir=/proc/self/fd/{image},upperdir={layer}/upper,workdir={layer}/work{self.overlay_options}"
            mount("overlay", root, "overlay", MS_NOSUID | MS_NODEV, below)
        except OSError as error:
            raise ContainerFault(f"its image cannot be mounted: {error}", cause_of(error, "process")) from error

    def _call(self, words: list[str], output: int) -> None:
        """Call the runtime, and wait for it. Raises `ContainerFault`."""
        log = os.path.join(self._bundle, "runtime.log")
        pid = os.fork()
        if pid == 0:
            try:
                os.dup2(output, 1)
                os.dup2(output, 2)
                os.execv(self._runtime[0], [*self._runtime, "--log", log, *words])
            finally:
                os._exit(127)
        _, status = os.waitpid(pid, 0)
        if status == 0:
            return
        reason = _first_line(log) or f"{self._runtime[0]} ended with status {os.waitstatus_to_exitcode(status)}"
        raise self._fault(reason)

    def _fault(self, reason: str) -> ContainerFault:
        """Return what a message of the runtime means: the job's own fault if its program cannot be executed."""
        if reason.startswith("executable file"):
            return ContainerFault(f"command not found in the image: {self._program}", JOB_FAULT)
        if reason.startswith("open executable"):
            return ContainerFault(f"permission denied: {self._program} is not executable in the image", JOB_FAULT)
        return ContainerFault(f"its container could not be started: {reason}", "process")


def mount_refusal(path: str, allowed: list[object] | None, hidden: list[str]) -> str:
    """Return why a path, without links, may not be mounted on this node; "" if it may. `allowed` None: all but hidden.

    >>> mount_refusal("/data/x", ["/data"], []), mount_refusal("/data2", ["/data"], [])
    ('', 'the operator of this node allows only what is in /data')
    """
    for secret in hidden:
        if _is_in(path, secret):
            return f"it is in {secret}, which is private to the agent"
        if _is_in(secret, path):
            return f"{secret} in it is private to the agent"
    if allowed is None or any(_is_in(path, str(place)) for place in allowed):
        return ""
    if not allowed:
        return "the operator of this node allows no mounts"
    return f"the operator of this node allows only what is in {', '.join(map(str, allowed))}"


def _is_in(path: str, place: str) -> bool:
    return path == place or path.startswith(f"{place.rstrip('/')}/")


@contextmanager
def as_user(user: dict[str, object] | None) -> Iterator[None]:
    """Have the rights of a user for a while; None: one's own. The process must have a single thread."""
    if user is None:
        yield
        return
    own_user, own_group, own_groups = os.geteuid(), os.getegid(), os.getgroups()
    try:
        os.setgroups([int(str(group)) for group in as_list(user["groups"])])
        os.setegid(int(str(user["gid"])))
        os.seteuid(int(str(user["uid"])))
        yield
    finally:
        os.seteuid(own_user)
        os.setegid(own_group)
        os.setgroups(own_groups)


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """Mount something. Raises `OSError`."""
    words = [os.fsencode(word) for word in (source, target, kind)]
    if LIBC.mount(*words, ctypes.c_ulong(flags), os.fsencode(data) or None) != 0:
        raise _last_error(f"mount {kind or 'over'} {target}")


def _last_error(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")


def _first_line(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.readline().strip()
    except OSError:
        return ""
