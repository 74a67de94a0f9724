"""Several predictors as one: each is asked, and what one does not know is filled in from the others.

Remaining time comes from the job's own rate if it reports steps and has a total; otherwise from the first, in the
order of the list, that finds the job predictable. θ, and the rate of each candidate, come from the predictor most
confident in them; a latency from the first that gives one. So the order decides which predictor gives the remaining
time, and nothing else unless confidences are equal. Nothing is made up: a figure is one that a predictor gave, or the
remaining steps divided by a rate, and its confidence is never higher than that of its inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from cotenant.core.model.estimate import UNKNOWN, CandidateEstimate, Estimate, Observation, Query
from cotenant.core.policy.protocols import EstimatesMany, Predictor, Prepares
from cotenant.core.prediction.estimate_validation import invalid_reason
from cotenant.core.prediction.own_rate import expired, remaining_by_rate

CONFIDENCE_MIN = 0.5  # from which on a job is predictable (AITurbo, Zhao et al., HPDC 2021 [D])
REMEMBERED_MAX = 5_000  # answers that were checked or combined
OWN_RATE = "progress"  # the name of a job's own rate in the source of an estimate
NOBODY = replace(UNKNOWN, source=f"nobody: {UNKNOWN.source}")

NamedEstimate = tuple[str, Estimate]  # a predictor's name and its answer
Failed = Callable[[Predictor, str], None]  # called with the predictor that failed, and the error
Judged = tuple[CandidateEstimate, ...]


class Chain:
    """Asks predictors in their order. A predictor that fails is skipped and reported.

    >>> from cotenant.policies.history import History
    >>> Chain([History()]).estimate(Query("ann", "bert", "", gpu_milli=1000, replicas=1)).source
    'history: no similar job has succeeded yet'
    """

    def __init__(self, predictors: Sequence[Predictor], failed: Failed = lambda predictor, error: None) -> None:
        names = [predictor.name for predictor in predictors]
        if not names:
            raise ValueError("at least one predictor is needed")
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise ValueError(f"the predictor {twice[0]!r} is named twice")
        self._predictors = tuple(predictors)
        self._many = {one.name: one for one in predictors if isinstance(one, EstimatesMany)}  # slow to check
        self._failed = failed
        self._combined: dict[tuple[int, ...], tuple[Query, Sequence[NamedEstimate], Estimate]] = {}
        self._checked: dict[tuple[int, int], Estimate] = {}  # keyed by identity, and kept alive, too

    @property
    def predictors(self) -> Mapping[str, Predictor]:
        """The predictors by name, in their order."""
        return {predictor.name: predictor for predictor in self._predictors}

    def estimate(self, query: Query) -> Estimate:
        """Return what the predictors together know about a job."""
        return self.estimate_many([query])[0]

    def estimate_many(self, queries: Sequence[Query]) -> Sequence[Estimate]:
        """Return for each job what `estimate` returns; a predictor that takes many queries at once is called once."""
        own = [remaining_by_rate(query) for query in queries]
        queries = [_without_steps(query) if expired(query) else query for query in queries]
        answers = [(predictor.name, self._ask_many(predictor, queries)) for predictor in self._predictors]
        return [
            self._combine(
                [(name, estimate) for name, estimates in answers if (estimate := estimates[place]) is not None],
                query,
                own[place],
            )
            for place, query in enumerate(queries)
        ]

    def _combine(self, estimates: Sequence[NamedEstimate], query: Query, own: Estimate | None) -> Estimate:
        """Return the combined answers; the cached result if the predictors gave the very same answers as before.

        Answers are keyed by identity, and kept alive, so that an identity is never reused. An answer by the job's own
        rate is always new. It comes first; from before a change of the rate, last.
        """
        if own is not None:
            known = query.own_rate is None or query.own_rate.windows or not own.predictable
            named = (OWN_RATE, own)
            return combined([named, *estimates] if known else [*estimates, named], query)
        key = tuple([id(estimate) for _, estimate in estimates])
        before = self._combined.get(key)
        if before and _alike(before[0], query):
            return before[2]
        estimate = combined(estimates, query)
        if len(self._combined) >= REMEMBERED_MAX:
            self._combined.clear()
        self._combined[key] = query, estimates, estimate
        return estimate

    def observe(self, observation: Observation) -> None:
        """Pass an observation to all predictors."""
        for predictor in self._predictors:
            try:
                predictor.observe(observation)
            except Exception as error:  # anything that a third-party predictor may raise
                self._failed(predictor, f"observe: {type(error).__name__}: {error}")

    def prepare(self, fits_max: int) -> bool:
        """Let predictors that can do so fit in advance what the next queries need; True if more is left."""
        left = False
        for predictor in self._predictors:
            if isinstance(predictor, Prepares):
                try:
                    left |= predictor.prepare(fits_max) > 0
                except Exception as error:  # anything that a third-party predictor may raise
                    self._failed(predictor, f"prepare: {type(error).__name__}: {error}")
        return left

    def _ask_many(self, predictor: Predictor, queries: Sequence[Query]) -> Sequence[Estimate | None]:
        """Query all at once if the predictor can; one by one if it cannot, or if that fails."""
        many = self._many.get(predictor.name)
        if many is None or not queries:
            return [self._ask(predictor, query) for query in queries]
        try:
            estimates = many.estimate_many(queries)
            return [self._sound(predictor, one, query) for one, query in zip(estimates, queries, strict=True)]
        except Exception as error:  # anything that a third-party predictor may raise
            self._failed(predictor, f"estimate_many: {type(error).__name__}: {error}")
        return [self._ask(predictor, query) for query in queries]

    def _ask(self, predictor: Predictor, query: Query) -> Estimate | None:
        try:
            return self._sound(predictor, predictor.estimate(query), query)
        except (
            Exception
        ) as error:  # anything that a third-party predictor may raise, an answer of another type among it
            self._failed(predictor, f"estimate: {type(error).__name__}: {error}")
            return None

    def _sound(self, predictor: Predictor, estimate: Estimate, query: Query) -> Estimate | None:
        key = id(estimate), len(query.candidates)
        if key in self._checked and self._checked[key] is estimate:
            return estimate
        if wrong := invalid_reason(estimate, len(query.candidates)):
            self._failed(predictor, f"estimate: {wrong}")
            return None
        if len(self._checked) >= REMEMBERED_MAX:
            self._checked.clear()
        self._checked[key] = estimate
        return estimate


def by_own_rate(estimate: Estimate) -> bool:
    """Return whether a combined estimate's remaining time follows from the job's own rate."""
    return estimate.predictable and estimate.source.startswith(f"{OWN_RATE}: ")


def _without_steps(query: Query) -> Query:
    """Return a query that says nothing of the job's steps: it stopped reporting them, so no rate tells its end."""
    return replace(query, step=0, steps_total=0)


