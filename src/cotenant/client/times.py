"""Timestamps of messages as `datetime`, for the Python API."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

from cotenant.cli import units
from cotenant.codec.times import seconds


def moment(message: Any, field: str) -> datetime | None:
    """Return a message's timestamp in UTC; None if it is not set or outside the calendar."""
    unix_seconds = seconds(getattr(message, field)) if message.HasField(field) else math.nan
    return datetime.fromtimestamp(unix_seconds, UTC) if units.has_date(unix_seconds) else None
