"""Spans, identified by W3C traceparents, so that a trace can cross processes, restarts and the store as plain text."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from cotenant.telemetry.attributes import Attribute

if TYPE_CHECKING:
    from cotenant.telemetry.otel import Tracing

_tracing: Tracing | None = None


class Span(Protocol):
    """A span in progress."""

    @property
    def trace_parent(self) -> str:
        """The span's W3C traceparent, or "" while tracing is off."""

    def set(self, **attributes: Attribute) -> None:
        """Add attributes that were not known when the span started."""


class _NoSpan:
    """Replaces every span while tracing is off."""

    __slots__ = ()
    trace_parent = ""

    def set(self, **attributes: Attribute) -> None:
        """Do nothing."""

    def __enter__(self) -> _NoSpan:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


_NO_SPAN = _NoSpan()


def span(name: str, parent: str = "", **attributes: Attribute) -> AbstractContextManager[Span]:
    """Open a span under a traceparent; without one, under the active span, else as the root of a new trace.

    An exception that leaves the block is recorded in the span and propagates.

    >>> with span("plan", jobs=3) as plan:
    ...     plan.trace_parent  # tracing is off
    ''
    """
    if _tracing is None:
        return _NO_SPAN
    return _tracing.span(name, parent, attributes)


def record(name: str, parent: str, start_seconds: float, end_seconds: float, **attributes: Attribute) -> str:
    """Record a span that has already ended, in Unix seconds, and return its traceparent ("" while off)."""
    if _tracing is None:
        return ""
    return _tracing.record(name, parent, start_seconds, end_seconds, attributes)


def current() -> str:
    """Return the traceparent of the active span; "" if there is none or tracing is off."""
    return "" if _tracing is None else _tracing.current()


def root(name: str = "root", **attributes: Attribute) -> str:
    """Start a new trace with a span of zero length, and return its traceparent ("" while off)."""
    return "" if _tracing is None else _tracing.root(name, attributes)


def server_interceptors(traced: Callable[[str], bool]) -> list[Any]:
    """Return the interceptors with which a grpc.aio server traces the methods selected by `traced`; none while off."""
    return [] if _tracing is None else _tracing.server_interceptors(traced)


def client_interceptors() -> list[Any]:
    """Return the interceptors with which a grpc.aio channel traces its unary calls; none while off."""
    return [] if _tracing is None else _tracing.client_interceptors()


def install(tracing: Tracing | None) -> None:
    """Turn tracing on, or off with None. For `setup` and `shutdown`."""
    global _tracing  # the switch that every call checks
    _tracing = tracing
