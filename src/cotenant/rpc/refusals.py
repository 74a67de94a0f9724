"""Refusals on the wire."""

from __future__ import annotations

from cotenant.core.refusals import Code, Refusal
from cotenant.rpc.translate import LOCALITIES
from cotenant.v1 import job_pb2


def to_wire(refusal: Refusal) -> job_pb2.Refusal:
    """Write down why a job waits."""
    message = job_pb2.Refusal(
        code=refusal.code.value,
        detail=refusal.detail,
        remedy=refusal.remedy,
        numbers=dict(refusal.numbers),
        wait=refusal.wait.value,
    )
    if refusal.locality:
        message.locality = LOCALITIES.to_wire(refusal.locality)
    return message


def from_wire(message: job_pb2.Refusal) -> Refusal:
    """Read why a job waits."""
    locality = LOCALITIES.from_wire(message.locality) if message.locality in LOCALITIES.names else None
    return Refusal(Code(message.code), message.detail, message.remedy, dict(message.numbers), locality)
