"""Searches lines for users' regular expressions, in a process of its own that the agent can kill.

Started as `python -I -S pattern_process.py DIRECTORY BYTES`: where RE2 is installed, and how large a compiled pattern
may be. RE2 takes a time linear in the line. A pattern that is not in its syntax belongs to a job that an older version
admitted: it runs on Python's engine, which may take longer than the universe is old and cannot be interrupted; so it
must not happen inside the agent. Each request is a JSON line {"pattern", "lines"}; the answer is {"step", "loss"} of
the last line that matches, {} or {"error"}.
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from typing import Any

MEMORY_BYTES_MAX = 128 * 1024


def search(pattern: str, lines: list[str], memory_bytes_max: int = MEMORY_BYTES_MAX) -> dict[str, str]:
    """Return what the last line that matches says."""
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
    """Compile a pattern with RE2 if its syntax and size allow, else with Python's engine."""
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
    warnings.simplefilter("ignore")  # of Python's engine about users' patterns
    sys.path.append(sys.argv[1])
    for request in sys.stdin:
        asked = json.loads(request)
        print(json.dumps(search(asked["pattern"], asked["lines"], int(sys.argv[2]))), flush=True)
