"""Runs a task's program in a container without root and without another program.

Theory of operation. An agent that is not root gives each attempt a user, a process and a mount namespace: see
`isolation`. A task has all capabilities in that user namespace until it executes its program, so it may mount an image:

- It enters the attempt's mount namespace, which already hides the agent's files and shows the attempt's own processes,
  and makes one of its own. There it mounts the image read-only below a writable layer in memory, and in it what the
  configuration of the container lists: the same that crun gets from an agent that is root.
- Each target is resolved by the kernel with the image as its root (openat2), so that no link of an image leads out.
- Device files cannot be made without root: those of the node are mounted. Hooks run as the job's user.
- Then the image becomes the root directory, and the task executes the program: it stays the supervisor's own child, as
  without an image. Exec drops the capabilities, and no_new_privs keeps the program from regaining any.

bubblewrap and others would leave a process of theirs between the supervisor and the program, which hides how the
program ends and dies of the signals that warn it.

The supervisor loads this file by its bare name, for jobs with an image only. Run as a program, it tries to mount an
image and prints why that does not work, or nothing.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import stat
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from typing import Any
else:
    import _signal as signal  # the public module builds enumerations: see loop.py
if TYPE_CHECKING or __package__:
    from cotenant.node_agent.supervisor.container import (
        LAYER,
        MNT_DETACH,
        ROOT_FILES,
        ContainerFault,
        ContainerLauncher,
        mount,
    )
    from cotenant.node_agent.supervisor.isolation import (
        CLONE_NEWNS,
        LIBC,
        MS_BIND,
        MS_NODEV,
        MS_NOEXEC,
        MS_NOSUID,
        MS_REC,
        MS_SLAVE,
        check_inside,
    )
    from cotenant.node_agent.supervisor.launch_faults import cause_of, cause_of_execution
    from cotenant.node_agent.supervisor.task_process import TaskProcess, as_list, die_with_parent, execute
else:
    if __name__ == "__main__":  # started with -I
        sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    from container import LAYER, MNT_DETACH, ROOT_FILES, ContainerFault, ContainerLauncher, mount
    from isolation import (
        CLONE_NEWNS,
        LIBC,
        MS_BIND,
        MS_NODEV,
        MS_NOEXEC,
        MS_NOSUID,
        MS_REC,
        MS_SLAVE,
        check_inside,
    )
    from launch_faults import cause_of, cause_of_execution
    from task_process import TaskProcess, as_list, die_with_parent, execute

SYS_PIVOT_ROOT = 155 if platform.machine() == "x86_64" else 41
SYS_OPENAT2, SYS_MOUNT_SETATTR = 437, 442  # on all architectures
RESOLVE_NO_MAGICLINKS, RESOLVE_IN_ROOT = 0x02, 0x10
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
ATTRIBUTES = {"ro": 0x1, "rro": 0x1, "nosuid": 0x2, "nodev": 0x4}
FLAGS = {"nosuid": MS_NOSUID, "nodev": MS_NODEV, "noexec": MS_NOEXEC}
WORDS_OF_BINDS = frozenset({*ATTRIBUTES, *FLAGS, "rw", "bind", "rbind", "private", "rprivate", "slave", "rslave"})
SYSTEM = {"proc": os.path.join(os.sep, "proc"), "sysfs": os.path.join(os.sep, "sys")}
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
LINKS = {
    "fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2",
    "ptmx": "pts/ptmx",
}  # fmt: skip
TEMPORARY = os.path.join(os.sep, "tmp")
HOOKS = ("prestart", "createRuntime", "createContainer")  # what the tools of vendors use


class RootlessTask(TaskProcess):
    """A replica in a container of an agent that is not root."""

    def __init__(self, spec: dict[str, Any], group: Any, output: Any) -> None:
        super().__init__(spec, group, output)
        self._container: dict[str, object] = spec["container"]

    def _become_program(self, parent: int, exec_writer: int, output_writer: int) -> None:
        try:
            self.enter_limits()
            self.doing = "namespaces"
            assert self.namespaces is not None  # without them a node has no runtime
            self.namespaces.enter()
            die_with_parent(parent)
            null = os.open(os.devnull, os.O_RDONLY)
            for source, target in ((null, 0), (output_writer, 1), (output_writer, 2)):
                os.dup2(source, target)
            self.doing = "container"
            self.environment = RootlessLauncher(self._container, self.environment, self.command).enter(
                self.submit_directory, 2
            )
            self.doing = "command"
            execute(self.command, self.environment)
        except ContainerFault as fault:
            os.write(exec_writer, f"{fault.cause}\n{fault}".encode(errors="replace"))
        except BaseException as error:  # report any error
            cause = cause_of_execution(error) if self.doing == "command" else cause_of(error, "process")
            os.write(exec_writer, f"{cause}\n{self.reason(error)}".encode(errors="replace"))
        finally:
            os._exit(127)

    def reason(self, error: BaseException) -> str:
        """Return why the program could not be executed."""
        number = error.errno if isinstance(error, OSError) else 0
        if self.doing == "command" and number in (errno.ENOENT, errno.ENOTDIR):
            return f"command not found in the image: {self.command[0]}"
        if self.doing == "command" and number == errno.EACCES:
            return f"permission denied: {self.command[0]} is not executable in the image"
        return f"could not be started ({self.doing}): {error}" if self.doing == "container" else super().reason(error)


class RootlessLauncher(ContainerLauncher):
    """Makes the container of one task around its own process."""

    overlay_options = ",userxattr"  # what overlayfs notes of removed files, without root

    def enter(self, folder: Any, output: int) -> dict[str, str]:
        """Enter the container for good; return the program's variables.

        Raises:
            ContainerFault: it cannot be made.
            OSError: a call of the kernel fails.
        """
        self._mount_image(None)
        if folder is not None and (missing := self._mount_folder(None, folder)):
            os.write(output, f"cotenant: {missing}; started in an empty folder\n".encode(errors="replace"))
        self._mount_wanted(None)
        root_path = os.path.join(self._bundle, ROOT_FILES)
        root = os.open(root_path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for entry in as_list(self._config["mounts"]):
            assert isinstance(entry, dict)
            self._mount(root, entry)
        self._mount_devices(root)
        self._call_hooks()
        os.fchdir(root)
        if LIBC.syscall(SYS_PIVOT_ROOT, b".", b".") != 0:
            raise _last_error("pivot_root")
        if LIBC.umount2(b".", MNT_DETACH) != 0:
            raise _last_error("umount")
        directory = str(self._config["process"]["cwd"])
        try:
            os.chdir(directory)
        except OSError as error:
            reason = f"the working directory {directory} cannot be entered: {error.strerror}"
            raise ContainerFault(reason, "working_directory") from error
        return self._environment

    def _mount(self, root: int, entry: dict[str, Any]) -> None:
        """Mount one entry of the configuration, as OCI has it."""
        kind, target, options = entry["type"], str(entry["destination"]), [str(each) for each in entry["options"]]
        if kind in ("tmpfs", "devpts"):
            place = _opened(root, target, directory=True)
            flags = sum(FLAGS.get(each, 0) for each in options)
            data = ",".join(each for each in options if each not in WORDS_OF_BINDS)
            mount(kind, f"/proc/self/fd/{place}", kind, flags, data)
            os.close(place)
            return
        source = os.open(SYSTEM.get(kind, str(entry["source"])), os.O_PATH | os.O_CLOEXEC)
        _bind(root, source, target, options)

    def _mount_devices(self, root: int) -> None:
        for name in DEVICES:
            source = os.path.join(os.sep, "dev", name)
            _bind(root, os.open(source, os.O_PATH | os.O_CLOEXEC), source, [])
        dev = _opened(root, "/dev", directory=True)
        for name, target in LINKS.items():
            os.symlink(target, name, dir_fd=dev)
        os.close(dev)
        for device in as_list(self._config["linux"]["devices"]):
            assert isinstance(device, dict)
            try:
                _bind(root, os.open(str(device["source"]), os.O_PATH | os.O_CLOEXEC), str(device["path"]), [])
            except OSError as error:
                reason = f"the device {device['source']} cannot be mounted: {error.strerror}"
                raise ContainerFault(reason, "device") from error

    def _call_hooks(self) -> None:
        """Call the hooks of the container's devices. Raises `ContainerFault`."""
        hooks = self._config["hooks"]
        if not any(hooks.get(name) for name in HOOKS):
            return
        with open(os.path.join(self._bundle, "config.json"), "w", encoding="utf-8") as file:
            json.dump(self._config, file)
        state = {"ociVersion": self._config["ociVersion"], "id": self._name, "bundle": self._bundle}
        for hook in [hook for name in HOOKS for hook in hooks.get(name, ())]:
            _call_hook(hook, json.dumps({**state, "pid": os.getpid(), "status": "created"}).encode())


