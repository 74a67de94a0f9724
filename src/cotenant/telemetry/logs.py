"""Log lines: JSON on stderr for programs, colours where a person looks at a terminal."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from cotenant.telemetry import tracing
from cotenant.telemetry.lines import LEVEL_DEFAULT, LEVEL_OF_SERVICE

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}


def configure(service: str, level: str, stream: TextIO | None = None, *, prefix: str = "") -> None:
    """Send the logs of structlog and of the standard library, in one form, to `stream` (stderr)."""
    out = stream or sys.stderr
    known = level.lower() in LEVELS
    number = LEVELS[level.lower() if known else LEVEL_DEFAULT]
    shared = _shared(service)
    structlog.configure(
        processors=[*shared, *_rendering(out, prefix)],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(file=out),
        cache_logger_on_first_use=False,  # so that a later `setup`, or a test that captures logs, is heard
    )
    _adopt_standard_logging(shared, out, number, prefix)
    if not known:
        structlog.get_logger().warning("log_level_unknown", given=level, used=LEVEL_DEFAULT, known=[*LEVELS])


def of_command() -> Any:
    """A logger on stderr for a process that has set up none, for which nothing is set up by it either."""
    level = LEVELS.get(os.environ.get("COTENANT_LOG", "").lower(), LEVELS[LEVEL_OF_SERVICE["cli"]])
    return structlog.wrap_logger(
        structlog.WriteLogger(sys.stderr),
        processors=[*_shared("cli"), *_rendering(sys.stderr)],
        wrapper_class=structlog.make_filtering_bound_logger(level),
    )


def _shared(service: str) -> list[Processor]:
    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _Named(service),
        _add_trace_id,
    ]


def _rendering(out: TextIO, prefix: str = "") -> list[Processor]:
    """Choose the last steps. Tracebacks never show local variables, among which a token may be."""
    if out.isatty():
        first: list[Processor] = [_Prefixed(prefix)] if prefix else []
        return [*first, structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]


def _adopt_standard_logging(shared: list[Processor], out: TextIO, number: int, prefix: str) -> None:
    """Give lines of libraries (grpc, opentelemetry) the same form."""
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_rendering(out, prefix)],
        )
    )
    logging.basicConfig(handlers=[handler], level=max(number, logging.WARNING), force=True)


class _Named:
    """Puts the service's name into each line."""

    def __init__(self, service: str) -> None:
        self._service = service

    def __call__(self, logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        event["service"] = self._service
        return event


class _Prefixed:
    """Puts a prefix before each event."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def __call__(self, logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        event["event"] = f"{self._prefix} | {event.get('event', '')}"
        return event


def _add_trace_id(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    if trace_parent := tracing.current():
        event["trace_id"] = trace_parent.split("-")[1]
    return event
