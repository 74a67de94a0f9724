"""Predictors in an order: the first that finds a job predictable speaks for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import structlog

from cotenant.core.estimates import UNKNOWN, CandidateEstimate, Estimate, Observation, Query
from cotenant.core.policy import EstimatesMany, Predictor
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
        """Say what the first predictor says that finds the job predictable; else what the first one says.

        The latency of a service is the first that any of them tells, for whoever tells it cannot say when it ends.
        """
        answer: Answer | None = None
        for predictor in self._predictors:
            if (estimate := self._ask(predictor, query)) is not None:
                answer = _further(answer, (predictor.name, estimate))
            if _settled(answer, query):
                break
        return answer or NOBODY

    def estimate_many(self, queries: Sequence[Query]) -> Sequence[Answer]:
        """Say for each job what `estimate` says; a predictor that takes many questions at once is asked only once."""
        answers: list[Answer | None] = [None] * len(queries)
        open_places = list(range(len(queries)))
        for predictor in self._predictors:
            asked = [queries[place] for place in open_places]
            for place, estimate in zip(open_places, self._ask_many(predictor, asked), strict=True):
                if estimate is not None:
                    answers[place] = _further(answers[place], (predictor.name, estimate))
            open_places = [place for place in open_places if not _settled(answers[place], queries[place])]
        return [answer or NOBODY for answer in answers]

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

    def _ask_many(self, predictor: Predictor, queries: Sequence[Query]) -> Sequence[Estimate | None]:
        """Ask about all at once where the predictor can; where that fails, or it cannot, one by one."""
        if not isinstance(predictor, EstimatesMany) or not queries:
            return [self._ask(predictor, query) for query in queries]
        try:
            estimates = predictor.estimate_many(queries)
            return [self._sound(predictor, one, query) for one, query in zip(estimates, queries, strict=True)]
        except Exception as error:  # whatever a stranger's predictor does
            self._failed(predictor, f"estimate_many: {type(error).__name__}: {error}")
        return [self._ask(predictor, query) for query in queries]

    def _ask(self, predictor: Predictor, query: Query) -> Estimate | None:
        try:
            return self._sound(predictor, predictor.estimate(query), query)
        except Exception as error:  # whatever a stranger's predictor does, an answer of another type among it
            self._failed(predictor, f"estimate: {type(error).__name__}: {error}")
            return None

    def _sound(self, predictor: Predictor, estimate: Estimate, query: Query) -> Estimate | None:
        if wrong := unsound(estimate, len(query.candidates)):
            self._failed(predictor, f"estimate: {wrong}")
            return None
        return estimate

    def _failed(self, predictor: Predictor, error: str) -> None:
        self._failures[predictor.name] += 1
        self._last_errors[predictor.name] = error


def _further(so_far: Answer | None, answer: Answer) -> Answer:
    """Go on with the first that finds the job predictable, else with the first; latencies are taken from either."""
    if so_far is None:
        return answer
    if answer[1].predictable and not so_far[1].predictable:
        so_far, answer = answer, so_far
    return so_far[0], _with_latencies(so_far[1], answer[1])


def _settled(answer: Answer | None, query: Query) -> bool:
    """Say whether nobody else needs to be asked: how long the job will run is known, and a service's latency."""
    if answer is None or not answer[1].predictable:
        return False
    return not query.qos.arrivals_per_second or _tells_latency(answer[1])


def _tells_latency(estimate: Estimate) -> bool:
    return any(judged.latency for judged in estimate.candidates)


def _with_latencies(estimate: Estimate, told: Estimate) -> Estimate:
    """Add the latencies that another predictor told: a service is never predictable, but its latency may be known."""
    if not _tells_latency(told):
        return estimate
    judged = estimate.candidates or (CandidateEstimate(),) * len(told.candidates)
    merged = [
        replace(ours, latency=ours.latency or theirs.latency)
        for ours, theirs in zip(judged, told.candidates, strict=True)
    ]
    return replace(estimate, candidates=tuple(merged))
