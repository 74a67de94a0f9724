"""Log records for a collector: what somebody must be able to find years later, beside the lines on stderr."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Sink(Protocol):
    """Where records go."""

    def emit(self, event: str, fields: Mapping[str, Any]) -> None:
        """Send a record, without waiting for it."""


_sink: Sink | None = None


def install(sink: Sink | None) -> None:
    """Say where records go from now on; None: nowhere."""
    global _sink
    _sink = sink


def emit(event: str, fields: Mapping[str, Any]) -> None:
    """Send a record, where the environment asks for that."""
    if _sink is not None:
        _sink.emit(event, fields)
