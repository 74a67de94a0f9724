"""The stop order that the agent leaves in an attempt's directory, as the supervisor reads it.

The supervisor loads this file by its bare name without the package; it imports next to nothing.
"""

from __future__ import annotations

# The agent compares this text with states of earlier releases' supervisors, and a rule of `core.failures` matches it.
STOPPED_EXTERNALLY = "it was told to end by something else than the agent, as at a shutdown"


def ordered_grace_seconds() -> float | None:
    """Return the grace period of the agent's last order; None if there is none."""
    import json

    try:
        with open("stop.json", encoding="utf-8") as file:
            grace_seconds = json.load(file)["grace_seconds"]
        return float(grace_seconds) if 0 <= grace_seconds < float("inf") else None
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):  # missing or damaged
        return None
