"""Aggregated log of predictors' failures: a predictor that fails on every query would flood the log."""

from __future__ import annotations

from collections import Counter

import structlog

from cotenant.core.policy.protocols import Predictor

log = structlog.get_logger()


class FailureLog:
    """Counts each predictor's failures and remembers the last error."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._last_errors: dict[str, str] = {}

    def add(self, predictor: Predictor, error: str) -> None:
        """Count a predictor's failure."""
        self._counts[predictor.name] += 1
        self._last_errors[predictor.name] = error

    def flush(self) -> None:
        """Log the failures since the last call, one line per predictor."""
        for name, count in self._counts.items():
            log.error("predictor_failed", predictor=name, count=count, last_error=self._last_errors[name])
        self._counts.clear()