def _alike(query: Query, other: Query) -> bool:
    """Return whether the same answers mean the same for two queries."""
    return (
        query.steps_total - query.step == other.steps_total - other.step
        and query.phase == other.phase
        and query.cores == other.cores
        and query.gpu_type == other.gpu_type
        and query.candidates == other.candidates
    )


def combined(estimates: Sequence[NamedEstimate], query: Query) -> Estimate:
    """Return predictors' answers about one job combined, in their order; names all predictors that contributed.

    >>> asked = Query("ann", "bert", "", 1000, 1)
    >>> curve = Estimate(cores_useful=6, cores_useful_confidence=0.9, source="θ is 6 cores")
    >>> past = Estimate(True, 0.7, remaining_seconds=60.0, source="the median of 3 similar runs")
    >>> both = combined([("xiao-piecewise", curve), ("history", past)], asked)
    >>> both.remaining_seconds, both.cores_useful, both.source
    (60.0, 6, 'history: the median of 3 similar runs; θ by xiao-piecewise')
    """
    if not estimates:
        return NOBODY
    judged, rates_by, latency_by = _judged(estimates, query)
    name, speaks = next((one for one in estimates if one[1].predictable), estimates[0])
    also: list[str] = []
    if not speaks.predictable and (rest := _by_rate(judged, query)):
        name, speaks = " and ".join(rates_by), rest
    useful_by, useful = name, speaks
    for other, estimate in estimates:
        if estimate.cores_useful is not None and (
            useful.cores_useful is None or estimate.cores_useful_confidence > useful.cores_useful_confidence
        ):
            useful_by, useful = other, estimate
    if len(estimates) > 1:
        speaking = name.split(" and ")
        for what, others in (("θ", (useful_by,)), ("rates", rates_by), ("latency", latency_by)):
            if strangers := [other for other in others if other not in speaking]:
                also.append(f"; {what} by {' and '.join(strangers)}")
    return Estimate(
        speaks.predictable,
        speaks.confidence,
        speaks.remaining_seconds,
        speaks.remaining_p10_seconds,
        speaks.remaining_p90_seconds,
        useful.cores_useful,
        judged,
        f"{name}: {speaks.source}{''.join(also)}",
        useful.cores_useful_confidence,
    )


