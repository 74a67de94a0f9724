"""The eras of a store: each process that opened it, with the last write before that, under one key."""

from __future__ import annotations

import json
import secrets

from cotenant.store.port import Entry
from cotenant.store.revision_offset import OWN

ERAS = f"{OWN}eras"
KEPT_MAX = 128
NAME_LENGTH_MAX = 64

Eras = tuple[tuple[str, int], ...]


def eras_of(entry: Entry | None) -> Eras:
    """Return the eras of a store; empty if there are none or the key is damaged."""
    if entry is None:
        return ()
    try:
        return tuple((str(name), int(before)) for name, before in json.loads(entry.value))
    except (ValueError, TypeError, RecursionError, OverflowError):
        return ()


def begun(eras: Eras, before: int) -> tuple[str, bytes]:
    """Return the name of a new era after the given ones, and the value to write; `before` is the last write."""
    name = secrets.token_hex(8)
    return name, json.dumps([*eras, (name, before)][-KEPT_MAX:], separators=(",", ":")).encode()


def name_of(value: bytes) -> str:
    """Return the name of the last era in a value; "" if it is damaged."""
    eras = eras_of(Entry(ERAS, value, 0, 0))
    return eras[-1][0] if eras else ""