def _call_hook(hook: dict[str, Any], state: bytes) -> None:
    reader, writer = os.pipe()
    os.write(writer, state)  # less than a pipe holds
    os.close(writer)
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(reader, 0)
            signal.alarm(int(hook.get("timeout", 0)))  # 0: none
            variables = dict(word.partition("=")[::2] for word in hook["env"])
            os.execve(hook["path"], hook["args"] or [hook["path"]], variables)
        finally:
            os._exit(127)
    os.close(reader)
    _, status = os.waitpid(pid, 0)
    if status != 0:
        how = os.waitstatus_to_exitcode(status)
        raise ContainerFault(f"the hook {hook['path']} of its CDI spec ended with status {how}", "device")


def _bind(root: int, source: int, target: str, options: list[str]) -> None:
    """Mount an open file or directory of the node at a path in the image, with everything below it."""
    directory = stat.S_ISDIR(os.fstat(source).st_mode)
    place = _opened(root, target, directory=directory)
    mount(f"/proc/self/fd/{source}", f"/proc/self/fd/{place}", "", MS_BIND | MS_REC)
    os.close(place)
    os.close(source)
    attributes = 0
    for option in options:
        attributes |= ATTRIBUTES.get(option, 0)
    if attributes:
        place = _opened(root, target, directory=directory)  # what is mounted there now
        _set_attributes(place, attributes)
        os.close(place)


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


