"""What happened before."""

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
from cotenant.core.prediction.job_class_memory import Key, Remembered, kind_of

UNJUDGED = CandidateEstimate()

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Summary:
    """What figures say: their 10th, 50th and 90th percentiles, and how far they can be trusted, from 0 to 1."""

    low: float
    middle: float
    high: float
    confidence: float


@dataclass(slots=True)
class Samples:
    """The latest figures of one thing. Their summary is kept, for it is asked for far more often than they change."""

    figures: list[float] = field(default_factory=list)
    _summary: Summary | None = None

    def add(self, figure: float, figures_max: int) -> None:
        """Add a figure; the oldest make room."""
        self.figures.append(figure)
        del self.figures[:-figures_max]
        self._summary = None

    @property
    def summary(self) -> Summary:
        """What the figures say; there must be some."""
        if self._summary is None:
            self._summary = summarise(self.figures)
        return self._summary


Held = tuple[int, int]  # cores per replica, and nodes
Rates = dict[Held, Samples]
NO_RATES: Rates = {}
Asked = tuple[str, str, int | None, int, float, float | None, tuple[Candidate, ...]]


@dataclass(slots=True)
class Profile:
    """What was seen of one kind of job: run times of its successes, rates by cores; the latest of each."""

    run_seconds: Samples = field(default_factory=Samples)
    rates: dict[str, Rates] = field(default_factory=dict)  # by GPU type
    answer: tuple[Asked, Estimate] | None = None  # the last one; jobs of a kind are mostly asked about alike


