"""Predictions from similar jobs that ran before."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from cotenant.core.model.estimate import TRAINING, Candidate, CandidateEstimate, Estimate, Observation, Query
from cotenant.core.model.refusal import plural
from cotenant.core.model.validation import Violation
from cotenant.core.prediction import record_validation as kept
from cotenant.core.prediction.job_class_memory import JobClassMemory, Key, job_class_of

NO_ESTIMATE = CandidateEstimate()

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Summary:
    """Percentiles of some figures (10th, 50th, 90th), and their confidence from 0 to 1."""

    low: float
    middle: float
    high: float
    confidence: float


@dataclass(slots=True)
class Samples:
    """The latest figures of one kind. The summary is cached: it is requested far more often than it changes."""

    figures: list[float] = field(default_factory=list)
    _summary: Summary | None = None

    def add(self, figure: float, figures_max: int) -> None:
        """Add a figure, dropping the oldest if there are too many."""
        self.figures.append(figure)
        del self.figures[:-figures_max]
        self._summary = None

    @property
    def summary(self) -> Summary:
        """The summary of the figures; there must be at least one."""
        if self._summary is None:
            self._summary = summarize(self.figures)
        return self._summary


AllocationKey = tuple[int, int]  # cores per replica, and nodes
Rates = dict[AllocationKey, Samples]
NO_RATES: Rates = {}
QueryKey = tuple[str, str, int | None, int, float, float | None, tuple[Candidate, ...]]


@dataclass(slots=True)
class Profile:
    """What was observed of one job class: run times of successes, and rates by cores; the latest of each."""

    run_seconds: Samples = field(default_factory=Samples)
    rates: dict[str, Rates] = field(default_factory=dict)  # by GPU type
    answer: tuple[QueryKey, Estimate] | None = None  # the last answer; queries about a job class are mostly equal


class History:
    """Predict a job by similar earlier jobs: their median run time, and their median rate by cores.

    Most deep-learning jobs are resubmissions, and most of those are predictable: 71 % and 95.7 % in the data of AITurbo
    (Zhao et al., HPDC 2021 [C]). Jobs are similar if they share user, model (else name), GPUs and replicas. The
    remaining time of a running job is the median over the runs that lasted longer than it has run so far; a job that
    outlives them all becomes unpredictable again. A job counts as predictable from a confidence of 0.5 [D]; confidence
    grows with the number of runs and falls with their interquartile range [R]. If rates and a total number of steps are
    known, the remaining steps decide. The user's own expectation is used, with low confidence, where nothing else is
    known.

    θ, the number of cores beyond which the rate does not grow (Xiao et al., SoCC 2018), is the smallest count within 2
    % of the best rate, reported once three counts were observed [R].

    >>> history = History()
    >>> for seconds in (90, 100, 110):
    ...     run = Observation("ann", "bert", "", 1000, 1, Candidate(cores=4), run_seconds=seconds, succeeded=True)
    ...     history.observe(run)
    >>> history.estimate(Query("ann", "bert", "", gpu_milli=1000, replicas=1)).remaining_seconds
    100.0
    """

    name = "history"
    api_version = 1

    @dataclass(frozen=True, slots=True)
    class Options:
        """How much is remembered, and how much confidence is needed.

        kinds_max: job classes remembered; the least recently used class is dropped first.
        samples_max: latest run times, and latest rates for each core count, remembered of each job class.
        confidence_min: minimum confidence from which a job is predictable.
        hint_confidence: confidence of the user's own expectation.
        tolerance: rates within this share of the best count as the best, for θ.
        core_counts_min: number of core counts that must have been observed before θ is reported.
        """

        kinds_max: int = 10_000
        samples_max: int = 32
        confidence_min: float = 0.5
        hint_confidence: float = 0.25
        tolerance: float = 0.02
        core_counts_min: int = 3

        def check(self) -> Iterator[Violation]:
            """Yield a violation for each invalid option."""
            for name, least in (("kinds_max", 1), ("samples_max", 1), ("core_counts_min", 1)):
                if getattr(self, name) < least:
                    yield Violation(name, f"must be {least} or more, not {getattr(self, name)}")
            for name in ("confidence_min", "hint_confidence", "tolerance"):
                if not 0 <= getattr(self, name) <= 1:
                    yield Violation(name, f"must be from 0 to 1, not {getattr(self, name):g}")

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()
        self._profiles: JobClassMemory[Profile] = JobClassMemory(
            self.options.kinds_max, Profile, _write, lambda content: _read(content, self.options.samples_max)
        )

    def observe(self, observation: Observation) -> None:
        """Record a training window's rate, or the run time of a successful job; a value of 0 is ignored.

        Raises:
            ValueError: an invalid figure; nothing of the observation is kept.
        """
        rate, run_seconds = observation.rate_per_second or 0.0, observation.run_seconds or 0.0
        for what, figure in (("rate", rate), ("run time", run_seconds)):
            if not 0 <= figure < math.inf:
                raise ValueError(f"a {what} must be positive and finite, not {figure:g}")
        learnt_run = run_seconds if observation.succeeded else 0.0
        if observation.phase != TRAINING:
            rate = 0.0  # another phase, such as validation, has another rate
        if not (rate or learnt_run):
            return
        profile = self._profiles.change(job_class_of(observation))
        if rate:
            by_cores = _one_of(profile.rates, observation.allocation.gpu_type, {}, self.options.samples_max)
            held = observation.allocation.cores, observation.allocation.nodes
            _one_of(by_cores, held, Samples(), self.options.samples_max).add(rate, self.options.samples_max)
        profile.answer = None
        if learnt_run:
            profile.run_seconds.add(learnt_run, self.options.samples_max)

    def forget_rates(self, like: Observation) -> None:
        """Drop a job class's rates on one GPU type; run times stay."""
        if like.phase == TRAINING and self._profiles.get(job_class_of(like)):
            profile = self._profiles.change(job_class_of(like))
            profile.rates.pop(like.allocation.gpu_type, None)
            profile.answer = None

    def estimate(self, query: Query) -> Estimate:
        """Return what similar jobs did, with the confidence and the source."""
        profile = self._profiles.get(job_class_of(query))
        if profile is None:
            return self._estimate(Profile(), query)
        steps = max(0, query.steps_total - query.step)
        asked = (query.gpu_type, query.phase, query.cores, steps, query.run_seconds, query.expected_seconds)
        if profile.answer is None or profile.answer[0] != (*asked, query.candidates):
            profile.answer = (*asked, query.candidates), self._estimate(profile, query)
        return profile.answer[1]

    def _estimate(self, profile: Profile, query: Query) -> Estimate:
        if query.phase != TRAINING:
            profile = Profile(profile.run_seconds)  # only training rates are known
        rates = profile.rates.get(_gpu_type(query.gpu_type, profile), NO_RATES)
        steps = max(0, query.steps_total - query.step)
        rest = self._by_steps(rates, steps, query.cores) or self._by_runs(profile.run_seconds, query.run_seconds)
        if rest is None or rest.confidence < self.options.confidence_min:
            rest = _by_hint(query, self.options.hint_confidence) or _unpredictable(profile, query.run_seconds)
        if not profile.rates:
            return replace(rest, candidates=(NO_ESTIMATE,) * len(query.candidates)) if query.candidates else rest
        by_type = {query.gpu_type: rates}
        for candidate in query.candidates:
            if candidate.gpu_type not in by_type:
                by_type[candidate.gpu_type] = profile.rates.get(_gpu_type(candidate.gpu_type, profile), NO_RATES)
        judged = tuple([_judge(candidate, by_type[candidate.gpu_type], steps) for candidate in query.candidates])
        return replace(rest, cores_useful=self._cores_useful(rates), candidates=judged)

    def knows_rate(self, query: Query) -> bool:
        """Return whether rates of similar jobs were observed."""
        profile = self._profiles.get(job_class_of(query))
        return profile is not None and bool(profile.rates)

    def _by_steps(self, rates: Rates, steps: int, cores: int | None) -> Estimate | None:
        """Return the remaining steps divided by the rate on these cores; without cores, by the best rate."""
        if not steps or not rates:
            return None
        samples = _fastest(rates) if cores is None else _on(cores, rates)
        if samples is None:
            return None
        rate = samples.summary
        source = f"{plural(steps, 'step')} left at {rate.middle:.3g} per second, the median of {len(samples.figures)}"
        return Estimate(True, rate.confidence, steps / rate.middle, steps / rate.high, steps / rate.low, source=source)

    def _by_runs(self, run_seconds: Samples, so_far: float) -> Estimate | None:
        """Return the median of the runs that lasted longer than this job has run so far."""
        longer = [seconds for seconds in run_seconds.figures if seconds > so_far]
        if not longer:
            return None
        whole = run_seconds.summary if len(longer) == len(run_seconds.figures) else summarize(longer)
        low, middle, high = (quantile - so_far for quantile in (whole.low, whole.middle, whole.high))
        source = f"the median of {plural(len(longer), 'similar run')}" + (" that lasted longer" if so_far else "")
        return Estimate(True, whole.confidence, middle, low, high, source=source)

    def _cores_useful(self, rates: Rates) -> int | None:
        """Return θ for the node count with the most observed core counts."""
        if len(rates) < self.options.core_counts_min:
            return None
        seen = Counter([nodes for _, nodes in rates])
        most = min(seen, key=lambda nodes: (-seen[nodes], nodes))
        if seen[most] < self.options.core_counts_min:
            return None
        medians = {cores: samples.summary.middle for (cores, nodes), samples in rates.items() if nodes == most}
        enough = max(medians.values()) * (1 - self.options.tolerance)
        return min(cores for cores, rate in medians.items() if rate >= enough)

    def dump(self) -> Mapping[str, bytes]:
        """Return the records changed since the last dump; an empty record was dropped."""
        return self._profiles.dump()

    def restore(self, records: Mapping[str, bytes]) -> Sequence[str]:
        """Restore dumped records; returns the names of the records that could not be read."""
        return self._profiles.restore(records)


