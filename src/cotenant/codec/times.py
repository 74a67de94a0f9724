"""Encodes and decodes times and durations."""

from __future__ import annotations

import math

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

NANOS = 1_000_000_000
TIMESTAMP_SECONDS_MAX = 253_402_300_799  # the end of the year 9999, the maximum of google.protobuf.Timestamp
DURATION_SECONDS_MAX = 315_576_000_000  # 10,000 years, the maximum of google.protobuf.Duration


def timestamp(seconds: float) -> Timestamp:
    """Encode Unix seconds, to the nanosecond."""
    return Timestamp(**_split(seconds))


def duration(seconds: float) -> Duration:
    """Encode non-negative seconds, to the nanosecond."""
    return Duration(**_split(seconds))


def _split(seconds: float) -> dict[str, int]:
    """Split seconds into whole seconds and nanoseconds, so that decoding returns exactly the same number."""
    whole = math.floor(seconds)
    nanos = round((seconds - whole) * NANOS)
    return {"seconds": whole + nanos // NANOS, "nanos": nanos % NANOS}


def seconds(message: Timestamp | Duration) -> float:
    """Decode a timestamp to Unix seconds, or a duration to seconds."""
    return (message.seconds * NANOS + message.nanos) / NANOS  # integers first, to round only once


def optional_seconds(message: Message, field: str) -> float | None:
    """Decode the duration in a field, None if it is not set."""
    return seconds(getattr(message, field)) if message.HasField(field) else None
