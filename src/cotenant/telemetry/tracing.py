"""Spans, named by W3C traceparents, so that a trace can cross processes, restarts and the store as plain text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from cotenant.telemetry.otel import Tracing

Attribute = str | bool | int | float | Sequence[str] | Sequence[int] | Sequence[float]

_tracing: Tracing | None = None


class Span(Protocol):
    """A span under way."""

    @property
    def trace_parent(self) -> str:
        """The span's W3C traceparent, or "" while tracing is off."""

    def set(self, **attributes: Attribute) -> None:
        """Add attributes that were not known when the span began."""


class _NoSpan:
    """Stands in for every span while tracing is off."""

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

    An exception that leaves the block is recorded in the span and goes on.

    >>> with span("plan", jobs=3) as plan:
    ...     plan.trace_parent  # tracing is off
    ''
    """
    if _tracing is None:
        return _NO_SPAN
    return _tracing.span(name, parent, attributes)


def record(name: str, parent: str, start_seconds: float, end_seconds: float, **attributes: Attribute) -> str:
    """Tell of a span that is over already, in unix seconds, and return its traceparent ("" while off)."""
    if _tracing is None:
        return ""
    return _tracing.record(name, parent, start_seconds, end_seconds, attributes)


def current() -> str:
    """Return the traceparent of the active span; "" where there is none or tracing is off."""
    return "" if _tracing is None else _tracing.current()


def root(name: str = "root", **attributes: Attribute) -> str:
    """Begin a trace of its own with a span of no length, and return its traceparent ("" while off)."""
    return "" if _tracing is None else _tracing.root(name, attributes)


def server_interceptors(traced: Callable[[str], bool]) -> list[Any]:
    """Return what a grpc.aio server needs to trace the methods that `traced` picks; nothing while tracing is off."""
    return [] if _tracing is None else _tracing.server_interceptors(traced)


def client_interceptors() -> list[Any]:
    """Return what a grpc.aio channel needs to trace its unary calls; nothing while tracing is off."""
    return [] if _tracing is None else _tracing.client_interceptors()


def install(tracing: Tracing | None) -> None:
    """Turn tracing on, or off with None. For `setup` and `shutdown`."""
    global _tracing  # the one switch that every call looks at
    _tracing = tracing
