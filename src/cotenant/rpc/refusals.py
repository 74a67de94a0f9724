"""Refusals on the wire: what has no field of its own there goes with the numbers."""

from __future__ import annotations

from cotenant.core.refusals import Code, Refusal
from cotenant.rpc.translate import LOCALITIES
from cotenant.v1 import job_pb2

OVER_SHARE, LOCALITY = "over_share", "wanted_locality"  # 1 where it is so; as the wire numbers the levels


def to_wire(refusal: Refusal) -> job_pb2.Refusal:
    """Write down why a job waits."""
    numbers = dict(refusal.numbers)
    if refusal.over_share:
        numbers[OVER_SHARE] = 1.0
    if refusal.locality:
        numbers[LOCALITY] = float(LOCALITIES.to_wire(refusal.locality))
    return job_pb2.Refusal(code=refusal.code.value, detail=refusal.detail, remedy=refusal.remedy, numbers=numbers)


def from_wire(message: job_pb2.Refusal) -> Refusal:
    """Read why a job waits.

    Raises:
        ValueError: the code is from a newer version.
    """
    numbers = dict(message.numbers)
    over_share, level = bool(numbers.pop(OVER_SHARE, 0)), int(numbers.pop(LOCALITY, 0))
    locality = LOCALITIES.from_wire(level) if level in LOCALITIES.names else None
    return Refusal(Code(message.code), message.detail, message.remedy, numbers, locality, over_share)
