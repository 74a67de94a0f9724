"""Why an attempt was not launched, as `--json` prints it."""

from __future__ import annotations

from typing import Any

from cotenant.codec.specs import LAUNCH_CAUSES
from cotenant.v1.job_pb2 import LaunchFailure


def launch_failure_view(failure: LaunchFailure) -> dict[str, Any]:
    """Return why an attempt was not launched, where; a newer server's cause keeps its number."""
    cause = LAUNCH_CAUSES.names.get(failure.cause, f"cause {failure.cause}")
    return {"cause": cause, "reason": failure.reason, "node": failure.node_id}
