"""Runs commands in processes forked from one that has imported them: a start and the imports take most of a command.

`python -m tests.end_to_end.command_server FD MODULE …` serves on a socket. A request is the arguments, the environment,
the folder and the limits of descriptors as JSON, with four descriptors: the command's three streams and a pipe, on
which its process id and then its exit status are told. Everything that a process has of its own, a command has as well,
but for its imports.
"""

from __future__ import annotations

import gc
import io
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import IO

BYTES_MAX = 1 << 20
DESCRIPTORS = 4
START_SECONDS_MAX = 120.0  # with the imports of the server
COMMANDS = ("jobs.change", "jobs.explain", "jobs.list_jobs", "jobs.logs", "jobs.show", "jobs.submit", "jobs.wait")
IMPORTED = (  # what commands have in common, and those that tests use most
    "cotenant.cli.application",
    *(f"cotenant.cli.{name}" for name in (*COMMANDS, "mesh.replicas", "mesh.status", "mesh.tenants", "nodes.nodes")),
)
SERVED = (  # what `up` and `serve` have imported when they serve
    "cotenant.cli.application",
    *(f"cotenant.cli.mesh.{name}" for name in ("up", "serve", "http_process", "web_process")),
    *(f"cotenant.services.{name}.__main__" for name in ("queue", "placement", "predictor", "contention")),
    "cotenant.node_agent.__main__",
    *(f"cotenant.policies.{name}" for name in ("history", "coda_eliminator", "lightgbm_duration", "robust_order")),
    "cotenant.policies.coda_eliminator.relief",
    "cotenant.policies.lightgbm_duration.runtime_model",
    "cotenant.security.credentials",
    "grpc_reflection.v1alpha.reflection",
)


class Forked:
    """A process that was forked by a command server; it has the methods of `subprocess.Popen` that tests call."""

    def __init__(self, pid: int, told: io.FileIO) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._told = told

    def poll(self) -> int | None:
        """Return its exit status; None if it has not exited."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it exits and return its status.

        Raises:
            TimeoutExpired: it has not exited by then.
        """
        if self.returncode is None:
            try:
                self.returncode = int(_line(self._told, timeout))
            except TimeoutError:
                raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0) from None
            self._told.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has exited."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it, unless it has exited."""
        self.send_signal(signal.SIGKILL)


class CommandServer:
    """A server of commands that has imported some modules, started when the first command is run."""

    def __init__(self, command: str, modules: Sequence[str]) -> None:
        self._command = command
        self._modules = modules
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def run(
        self,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        folder: str | Path,
        stdin: str,
        seconds: float,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as `subprocess.run` would.

        Raises:
            TimeoutExpired: it took longer; it is killed.
        """
        with (
            Path(os.devnull).open("rb") if not stdin else _file_of(stdin) as given,
            _file_of("") as out,
            _file_of("") as err,
        ):
            process = self.start(arguments, environment=environment, folder=folder, streams=(given, out, err))
            try:
                status = process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise subprocess.TimeoutExpired([self._command, *arguments], seconds) from None
            return subprocess.CompletedProcess(arguments, status, _text_of(out), _text_of(err))

    def start(
        self,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        folder: str | Path,
        streams: tuple[IO[bytes], IO[bytes], IO[bytes]],
    ) -> Forked:
        """Start a command as `subprocess.Popen` would, with these streams."""
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        request = json.dumps([[self._command, *arguments], dict(environment), str(folder), limits]).encode()
        told, tell = os.pipe()
        try:
            with self._lock:
                descriptors = [*(stream.fileno() for stream in streams), tell]
                socket.send_fds(self._served(), [request], descriptors)
        finally:
            os.close(tell)
        answers = io.FileIO(told)
        return Forked(int(_line(answers, START_SECONDS_MAX)), answers)

    def _served(self) -> socket.socket:
        """Return the socket of the server, which is started first if it does not run yet."""
        if self._socket is None:
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", __name__, str(theirs.fileno()), *self._modules],
                    pass_fds=[theirs.fileno()],
                    cwd=Path(__file__).parents[2],
                )
        return self._socket


def _file_of(text: str) -> io.BufferedRandom:
    file = os.fdopen(os.memfd_create("stream"), "w+b")
    file.write(text.encode())
    file.seek(0)
    return file


def _text_of(file: io.BufferedRandom) -> str:
    file.seek(0)
    return file.read().decode()


def _line(answers: io.FileIO, seconds: float | None) -> bytes:
    """Read a line of digits. Raises TimeoutError."""
    poll = select.poll()
    poll.register(answers, select.POLLIN)
    if not poll.poll(None if seconds is None else seconds * 1000):
        raise TimeoutError
    line = answers.readline()
    assert line, "the command server has ended"
    return line


def serve(requests: socket.socket) -> None:
    """Fork a command for each request until the other side ends; return in the forked process, which is to run it."""
    running: dict[int, int] = {}  # the pipe of each command, by process id
    waking, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    ready = select.poll()  # descriptors may be beyond 1023
    ready.register(requests, select.POLLIN)
    ready.register(waking, select.POLLIN)
    while True:
        descriptors = [descriptor for descriptor, _ in ready.poll()]
        if waking in descriptors:
            os.read(waking, BYTES_MAX)
            _tell_ends(running)
        if requests.fileno() not in descriptors:
            continue
        data, received, _, _ = socket.recv_fds(requests, BYTES_MAX, DESCRIPTORS)
        if not data:
            raise SystemExit
        pid = os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for descriptor in (waking, woken, requests.detach(), *running.values()):
                os.close(descriptor)
            arguments, environment, folder, limits = json.loads(data)
            resource.setrlimit(resource.RLIMIT_NOFILE, tuple(limits))
            _become(arguments, environment, folder, received)
            return
        *streams, running[pid] = received
        _tell(running[pid], pid)
        for stream in streams:
            os.close(stream)


def _tell_ends(running: dict[int, int]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        pipe = running.pop(pid)
        _tell(pipe, os.waitstatus_to_exitcode(status))
        os.close(pipe)


def _tell(pipe: int, number: int) -> None:
    with suppress(BrokenPipeError):  # nobody waits any more
        os.write(pipe, b"%d\n" % number)


def _become(arguments: list[str], environment: dict[str, str], folder: str, descriptors: list[int]) -> None:
    """Make this process what it would be if it had been started with these."""
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
    for descriptor in descriptors:
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = arguments
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False, errors="backslashreplace", buffering=1)


def main() -> None:
    """Serve, and in each forked process run the command line."""
    from cotenant.cli.main import main as command_line

    for module in sys.argv[2:]:
        import_module(module)
    gc.collect()
    gc.freeze()
    serve(socket.socket(fileno=int(sys.argv[1])))
    command_line()


if __name__ == "__main__":
    main()
