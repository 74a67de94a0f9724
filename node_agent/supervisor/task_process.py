"""One process of an attempt, from fork to reaping.

The supervisor loads this file by its bare name without the package; it imports next to nothing.
"""

from __future__ import annotations

import ctypes
import errno
import marshal
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal

    from cotenant.node_agent.supervisor.cgroups import Group
    from cotenant.node_agent.supervisor.isolation import Namespaces
    from cotenant.node_agent.supervisor.output_file import OutputFile
else:
    import _signal as signal  # the public module builds enumerations: see loop.py
if TYPE_CHECKING or __package__:
    from cotenant.node_agent.supervisor.isolation import namespaces_of
    from cotenant.node_agent.supervisor.launch_faults import cause_of, cause_of_execution
else:
    from isolation import namespaces_of
    from launch_faults import cause_of, cause_of_execution

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
UNSETTABLE_SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
MEBIBYTE = 1 << 20
LIBC = ctypes.CDLL(None, use_errno=True)


class TaskProcess:
    """A replica: what to start and, once started, its process."""

    def __init__(self, spec: dict[str, object], group: Group | None, output: OutputFile) -> None:
        self.group = group
        self.output = output
        self.rank = as_int(spec["rank"])
        self.command = [str(word) for word in as_list(spec["command"])]
        self.cpus = [as_int(cpu) for cpu in as_list(spec["cpus"])]
        self.memory_limit_bytes = as_int(spec["memory_limit_bytes"])
        self.directory = str(spec["directory"])
        self.directory_is_ours = bool(spec.get("directory_is_ours"))
        user = spec.get("user")
        self.user: dict[str, object] | None = user if isinstance(user, dict) else None
        variables = spec["environment"]
        assert isinstance(variables, dict)
        self.environment: dict[str, str] = variables
        self.secret_environment = str(spec.get("secret_environment") or "")  # a file that only the agent can read
        folder = spec.get("submit_directory")
        self.submit_directory = SubmitDirectory(folder) if isinstance(folder, dict) else None
        environment = spec.get("python_environment")
        self.python_environment: dict[str, object] = environment if isinstance(environment, dict) else {}
        self.doing = "starting"  # what fails if the program is not executed
        self.pid = 0
        self.exec_reader = -1  # readable once the program runs, with the reason if it does not
        self.output_reader = -1
        self.exec_error = ""
        self.launch_cause = ""  # set if an exec_error is not the job's fault
        self.status: int | None = None  # from waitpid
        self._told = b""  # from the exec pipe
        self.isolation = spec.get("isolation")
        self.namespaces: Namespaces | None = None  # None: it shares the supervisor's view

    @property
    def running(self) -> bool:
        """Whether the process was forked and not yet reaped."""
        return self.pid > 0 and self.status is None

    @property
    def failed(self) -> bool:
        """Whether it ended with a status other than 0."""
        return self.status is not None and self.status != 0

    def start(self) -> None:
        """Fork; the child executes the program or writes to the exec pipe why it cannot."""
        self.namespaces = namespaces_of(self.isolation)
        self.exec_reader, exec_writer = os.pipe()
        os.set_blocking(self.exec_reader, False)
        try:
            self.output_reader, output_writer = os.pipe()
        except OSError:
            os.close(exec_writer)
            raise
        os.set_blocking(self.output_reader, False)
        parent = os.getpid()
        try:
            self.pid = os.fork()
            if self.pid == 0:
                self._become_program(parent, exec_writer, output_writer)
        finally:
            os.close(exec_writer)
            os.close(output_writer)

    def _become_program(self, parent: int, exec_writer: int, output_writer: int) -> None:
        try:
            missing = self.enter(parent)
            null = os.open(os.devnull, os.O_RDONLY)
            for source, target in ((null, 0), (output_writer, 1), (output_writer, 2)):
                os.dup2(source, target)
            if missing:
                os.write(2, f"cotenant: {missing}; started in an empty folder\n".encode(errors="replace"))
            self._check_interpreter()
            self.doing = "command"
            execute(self.command, self.environment)
        except BaseException as error:  # report any error
            told = f"{self._cause(error)}\n{self.reason(error)}"
            os.write(exec_writer, told.encode(errors="replace"))
        finally:
            os._exit(127)

    def enter_limits(self) -> None:
        """Enter a session and the control group of its own, with the CPUs that it may use."""
        reset_signals()
        os.setsid()
        self.doing = "secret"
        self._read_secrets()
        self.doing = "control group"
        if self.group is not None:
            self.group.attach()
        self.doing = "cpus"
        if self.cpus:
            os.sched_setaffinity(0, self.cpus)

    def enter(self, parent: int) -> str:
        """Become what the task is before it executes its program; `parent` is the process that forked this one.

        Return why this node does not have the submitter's folder, or "". An error leaves in `doing` what failed.
        """
        self.enter_limits()
        if self.namespaces is not None:
            self.doing = "namespaces"
            self.namespaces.enter()
        if self.user is None or self.directory_is_ours:  # may be accessible only to the agent
            self.doing = "directory"
            os.chdir(self.directory)
        if self.user is not None:
            self.doing = "user"
            switch_user(self.user)
            self.doing = "directory"
            os.chdir("." if self.directory_is_ours else self.directory)
        missing = self._enter_submit_directory()
        self.doing = "starting"
        die_with_parent(parent)  # only now: a change of user resets it
        return missing

    def _read_secrets(self) -> None:
        """Add the variables that are secrets, which are in no spec. Raises `OSError`."""
        if self.secret_environment:
            with open(self.secret_environment, "rb") as file:
                self.environment = {**self.environment, **marshal.load(file)}  # both ends run the same interpreter

    def _enter_submit_directory(self) -> str:
        """Enter the submitter's folder, with its search path; return why this node does not have it.

        As the job's user, whose rights decide. A job that names a working directory stays there.
        """
        folder = self.submit_directory
        if folder is None:
            return ""
        own = os.open(".", os.O_PATH)
        try:
            missing = folder.enter()
            if missing or not self.directory_is_ours:
                os.fchdir(own)
        finally:
            os.close(own)
        if not missing:
            self.environment = {**self.environment, **folder.environment, "COTENANT_SUBMIT_DIR": folder.path}
        return missing if self.directory_is_ours else ""

    def _check_interpreter(self) -> None:
        """Check the interpreter of the job's Python environment, if the job uses one here. Raises `OSError`."""
        needed = self.python_environment.get("requested") or "COTENANT_SUBMIT_DIR" in self.environment
        if not self.python_environment or not needed:
            return
        self.doing = "environment"
        interpreter = str(self.python_environment["interpreter"])
        os.stat(interpreter)
        if not os.access(interpreter, os.X_OK):
            raise PermissionError(errno.EACCES, "it is not executable for the job's user")

    def _interpreter_reason(self, error: OSError) -> str:
        interpreter = str(self.python_environment["interpreter"])
        try:
            name = f"{interpreter} (a link to {os.readlink(interpreter)})"
        except OSError:
            name = interpreter
        return (
            f"this node does not have the interpreter {name} of the job's Python environment "
            f"{self.python_environment['path']}: {error.strerror}; {SHARE_ENVIRONMENT}"
        )

    def _cause(self, error: BaseException) -> str:
        doing = self.doing
        if doing == "command":
            return cause_of_execution(error)
        if doing == "directory" and not self.directory_is_ours:
            doing = "working_directory"
        return cause_of(error, {"starting": "process", "control group": "cgroup"}.get(doing, doing))

    def reason(self, error: BaseException) -> str:
        """Return why the program could not be executed."""
        doing = self.doing
        if not isinstance(error, OSError):
            return f"could not be started ({doing}): {error}"
        if doing == "environment":
            return self._interpreter_reason(error)
        program = self.command[0]
        if doing == "directory":
            return f"the working directory {self.directory} cannot be entered: {error.strerror}"
        if doing == "cpus":
            return f"the CPUs {self.cpus} cannot be used: {error.strerror}"
        if doing != "command":
            return f"could not be started ({doing}): {error.strerror}"
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            places = [""] if "/" in program else self.environment.get("PATH", os.defpath).split(os.pathsep)
            found = [path for path in (os.path.join(place, program) for place in places) if os.path.exists(path)]
            return f"the interpreter of {found[0]} is missing" if found else f"command not found: {program}"
        if error.errno == errno.EACCES:
            return f"permission denied: {program} is not executable"
        return f"cannot run {program}: {error.strerror}"

    def read_exec_result(self) -> bool:
        """Read whether the program runs; return False while that is undecided."""
        if not self._receive():
            return False
        os.close(self.exec_reader)
        self.exec_reader = -1
        self.launch_cause, _, self.exec_error = self._told.decode(errors="replace").partition("\n")
        return True

    def _receive(self) -> bool:
        """Read from the exec pipe; return whether that was all."""
        while True:
            try:
                piece = os.read(self.exec_reader, 4096)
            except BlockingIOError:
                return False
            if not piece:
                return True
            self._told += piece

    def owns(self, pid: int) -> bool:
        """Return whether a process that has ended was the task's."""
        return self.pid == pid and self.status is None

    def pump(self) -> bool:
        """Copy available output to its file; return False once the pipe has no writer."""
        try:
            data = os.read(self.output_reader, 65536)
        except BlockingIOError:
            return True
        if not data:
            os.close(self.output_reader)
            self.output_reader = -1
            return False
        self.output.write(data)
        return True

    def drain(self) -> None:
        """Copy the rest of the pipe without waiting for other writers."""
        while self.output_reader >= 0:
            try:
                data = os.read(self.output_reader, 65536)
            except BlockingIOError:
                data = b""
            if data:
                self.output.write(data)
            else:
                os.close(self.output_reader)
                self.output_reader = -1
        self.output.close()

    def group_lives(self) -> bool:
        """Return whether any process is left in the task's process group, which received the same signals."""
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return self.pid > 0

    def signal_group(self, number: int) -> None:
        """Send a signal to the task's process group once its program runs."""
        if self.running and self.exec_reader < 0 and not self.exec_error:
            try:
                os.killpg(self.pid, number)
            except (ProcessLookupError, PermissionError):
                return  # it has just ended, or runs as another user: no warning


