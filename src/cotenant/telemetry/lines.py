"""A logger for modules that short commands import too: importing structlog takes longer than such a command."""

from __future__ import annotations

from typing import Any


class Logger:
    """structlog's logger, imported at the first use; on stderr, as a command's, if logs are not set up."""

    def __getattr__(self, method: str) -> Any:
        from cotenant.telemetry import logs
        from cotenant.telemetry.plain_structlog import structlog

        return getattr(structlog.get_logger() if structlog.is_configured() else logs.of_command(), method)


def logger() -> Any:
    """Return a logger whose import costs nothing. Like structlog's, it takes an event and fields."""
    return Logger()
