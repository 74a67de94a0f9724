"""Listens to what attempts tell of their progress: over a socket of each, and in their output."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from cotenant.node_agent.control.output_patterns import OutputPattern, PatternMatcher
from cotenant.node_agent.control.progress import Told, Track, newest_lines, parse_line
from cotenant.node_agent.runtime.attempt_status import AttemptKey
from cotenant.node_agent.runtime.socket_paths import link_apart, progress_socket

log = structlog.get_logger()

REPORT_SECONDS = 1.0
PATTERN_SECONDS = 1.0
PROFILED_PATTERN_SECONDS = 0.1
DATAGRAMS_PER_ROUND, LINES_PER_ROUND = 64, 512  # some milliseconds
ROUND_PAUSE_SECONDS = 0.1
LAST_LOOK_SECONDS_MAX = 3.0

Tell = Callable[[AttemptKey, Track, float, float], None]  # with the rate per second, and seconds since 1970
Step = Callable[[int, str, float], None]  # with the step, its phase, and seconds of the monotonic clock


@dataclass(slots=True)
class _Listener:
    key: AttemptKey
    path: Path
    socket: socket.socket
    pattern: OutputPattern | None
    track: Track = field(default_factory=Track)
    dirty: bool = False
    told_at: float = -REPORT_SECONDS
    timer: asyncio.TimerHandle | None = None
    scan: asyncio.Task[None] | None = None
    profiled: Step | None = None

    def take(self, told: Told) -> None:
        """Note what the job tells; while it is profiled the steps' times go to the profile and nowhere else."""
        before, now = (self.track.phase, self.track.phase_step), time.monotonic()
        self.track.take(told, now)
        if self.profiled:
            self.track.forget_rate()
            if (self.track.phase, self.track.phase_step) != before:
                self.profiled(self.track.phase_step, self.track.phase, now)


class ProgressReader:
    """All attempts' progress; each change is told, but for one attempt at most once a second."""

    def __init__(self, sockets: Path, tell: Tell) -> None:
        self._sockets = sockets
        self._tell = tell
        self._listeners: dict[AttemptKey, _Listener] = {}
        self._matcher = PatternMatcher()
        self._loop = asyncio.get_running_loop()

    def watch(self, key: AttemptKey, regex: str, output: Callable[[], Path | None]) -> None:
        """Begin to listen to an attempt; its socket is there when this returns."""
        if key in self._listeners:
            return
        path = progress_socket(self._sockets, key)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        receiver.bind(str(path))
        path.chmod(0o622)  # a job may have dropped its rights
        link_apart(path)
        pattern = OutputPattern(key, regex, output, self._matcher) if regex else None
        listener = self._listeners[key] = _Listener(key, path, receiver, pattern)
        self._loop.add_reader(receiver, self._read_round, listener)
        if pattern:
            listener.scan = self._loop.create_task(self._scan_forever(listener, pattern))

    def _read_round(self, listener: _Listener) -> None:
        """Take what waits, up to a limit: a job that floods us is left alone for a moment."""
        if not self._drain(listener):
            self._loop.remove_reader(listener.socket)
            self._loop.call_later(ROUND_PAUSE_SECONDS, self._read_again, listener)

    def _read_again(self, listener: _Listener) -> None:
        if self._listeners.get(listener.key) is listener:
            self._loop.add_reader(listener.socket, self._read_round, listener)

    def _drain(self, listener: _Listener) -> bool:
        """Take what waits; False where that is more than is taken at once."""
        lines = 0
        for _ in range(DATAGRAMS_PER_ROUND):
            try:
                newest = newest_lines(listener.socket.recv(65536))
            except BlockingIOError:
                return True
            for line in newest:
                if told := parse_line(line):
                    listener.take(told)
                    self._changed(listener)
            lines += len(newest)
            if lines >= LINES_PER_ROUND:
                break
        return False

    def _changed(self, listener: _Listener) -> None:
        listener.dirty = True
        if listener.timer is None:
            wait_seconds = max(0.0, listener.told_at + REPORT_SECONDS - self._loop.time())
            listener.timer = self._loop.call_later(wait_seconds, self._tell_now, listener)

    def _tell_now(self, listener: _Listener) -> None:
        if listener.timer:
            listener.timer.cancel()
            listener.timer = None
        if listener.dirty:
            listener.dirty = False
            listener.told_at = self._loop.time()
            rate = listener.track.rate_per_second(time.monotonic())
            self._tell(listener.key, listener.track, rate, time.time())

    async def _scan_forever(self, listener: _Listener, pattern: OutputPattern) -> None:
        while pattern.usable:
            await asyncio.sleep(PROFILED_PATTERN_SECONDS if listener.profiled else PATTERN_SECONDS)
            await self._scan(listener, pattern)

    async def _scan(self, listener: _Listener, pattern: OutputPattern) -> None:
        if told := await pattern.newest():
            listener.take(told)
            self._changed(listener)

    def profile(self, key: AttemptKey, step: Step | None) -> None:
        """Tell `step` of each advance of an attempt while its cores are narrowed; None ends that.

        Its rate is that on all of its cores and on no others, so meanwhile nobody is told one, and afterwards a new
        one begins.
        """
        if listener := self._listeners.get(key):
            listener.profiled = step
            listener.track.forget_rate()

    def forget_rate(self, key: AttemptKey) -> None:
        """The attempt has other cores now: its rate begins anew."""
        if listener := self._listeners.get(key):
            listener.track.forget_rate()

    def rate_per_second(self, key: AttemptKey) -> float:
        """The attempt's rate now; 0 where it is not known."""
        listener = self._listeners.get(key)
        return listener.track.rate_per_second(time.monotonic()) if listener else 0.0

    def rate_over(self, key: AttemptKey, seconds: float) -> tuple[float, str]:
        """The attempt's rate over about so many last seconds, 0 where it is not known, and in which phase that is."""
        listener = self._listeners.get(key)
        if listener is None:
            return 0.0, ""
        return listener.track.rate_over(time.monotonic(), seconds), listener.track.phase

    def tell(self, key: AttemptKey) -> None:
        """Tell of an attempt soon, also where it has told nothing itself."""
        if listener := self._listeners.get(key):
            self._changed(listener)

    async def finish(self, key: AttemptKey) -> None:
        """The attempt has ended: take in and tell the last that it told, and stop listening."""
        listener = self._listeners.get(key)
        if listener is None:
            return
        self._drain(listener)
        if listener.scan:
            listener.scan.cancel()
        if listener.pattern:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._scan(listener, listener.pattern), LAST_LOOK_SECONDS_MAX)
        self._tell_now(listener)
        self._drop(listener)

    def _drop(self, listener: _Listener) -> None:
        del self._listeners[listener.key]
        self._loop.remove_reader(listener.socket)
        listener.socket.close()
        if listener.timer:
            listener.timer.cancel()
        if listener.scan:
            listener.scan.cancel()
        if listener.pattern:
            listener.pattern.close()
        try:
            os.unlink(listener.path)
        except FileNotFoundError:
            pass
        except OSError as error:  # a read-only disk must not keep anybody from hearing of the attempt's end
            log.warning("progress_socket_not_removed", attempt=str(listener.key), error=str(error))

    async def close(self) -> None:
        """Stop listening. The sockets of running jobs go; the next agent makes them anew under the same names."""
        for listener in list(self._listeners.values()):
            self._drop(listener)
        await self._matcher.close()
