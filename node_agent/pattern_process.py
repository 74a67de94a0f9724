"""Searches lines for users' regular expressions, in a process of its own that the agent can kill.

Started as `python -I -S pattern_process.py`. A pattern can be written, in error or not, that takes longer than the
universe is old; Python cannot be interrupted inside one, so it must not happen inside the agent. Each request is a
JSON line {"pattern", "lines"}; the answer is {"step", "loss"} of the last line that matches, {} or {"error"}.
"""

from __future__ import annotations

import json
import re
import sys


def search(pattern: str, lines: list[str]) -> dict[str, str]:
    """Search from the last line back."""
    try:
        compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        return {"error": f"is not a regular expression: {error}"}
    if compiled.groups < 1:
        return {"error": "has no group for the step"}
    for line in reversed(lines):
        if match := compiled.search(line):
            found = {"step": match[1], "loss": match.groupdict().get("loss")}
            return {name: text for name, text in found.items() if text is not None}
    return {}


if __name__ == "__main__":
    for request in sys.stdin:
        asked = json.loads(request)
        print(json.dumps(search(asked["pattern"], asked["lines"])), flush=True)
