"""Runs one command beside the processes of a running task, and ends it with everything that it started.

Started by the agent as `python -I -S session.py DIRECTORY RANK CONTROL_FD`, with the command's stdin, stdout and stderr
as its own. It loads the files beside it by their bare names, without the package. Theory of operation:

- It enters the user and process namespaces of the task, if it has some, and forks the reaper, which is inside them: the
  parent of the command, and of what the command leaves behind.
- The command's process becomes what the task was before it executed its program: in its control group and namespaces,
  with its user, environment and directory (`TaskProcess.enter`).
- It waits for the command's end or for the end of the agent, which holds the other end of the control socket. Then it
  kills all descendants of the reaper until there are none, and reports the command's status.

The job's supervisor knows nothing of it. It kills the command with the job if there is a control group; otherwise the
agent does when the job has ended.
"""

from __future__ import annotations

import fcntl
import marshal
import os
import select
import sys
import termios
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    import socket

    from cotenant.node_agent.supervisor.cgroups import Group
    from cotenant.node_agent.supervisor.container import ContainerNamespaces
    from cotenant.node_agent.supervisor.isolation import Namespaces, join_namespaces
    from cotenant.node_agent.supervisor.output_file import OutputFile
    from cotenant.node_agent.supervisor.process_table import children
    from cotenant.node_agent.supervisor.supervisor import restore_descriptor_limit
    from cotenant.node_agent.supervisor.task_process import TaskProcess, adopt_orphans, as_int, as_list, execute
else:
    import _signal as signal  # their public modules build enumerations: see loop.py
    import _socket as socket

    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    from cgroups import Group
    from container import ContainerNamespaces
    from isolation import join_namespaces
    from output_file import OutputFile
    from process_table import children
    from supervisor import restore_descriptor_limit
    from task_process import TaskProcess, adopt_orphans, as_int, as_list, execute

REQUEST_BYTES_MAX = 1 << 20
HANG_UP_SECONDS = 0.5  # between SIGHUP and SIGKILL
ROUND_SECONDS, ROUND_SECONDS_MAX = 0.01, 0.5
SHELL = "/bin/sh"


class SessionTask(TaskProcess):
    """A command in the place of a task's program."""

    def __init__(self, spec: dict[str, object], group: Group | None, request: dict[str, object]) -> None:
        super().__init__(spec, group, OutputFile(os.devnull, 0))
        words = [str(word) for word in as_list(request["command"])]
        self.terminal = bool(request["terminal"])
        self.in_container = bool(spec.get("container"))
        variables = request["environment"]
        assert isinstance(variables, dict)
        self.environment = {**self.environment, **variables}
        self.command = words or [_shell_of(self.environment)]
        if self.terminal and self.user is not None:
            os.fchown(0, as_int(self.user["uid"]), -1)
        if group is None or "cpuset" not in group.enforces:  # its cores may have changed since it was started
            self.cpus = sorted(os.sched_getaffinity(as_int(request["pid"])))

    def become_command(self, parent: int, exec_writer: int) -> None:
        """Execute the command, or write to the exec pipe why it cannot be."""
        try:
            self.enter(parent)
            if self.terminal:
                self.doing = "terminal"
                fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            self.doing = "command"
            execute(self.command, self.environment)
        except BaseException as error:  # report any error
            os.write(exec_writer, self.reason(error).encode(errors="replace"))
        finally:
            os._exit(127)


def _shell_of(environment: dict[str, str]) -> str:
    shell = environment.get("SHELL", "")
    return shell if shell and os.access(shell, os.X_OK) else SHELL


