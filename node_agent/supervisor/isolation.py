"""The namespaces of one attempt: a user, a process and a mount namespace that its tasks share.

An agent that is not root runs every job as its own user, so file modes and signal permissions do not protect the agent
from a job. The kernel lets any user create a user namespace, and inside it the two others:

- The supervisor creates the user and the process namespace and stays outside the latter: it keeps its pid and its view
  of /proc, and the processes that it forks from then on are inside. Every user and group id but the agent's own is
  unmapped inside.
- Its first child is the init process. It creates the mount namespace, hides directories there, and reaps orphans. When
  it ends, the kernel kills everything in the process namespace; it is killed with the supervisor.
- Each task enters the mount namespace before it executes the program. Exec drops the capabilities that a task has until
  then, and no_new_privs keeps it from regaining any, so a job cannot unmount what hides a directory.

A job then sees only the processes of its own attempt, and has no other pid to signal or trace. Outside processes are in
the parent user namespace, which denies tracing even if a job learns a pid. Control groups are read-only inside, because
they are another way to kill or stop a process.

The network, IPC and everything else that belongs to the user, such as their home directory, stay shared.

The supervisor loads this file by its bare name without the package; it imports next to nothing. Run as a program, it
tries all of this once and prints why it does not work, or nothing.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable
else:
    import _signal as signal  # the public module builds enumerations: see loop.py

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID = 0x00020000, 0x10000000, 0x20000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 0x1, 0x2, 0x4, 0x8
MS_REMOUNT, MS_BIND, MS_REC, MS_SLAVE = 0x20, 0x1000, 0x4000, 0x80000
FLAG_OF_OPTION = {"nosuid": MS_NOSUID, "nodev": MS_NODEV, "noexec": MS_NOEXEC}
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
READY = b"ready"
DESCRIPTORS_MAX = 65536
LIBC = ctypes.CDLL(None, use_errno=True)


class Namespaces:
    """The namespaces of one attempt, as its supervisor holds them."""

    def __init__(self, init_pid: int, mounts: int) -> None:
        self.init_pid = init_pid
        self._mounts = mounts  # a descriptor of the mount namespace

    def enter(self) -> None:
        """Enter the mount namespace for good, from a task's process; its directory is then `/`. Raises `OSError`."""
        if LIBC.setns(self._mounts, CLONE_NEWNS) != 0:
            raise _last_error("setns")
        if LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
            raise _last_error("prctl(PR_SET_NO_NEW_PRIVS)")


_of_this_process: list[Namespaces] = []


def namespaces_of(spec: object) -> Namespaces | None:
    """Return the namespaces of the supervised attempt, created on the first call.

    `spec` is the attempt's isolation spec; None: its tasks have no namespaces. Raises `OSError`.
    """
    if not isinstance(spec, dict):
        return None
    if not _of_this_process:
        shown = [(str(source), str(target)) for source, target in spec["shown"]]
        try:
            _of_this_process.append(open_namespaces([str(path) for path in spec["hidden"]], shown))
        except OSError as error:
            raise OSError(error.errno, f"cannot isolate it: {error.strerror}") from error
    return _of_this_process[0]


def join_namespaces(pid: int) -> Namespaces:
    """Enter the user namespace of a running task, and its process namespace with the processes that are forked next.

    The caller must have a single thread. Raises `OSError`.
    """
    users, processes, mounts = (
        os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in ("user", "pid", "mnt")
    )
    for descriptor, kind in ((users, CLONE_NEWUSER), (processes, CLONE_NEWPID)):
        if LIBC.setns(descriptor, kind) != 0:
            raise _last_error("setns")
        os.close(descriptor)
    return Namespaces(pid, mounts)


def open_namespaces(hidden: list[str], shown: list[tuple[str, str]]) -> Namespaces:
    """Create the namespaces; processes that the caller forks afterwards are in the first two of them.

    `hidden` are files and directories that tasks see empty. `shown` are directories (source, target) that stay visible
    at `target`, which may be inside a hidden one. The caller must have a single thread. Raises `OSError`.
    """
    uid, gid = os.geteuid(), os.getegid()
    if LIBC.unshare(CLONE_NEWUSER | CLONE_NEWPID) != 0:
        raise _last_error("unshare")
    _write("/proc/self/setgroups", "deny")  # required for mapping a group without root
    _write("/proc/self/uid_map", f"{uid} {uid} 1")
    _write("/proc/self/gid_map", f"{gid} {gid} 1")
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _run_init(writer, hidden, shown)
    os.close(writer)
    answer = os.read(reader, 4096)
    os.close(reader)
    if answer != READY:
        os.waitpid(pid, 0)
        raise OSError(errno.EPERM, answer.decode(errors="replace") or "the init process died")
    return Namespaces(pid, os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC))


