"""When placement was last known to have heard this node: written by the agent, watched by supervisors.

A job may ask to be stopped where its node has been without the control plane for too long, so that it can safely be
started elsewhere. That must hold where the agent is dead or the machine was suspended, so each supervisor looks by
itself, on a clock that counts on through suspension and that nobody can set. What is written is when the agent *sent*
the newest message that placement has answered: placement cannot have taken the node as silent before that.

Loaded by the supervisor without the package around it: it imports next to nothing.
"""

from __future__ import annotations

import os
import time

LEASE = "lease"  # the file's name in the state directory
WIDTH_BYTES = 48
LOOK_SECONDS_MAX = 5.0  # a wait in the kernel does not count the time that the machine was suspended


def boot_seconds() -> float:
    """Seconds since the machine was booted, with those in which it was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    """A text that is another one after each boot; empty where the kernel does not tell."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def read_lease(path: str) -> float:
    """When placement was last known to have heard the node, in seconds since boot; 0 where nothing is known."""
    try:
        with open(path, encoding="ascii") as file:
            first, second = file.read(WIDTH_BYTES).split()
            return float(first) if first == second else 0.0  # else it is just being written
    except (OSError, ValueError):
        return 0.0


class Lease:
    """The agent's end: keeps the file open, and writes over the same bytes, which works on a full disk too."""

    def __init__(self, path: str) -> None:
        """Begin with what is known; of an earlier boot that is nothing. Raises `OSError`."""
        known = read_lease(path)
        self._heard_seconds = known if known <= boot_seconds() else 0.0
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._write()

    def renew(self, sent_seconds: float) -> None:
        """Placement has answered what was sent at that time, in seconds since boot. Raises `OSError`."""
        if sent_seconds > self._heard_seconds:
            self._heard_seconds = sent_seconds
            self._write()

    def _write(self) -> None:
        text = f"{self._heard_seconds:.3f} {self._heard_seconds:.3f}".ljust(WIDTH_BYTES)
        os.pwrite(self._descriptor, text.encode(), 0)

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._descriptor)


class Leash:
    """The supervisor's end: until when a job may run on, unless placement is heard of again before."""

    def __init__(self, path: str, allowed_seconds: float, heard_seconds: float) -> None:
        self._path = path
        self._allowed_seconds = allowed_seconds
        self._until = heard_seconds + allowed_seconds

    def over(self) -> bool:
        """Whether it is too late. A lease that was renewed only after it had run out is no lease any more."""
        heard = read_lease(self._path)
        if heard <= self._until:
            self._until = max(self._until, heard + self._allowed_seconds)
        return boot_seconds() >= self._until

    def look_again_seconds(self) -> float:
        """After how long to look again."""
        return min(LOOK_SECONDS_MAX, max(0.0, self._until - boot_seconds()))
