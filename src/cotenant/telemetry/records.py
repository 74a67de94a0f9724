"""Log records for a collector: events that must be found years later, in addition to the lines on stderr."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Sink(Protocol):
    """The destination of records."""

    def emit(self, event: str, fields: Mapping[str, Any]) -> None:
        """Send a record, without waiting for it."""


_sink: Sink | None = None


def install(sink: Sink | None) -> None:
    """Set the destination of records from now on; None: nowhere."""
    global _sink
    _sink = sink


def emit(event: str, fields: Mapping[str, Any]) -> None:
    """Send a record, if the environment enables that."""
    if _sink is not None:
        _sink.emit(event, fields)
