"""What went wrong with predictors, told from time to time: one that fails at all it is asked would fill the log."""

from __future__ import annotations

from collections import Counter

import structlog

from cotenant.core.policy.protocols import Predictor

log = structlog.get_logger()


class Failures:
    """Counts how often each predictor failed, and remembers how it did last."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._last_errors: dict[str, str] = {}

    def add(self, predictor: Predictor, error: str) -> None:
        """Note that a predictor failed."""
        self._counts[predictor.name] += 1
        self._last_errors[predictor.name] = error

    def tell(self) -> None:
        """Log what went wrong since the last time, one line for each predictor, however often it did."""
        for name, count in self._counts.items():
            log.error("predictor_failed", predictor=name, count=count, last_error=self._last_errors[name])
        self._counts.clear()