SHARE_ENVIRONMENT = "keep it on storage that all nodes have at the same path, or submit with --env-from none"
TAKE_ALONG = "`cotenant submit --upload .` takes it along"


class SubmitDirectory:
    """The folder that the job was submitted from."""

    def __init__(self, spec: dict[str, object]) -> None:
        self.path = str(spec["path"])
        self.identity = (as_int(spec["inode"]), as_int(spec["owner_uid"]))
        variables = spec["environment"]
        assert isinstance(variables, dict)
        self.environment: dict[str, str] = variables

    def enter(self) -> str:
        """Change to the folder; return why it cannot be, or why it is a different folder of the same path."""
        try:
            os.chdir(self.path)
            found = os.stat(".")
        except FileNotFoundError as error:
            return f"this node does not have the folder {self.path}: {error.strerror}; {TAKE_ALONG}"
        except (OSError, ValueError) as error:
            return f"this node does not have the folder {self.path}: {getattr(error, 'strerror', None) or error}"
        if (found.st_ino, found.st_uid) != self.identity:
            return f"this node has a different folder {self.path}; {TAKE_ALONG}"
        return ""


def exit_message(task: TaskProcess, out_of_memory: bool) -> str:
    """Return how a task failed, in one sentence."""
    assert task.status is not None
    if out_of_memory:
        limit = task.memory_limit_bytes
        bound = f"its limit is {limit / MEBIBYTE:.0f} MiB" if limit else "the node had no more"
        return f"rank {task.rank} ran out of memory: {bound}"
    if os.WIFSIGNALED(task.status):
        which = os.WTERMSIG(task.status)
        return f"rank {task.rank} was ended by signal {which} ({signal.strsignal(which)})"
    return f"rank {task.rank} ended with status {os.waitstatus_to_exitcode(task.status)}"