class Session:
    """The command's processes, seen from outside of their namespaces."""

    def __init__(self, task: SessionTask, control: socket.socket) -> None:
        self.task, self.control = task, control
        self.status = b""  # of the command, once it has ended
        self.reaper_gone = False

    def run(self, init_pid: int) -> None:
        """Start the command, wait for its end or the agent's, and report its status."""
        self.task.namespaces = self._namespaces(init_pid)
        exec_reader, exec_writer = os.pipe()
        status_reader, status_writer = os.pipe()
        self.reaper = os.fork()
        if self.reaper == 0:
            _run_reaper(self.task, exec_writer, status_writer)
        os.close(exec_writer)
        os.close(status_writer)
        _leave_streams()
        if error := _read_all(exec_reader):
            self._report(b"failed " + error)
        else:
            self._report(b"started")
            self._wait(status_reader)
        self._end_all()
        self.status = self.status or os.read(status_reader, 64)
        self._report(b"ended " + self.status)

    def _namespaces(self, init_pid: int) -> Namespaces | None:
        if self.task.isolation:  # of a container without root, too
            return join_namespaces(init_pid)
        return ContainerNamespaces(init_pid) if self.task.in_container else None

    def _report(self, message: bytes) -> None:
        try:
            self.control.send(message)
        except OSError:
            return  # the agent is gone

    def _wait(self, status_reader: int) -> None:
        """Wait until the command has ended, or the agent has closed its end of the socket."""
        poll = select.poll()
        poll.register(self.control.fileno(), select.POLLIN)
        poll.register(status_reader, select.POLLIN)
        if any(descriptor == status_reader for descriptor, _ in poll.poll()):
            self.status = os.read(status_reader, 64)

    def _end_all(self) -> None:
        """Kill everything that is left: first with SIGHUP, as a terminal that hangs up."""
        self._signal(signal.SIGHUP)
        self._signal(signal.SIGCONT)
        hung_up, pause = time.monotonic(), ROUND_SECONDS
        while not self._gone():
            if self.status or time.monotonic() - hung_up >= HANG_UP_SECONDS:
                self._signal(signal.SIGKILL)
                pause = min(ROUND_SECONDS_MAX, pause * 1.5)
            time.sleep(pause)

    def _gone(self) -> bool:
        if not self.reaper_gone:
            self.reaper_gone = os.waitpid(self.reaper, os.WNOHANG)[0] != 0
        return self.reaper_gone

    def _signal(self, number: int) -> None:
        for pid in [] if self._gone() else descendants(self.reaper):
            try:
                os.kill(pid, number)
            except (ProcessLookupError, PermissionError):
                continue  # it has just ended, or is a set-uid program


def descendants(pid: int) -> list[int]:
    """Return all descendants of a process, parents first."""
    found = [pid]
    for parent in found:
        try:
            found += children(parent)
        except OSError:
            continue
    return found[1:]


def _run_reaper(task: SessionTask, exec_writer: int, status_writer: int) -> None:
    """Fork the command; report its status, and reap what it leaves until nothing is left."""
    try:
        adopt_orphans()
        for ignored in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
            signal.signal(ignored, signal.SIG_IGN)
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            task.become_command(parent, exec_writer)
        os.close(exec_writer)
        _leave_streams()
        while True:
            ended, status = os.wait()
            if ended == pid:
                os.write(status_writer, str(status).encode())
    except ChildProcessError:
        os._exit(0)
    except BaseException as error:  # report any error
        os.write(exec_writer, str(error).encode(errors="replace"))
    finally:
        os._exit(1)


def _leave_streams() -> None:
    """Replace the command's streams, so that their reader sees the end when the command closes them."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)


def _read_all(descriptor: int) -> bytes:
    pieces = []
    while piece := os.read(descriptor, 4096):
        pieces.append(piece)
    return b"".join(pieces)


def main(directory: str, rank: int, control_descriptor: int) -> None:
    """Run the command that the agent asks for, in the task with this rank of the attempt in `directory`."""
    control = socket.socket(fileno=control_descriptor)
    os.set_inheritable(control_descriptor, False)
    try:
        request = marshal.loads(control.recv(REQUEST_BYTES_MAX))
        os.chdir(directory)
        with open("spec", "rb") as file:
            spec = marshal.load(file)  # both ends run the same interpreter
        restore_descriptor_limit(spec.get("descriptors_max"))
        described = next(one for one in as_list(spec["tasks"]) if isinstance(one, dict) and one["rank"] == rank)
        group = Group.from_json(spec["group"]).child(f"task-{rank}") if spec["group"] else None
        Session(SessionTask(described, group, request), control).run(request["pid"])
    except Exception as error:  # report any error
        control.send(b"failed " + str(error).encode(errors="replace")[:4096])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
