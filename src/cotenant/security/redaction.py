"""What stands in texts in place of jobs that a caller may not know of."""

from __future__ import annotations

import re
from collections.abc import Callable

OTHERS = "another tenant's job"
_ID = re.compile(r"(?<![0-9a-z])[0-9a-hjkmnp-tv-z]{12}(?:_[0-9]+)?(?![0-9a-z])")  # of a job, or of an array's


def without_others(text: str, name_of: Callable[[str], str | None]) -> str:
    """Take ids out of a text, with the name or the attempt's number behind them.

    `name_of` tells the name of a job by its id, and None where the id is none, or of a job that may be known.

    >>> without_others("waits for 0t6czcnzd6ed (bert)", {"0t6czcnzd6ed": "bert"}.get)
    "waits for another tenant's job"
    >>> without_others("python in 0t6czcnzd6ed/1, 0t6czcnzd6ee (own)", {"0t6czcnzd6ed": ""}.get)
    "python in another tenant's job, 0t6czcnzd6ee (own)"
    """
    for found in set(_ID.findall(text)):
        if (name := name_of(found)) is not None:
            text = re.sub(rf"{found}(?: \({re.escape(name)}\)|/[0-9]+)?", OTHERS, text)
    return text
