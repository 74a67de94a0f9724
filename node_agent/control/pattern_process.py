"""Searches lines for users' regular expressions, in a process of its own that the agent can kill.

Started as `python -I -S pattern_process.py DIRECTORY BYTES`: the directory where RE2 is installed, and the maximum size
of a compiled pattern. RE2 runs in time linear in the line. A pattern outside of RE2's syntax belongs to a job that an
older version admitted: it runs on Python's engine, which may need exponential time and cannot be interrupted, so it
must not run inside the agent. Each request is a JSON line {"pattern", "lines"}; the answer is {"step", "loss"} of the
last matching line, {} or {"error"}.
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from typing import Any

MEMORY_BYTES_MAX = 128 * 1024


def search(pattern: str, lines: list[str], memory_bytes_max: int = MEMORY_BYTES_MAX) -> dict[str, str]:
    """Return the step and the loss in the last matching line."""
    try:
        compiled = _compiled(pattern, memory_bytes_max)
    except (re.error, OverflowError, RecursionError) as error:
        return {"error": f"is not a regular expression: {error}"}
    if compiled.groups < 1:
        return {"error": "has no group for the step"}
    loss = compiled.groupindex.get("loss")
    for line in reversed(lines):
        if match := compiled.search(line):
            found = {"step": match[1], "loss": match[loss] if loss else None}
            return {name: text for name, text in found.items() if text is not None}
    return {}


def _compiled(pattern: str, memory_bytes_max: int) -> Any:
    """Return a pattern compiled with RE2 if its syntax and size allow, otherwise with Python's engine."""
    try:
        import re2
    except ImportError:
        return re.compile(pattern)
    options = re2.Options()
    options.max_mem, options.log_errors = memory_bytes_max, False
    try:
        return re2.compile(pattern, options)
    except (re2.error, UnicodeEncodeError):
        return re.compile(pattern)


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # from Python's engine, about users' patterns
    sys.path.append(sys.argv[1])
    for request in sys.stdin:
        fields = json.loads(request)
        print(json.dumps(search(fields["pattern"], fields["lines"], int(sys.argv[2]))), flush=True)