def as_int(value: object) -> int:
    """Return an int from JSON."""
    assert isinstance(value, int)
    return value


def as_float(value: object) -> float:
    """Return a number from JSON as a float."""
    assert isinstance(value, (int, float))
    return float(value)


def as_list(value: object) -> list[object]:
    """Return a list from JSON."""
    assert isinstance(value, list)
    return value


def reset_signals() -> None:
    """Reset the program's signals as a shell would: nothing ignored, nothing blocked."""
    signal.set_wakeup_fd(-1)
    for which in signal.valid_signals():
        if which not in UNSETTABLE_SIGNALS and signal.getsignal(which) != signal.SIG_DFL:
            signal.signal(which, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def execute(command: list[str], environment: dict[str, str]) -> None:
    """Execute the program, searched along its own PATH.

    Like `os.execvpe`, which imports a module first: the job's user may not be able to read our library.
    """
    program = command[0]
    if "/" in program:
        os.execve(program, command, environment)
    failed: OSError | None = None
    for place in environment.get("PATH", os.defpath).split(os.pathsep):
        path = os.path.join(place, program)
        try:
            os.execve(path, command, environment)
        except OSError as error:
            if failed is None and os.path.exists(path):
                failed = error
    raise failed or FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))


def switch_user(user: dict[str, object]) -> None:
    """Switch to a user with their groups; keep no privileges."""
    gid, uid = as_int(user["gid"]), as_int(user["uid"])
    os.setgroups([as_int(group) for group in as_list(user["groups"])])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    if os.getresuid() != (uid, uid, uid) or os.getresgid() != (gid, gid, gid):
        raise OSError(errno.EPERM, "the kernel did not let go")


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its supervisor dies; without cgroups nothing else would."""
    LIBC.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() not in (parent, 0):  # 0: in a pid namespace, whose init is killed with the supervisor
        os._exit(127)


def adopt_orphans() -> None:
    """Become the parent of every orphaned descendant, so that none escapes."""
    if LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
