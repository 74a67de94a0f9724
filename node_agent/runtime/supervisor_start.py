"""Starts supervisors: forked by a zygote (`supervisor/zygote.py`) or, without one, executed.

The agent holds an attempt's lock when it asks the zygote, and passes the lock's descriptor with the request. Whatever
happens then, the lock and the supervisor's log show the outcome, as they do after a restart of the agent: a held lock
is a living supervisor, a log without one is a supervisor that has ended, and neither means that nothing was started.
Only then is the supervisor executed instead, so it is never started twice.

A zygote is only a faster way. If it is killed, or does not answer and is killed for that, the next launch starts
another one; if it does not live long, supervisors are executed for a while.
"""

from __future__ import annotations

import array
import contextlib
import marshal
import os
import select
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import structlog

from cotenant.node_agent.runtime.attempt_directory import AttemptDirectory
from cotenant.node_agent.supervisor.cgroups import Group
from cotenant.node_agent.supervisor.launch_faults import SUPERVISOR_LOG

log = structlog.get_logger()

SUPERVISOR = Path(__file__).parents[1] / "supervisor" / "supervisor.py"
ENVIRONMENT = {"PATH": os.defpath, "LANG": "C.UTF-8"}
PADDING = " " * 3072  # room for a supervisor's command line
ANSWER_SECONDS_MAX = 30.0  # on an overloaded machine
ANSWER_BYTES_MAX = 64
EXIT_SECONDS_MAX = 30.0  # of a killed process
LOOK_SECONDS_FIRST, LOOK_SECONDS_MAX = 0.01, 0.5
LIFE_SECONDS_MIN = 60.0  # of a zygote that does not count as failed when it ends
RETRY_SECONDS_FIRST, RETRY_SECONDS_MAX = 0.5, 60.0
STAMP_SECONDS = 1.0  # between looks for a newer package

Stamp = tuple[tuple[str, int, int], ...]


class SupervisorProcess(NamedTuple):
    """A supervisor that was started; without a start time it is a child of this process.

    `GONE` is one that has ended without having recorded a state.
    """

    pid: int
    start_ticks: int | None = None


GONE = SupervisorProcess(0, 0)


