"""Launch failures as `--json` prints them."""

from __future__ import annotations

from typing import Any

from cotenant.codec.specs import LAUNCH_CAUSES
from cotenant.v1.job_pb2 import LaunchFailure


def launch_failure_view(failure: LaunchFailure) -> dict[str, Any]:
    """Return why and where an attempt was not launched; a cause that only a newer server knows keeps its number."""
    cause = LAUNCH_CAUSES.names.get(failure.cause, f"cause {failure.cause}")
    return {"cause": cause, "reason": failure.reason, "node": failure.node_id}
