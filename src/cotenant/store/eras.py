"""The eras of a store: who opened it after whom, kept under one key.

The key's value names the eras but for when the last one began: that is the revision at which the key was changed.
"""

from __future__ import annotations

import json
import secrets

from cotenant.store.port import Entry
from cotenant.store.shifted import OWN

ERAS = f"{OWN}eras"
KEPT_MAX = 128
NAME_LENGTH_MAX = 64

Eras = tuple[tuple[str, int], ...]


def eras_of(entry: Entry | None, base: int) -> Eras:
    """Return the eras of a raw store, with revisions shifted by `base`; none where there are none, or it is damaged."""
    if entry is None:
        return ()
    try:
        read = [(str(name), int(begun)) for name, begun in json.loads(entry.value)]
    except (ValueError, TypeError, RecursionError, OverflowError):
        return ()
    return (*read[:-1], (read[-1][0], entry.mod_revision + base)) if read else ()


def begun(eras: Eras) -> tuple[str, bytes]:
    """Return the name of a new era behind others, and what is to be written for it."""
    name = secrets.token_hex(8)
    return name, json.dumps([*eras, (name, 0)][-KEPT_MAX:], separators=(",", ":")).encode()


def name_of(value: bytes) -> str:
    """Return the name of the last era that a value holds; "" where it is damaged."""
    eras = eras_of(Entry(ERAS, value, 0, 0), 0)
    return eras[-1][0] if eras else ""
