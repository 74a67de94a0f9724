"""Predictors in an order: the first that finds a job predictable speaks for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import structlog

from cotenant.core.estimates import UNKNOWN, Estimate, Observation, Query
from cotenant.core.policy import Predictor
from cotenant.services.predictor.words import unsound

log = structlog.get_logger()

Answer = tuple[str, Estimate]  # the predictor's name and what it says
NOBODY: Answer = ("nobody", UNKNOWN)


class Chain:
    """Asks one predictor after another. One that fails is passed over and named in the log.

    >>> from cotenant.policies.history import History
    >>> name, estimate = Chain([History()]).estimate(Query("ann", "bert", "", gpu_milli=1000, replicas=1))
    >>> name, estimate.source
    ('history', 'no job like this one has succeeded yet')
    """

    def __init__(self, predictors: Sequence[Predictor]) -> None:
        names = [predictor.name for predictor in predictors]
        if not names:
            raise ValueError("at least one predictor is needed")
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise ValueError(f"the predictor {twice[0]!r} is named twice")
        self._predictors = tuple(predictors)
        self._failures: Counter[str] = Counter()
        self._last_errors: dict[str, str] = {}

    @property
    def predictors(self) -> Mapping[str, Predictor]:
        """The predictors by name, in their order."""
        return {predictor.name: predictor for predictor in self._predictors}

    def estimate(self, query: Query) -> Answer:
        """Say what the first predictor says that finds the job predictable; else what the first one says."""
        unsure: Answer | None = None
        for predictor in self._predictors:
            estimate = self._ask(predictor, query)
            if estimate is None:
                continue
            if estimate.predictable:
                return predictor.name, estimate
            unsure = unsure or (predictor.name, estimate)
        return unsure or NOBODY

    def observe(self, observation: Observation) -> None:
        """Show all predictors what was seen."""
        for predictor in self._predictors:
            try:
                predictor.observe(observation)
            except Exception as error:  # whatever a stranger's predictor does
                self._failed(predictor, f"observe: {type(error).__name__}: {error}")

    def tell_failures(self) -> None:
        """Log what went wrong since the last time, one line for each predictor, however often it did."""
        for name, count in self._failures.items():
            log.error("predictor_failed", predictor=name, count=count, last_error=self._last_errors[name])
        self._failures.clear()

    def _ask(self, predictor: Predictor, query: Query) -> Estimate | None:
        try:
            estimate = predictor.estimate(query)
            if wrong := unsound(estimate, len(query.candidates)):
                self._failed(predictor, f"estimate: {wrong}")
                return None
        except Exception as error:  # whatever a stranger's predictor does, an answer of another type among it
            self._failed(predictor, f"estimate: {type(error).__name__}: {error}")
            return None
        return estimate

    def _failed(self, predictor: Predictor, error: str) -> None:
        self._failures[predictor.name] += 1
        self._last_errors[predictor.name] = error
