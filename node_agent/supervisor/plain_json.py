"""Writes JSON without the json module, whose import takes a supervisor longer than everything else.

The supervisor loads this file by its bare name without the package; it imports next to nothing.
"""

from __future__ import annotations

from _json import encode_basestring_ascii


def dumps(value: object) -> str:
    """Return plain values as `json.dumps` does; numbers must be finite, and keys strings.

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
    raise TypeError(f"{type(value).__name__} is not a plain value")
