"""When placement last acknowledged this node: written by the agent, checked by supervisors.

A job may ask to be stopped if its node has been disconnected from the control plane for too long, so that it can safely
be started elsewhere. That must work if the agent is dead or the machine was suspended, so each supervisor checks by
itself, on a clock that includes suspension and cannot be set. The recorded time is when the agent *sent* the newest
message that placement has answered: placement cannot have declared the node lost before that.

The supervisor loads this file by its bare name without the package; it imports next to nothing.
"""

from __future__ import annotations

import os
import time

LEASE = "lease"  # the file's name in the state directory
WIDTH_BYTES = 48
LEFT_SECONDS_MIN = 0.05
LOOK_SECONDS_MAX = 5.0  # waits in the kernel do not include suspension


def boot_seconds() -> float:
    """Return the seconds since boot, including suspension."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    """Return an id that differs after each boot; "" if the kernel has none."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def read_lease(path: str) -> float:
    """Return when placement last acknowledged the node, in seconds since boot; 0 if unknown."""
    try:
        with open(path, encoding="ascii") as file:
            first, second = file.read(WIDTH_BYTES).split()
            return float(first) if first == second else 0.0  # otherwise a write is in progress
    except (OSError, ValueError):
        return 0.0


class Lease:
    """The agent's side: keeps the file open and overwrites it in place, which works on a full disk too."""

    def __init__(self, path: str) -> None:
        """Start with the recorded time, unless it is from an earlier boot. Raises `OSError`."""
        known = read_lease(path)
        self._heard_seconds = known if known <= boot_seconds() else 0.0
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._write()

    def renew(self, sent_seconds: float) -> None:
        """Record that placement answered a message sent at this time, in seconds since boot. Raises `OSError`."""
        if sent_seconds > self._heard_seconds:
            self._heard_seconds = sent_seconds
            self._write()

    def _write(self) -> None:
        text = f"{self._heard_seconds:.3f} {self._heard_seconds:.3f}".ljust(WIDTH_BYTES)
        os.pwrite(self._descriptor, text.encode(), 0)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


class DisconnectLimit:
    """The supervisor's side: until when a job may run unless placement acknowledges the node again."""

    reason = "DISCONNECTED"

    def __init__(self, path: str, allowed_seconds: float, heard_seconds: float) -> None:
        self.message = f"its node was disconnected from the control plane for {allowed_seconds:g} s"
        self._path = path
        self._allowed_seconds = allowed_seconds
        self._until = heard_seconds + allowed_seconds

    def expired(self) -> bool:
        """Return whether the limit is over. A lease that was renewed after it had expired stays expired."""
        heard = read_lease(self._path)
        if heard <= self._until:
            self._until = max(self._until, heard + self._allowed_seconds)
        return boot_seconds() >= self._until

    def next_check_seconds(self) -> float:
        """Return the seconds until the next check: well before the limit.

        A check at the limit itself could come late, and see only a renewal after it: a lease that was renewed in time
        would count as expired.
        """
        left = max(0.0, self._until - boot_seconds())
        return min(LOOK_SECONDS_MAX, left / 2 if left > LEFT_SECONDS_MIN else left)