class _MountAttr(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "namespace"))


def _opened(root: int, path: str, *, directory: bool) -> int:
    """Open a path of an image, which is made if it is missing. Raises `OSError`."""
    words = [word for word in path.split("/") if word not in ("", ".")]
    try:
        return _open_in(root, "/".join(words) or ".")
    except FileNotFoundError:
        if not words:
            raise
    parent = _opened(root, "/".join(words[:-1]), directory=True)
    try:
        if directory:
            os.mkdir(words[-1], 0o755, dir_fd=parent)
        else:
            os.close(os.open(words[-1], os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644, dir_fd=parent))
    finally:
        os.close(parent)
    return _open_in(root, "/".join(words))


def _open_in(root: int, path: str) -> int:
    how = _OpenHow(os.O_PATH | os.O_CLOEXEC, 0, RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS)
    handle: int = LIBC.syscall(SYS_OPENAT2, root, os.fsencode(path), ctypes.byref(how), ctypes.sizeof(how))
    if handle < 0:
        raise _last_error(f"open {path} in the image")
    return handle


def _set_attributes(place: int, attributes: int) -> None:
    wanted = _MountAttr(attributes, 0, 0, 0)
    words = f"/proc/self/fd/{place}".encode(), AT_RECURSIVE, ctypes.byref(wanted), ctypes.sizeof(wanted)
    if LIBC.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, *words) != 0:
        raise _last_error("mount_setattr")


def _last_error(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")


def self_test() -> str:
    """Mount an image as a job would; return why that does not work, "" if it does."""
    return check_inside([], _try_mounts)


def _try_mounts() -> str:
    if LIBC.unshare(CLONE_NEWNS) != 0:
        raise _last_error("unshare")
    mount("none", "/", "", MS_REC | MS_SLAVE)
    bundle = TEMPORARY  # covered by a file system of our own
    mount("tmpfs", bundle, "tmpfs", 0, "mode=0755")
    for name in ("image", LAYER, ROOT_FILES):
        os.mkdir(f"{bundle}/{name}")
    mounts: list[dict[str, object]] = [
        {"type": "proc", "destination": "/proc", "options": []},
        {"type": "tmpfs", "destination": "/dev", "options": ["mode=755"]},
        {"type": "devpts", "destination": "/dev/pts", "options": ["newinstance", "ptmxmode=0666"]},
        {"type": "sysfs", "destination": "/sys", "options": ["ro"]},
        {"type": "tmpfs", "destination": TEMPORARY, "options": []},
    ]
    config = {"process": {"cwd": TEMPORARY}, "mounts": mounts, "linux": {"devices": []}, "hooks": {}}
    RootlessLauncher(
        {"runtime": [], "name": "", "bundle": bundle, "image": f"{bundle}/image", "image_of_user": False,
         "starts_in_folder": False, "config": config}, {}, [""],
    ).enter(None, 2)  # fmt: skip
    return ""


if __name__ == "__main__":
    print(self_test(), end="")
