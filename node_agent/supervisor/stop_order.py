"""The stop order that the agent leaves in an attempt's directory, as the supervisor reads it.

Loaded by the supervisor without the package around it: it imports next to nothing.
"""

from __future__ import annotations

BY_ANOTHER = "it was told to end by something else than the agent, as at a shutdown"


def ordered_grace_seconds() -> float | None:
    """Return the grace of the agent's last order; None where it has given none."""
    import json

    try:
        with open("stop.json", encoding="utf-8") as file:
            grace_seconds = json.load(file)["grace_seconds"]
        return float(grace_seconds) if 0 <= grace_seconds < float("inf") else None
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):  # none, or damaged
        return None
