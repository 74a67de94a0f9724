"""What the agent itself lacks: file descriptors, memory, process ids. None of it says anything of a disk or a job.

An agent at its limit has to report so, and to stop jobs, which takes a few descriptors. So it holds some back, and
releases them when there are no others. No launch takes those: a launch waits a moment for the shortage to pass, and is
refused then (the job is not to blame, and goes elsewhere); the node gets no new work from the moment it is reported.
"""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from collections.abc import Callable

import structlog

from cotenant import file_descriptors, telemetry

log = structlog.get_logger()

SPARE = 16
LAUNCH_DESCRIPTORS_MIN = 24  # free ones, without which no launch is begun
PATIENCE_SECONDS = 10.0  # for a shortage to pass, before a launch is refused and the job goes elsewhere
LOOK_SECONDS = 0.1
LACKING = {
    errno.EMFILE: "descriptors",
    errno.ENFILE: "descriptors",
    errno.ENOMEM: "memory",
    errno.EAGAIN: "processes",
}
SAID = {
    errno.EMFILE: "the agent has opened as many as it may",
    errno.ENFILE: "the system has none left (fs.file-max)",
    errno.ENOMEM: "the agent cannot allocate memory",
    errno.EAGAIN: "no process or thread can be started (pids.max, ulimit -u or kernel.pid_max)",
}

FREE = telemetry.gauge("cotenant.agent.descriptors_free", "{descriptor}", "File descriptors that an agent may open.")


def lacking(error: BaseException) -> str:
    """Return what the process lacks according to an error: descriptors, memory or processes; "" for any other error.

    >>> lacking(OSError(errno.EMFILE, "Too many open files")), lacking(OSError(errno.ENOSPC, "No space left on device"))
    ('descriptors', '')
    >>> lacking(RuntimeError("can't start new thread"))
    'processes'
    """
    if isinstance(error, MemoryError):
        return "memory"
    if isinstance(error, RuntimeError) and "start new thread" in str(error):
        return "processes"
    return LACKING.get(error.errno or 0, "") if isinstance(error, OSError) else ""


class OwnLimits:
    """Watches what the agent has left. `wake` is called where a shortage is found, so that it is reported at once."""

    def __init__(self, wake: Callable[[], None] = lambda: None) -> None:
        self._spare = file_descriptors.Spare(SPARE)
        self._wake = wake

    def usage(self) -> file_descriptors.Usage:
        """Return the descriptors that are open without those held back, and release these where no others are left."""
        usage = file_descriptors.usage()
        if usage.free == 0 and self._spare.release():
            log.warning("spare_descriptors_released", used=usage.used, limit=usage.limit)
        elif usage.free > SPARE + LAUNCH_DESCRIPTORS_MIN:
            self._spare.refill()
        usage = file_descriptors.usage()
        free = usage.free if self._spare.held else max(0, usage.free - SPARE)
        FREE.set(free)
        return file_descriptors.Usage(usage.limit - free, usage.limit)

    async def room(self, given_up: Callable[[], bool]) -> str:
        """Wait for some seconds until the agent has what a launch takes, or until that is given up.

        Returns why there is still no room; "" where there is, or nobody wants it any longer.
        """
        deadline, told = time.monotonic() + PATIENCE_SECONDS, ""
        while (why := self.shortage()) and not given_up():
            if time.monotonic() >= deadline:
                return why
            if why != told:
                log.warning("launch_waits", why=why)
                self._wake()
                told = why
            await asyncio.sleep(LOOK_SECONDS)
        return ""

    def shortage(self) -> str:
        """Return why no launch should be begun; "" where there is enough of everything."""
        if self.usage().free < LAUNCH_DESCRIPTORS_MIN:
            return "out of file descriptors"
        return thread_error()

    def close(self) -> None:
        """Release what is held back."""
        self._spare.close()


def thread_error() -> str:
    """Return why no thread, and so no process, can be started; "" where one can."""
    try:
        trial = threading.Thread(target=_nothing, name="trial")
        trial.start()
    except (RuntimeError, MemoryError) as error:
        return SAID[errno.EAGAIN] if lacking(error) == "processes" else SAID[errno.ENOMEM]
    trial.join()
    return ""


def _nothing() -> None:
    """Be a thread that can be started."""
