"""A command in a running attempt, started for a session: its process, and its streams as the agent holds them."""

from __future__ import annotations

import contextlib
import fcntl
import marshal
import os
import signal
import socket
import struct
import sys
import termios
from pathlib import Path

from cotenant.node_agent.runtime.runtime_port import SessionCommand, SessionFailed
from cotenant.node_agent.runtime.supervisor_start import ENVIRONMENT, SUPERVISOR
from cotenant.rpc.descriptors import ready

ANSWER_BYTES_MAX = 1 << 13
PROGRAM = str(SUPERVISOR.with_name("session.py"))
CONTROL = 3  # the descriptor of the control socket in the session's process


class SessionProcess:
    """A session's process. `error` is -1 if it runs on a terminal, whose `input` and `output` are the same."""

    def __init__(self, pidfd: int, control: socket.socket, streams: tuple[int, int, int]) -> None:
        self._pidfd, self._control = pidfd, control
        self.input, self.output, self.error = streams
        self.terminal = self.error < 0

    async def started(self) -> None:
        """Wait until the command runs.

        Raises:
            SessionFailed: it cannot be started.
        """
        word, _, rest = (await self._message()).partition(b" ")
        if word != b"started":
            raise SessionFailed(rest.decode(errors="replace") or "its process was killed")

    async def ended(self) -> tuple[int, int]:
        """Wait until the command and all that it started have ended; return its exit code and signal."""
        while (message := await self._message()) and not message.startswith(b"ended"):
            continue
        status = message.partition(b" ")[2]
        if not status.isdigit():
            return 0, signal.SIGKILL  # its process was killed
        code = os.waitstatus_to_exitcode(int(status))
        return max(0, code), max(0, -code)

    async def _message(self) -> bytes:
        """Return the next message of the process, b"" after its end."""
        await ready(self._control.fileno())
        try:
            return self._control.recv(ANSWER_BYTES_MAX)
        except OSError:
            return b""

    def resize(self, rows: int, columns: int) -> None:
        """Set the size of its terminal; its processes are sent SIGWINCH."""
        if self.terminal:
            with contextlib.suppress(OSError):  # the terminal is gone
                _set_size(self.output, (rows, columns))

    async def close(self) -> None:
        """Kill all that is left of it, and wait until it is gone."""
        self._control.close()
        await ready(self._pidfd)
        self._reap()

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
        os.close(self._pidfd)


def start_session(directory: Path, wanted: SessionCommand, pid: int) -> SessionProcess:
    """Start a session's process for an attempt, in the task of a process. Raises `OSError`."""
    with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
        control, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.callback(control.close)
        theirs.callback(far.close)
        streams, stdio = _terminal(wanted, ours, theirs) if wanted.size else _pipes(ours, theirs)
        for descriptor in set(streams) - {-1}:
            os.set_blocking(descriptor, False)
        control.setblocking(False)
        control.send(
            marshal.dumps(
                {
                    "command": list(wanted.command),
                    "terminal": wanted.size is not None,
                    "environment": dict(wanted.environment),
                    "pid": pid,
                }
            )
        )
        own = os.posix_spawn(
            sys.executable,
            [sys.executable, "-I", "-S", PROGRAM, str(directory), str(wanted.rank), str(CONTROL)],
            ENVIRONMENT,
            file_actions=_file_actions(stdio, far.fileno()),
            setsid=True,
            setsigmask=[],
        )
        process = SessionProcess(os.pidfd_open(own), control, streams)
        ours.pop_all()
        return process


def _file_actions(stdio: tuple[int, int, int], control: int) -> list[tuple[int, ...]]:
    """Return how the process gets its descriptors. They are copied out of the way first, as they may be its targets."""
    above = 1 + max(*stdio, control, CONTROL)
    sources = (*stdio, control)
    moved = [(os.POSIX_SPAWN_DUP2, source, above + place) for place, source in enumerate(sources)]
    placed = [(os.POSIX_SPAWN_DUP2, above + place, place) for place in range(len(sources))]
    return [*moved, *placed, *((os.POSIX_SPAWN_CLOSE, above + place) for place in range(len(sources)))]


def _terminal(
    wanted: SessionCommand, ours: contextlib.ExitStack, theirs: contextlib.ExitStack
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    master, slave = os.openpty()
    ours.callback(os.close, master)
    theirs.callback(os.close, slave)
    _set_size(master, wanted.size or (0, 0))
    reading = os.dup(master)  # the loop waits for each descriptor in one direction
    ours.callback(os.close, reading)
    return (master, reading, -1), (slave, slave, slave)


def _pipes(
    ours: contextlib.ExitStack, theirs: contextlib.ExitStack
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    pairs = [os.pipe() for _ in range(3)]
    for place, (reader, writer) in enumerate(pairs):
        ours.callback(os.close, writer if place == 0 else reader)
        theirs.callback(os.close, reader if place == 0 else writer)
    (their_input, our_input), (our_output, their_output), (our_error, their_error) = pairs
    return (our_input, our_output, our_error), (their_input, their_output, their_error)


def _set_size(terminal: int, size: tuple[int, int]) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
