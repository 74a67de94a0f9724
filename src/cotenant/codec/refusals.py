"""Encodes and decodes refusals; values without a field of their own are sent as numbers."""

from __future__ import annotations

import math

from cotenant.codec.specs import DURATION_SECONDS_MAX, LOCALITIES, duration, seconds
from cotenant.core.model.job import Locality
from cotenant.core.model.refusal import Code, Refusal
from cotenant.v1 import job_pb2

OVER_SHARE = "over_share"  # 1 if true
LOCALITY, RELAXES_TO = "wanted_locality", "relaxes_to"  # as the numbers of the enum
HELD_SECONDS = "held_seconds"


def to_wire(refusal: Refusal) -> job_pb2.Refusal:
    """Encode why a job waits."""
    numbers = _numbers(refusal)
    if refusal.relaxes_to:
        numbers[RELAXES_TO] = float(LOCALITIES.to_wire(refusal.relaxes_to))
    if refusal.held_seconds < math.inf:
        numbers[HELD_SECONDS] = refusal.held_seconds
    return _message(refusal, refusal.detail, numbers)


def to_text(refusal: Refusal) -> job_pb2.Refusal:
    """Encode why a job waits, for users: the detail includes what time alone will change."""
    return _message(refusal, refusal.full_detail, _numbers(refusal))


def _numbers(refusal: Refusal) -> dict[str, float]:
    numbers = dict(refusal.numbers)
    if refusal.over_share:
        numbers[OVER_SHARE] = 1.0
    if refusal.locality:
        numbers[LOCALITY] = float(LOCALITIES.to_wire(refusal.locality))
    return numbers


def _message(refusal: Refusal, detail: str, numbers: dict[str, float]) -> job_pb2.Refusal:
    message = job_pb2.Refusal(code=refusal.code.value, detail=detail, remedy=refusal.remedy, numbers=numbers)
    if refusal.holds_seconds <= DURATION_SECONDS_MAX:
        message.holds.CopyFrom(duration(refusal.holds_seconds))
    return message


def from_wire(message: job_pb2.Refusal) -> Refusal:
    """Decode why a job waits.

    Raises:
        ValueError: the code is from a newer version.
    """
    numbers = dict(message.numbers)
    return Refusal(
        Code(message.code),
        message.detail,
        message.remedy,
        locality=_level(numbers.pop(LOCALITY, 0)),
        over_share=bool(numbers.pop(OVER_SHARE, 0)),
        holds_seconds=seconds(message.holds) if message.HasField("holds") else math.inf,
        held_seconds=numbers.pop(HELD_SECONDS, math.inf),
        relaxes_to=_level(numbers.pop(RELAXES_TO, 0)),
        numbers=numbers,
    )


def _level(number: float) -> Locality | None:
    return LOCALITIES.from_wire(int(number)) if int(number) in LOCALITIES.names else None
