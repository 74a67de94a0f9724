"""Forks supervisors whose imports are done: a supervisor starts in two milliseconds instead of twenty.

Started as `python -I -S zygote.py CHANNEL DIRECTORY PADDING`, with an environment of its own and no descriptor but the
standard ones and the channel, a Unix socket to the agent. Theory of operation:

- It is executed, not forked from the agent: it has none of the agent's descriptors, threads, locks, memory or
  secrets, so that neither it nor a supervisor can leak them to a job.
- A request is the path of an attempt's directory, with the descriptor of the attempt's lock. The answer is the pid and
  the start time of the supervisor. Between them is one fork, after which nothing distinguishes the supervisor from one
  that was executed: a session of its own, the same descriptors, environment, signals, limits and command line.
- The supervisor creates its log while it holds the lock, before anything else, and only then does the zygote answer. So
  an agent without an answer can see the outcome: if nothing holds the lock and there is no log, nothing was started.
- It knows nothing of attempts, and keeps no descriptor of them. If it is killed, supervisors run on.
- It ends when the agent's end of the channel is closed, by an exit or a kill. A supervisor closes its copy of the
  channel at once, so each end notices the death of the other.
- It lives in the group that supervisors move to, so that they need not: the first move of a process between groups
  waits some milliseconds for all CPUs (an RCU grace period).
"""

from __future__ import annotations

import gc
import marshal
import os
import select
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    import socket
    from typing import NoReturn

    from cotenant.node_agent.supervisor import supervisor
    from cotenant.node_agent.supervisor.cgroups import Group, GroupError
    from cotenant.node_agent.supervisor.command_line import CommandLine
    from cotenant.node_agent.supervisor.launch_faults import SUPERVISOR_LOG
    from cotenant.node_agent.supervisor.process_table import start_ticks
else:
    import _signal as signal  # their public modules build enumerations: see loop.py
    import _socket as socket

    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    import supervisor
    from cgroups import Group, GroupError
    from command_line import CommandLine
    from launch_faults import SUPERVISOR_LOG
    from process_table import start_ticks

REQUEST_BYTES_MAX = 8192
DESCRIPTOR_BYTES = 4
LOCK = 3  # a supervisor's lock has this number
HELD = b"held"
UNCLEAR = b"?"  # nothing was started, or what was started has already ended: the agent finds out which


class Zygote:
    """The process and its channel to the agent."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.command_line = CommandLine()
        self.home: object = None  # the group that it lives in, as in a spec
        self.reader, self.writer = os.pipe()

    def run(self) -> None:
        """Join the group that the agent names, then fork supervisors until the agent is gone."""
        self.home = join(marshal.loads(self.channel.recv(REQUEST_BYTES_MAX)))
        self._catch_ended_children()
        gc.freeze()  # what is there now stays shared with supervisors
        poll = select.poll()
        for descriptor in (self.reader, self.channel.fileno()):
            poll.register(descriptor, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll()}
            if self.reader in ready:
                os.read(self.reader, 4096)
                reap()
            if self.channel.fileno() in ready and not self._serve():
                return

    def _catch_ended_children(self) -> None:
        for descriptor in (self.reader, self.writer):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(self.writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # the wake-up pipe reports it

    def _serve(self) -> bool:
        """Start the requested supervisor; return False if the agent is gone."""
        request, lock = receive(self.channel)
        if not request:
            return False
        if lock < 0:
            answer = UNCLEAR
        else:
            try:
                answer = self._start(os.fsdecode(request), lock)
            except OSError:  # no process, descriptor or memory is left
                answer = UNCLEAR
            finally:
                os.close(lock)
        self.channel.send(answer)
        return True

    def _start(self, directory: str, lock: int) -> bytes:
        """Fork a supervisor and wait until it holds its lock and has its log."""
        reader, writer = os.pipe()
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # until the supervisor handles it
            try:
                pid = os.fork()
                if pid == 0:
                    self._become_supervisor(directory, lock, writer)
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
                os.close(writer)
            if os.read(reader, len(HELD)) != HELD:
                return UNCLEAR
            return f"{pid} {start_ticks(pid)}".encode()  # it is not reaped before the next call of `reap`
        finally:
            os.close(reader)

    def _become_supervisor(self, directory: str, lock: int, writer: int) -> NoReturn:
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            log = os.open(os.path.join(directory, SUPERVISOR_LOG), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            for target in (1, 2):
                os.dup2(log, target)
            os.write(writer, HELD)
            os.dup2(lock, LOCK)  # this or the supervisor closes what belongs to the zygote
            self.command_line.replace([*supervisor.COMMAND, supervisor.__file__, directory, str(LOCK)])
            supervisor.main(directory, LOCK, self.home)
            status = 0
        except BaseException:  # report any error as an interpreter would
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(status)  # the interpreter's own end would copy most of the shared pages


def join(home: object) -> object:
    """Join a control group, described as in a spec; return it, or None if supervisors have to move by themselves."""
    try:
        if isinstance(home, dict):
            Group.from_json(home).attach()
            return home
    except GroupError:
        pass  # a supervisor that cannot move either says why in its log
    return None


def receive(channel: socket.socket) -> tuple[bytes, int]:
    """Return a request and its descriptor: no request if the agent is gone, -1 if the descriptor is missing."""
    try:
        request, ancillary, _, _ = channel.recvmsg(REQUEST_BYTES_MAX, socket.CMSG_SPACE(DESCRIPTOR_BYTES))
    except OSError:
        return b"", -1
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            return request, int.from_bytes(data[:DESCRIPTOR_BYTES], sys.byteorder)
    return request, -1


def reap() -> None:
    """Reap ended supervisors."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def main(channel: int, directory: str) -> None:
    """Serve the agent at the other end of the channel; `directory` is shown in the list of processes."""
    os.set_inheritable(channel, False)
    os.closerange(channel + 1, supervisor.DESCRIPTORS_MAX)  # descriptors that a library of the agent left open
    os.chdir("/")
    zygote = Zygote(socket.socket(fileno=channel))
    zygote.command_line.replace([*supervisor.COMMAND, os.path.abspath(__file__), directory])
    zygote.run()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