def _run_init(writer: int, hidden: list[str], shown: list[tuple[str, str]]) -> None:
    """Run as the first process of the namespaces until killed."""
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        signal.set_wakeup_fd(-1)
        LIBC.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        os.setsid()
        _make_mounts(hidden, shown)
        os.chdir("/")
        os.write(writer, READY)  # fails if the supervisor died before PR_SET_PDEATHSIG
        os.closerange(0, DESCRIPTORS_MAX)
        while True:
            signal.sigwait([signal.SIGCHLD])
            _reap()
    except BaseException as error:  # report any error to the supervisor
        os.write(writer, str(error).encode(errors="replace")[:4096])
    finally:
        os._exit(1)


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def _make_mounts(hidden: list[str], shown: list[tuple[str, str]]) -> None:
    if LIBC.unshare(CLONE_NEWNS) != 0:
        raise _last_error("unshare")
    _mount("none", "/", "", MS_REC | MS_SLAVE)  # later mounts outside are visible; ours do not propagate
    sources = [(os.open(source, os.O_PATH | os.O_DIRECTORY), target) for source, target in shown]
    _mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    covers = [path for path in sorted(hidden) if _hide(path)]
    for source, target in sources:
        os.makedirs(target, mode=0o700, exist_ok=True)
        _mount(f"/proc/self/fd/{source}", target, "", MS_BIND | MS_REC)
    for path in covers:
        _mount("none", path, "", MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC)
    _make_cgroups_read_only()


def _hide(path: str) -> bool:
    """Hide a path; return whether it must be made read-only."""
    if os.path.isdir(path):
        _mount("tmpfs", path, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, "size=64k,mode=0700")
        return True
    if os.path.exists(path):
        _mount(os.devnull, path, "", MS_BIND)
    return False


def _make_cgroups_read_only() -> None:
    """Make control groups read-only, keeping their mounts' options: we may not remove any."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            mount, _, kind = line.partition(" - ")
            if kind.startswith("cgroup"):
                place, options = mount.split(" ")[4:6]
                flags = sum(FLAG_OF_OPTION.get(option, 0) for option in options.split(","))
                place = place.replace("\\040", " ")
                _mount("none", place, "", MS_REMOUNT | MS_BIND | MS_RDONLY | flags)


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    words = [os.fsencode(word) for word in (source, target, kind)]
    if LIBC.mount(*words, ctypes.c_ulong(flags), data.encode() or None) != 0:
        raise _last_error(f"mount {kind or 'over'} {target}")


def _last_error(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def self_test(hidden: list[str]) -> str:
    """Create namespaces like an attempt's and check from inside; return what does not work, "" if all does."""
    return check_inside(hidden, lambda: _leaks(hidden))


def check_inside(hidden: list[str], check: Callable[[], str]) -> str:
    """Return what a check finds in new namespaces like an attempt's, or why it fails there; "" if all works."""
    try:
        namespaces = open_namespaces(hidden, [])
    except OSError as error:
        return error.strerror or str(error)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            namespaces.enter()
            os.write(writer, check().encode())
        except Exception as error:  # whatever fails there does not work
            os.write(writer, (str(error) or repr(error)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    os.kill(namespaces.init_pid, signal.SIGKILL)
    return os.read(reader, 4096).decode(errors="replace")


def _leaks(hidden: list[str]) -> str:
    """Return what is visible but should not be."""
    if os.getppid() != 0:
        return "the supervisor is visible"
    if len([name for name in os.listdir("/proc") if name.isdigit()]) != 2:
        return "other processes are visible"
    visible = [path for path in hidden if os.path.isdir(path) and os.listdir(path)]
    return f"{visible[0]} is visible" if visible else ""


if __name__ == "__main__":
    print(self_test(sys.argv[1:]), end="")
