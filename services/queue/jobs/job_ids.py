"""Job ids: short, sortable by creation time, and random enough to avoid collisions."""

from __future__ import annotations

import re
import secrets
import time

from cotenant.core.model.job_number import DIGITS, ID_DIGITS, encode

_EPOCH_MS = 1_767_225_600_000  # 2026-01-01
_TIME_DIGITS = 8
_RANDOM_DIGITS = ID_DIGITS - _TIME_DIGITS
_ID = re.compile(rf"[{DIGITS}]{{{ID_DIGITS}}}(_\d+)?")


class JobIdGenerator:
    """Generates ids that increase, even if the clock stops or goes back."""

    def __init__(self) -> None:
        self._last = 0

    def new(self) -> str:
        """Return an id of 12 characters: milliseconds, then 20 random bits."""
        self._last = max(self._last + 1, time.time_ns() // 1_000_000 - _EPOCH_MS)
        return encode(self._last, _TIME_DIGITS) + encode(secrets.randbits(5 * _RANDOM_DIGITS), _RANDOM_DIGITS)


def is_id(text: str) -> bool:
    """Return whether a text has the form of a job or array id.

    The time in it proves nothing: the clock of the process that made it may have been off by days.

    >>> is_id("00000001abcd"), is_id("00000001abcd_17"), is_id("nothing"), is_id("00000001abco")
    (True, True, False, False)
    """
    return _ID.fullmatch(text) is not None