def _one_of(known: dict[K, V], key: K, new: V, count_max: int) -> V:
    """Return the entry of a key, adding it if needed; the oldest entry is dropped if there are too many."""
    if key not in known and len(known) >= count_max:
        del known[next(iter(known))]
    return known.setdefault(key, new)


def _gpu_type(wanted: str, profile: Profile) -> str:
    """Return the wanted GPU type; without one, the type that was observed most."""
    if wanted or not profile.rates:
        return wanted
    if len(profile.rates) == 1:
        return next(iter(profile.rates))
    return max(
        sorted(profile.rates), key=lambda kind: sum(len(samples.figures) for samples in profile.rates[kind].values())
    )


def _judge(candidate: Candidate, rates: Rates, steps: int) -> CandidateEstimate:
    samples = rates.get((candidate.cores, candidate.nodes))
    if samples is None and candidate.gpu_type and not candidate.cores:  # undecided: as many as were best there
        some = [one for (_, nodes), one in sorted(rates.items()) if nodes == candidate.nodes]
        samples = max(some, key=lambda one: one.summary.middle, default=None)
    if samples is None:
        return NO_ESTIMATE
    rate = samples.summary
    return CandidateEstimate(rate.middle, steps / rate.middle if steps else None, rate.confidence)


def _fastest(rates: Rates) -> Samples | None:
    return max((rates[held] for held in sorted(rates)), key=lambda samples: samples.summary.middle, default=None)