class Zygote:
    """One zygote process, as the agent sees it. Starting it returns before its imports are done."""

    def __init__(self, home: Group | None, state_dir: Path) -> None:
        """Start it in the group `home`. Raises `OSError`."""
        self.home, self._stamp = home, package_stamp()
        self._looked = self._born = time.monotonic()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                self.pid = self._spawn(theirs.fileno(), state_dir)
            try:
                self._pidfd = os.pidfd_open(self.pid)
            except OSError:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                raise
            self._channel.settimeout(ANSWER_SECONDS_MAX)
            with contextlib.suppress(OSError):  # it has ended, which the first request finds out
                self._channel.send(marshal.dumps(home.to_json() if home else None))
        except BaseException:
            self._channel.close()
            raise

    @staticmethod
    def _spawn(channel: int, state_dir: Path) -> int:
        number = 3 if channel != 3 else 4
        program = str(SUPERVISOR.with_name("zygote.py"))
        return os.posix_spawn(
            sys.executable,
            [sys.executable, "-I", "-S", program, str(number), str(state_dir), PADDING],
            ENVIRONMENT,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_DUP2, 1, 2),
                (os.POSIX_SPAWN_DUP2, channel, number),
            ],
            setsid=True,
            setsigmask=[],
        )

    @property
    def lived_seconds(self) -> float:
        """How long ago it was started."""
        return time.monotonic() - self._born

    def outdated(self) -> bool:
        """Return whether its program or the interpreter was replaced on disk, as of the last second."""
        if (now := time.monotonic()) < self._looked + STAMP_SECONDS:
            return False
        self._looked = now
        return self._stamp != package_stamp()

    def gone(self, timeout_seconds: float = 0) -> bool:
        """Return whether it has exited and closed all its files, after at most this time. Blocks."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(1000 * timeout_seconds))

    def fork(self, directory: AttemptDirectory, lock: int) -> SupervisorProcess | None:
        """Let it fork a supervisor that holds the lock; None if it did not, or the outcome is unknown. Blocks.

        Raises:
            OSError: it has ended or does not answer.
        """
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [lock]))
        self._channel.sendmsg([os.fsencode(directory.path)], [rights])
        answer = self._channel.recv(ANSWER_BYTES_MAX)
        if not answer:
            raise ConnectionResetError("it has ended")
        pid, _, ticks = answer.partition(b" ")
        return SupervisorProcess(int(pid), int(ticks)) if ticks else None

    def end(self) -> None:
        """Kill it, which harms nothing, and wait until it is gone. Blocks."""
        self._channel.close()
        signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self.gone(EXIT_SECONDS_MAX)
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
        os.close(self._pidfd)


class SupervisorStarter:
    """Starts supervisors for a node, from several threads; until it is opened, by executing them."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._state_dir: Path | None = None
        self._zygote: Zygote | None = None
        self._failures = 0
        self._retry_at = 0.0  # monotonic

    def open(self, state_dir: Path, home: Group | None) -> None:
        """Use zygotes from now on, and start the first one. Blocks for a moment."""
        with self._turn:
            self._state_dir = state_dir
            self._ready_zygote(home)

    def close(self) -> None:
        """End the zygote; supervisors continue. Blocks until it is gone."""
        with self._turn:
            self._state_dir = None
            self._end_zygote()

    def start(self, directory: AttemptDirectory, home: Group | None) -> SupervisorProcess | None:
        """Start a supervisor in a session of its own, holding the attempt's lock; None if another one holds it. Blocks.

        Raises:
            OSError: no process can be started.
        """
        lock = directory.lock()
        if lock is None:
            return None
        try:
            with self._turn:
                zygote = self._ready_zygote(home)
                started = self._fork(zygote, directory, lock) if zygote else None
            if zygote is None or started is not None:
                return started or execute(directory, lock)
        finally:
            os.close(lock)
        return start_if_not_started(directory)

    def _ready_zygote(self, home: Group | None) -> Zygote | None:
        """Return a zygote of the package on disk, in the right group; None if there is none for now."""
        if (zygote := self._zygote) is not None:
            if zygote.gone():
                self._zygote_failed(zygote, "it has ended")
            elif zygote.outdated() or not same_group(zygote.home, home):
                log.info("zygote_replaced", pid=zygote.pid)
                self._end_zygote()
        if self._zygote is None and self._state_dir is not None and time.monotonic() >= self._retry_at:
            self._start_zygote(home, self._state_dir)
        return self._zygote

    def _start_zygote(self, home: Group | None, state_dir: Path) -> None:
        if not SUPERVISOR.with_name("zygote.py").exists():
            return
        try:
            self._zygote = Zygote(home, state_dir)
            log.info("zygote_started", pid=self._zygote.pid)
        except OSError as error:
            self._count_failure(str(error))

    def _fork(self, zygote: Zygote, directory: AttemptDirectory, lock: int) -> SupervisorProcess | None:
        try:
            return zygote.fork(directory, lock)
        except (OSError, ValueError) as error:
            self._zygote_failed(zygote, str(error))
            return None

    def _zygote_failed(self, zygote: Zygote, why: str) -> None:
        if zygote.lived_seconds >= LIFE_SECONDS_MIN:
            self._failures = 0
        self._end_zygote()
        self._count_failure(why)

    def _count_failure(self, why: str) -> None:
        """Start the next one at once, the one after that after a pause, which doubles."""
        pause = min(RETRY_SECONDS_MAX, RETRY_SECONDS_FIRST * 2**self._failures) if self._failures else 0.0
        self._failures = min(self._failures + 1, 16)
        self._retry_at = time.monotonic() + pause
        log.warning("zygote_failed", why=why, failures=self._failures, retry_seconds=pause)

    def _end_zygote(self) -> None:
        zygote, self._zygote = self._zygote, None
        if zygote is not None:
            zygote.end()


def start_if_not_started(directory: AttemptDirectory) -> SupervisorProcess | None:
    """Return the supervisor that a zygote has started without an answer; execute one if there is none. Blocks.

    While something holds the lock, a supervisor may still be about to start the job, however slowly.
    """
    pause = LOOK_SECONDS_FIRST
    while (status := directory.status()) is None and directory.supervised():
        time.sleep(pause)
        pause = min(LOOK_SECONDS_MAX, pause * 2)
    if status := status or directory.status():
        return SupervisorProcess(status.pid, status.pid_start_ticks)
    if directory.was_started():
        return GONE
    lock = directory.lock()
    if lock is None:
        return None
    try:
        return execute(directory, lock)
    finally:
        os.close(lock)


def execute(directory: AttemptDirectory, lock: int) -> SupervisorProcess:
    """Execute a supervisor as a child of this process. Raises `OSError`.

    SIGTERM is blocked until the supervisor handles it, so that an immediate stop order does not kill it.
    """
    inherited_lock = 3 if lock != 3 else 4
    log_path = str(directory.path / SUPERVISOR_LOG)
    pid = os.posix_spawn(
        sys.executable,
        [sys.executable, "-I", "-S", str(SUPERVISOR), str(directory.path), str(inherited_lock)],
        ENVIRONMENT,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
            (os.POSIX_SPAWN_DUP2, lock, inherited_lock),
        ],
        setsid=True,
        setsigmask=[signal.SIGTERM],
    )
    return SupervisorProcess(pid)


def same_group(one: Group | None, other: Group | None) -> bool:
    """Return whether both are the same control group, or none."""
    return (one and one.directories) == (other and other.directories)


def package_stamp() -> Stamp:
    """Return what changes when the supervisor's program or the interpreter is replaced on disk; () if it is gone."""
    try:
        with os.scandir(SUPERVISOR.parent) as entries:
            found = [(entry.path, entry.stat()) for entry in entries if entry.name.endswith(".py")]
        found.append((sys.executable, os.stat(sys.executable)))
    except OSError:
        return ()
    return tuple(sorted((path, stat.st_ino, stat.st_mtime_ns) for path, stat in found))
