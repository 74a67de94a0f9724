"""A logger for modules that short commands import too: structlog takes longer to import than they take to answer."""

from __future__ import annotations

from typing import Any

LEVEL_DEFAULT = "info"
LEVEL_OF_SERVICE = {"cli": "warning"}  # a command's own output is what its user reads


class Logger:
    """structlog's logger, had when something is first said; on stderr, as a command's, where nobody set up logs."""

    def __getattr__(self, method: str) -> Any:
        import structlog

        from cotenant.telemetry import logs

        return getattr(structlog.get_logger() if structlog.is_configured() else logs.of_command(), method)


def logger() -> Any:
    """A logger whose import costs nothing. As structlog's, it takes an event and fields."""
    return Logger()
