"""Receives attempts' progress: over one socket per attempt, and from their output."""

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
from cotenant.node_agent.control.progress import ProgressTracker, ProgressUpdate, newest_lines, parse_line
from cotenant.node_agent.runtime.attempt_status import AttemptKey
from cotenant.node_agent.runtime.socket_paths import link_private_socket, progress_socket

log = structlog.get_logger()

REPORT_SECONDS = 1.0
PATTERN_SECONDS = 1.0
PROFILED_PATTERN_SECONDS = 0.1
DATAGRAMS_PER_ROUND, LINES_PER_ROUND = 64, 512  # some milliseconds
ROUND_PAUSE_SECONDS = 0.1
LAST_LOOK_SECONDS_MAX = 3.0

ReportProgress = Callable[
    [AttemptKey, ProgressTracker, float, float], None
]  # with the rate per second, and seconds since 1970
Step = Callable[[int, str, float], None]  # with the step, its phase, and seconds of the monotonic clock


@dataclass(slots=True)
class _Listener:
    key: AttemptKey
    path: Path
    socket: socket.socket
    pattern: OutputPattern | None
    track: ProgressTracker = field(default_factory=ProgressTracker)
    dirty: bool = False
    reported_at: float = -REPORT_SECONDS
    timer: asyncio.TimerHandle | None = None
    scan: asyncio.Task[None] | None = None
    profiled: Step | None = None

    def update(self, update: ProgressUpdate) -> None:
        """Record an update; while the job is profiled, step times go to the profile only."""
        before, now = (self.track.phase, self.track.phase_step), time.monotonic()
        self.track.update(update, now)
        if self.profiled:
            self.track.forget_rate()
            if (self.track.phase, self.track.phase_step) != before:
                self.profiled(self.track.phase_step, self.track.phase, now)


class ProgressReader:
    """The progress of all attempts; each change is reported, but at most once a second per attempt."""

    def __init__(self, sockets: Path, report: ReportProgress) -> None:
        self._sockets = sockets
        self._report = report
        self._listeners: dict[AttemptKey, _Listener] = {}
        self._matcher = PatternMatcher()
        self._loop = asyncio.get_running_loop()

    def watch(self, key: AttemptKey, regex: str, output: Callable[[], Path | None]) -> None:
        """Start listening to an attempt; its socket exists when this returns."""
        if key in self._listeners:
            return
        path = progress_socket(self._sockets, key)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        receiver.bind(str(path))
        path.chmod(0o622)  # a job may have dropped privileges
        link_private_socket(path)
        pattern = OutputPattern(key, regex, output, self._matcher) if regex else None
        listener = self._listeners[key] = _Listener(key, path, receiver, pattern)
        self._loop.add_reader(receiver, self._read_batch, listener)
        if pattern:
            listener.scan = self._loop.create_task(self._scan_forever(listener, pattern))

    def _read_batch(self, listener: _Listener) -> None:
        """Read a bounded batch; a job that floods the socket is not read for a moment."""
        if not self._drain(listener):
            self._loop.remove_reader(listener.socket)
            self._loop.call_later(ROUND_PAUSE_SECONDS, self._resume_reading, listener)

    def _resume_reading(self, listener: _Listener) -> None:
        if self._listeners.get(listener.key) is listener:
            self._loop.add_reader(listener.socket, self._read_batch, listener)

    def _drain(self, listener: _Listener) -> bool:
        """Read waiting datagrams; return False if more remain than one batch."""
        lines = 0
        for _ in range(DATAGRAMS_PER_ROUND):
            try:
                newest = newest_lines(listener.socket.recv(65536))
            except BlockingIOError:
                return True
            for line in newest:
                if update := parse_line(line):
                    listener.update(update)
                    self._changed(listener)
            lines += len(newest)
            if lines >= LINES_PER_ROUND:
                break
        return False

    def _changed(self, listener: _Listener) -> None:
        listener.dirty = True
        if listener.timer is None:
            wait_seconds = max(0.0, listener.reported_at + REPORT_SECONDS - self._loop.time())
            listener.timer = self._loop.call_later(wait_seconds, self._report_now, listener)

    def _report_now(self, listener: _Listener) -> None:
        if listener.timer:
            listener.timer.cancel()
            listener.timer = None
        if listener.dirty:
            listener.dirty = False
            listener.reported_at = self._loop.time()
            rate = listener.track.rate_per_second(time.monotonic())
            self._report(listener.key, listener.track, rate, time.time())

    async def _scan_forever(self, listener: _Listener, pattern: OutputPattern) -> None:
        while pattern.usable:
            await asyncio.sleep(PROFILED_PATTERN_SECONDS if listener.profiled else PATTERN_SECONDS)
            await self._scan(listener, pattern)

    async def _scan(self, listener: _Listener, pattern: OutputPattern) -> None:
        if update := await pattern.latest():
            listener.update(update)
            self._changed(listener)

    def profile(self, key: AttemptKey, step: Step | None) -> None:
        """Call `step` for each step of an attempt while it is profiled; None ends that.

        An attempt's rate refers to all of its cores, so none is reported during a profile, and a new one is measured
        afterwards.
        """
        if listener := self._listeners.get(key):
            listener.profiled = step
            listener.track.forget_rate()

    def forget_rate(self, key: AttemptKey) -> None:
        """Reset an attempt's rate because its cores changed."""
        if listener := self._listeners.get(key):
            listener.track.forget_rate()

    def rate_per_second(self, key: AttemptKey) -> float:
        """Return the attempt's current rate; 0 if unknown."""
        listener = self._listeners.get(key)
        return listener.track.rate_per_second(time.monotonic()) if listener else 0.0

    def rate_over(self, key: AttemptKey, seconds: float) -> tuple[float, str]:
        """Return the attempt's rate over about the last `seconds`, 0 if unknown, and the phase it belongs to."""
        listener = self._listeners.get(key)
        if listener is None:
            return 0.0, ""
        return listener.track.rate_over(time.monotonic(), seconds), listener.track.phase

    def report_soon(self, key: AttemptKey) -> None:
        """Schedule a report of an attempt even if the job has reported nothing itself."""
        if listener := self._listeners.get(key):
            self._changed(listener)

    async def finish(self, key: AttemptKey) -> None:
        """Read and report the last progress of an ended attempt, and stop listening."""
        listener = self._listeners.get(key)
        if listener is None:
            return
        self._drain(listener)
        if listener.scan:
            listener.scan.cancel()
        if listener.pattern:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._scan(listener, listener.pattern), LAST_LOOK_SECONDS_MAX)
        self._report_now(listener)
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
        except OSError as error:  # a read-only disk must not block the report of the attempt's end
            log.warning("progress_socket_removal_failed", attempt=str(listener.key), error=str(error))

    async def close(self) -> None:
        """Stop listening and remove the sockets; the next agent recreates those of running jobs by the same names."""
        for listener in list(self._listeners.values()):
            self._drop(listener)
        await self._matcher.close()