def _on(cores: int, rates: Rates) -> Samples | None:
    """Return the rates on a core count; if observed on several node counts, those on the most observed count."""
    found = [(-len(samples.figures), nodes) for (seen, nodes), samples in rates.items() if seen == cores]
    return rates[cores, min(found)[1]] if found else None


def summarize(figures: Sequence[float]) -> Summary:
    """Return percentiles; more figures and a smaller interquartile range give more confidence.

    >>> summarize([60.0]).confidence, summarize([60.0] * 8).confidence
    (0.3333333333333333, 0.8)
    """
    ordered = sorted(figures)
    p10, p25, middle, p75, p90 = (_quantile(ordered, share) for share in (0.1, 0.25, 0.5, 0.75, 0.9))
    return Summary(p10, middle, p90, len(figures) / (len(figures) + 2) / (1 + (p75 - p25) / middle))


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Interpolate linearly, as numpy does, at a tenth of its cost for so few figures.

    >>> _quantile([10.0, 20.0, 30.0], 0.25)
    15.0
    """
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _by_hint(query: Query, confidence: float) -> Estimate | None:
    if query.expected_seconds is None or not 0 < query.expected_seconds - query.run_seconds < math.inf:
        return None
    rest = query.expected_seconds - query.run_seconds
    return Estimate(True, confidence, rest, source=f"its user expects {query.expected_seconds:g} s in total")


def _unpredictable(profile: Profile, so_far: float) -> Estimate:
    runs = profile.run_seconds.figures
    if not runs:
        return Estimate(source="no similar job has succeeded yet")
    if max(runs) <= so_far:
        return Estimate(source=f"it has outlived {plural(len(runs), 'similar run')}")
    return Estimate(source=f"{plural(len(runs), 'similar run')}: too few or too different")


def _write(key: Key, profile: Profile) -> bytes:
    rates = [
        [kind, cores, nodes, samples.figures]
        for kind, by_cores in profile.rates.items()
        for (cores, nodes), samples in by_cores.items()
    ]
    return json.dumps({"key": key, "runs": profile.run_seconds.figures, "rates": rates}, separators=(",", ":")).encode()


def _read(content: bytes, samples_max: int) -> tuple[Key, Profile]:
    """Decode a profile.

    Raises:
        ValueError: the content is not a valid profile.
    """
    record = json.loads(content)
    profile = Profile(_figures(record["runs"], samples_max, kept.SECONDS_MAX))
    for kind, cores, *told in record["rates"]:
        nodes, samples = told if len(told) == 2 else (1, *told)  # version 0.1 did not distinguish nodes
        rates = _figures(samples, samples_max, kept.RATE_MAX_PER_SECOND)
        if not rates.figures:
            raise ValueError(f"the record has no rate on {cores} cores")
        profile.rates.setdefault(kept.text(kind), {})[kept.cores(cores), kept.nodes(nodes)] = rates
    return kept.kind(record["key"]), profile


def _figures(samples: Sequence[float], samples_max: int, most: float) -> Samples:
    return Samples([kept.between(figure, kept.RATE_MIN_PER_SECOND, most) for figure in samples][-samples_max:])
