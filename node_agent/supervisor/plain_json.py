"""Writes JSON without the module of that name, which takes a supervisor longer to import than all else that it does.

Loaded by the supervisor without the package around it: it imports next to nothing.
"""

from __future__ import annotations

from _json import encode_basestring_ascii


def dumps(value: object) -> str:
    """Write plain values as `json.dumps` does; numbers must be finite, and keys texts.

    >>> dumps({"pid": 3, "exit": None, "tasks": [{"rank": 0, "ok": True}], "said": "caf\\u00e9", "time": 1.5})
    '{"pid": 3, "exit": null, "tasks": [{"rank": 0, "ok": true}], "said": "caf\\\\u00e9", "time": 1.5}'
    """
    if isinstance(value, str):
        return encode_basestring_ascii(value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):
        return float.__repr__(value)
    if isinstance(value, dict):
        return "{" + ", ".join([f"{dumps(key)}: {dumps(each)}" for key, each in value.items()]) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join([dumps(each) for each in value]) + "]"
    raise TypeError(f"{type(value).__name__} is no plain value")
