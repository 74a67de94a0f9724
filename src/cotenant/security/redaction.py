"""Redaction: replaces jobs in texts that a caller may not know about."""

from __future__ import annotations

import re
from collections.abc import Callable

REDACTED = "another tenant's job"
_ID = re.compile(r"(?<![0-9a-z])[0-9a-hjkmnp-tv-z]{12}(?:_[0-9]+)?(?![0-9a-z])")  # of a job or an array task


def redact_others(text: str, name_of: Callable[[str], str | None]) -> str:
    """Return a text without the IDs of hidden jobs, and without the name or attempt number after each ID.

    `name_of` returns the name of a hidden job by its ID; None if the ID is unknown or the job is visible.

    >>> redact_others("waits for 0t6czcnzd6ed (bert)", {"0t6czcnzd6ed": "bert"}.get)
    "waits for another tenant's job"
    >>> redact_others("python in 0t6czcnzd6ed/1, 0t6czcnzd6ee (own)", {"0t6czcnzd6ed": ""}.get)
    "python in another tenant's job, 0t6czcnzd6ee (own)"
    """
    for found in set(_ID.findall(text)):
        if (name := name_of(found)) is not None:
            text = re.sub(rf"{found}(?: \({re.escape(name)}\)|/[0-9]+)?", REDACTED, text)
    return text