class History:
    """Expect of a job what its like did before: the median run time, and the median rate by cores.

    Most deep-learning jobs are resubmissions, and those are mostly predictable: 71 % and 95.7 % in the data of AITurbo
    (Zhao et al., HPDC 2021 [C]). Jobs are alike that share their user, their model (else their name), their GPUs and
    their replicas. The rest of a running job is the median of those runs that lasted longer than it has; a job that
    outlives them all is unpredictable again. A job counts as predictable from a confidence of 0.5 on [D]; confidence
    grows with the number of runs and falls with the spread of their middle half [R]. Where rates and a total of steps
    are known, the steps that are left decide. A user's own expectation serves where nothing else is known, with low
    confidence.

    θ, the cores beyond which nothing is gained (Xiao et al., SoCC 2018), is the smallest count within 2 % of the best
    rate, told once three counts were seen [R].

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
        """How much is remembered, and how sure is sure.

        kinds_max: kinds of jobs remembered; the one unused for longest is forgotten first.
        samples_max: latest run times, and latest rates for each count of cores, remembered of each kind.
        confidence_min: from this confidence on a job is predictable.
        hint_confidence: the confidence in what a user expects.
        tolerance: a rate this share below the best counts as the best, for θ.
        core_counts_min: so many counts of cores must have been seen for θ to be told.
        """

        kinds_max: int = 10_000
        samples_max: int = 32
        confidence_min: float = 0.5
        hint_confidence: float = 0.25
        tolerance: float = 0.02
        core_counts_min: int = 3

        def check(self) -> Iterator[Violation]:
            """Name every option that makes no sense."""
            for name, least in (("kinds_max", 1), ("samples_max", 1), ("core_counts_min", 1)):
                if getattr(self, name) < least:
                    yield Violation(name, f"must be {least} or more, not {getattr(self, name)}")
            for name in ("confidence_min", "hint_confidence", "tolerance"):
                if not 0 <= getattr(self, name) <= 1:
                    yield Violation(name, f"must be from 0 to 1, not {getattr(self, name):g}")

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()
        self._profiles: Remembered[Profile] = Remembered(
            self.options.kinds_max, Profile, _write, lambda content: _read(content, self.options.samples_max)
        )

    def observe(self, observation: Observation) -> None:
        """Take in a training window's rate, or the run time of a job that succeeded; 0 of either tells nothing.

        Raises:
            ValueError: a figure that cannot be; nothing of the observation is kept.
        """
        rate, run_seconds = observation.rate_per_second or 0.0, observation.run_seconds or 0.0
        for what, figure in (("rate", rate), ("run time", run_seconds)):
            if not 0 <= figure < math.inf:
                raise ValueError(f"a {what} must be positive and finite, not {figure:g}")
        learnt_run = run_seconds if observation.succeeded else 0.0
        if observation.phase != TRAINING:
            rate = 0.0  # validation, say, has another rate, and would blur that of training
        if not (rate or learnt_run):
            return
        profile = self._profiles.change(kind_of(observation))
        if rate:
            by_cores = _one_of(profile.rates, observation.allocation.gpu_type, {}, self.options.samples_max)
            held = observation.allocation.cores, observation.allocation.nodes
            _one_of(by_cores, held, Samples(), self.options.samples_max).add(rate, self.options.samples_max)
        profile.answer = None
        if learnt_run:
            profile.run_seconds.add(learnt_run, self.options.samples_max)

    def forget_rates(self, like: Observation) -> None:
        """Let the rates of a kind go on one GPU type; run times stay."""
        if like.phase == TRAINING and self._profiles.get(kind_of(like)):
            profile = self._profiles.change(kind_of(like))
            profile.rates.pop(like.allocation.gpu_type, None)
            profile.answer = None

    def estimate(self, query: Query) -> Estimate:
        """Tell what jobs like this one did: how sure, and from what."""
        profile = self._profiles.get(kind_of(query))
        if profile is None:
            return self._estimate(Profile(), query)
        steps = max(0, query.steps_total - query.step)
        asked = (query.gpu_type, query.phase, query.cores, steps, query.run_seconds, query.expected_seconds)
        if profile.answer is None or profile.answer[0] != (*asked, query.candidates):
            profile.answer = (*asked, query.candidates), self._estimate(profile, query)
        return profile.answer[1]

    def _estimate(self, profile: Profile, query: Query) -> Estimate:
        if query.phase != TRAINING:
            profile = Profile(profile.run_seconds)  # only training's rates are known
        rates = profile.rates.get(_gpu_type(query.gpu_type, profile), NO_RATES)
        steps = max(0, query.steps_total - query.step)
        rest = self._by_steps(rates, steps, query.cores) or self._by_runs(profile.run_seconds, query.run_seconds)
        if rest is None or rest.confidence < self.options.confidence_min:
            rest = _by_hint(query, self.options.hint_confidence) or _unpredictable(profile, query.run_seconds)
        if not profile.rates:
            return replace(rest, candidates=(UNJUDGED,) * len(query.candidates)) if query.candidates else rest
        by_type = {query.gpu_type: rates}
        for candidate in query.candidates:
            if candidate.gpu_type not in by_type:
                by_type[candidate.gpu_type] = profile.rates.get(_gpu_type(candidate.gpu_type, profile), NO_RATES)
        judged = tuple([_judge(candidate, by_type[candidate.gpu_type], steps) for candidate in query.candidates])
        return replace(rest, cores_useful=self._cores_useful(rates), candidates=judged)

    def knows_rate(self, query: Query) -> bool:
        """Say whether rates of jobs like this one were seen."""
        profile = self._profiles.get(kind_of(query))
        return profile is not None and bool(profile.rates)

    def _by_steps(self, rates: Rates, steps: int, cores: int | None) -> Estimate | None:
        """Divide the steps that are left by the rate on these cores; on any cores, the best."""
        if not steps or not rates:
            return None
        samples = _fastest(rates) if cores is None else _on(cores, rates)
        if samples is None:
            return None
        rate = samples.summary
        source = f"{plural(steps, 'step')} left at {rate.middle:.3g} per second, the median of {len(samples.figures)}"
        return Estimate(True, rate.confidence, steps / rate.middle, steps / rate.high, steps / rate.low, source=source)

    def _by_runs(self, run_seconds: Samples, so_far: float) -> Estimate | None:
        """Take the median of the runs that lasted longer than this one has."""
        longer = [seconds for seconds in run_seconds.figures if seconds > so_far]
        if not longer:
            return None
        whole = run_seconds.summary if len(longer) == len(run_seconds.figures) else summarise(longer)
        low, middle, high = (quantile - so_far for quantile in (whole.low, whole.middle, whole.high))
        source = f"the median of {plural(len(longer), 'run')} like it" + (" that lasted longer" if so_far else "")
        return Estimate(True, whole.confidence, middle, low, high, source=source)

    def _cores_useful(self, rates: Rates) -> int | None:
        """Find θ on that many nodes on which the most core counts were seen."""
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
        """Write down what changed since the last dump; a record without content was forgotten."""
        return self._profiles.dump()

    def restore(self, records: Mapping[str, bytes]) -> Sequence[str]:
        """Take back what was dumped; names the records that could not be read."""
        return self._profiles.restore(records)


def _one_of(known: dict[K, V], key: K, new: V, count_max: int) -> V:
    """Find what is kept under a key or begin it; the oldest makes room."""
    if key not in known and len(known) >= count_max:
        del known[next(iter(known))]
    return known.setdefault(key, new)


def _gpu_type(wanted: str, profile: Profile) -> str:
    """Take the wanted type; where none is wanted, the one that was seen most."""
    if wanted or not profile.rates:
        return wanted
    if len(profile.rates) == 1:
        return next(iter(profile.rates))
    return max(
        sorted(profile.rates), key=lambda kind: sum(len(samples.figures) for samples in profile.rates[kind].values())
    )


def _judge(candidate: Candidate, rates: Rates, steps: int) -> CandidateEstimate:
    samples = rates.get((candidate.cores, candidate.nodes))
    if samples is None:
        return UNJUDGED
    rate = samples.summary
    return CandidateEstimate(rate.middle, steps / rate.middle if steps else None, rate.confidence)


def _fastest(rates: Rates) -> Samples | None:
    return max((rates[held] for held in sorted(rates)), key=lambda samples: samples.summary.middle, default=None)


def _on(cores: int, rates: Rates) -> Samples | None:
    """Give the rates on so many cores; where they were seen on several numbers of nodes, on that with the most."""
    found = [(-len(samples.figures), nodes) for (seen, nodes), samples in rates.items() if seen == cores]
    return rates[cores, min(found)[1]] if found else None


def summarise(figures: Sequence[float]) -> Summary:
    """Find percentiles; trust more figures more, and those less whose middle half differs.

    >>> summarise([60.0]).confidence, summarise([60.0] * 8).confidence
    (0.3333333333333333, 0.8)
    """
    ordered = sorted(figures)
    p10, p25, middle, p75, p90 = (_quantile(ordered, share) for share in (0.1, 0.25, 0.5, 0.75, 0.9))
    return Summary(p10, middle, p90, len(figures) / (len(figures) + 2) / (1 + (p75 - p25) / middle))


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Interpolate between neighbours, as numpy does, at a tenth of its price for so few figures.

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
    return Estimate(True, confidence, rest, source=f"its user expects {query.expected_seconds:g} s in all")


def _unpredictable(profile: Profile, so_far: float) -> Estimate:
    runs = profile.run_seconds.figures
    if not runs:
        return Estimate(source="no job like this one has succeeded yet")
    if max(runs) <= so_far:
        return Estimate(source=f"it has outlived {plural(len(runs), 'run')} like it")
    return Estimate(source=f"{plural(len(runs), 'run')} like it are too few or differ too much")


def _write(key: Key, profile: Profile) -> bytes:
    rates = [
        [kind, cores, nodes, samples.figures]
        for kind, by_cores in profile.rates.items()
        for (cores, nodes), samples in by_cores.items()
    ]
    return json.dumps({"key": key, "runs": profile.run_seconds.figures, "rates": rates}, separators=(",", ":")).encode()


def _read(content: bytes, samples_max: int) -> tuple[Key, Profile]:
    """Read a profile back.

    Raises:
        ValueError: it is none, or some figure in it cannot be.
    """
    record = json.loads(content)
    profile = Profile(_figures(record["runs"], samples_max, kept.SECONDS_MAX))
    for kind, cores, *told in record["rates"]:
        nodes, samples = told if len(told) == 2 else (1, *told)  # nodes were not told apart in version 0.1
        rates = _figures(samples, samples_max, kept.RATE_MAX_PER_SECOND)
        if not rates.figures:
            raise ValueError(f"it has no rate on {cores} cores")
        profile.rates.setdefault(kept.text(kind), {})[kept.cores(cores), kept.nodes(nodes)] = rates
    return kept.kind(record["key"]), profile


def _figures(samples: Sequence[float], samples_max: int, most: float) -> Samples:
    return Samples([kept.between(figure, kept.RATE_MIN_PER_SECOND, most) for figure in samples][-samples_max:])
