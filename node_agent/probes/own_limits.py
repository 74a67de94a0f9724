"""The agent's own resources: file descriptors, memory and process ids. A shortage is not the fault of a disk or a job.

An agent at its limit must still report that and stop jobs, which takes a few descriptors. So it reserves some, and
releases them when no others are left. Launches do not use the reserve: a launch waits briefly for the shortage to pass
and is then refused (the job is not to blame and runs elsewhere); the node gets no new work once the shortage is
reported.
"""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from collections.abc import Callable

import structlog

from cotenant import file_descriptors, telemetry
from cotenant.exhaustion import exhausted_resource

log = structlog.get_logger()

SPARE = 16
LAUNCH_DESCRIPTORS_MIN = 24  # free ones needed to start a launch
SHORTAGE_SECONDS_MAX = 10.0  # for a shortage to pass before a launch is refused
LOOK_SECONDS = 0.1
EXHAUSTION_MESSAGES = {
    errno.EMFILE: "the agent has reached its limit",
    errno.ENFILE: "the system has none left (fs.file-max)",
    errno.ENOMEM: "the agent cannot allocate memory",
    errno.EAGAIN: "no process or thread can be started (pids.max, ulimit -u or kernel.pid_max)",
}

FREE = telemetry.gauge("cotenant.agent.descriptors_free", "{descriptor}", "File descriptors that an agent can open.")


class OwnLimits:
    """Monitors the agent's own resources. `wake` is called when a shortage is found, so that it is reported at once."""

    def __init__(self, wake: Callable[[], None] = lambda: None) -> None:
        self._spare = file_descriptors.Spare(SPARE)
        self._wake = wake

    def usage(self) -> file_descriptors.Usage:
        """Return the used descriptors without the reserve; release the reserve if no others are left."""
        usage = file_descriptors.usage()
        if usage.free == 0 and self._spare.release():
            log.warning("spare_descriptors_released", used=usage.used, limit=usage.limit)
        elif usage.free > SPARE + LAUNCH_DESCRIPTORS_MIN:
            self._spare.refill()
        usage = file_descriptors.usage()
        free = usage.free if self._spare.held else max(0, usage.free - SPARE)
        FREE.set(free)
        return file_descriptors.Usage(usage.limit - free, usage.limit)

    async def wait_for_resources(self, given_up: Callable[[], bool]) -> str:
        """Wait for some seconds until the agent has the resources for a launch, or until the launch is given up.

        Returns the shortage; "" if there is none or the launch was given up.
        """
        deadline, logged = time.monotonic() + SHORTAGE_SECONDS_MAX, ""
        while (why := self.shortage()) and not given_up():
            if time.monotonic() >= deadline:
                return why
            if why != logged:
                log.warning("launch_delayed", why=why)
                self._wake()
                logged = why
            await asyncio.sleep(LOOK_SECONDS)
        return ""

    def shortage(self) -> str:
        """Return why no launch should start; "" if all resources suffice."""
        if self.usage().free < LAUNCH_DESCRIPTORS_MIN:
            return "out of file descriptors"
        return thread_error()

    def close(self) -> None:
        """Release the reserve."""
        self._spare.close()


def thread_error() -> str:
    """Return why no thread, and so no process, can be started; "" if one can."""
    try:
        trial = threading.Thread(target=_nothing, name="trial")
        trial.start()
    except (RuntimeError, MemoryError) as error:
        return (
            EXHAUSTION_MESSAGES[errno.EAGAIN]
            if exhausted_resource(error) == "processes"
            else EXHAUSTION_MESSAGES[errno.ENOMEM]
        )
    trial.join()
    return ""


def _nothing() -> None:
    """The body of a trial thread."""
