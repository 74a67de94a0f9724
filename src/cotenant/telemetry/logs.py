"""Log lines: JSON on stderr for programs, colored text on a terminal, or what COTENANT_LOG_FORMAT says."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING, Any, TextIO

from cotenant.telemetry import tracing
from cotenant.telemetry.log_levels import LEVEL_DEFAULT, LEVEL_OF_SERVICE
from cotenant.telemetry.plain_structlog import structlog

if TYPE_CHECKING:
    from structlog.typing import EventDict, Processor, WrappedLogger

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}
GRPC_LOGGER = "grpc._cython.cygrpc"
FORMAT_VARIABLE = "COTENANT_LOG_FORMAT"
JSON, TEXT = "json", "text"
FORMATS = (JSON, TEXT)


def configure(service: str, level: str, stream: TextIO | None = None, *, prefix: str = "") -> None:
    """Send the logs of structlog and of the standard library, in the same format, to `stream` (stderr)."""
    out = stream or sys.stderr
    known = level.lower() in LEVELS
    number = LEVELS[level.lower() if known else LEVEL_DEFAULT]
    shared = _shared(service)
    structlog.configure(
        processors=[*shared, *_rendering(out, prefix)],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(file=out),
        cache_logger_on_first_use=False,  # so that a later `setup`, or a test that captures logs, takes effect
    )
    _adopt_standard_logging(shared, out, number, prefix)
    if not known:
        structlog.get_logger().warning("log_level_unknown", given=level, used=LEVEL_DEFAULT, known=[*LEVELS])
    if (format_ := os.environ.get(FORMAT_VARIABLE, "")) not in ("", *FORMATS):
        structlog.get_logger().warning("log_format_unknown", given=format_, known=[*FORMATS])


def of_command() -> Any:
    """Return a logger on stderr for a process that has not set up logs, without setting them up."""
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
    """Return the last processors. Tracebacks never show local variables, which may contain a token."""
    format_ = os.environ.get(FORMAT_VARIABLE, "")
    if format_ == TEXT or (out.isatty() and format_ != JSON):
        first: list[Processor] = [_Prefixed(prefix)] if prefix else []
        plain = structlog.dev.plain_traceback
        return [*first, structlog.dev.ConsoleRenderer(colors=out.isatty(), exception_formatter=plain)]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]


def _adopt_standard_logging(shared: list[Processor], out: TextIO, number: int, prefix: str) -> None:
    """Send the lines of libraries (grpc, opentelemetry) in the same format."""
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_rendering(out, prefix)],
        )
    )
    handler.addFilter(_shorten_grpc_error)
    logging.basicConfig(handlers=[handler], level=max(number, logging.WARNING), force=True)


def _shorten_grpc_error(record: logging.LogRecord) -> bool:
    """Drop the traceback of gRPC's line about an error text that is not UTF-8; it handles the call all the same."""
    if record.name == GRPC_LOGGER and str(record.msg).startswith("Invalid encoding"):
        record.exc_info, record.levelno, record.levelname = None, logging.WARNING, "WARNING"
    return True


class _Named:
    """Adds the service's name to each line."""

    def __init__(self, service: str) -> None:
        self._service = service

    def __call__(self, logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        event["service"] = self._service
        return event


class _Prefixed:
    """Adds a prefix to each event."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def __call__(self, logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        event["event"] = f"{self._prefix} | {event.get('event', '')}"
        return event


def _add_trace_id(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    if trace_parent := tracing.current():
        event["trace_id"] = trace_parent.split("-")[1]
    return event