def _judged(estimates: Sequence[NamedEstimate], query: Query) -> tuple[Judged, Sequence[str], Sequence[str]]:
    """Return each candidate's most confident rate, and the names of predictors whose rates and latencies were used."""
    candidates_by = [(name, estimate.candidates) for name, estimate in estimates if estimate.candidates]
    if not candidates_by:
        return (), (), ()
    names = [name for name, _ in candidates_by]
    steps = 0 if query.phase else max(0, query.steps_total - query.step)
    if len(candidates_by) == 1 and not any(
        one.latency or (one.remaining_seconds is None and one.rate_per_second) for one in candidates_by[0][1]
    ):
        only = candidates_by[0][1]
        return only, names if any(one.rate_per_second is not None for one in only) else (), ()
    judged, rated, waited = [], set(), set()
    for ones in zip(*[candidates for _, candidates in candidates_by], strict=True):
        surest = latency = -1
        confidence = -1.0
        for place, one in enumerate(ones):
            if one.rate_per_second is not None and one.confidence > confidence:
                surest, confidence = place, one.confidence  # the first of equals
            if latency < 0 and one.latency is not None:
                latency = place
        best = ones[max(surest, 0)]
        if surest >= 0:
            rated.add(surest)
            if best.remaining_seconds is None and best.rate_per_second:
                best = _with_rest(best, ones, steps)
        if latency >= 0:
            waited.add(latency)
            best = replace(best, latency=ones[latency].latency)
        judged.append(best)
    return tuple(judged), [names[one] for one in sorted(rated)], [names[one] for one in sorted(waited)]


def _with_rest(one: CandidateEstimate, ones: Judged, steps: int) -> CandidateEstimate:
    """Return an estimate with the remaining steps divided by its rate; unknown steps come from another estimate."""
    assert one.rate_per_second
    if steps:
        return replace(one, remaining_seconds=steps / one.rate_per_second)
    others = [other for other in ones if other.rate_per_second and other.remaining_seconds is not None]
    if not others:
        return one
    other = max(others, key=lambda other: other.confidence)
    assert other.rate_per_second
    assert other.remaining_seconds is not None
    rest = other.remaining_seconds * other.rate_per_second / one.rate_per_second
    return replace(one, remaining_seconds=rest, confidence=min(one.confidence, other.confidence))


def _by_rate(judged: Judged, query: Query) -> Estimate | None:
    """Return the remaining steps divided by the rate on what the job asks for, if that rate is confident enough."""
    steps = max(0, query.steps_total - query.step)
    if not steps or query.phase:
        return None
    for candidate, one in zip(query.candidates, judged, strict=False):
        asked = query.cores in (None, candidate.cores) and candidate.gpu_type == query.gpu_type
        if asked and one.rate_per_second:
            if one.confidence < CONFIDENCE_MIN:
                return None
            rate = one.rate_per_second
            return Estimate(True, one.confidence, steps / rate, source=f"{steps} steps left at {rate:.3g} per second")
    return None


def with_allocations(estimate: Estimate, query: Query) -> Estimate:
    """Return an estimate with each candidate's allocation added."""
    judged = [
        one if one.allocation is not None else replace(one, allocation=allocation)
        for one, allocation in zip(estimate.candidates, query.candidates, strict=False)
    ]
    return replace(estimate, candidates=tuple(judged))
