"""The stop order that the agent leaves in an attempt's directory, as the supervisor reads it.

The supervisor loads this file by its bare name without the package; it imports next to nothing.
"""

from __future__ import annotations

# The agent compares this text with states of earlier releases' supervisors, and a rule of `core.failures` matches it.
STOPPED_EXTERNALLY = "it was told to end by something else than the agent, as at a shutdown"
REASON_LENGTH_MAX = 20


def read_stop_order() -> tuple[float, str] | None:
    """Return the grace period in seconds and the reason of the agent's last order; None if there is none.

    The reason is the name of a `StopReason`, or "": agents of earlier releases gave none.
    """
    import json

    try:
        with open("stop.json", encoding="utf-8") as file:
            order = json.load(file)
        grace_seconds, reason = order["grace_seconds"], order.get("reason", "")
        known = isinstance(reason, str) and reason.isascii() and len(reason) <= REASON_LENGTH_MAX
        return (float(grace_seconds), reason if known else "") if 0 <= grace_seconds < float("inf") else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):  # or damaged
        return None
