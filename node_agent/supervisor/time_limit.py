"""How long an attempt may run: checked by its supervisor, so that the limit holds without agent and control plane.

The grace is part of the limit: the attempt is warned when only the grace is left of it. Time in which processes are
frozen or the machine is suspended counts.

The supervisor loads this file by its bare name without the package; it imports next to nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING or __package__:
    from cotenant.node_agent.supervisor import lease
else:
    import lease

UNITS = ((86_400, "days"), (3600, "h"), (60, "min"))


FILE = "time_limit.json"  # in the attempt's directory: the limit that replaced the first one


class TimeLimit:
    """The wall-clock limit of an attempt that started at a time since the boot, now unless given."""

    reason = "TIME_LIMIT"

    def __init__(self, limit_seconds: float, grace_seconds: float, started: float | None = None) -> None:
        self.message = f"reached its time limit of {in_words(limit_seconds)}"
        self._warn_at = (lease.boot_seconds() if started is None else started) + limit_seconds - grace_seconds

    def expired(self) -> bool:
        """Return whether the attempt is to be warned."""
        return lease.boot_seconds() >= self._warn_at

    def next_check_seconds(self) -> float:
        """Return the seconds until the next check: soon, since waits in the kernel do not include suspension."""
        return min(lease.LOOK_SECONDS_MAX, max(0.0, self._warn_at - lease.boot_seconds()))


def read_changed() -> tuple[float | None] | None:
    """Return the limit in seconds that replaced the first one, in a tuple: None is no limit. None if none did."""
    import json

    try:
        with open(FILE, encoding="utf-8") as file:
            limit_seconds = json.load(file)["limit_seconds"]
        if limit_seconds is None:
            return (None,)
        return (float(limit_seconds),) if 0 < limit_seconds < float("inf") else None
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):  # none, or damaged
        return None


def in_words(seconds: float) -> str:
    """Return a time limit in the largest unit of which it is a whole number, above one day in days only from two on.

    >>> in_words(7200), in_words(5400), in_words(86400), in_words(172800), in_words(1.5)
    ('2 h', '90 min', '24 h', '2 days', '1.5 s')
    """
    for size, unit in UNITS:
        if seconds % size == 0 and (seconds > size or unit != "days"):
            return f"{seconds / size:g} {unit}"
    return f"{seconds:g} s"
