"""What a notification says, and its signature."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Any

from google.protobuf.message import Message

from cotenant.codec import specs
from cotenant.core.model.lifecycle import Phase
from cotenant.v1 import job_pb2

SIGNATURE, DELIVERY = "Cotenant-Signature", "Cotenant-Delivery"


def job_contents(job: job_pb2.Job, reason: str) -> dict[str, Any]:
    """Return what a notification says about a job."""
    phase = specs.PHASES.get(job.phase)
    return {
        "kind": "job",
        "id": job.id,
        "name": job.spec.name,
        "tenant": job.spec.tenant,
        "phase": str(phase or ""),
        "reason": reason,
        "create_time": _time(job, "create_time"),
        "start_time": _time(job, "start_time"),
        "end_time": _time(job, "end_time"),
        "run_seconds": specs.seconds(job.run_time) or 0.0,
        "attempts": job.attempt.number,
        "trace_id": trace_id_of(job.trace_parent),
    }


def array_contents(array_id: str, first: job_pb2.Job, phases: Mapping[Phase, int]) -> dict[str, Any]:
    """Return what a notification says about an array as a whole; `first` is one of its jobs."""
    return {
        "kind": "array",
        "id": array_id,
        "name": first.spec.name,
        "tenant": first.spec.tenant,
        "jobs": {str(phase): count for phase, count in sorted(phases.items()) if count},
        "create_time": _time(first, "create_time"),
        "trace_id": trace_id_of(first.trace_parent),
    }


def trace_id_of(trace_parent: str) -> str:
    """Return the trace id of a W3C traceparent; "" if there is none.

    >>> trace_id_of("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    '0af7651916cd43dd8448eb211c80319c'
    """
    parts = trace_parent.split("-")
    return parts[1] if len(parts) == 4 else ""


def body_of(message_id: str, event: str, contents: Mapping[str, Any]) -> bytes:
    """Return the body of a webhook's request."""
    return json.dumps({"id": message_id, "event": event, **contents}, sort_keys=True).encode()


def signature(key: bytes, seconds: int, body: bytes) -> str:
    """Return the value of the header that signs a body at a time.

    >>> signature(b"secret", 1_700_000_000, b"{}")
    't=1700000000,v1=b8569b78799ff9e3cbff0fc2d63a33a2b57f3282abd07c37ae5e8e7d79a5f163'
    """
    digest = hmac.new(key, b"%d." % seconds + body, hashlib.sha256).hexdigest()
    return f"t={seconds},v1={digest}"


def subject_of(contents: Mapping[str, Any], event: str) -> str:
    """Return the subject of an e-mail.

    >>> subject_of({"kind": "job", "id": "0t6czcnzd6ed", "name": "bert"}, "failed")
    'Cotenant: job 0t6czcnzd6ed (bert) failed'
    """
    name = f" ({contents['name']})" if contents["name"] else ""
    became = "was cancelled" if event == "cancelled" else event
    return f"Cotenant: {contents['kind']} {contents['id']}{name} {became}"


def text_of(contents: Mapping[str, Any]) -> str:
    """Return the text of an e-mail: one line for each value."""
    lines = [f"{name.replace('_', ' ')}: {_in_words(value)}" for name, value in contents.items() if value]
    return "\n".join([*lines, "", f"cotenant explain {contents['id']}", ""])


def _in_words(value: Any) -> str:
    return ", ".join(f"{count} {phase}" for phase, count in value.items()) if isinstance(value, dict) else str(value)


def _time(job: Message, name: str) -> str | None:
    return str(getattr(job, name).ToJsonString()) if job.HasField(name) else None
