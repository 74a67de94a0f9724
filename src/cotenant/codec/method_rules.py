"""How a method of the API is called, and by whom: the options of the methods in protos/, as Python values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

DEADLINE_SECONDS_DEFAULT = 10.0


class MethodRules(NamedTuple):
    """The rules of a method; `cotenant/v1/options.proto` documents them.

    A method is retried on UNAVAILABLE if a repeat is harmless: it only reads, it has a `request_id` by which the server
    recognizes the repeat, or it requests a state that may already hold. Channels retry no streams: their callers resume
    them.
    """

    scopes: Mapping[str, str]  # the name of a `Scope` by role
    route: str  # the name of a `Route`
    audited: bool = False
    retried: bool = False
    has_request_id: bool = False
    deadline_seconds: float = DEADLINE_SECONDS_DEFAULT
    streams: bool = False


UNKNOWN_METHOD = MethodRules({}, "")
