"""Rates by number of cores: Xiao's curve, fitted to observed windows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cotenant.core.model.estimate import Candidate, CandidateEstimate, Estimate, Observation, Query, validated_rate
from cotenant.core.model.refusal import plural
from cotenant.core.model.validation import Violation
from cotenant.core.prediction import record_validation as kept
from cotenant.core.prediction.core_curve import DEFAULTS, Beliefs, Curve, Windows, fit
from cotenant.core.prediction.job_class_memory import JobClassMemory, Key, job_class_of

SETTINGS_MAX = 16  # phases, GPU types and node counts of one job class; the oldest is dropped
RATES_MAX, COUNTS_MAX = 8, 32  # latest rates of one core count, and core counts of one setting
FOUND_MAX = 64  # queries about one job class whose setting is cached
P10 = 1.2815515655446004  # standard deviations from the median to the 10th percentile
NO_ESTIMATE = CandidateEstimate()

Setting = tuple[str, str, int]  # phase, GPU type, nodes
QueryKey = tuple[str, str, int | None, int, tuple[Candidate, ...]]


@dataclass(slots=True)
class Seen:
    """The windows of one job class by setting, and their curves, which are requested far more often."""

    windows: dict[Setting, Windows] = field(default_factory=dict)
    curves: dict[Setting, Curve] = field(default_factory=dict)
    found: dict[tuple[str, str, int | None], Setting | None] = field(default_factory=dict)
    answer: tuple[QueryKey, Estimate] | None = None  # the last answer; queries about a job class are mostly equal

    def setting(self, phase: str, gpu_type: str, nodes: int | None) -> Setting | None:
        """Return the setting of a query; an open type or node count takes the one with the most windows."""
        asked = (phase, gpu_type, nodes)
        if asked not in self.found:
            if len(self.found) == FOUND_MAX:
                self.found.clear()
            fitting = [
                one for one in self.windows if one[0] == phase and gpu_type in ("", one[1]) and nodes in (None, one[2])
            ]
            self.found[asked] = max(sorted(fitting), key=lambda one: len(self.windows[one]), default=None)
        return self.found[asked]

    def add(self, setting: Setting, cores: int, rate: float) -> None:
        """Record the rate of a window."""
        if setting not in self.windows and len(self.windows) == SETTINGS_MAX:
            oldest = next(iter(self.windows))
            del self.windows[oldest]
            self.curves.pop(oldest, None)
        self.windows.setdefault(setting, Windows(rates_max=RATES_MAX, counts_max=COUNTS_MAX)).add(cores, rate)
        self.curves.pop(setting, None)
        self.found.clear()
        self.answer = None

    def drop(self, setting: Setting) -> None:
        """Drop the windows of a setting."""
        self.windows.pop(setting, None)
        self.curves.pop(setting, None)
        self.found.clear()
        self.answer = None


@dataclass(frozen=True, slots=True)
class CurveMatch:
    """The curve used for a job, the trust in it, and whether its rates hold for the job or only its θ."""

    curve: Curve
    trust: float = 1.0
    rates: bool = True

    def judge(self, cores: int, steps: int) -> CandidateEstimate:
        """Judge an allocation by its number of cores; 0 cores are undecided."""
        if not self.rates or cores < 1:
            return NO_ESTIMATE
        rate, confidence = self.curve.rate(cores), self.curve.confidence(cores) * self.trust
        if rate <= 0:
            return NO_ESTIMATE
        if cores > self.curve.points[-1].cores and not self.curve.levels_off:
            confidence /= 2  # it may continue to rise
        return CandidateEstimate(rate, steps / rate if steps else None, confidence)


class XiaoPiecewise:
    """Predict S(C) = P₀·log C + P₁·C steps per second on C cores below θ, and P₂ from θ on.

    The form is from Xiao et al., "Scheduling CPU for GPU-based Deep Learning Jobs" (SoCC 2018) [P]; θ is the sweet
    spot: more cores do not help. `cotenant.core.prediction.core_curve` explains how the curve is found from a few noisy
    windows, and its confidence [R]. The confidence in a rate is the probability that it is within 15 % of the truth:
    with a larger deviation the job would be measured again [R].

    Each phase (training, validation) has a curve of its own [P], and so has each GPU type and number of nodes. Jobs are
    similar if they share user, model (else name), GPUs and replicas. If no similar job was observed, the same model of
    other users on the same GPU type is used with less confidence: with its rates if GPUs and replicas are equal, else
    with θ alone if the GPUs per replica are equal. Memory is assumed to be sufficient: AlexNet's gain beyond 9 cores
    needs 125 GB per GPU in the profiles of Synergy (OSDI 2022) [D], and observations with too little memory bend the
    curve early.

    >>> from cotenant.core.model.estimate import Candidate, Observation, Query
    >>> predictor = XiaoPiecewise()
    >>> for cores, rate in ((1, 10.0), (2, 20.0), (5, 49.0), (16, 50.0)):
    ...     seen = Candidate(cores, gpu_milli=1000)
    ...     predictor.observe(Observation("ann", "res18", "", 1000, 1, seen, rate_per_second=rate, window_seconds=60.0))
    >>> query = Query("ann", "res18", "", 1000, 1, candidates=(Candidate(3), Candidate(12)))
    >>> estimate = predictor.estimate(query)
    >>> estimate.cores_useful, [round(candidate.rate_per_second) for candidate in estimate.candidates]
    (5, [30, 50])
    """

    name = "xiao-piecewise"
    api_version = 1

    @dataclass(frozen=True, slots=True)
    class Options:
        """How much is remembered, and the assumptions of the fit.

        kinds_max: job classes remembered; the least recently used class is dropped first.
        confidence_min: minimum confidence from which a job is predictable, and θ is reported.
        others_trust: factor on the confidence if only other users' jobs are known.
        noise: standard deviation of one window's rate, relative to it, unless the windows show more.
        form: deviation of real curves from the form, relative to the rate.
        """

        kinds_max: int = 10_000
        confidence_min: float = 0.5
        others_trust: float = 0.6
        noise: float = DEFAULTS.noise
        form: float = DEFAULTS.form

        def check(self) -> Iterator[Violation]:
            """Yield a violation for each invalid option."""
            if self.kinds_max < 1:
                yield Violation("kinds_max", f"must be 1 or more, not {self.kinds_max}")
            for name in ("confidence_min", "others_trust"):
                if not 0 <= getattr(self, name) <= 1:
                    yield Violation(name, f"must be from 0 to 1, not {getattr(self, name):g}")
            for name in ("noise", "form"):
                if not 0 < getattr(self, name) < 1:
                    yield Violation(name, f"must be above 0 and below 1, not {getattr(self, name):g}")

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()
        self._beliefs = Beliefs(noise=self.options.noise, form=self.options.form)
        self._seen: JobClassMemory[Seen] = JobClassMemory(self.options.kinds_max, Seen, _write, _read)
        self._due: dict[tuple[Key, Setting], None] = {}  # curves with new windows

    def observe(self, observation: Observation) -> None:
        """Record a window's rate; a window without a rate or a core count is ignored.

        Raises:
            ValueError: an invalid figure; nothing of the observation is kept.
        """
        rate, seen = validated_rate(observation), observation.allocation
        if seen.cores < 0 or seen.nodes < 1:
            raise ValueError(f"invalid job: {plural(seen.cores, 'core')} and {plural(seen.nodes, 'node')}")
        if rate and seen.cores:
            setting = (observation.phase, seen.gpu_type, seen.nodes)
            key = job_class_of(observation)
            self._seen.change(key).add(setting, seen.cores, rate)
            self._due[key, setting] = None
            if len(self._due) > self.options.kinds_max:
                del self._due[next(iter(self._due))]

    def prepare(self, fits_max: int) -> int:
        """Fit some of the curves with new windows in advance of queries."""
        for key, setting in list(self._due)[:fits_max]:
            del self._due[key, setting]
            seen = self._seen.get(key)
            if seen and setting in seen.windows:
                curve = self._curve(seen, setting)
                for point in curve.points:
                    curve.confidence(point.cores)
                self._theta(CurveMatch(curve))
        return len(self._due)

    def forget_rates(self, like: Observation) -> None:
        """Drop the windows of a job class in one setting."""
        if self._seen.get(job_class_of(like)):
            setting = (like.phase, like.allocation.gpu_type, like.allocation.nodes)
            self._seen.change(job_class_of(like)).drop(setting)

    def estimate(self, query: Query) -> Estimate:
        """Return θ, the rate under each candidate, and the remaining time."""
        key, steps = job_class_of(query), max(0, query.steps_total - query.step)
        own = self._seen.get(key)
        if own is None:
            return self._estimate(key, query, steps)
        asked = query.phase, query.gpu_type, query.cores, steps, query.candidates
        if own.answer and own.answer[0] == asked:
            return own.answer[1]
        estimate = self._estimate(key, query, steps)
        wanted = {(query.gpu_type, None), *[(one.gpu_type, one.nodes) for one in query.candidates]}
        if not query.model or all(own.setting(query.phase, *one) for one in wanted):
            own.answer = asked, estimate  # otherwise the answer depends on other users' jobs
        return estimate

    def _estimate(self, key: Key, query: Query, steps: int) -> Estimate:
        known = self._known(key, query, query.gpu_type, None)
        judged = self._judged(key, query, steps)
        if known is None:
            return Estimate(source="no rate of a similar job was observed on known cores", candidates=judged)
        curve = known.curve
        told = self._theta(known)
        rest = known.judge(curve.cores_useful if query.cores is None else query.cores, steps)
        estimate = replace(told, candidates=judged)
        if rest.remaining_seconds is None or rest.confidence < self.options.confidence_min:
            return estimate
        seconds, spread = rest.remaining_seconds, curve.spread(query.cores or curve.cores_useful)
        return replace(
            estimate,
            predictable=True,
            confidence=rest.confidence,
            remaining_seconds=seconds,
            remaining_p10_seconds=seconds / (1 + P10 * spread),
            remaining_p90_seconds=seconds / max(1 - P10 * spread, 0.1),
            source=f"{plural(steps, 'step')} left at {rest.rate_per_second:.3g} per second; {told.source}",
        )

    def _judged(self, key: Key, query: Query, steps: int) -> tuple[CandidateEstimate, ...]:
        """Judge each candidate by the curve of its GPU type and nodes, which is looked up once."""
        known: dict[tuple[str, int], CurveMatch | None] = {}
        judged = []
        for candidate in query.candidates:
            setting = candidate.gpu_type, candidate.nodes
            if setting not in known:
                known[setting] = self._known(key, query, *setting)
            curve = known[setting]
            judged.append(curve.judge(candidate.cores, steps) if curve else NO_ESTIMATE)
        return tuple(judged)

    def _theta(self, known: CurveMatch) -> Estimate:
        """Return the useful cores if they are known well enough."""
        curve = known.curve
        counts, (low, high) = len(curve.points), curve.interval
        confidence = curve.theta_confidence * known.trust
        whose = "" if known.trust == 1 else " of other users' jobs"
        source = f"θ is {_span(low, high)} cores, from {plural(counts, 'core count')}{whose}"
        if not curve.levels_off:
            source = f"the rate was not observed to level off by {plural(curve.points[-1].cores, 'core')}{whose}"
        if counts < (2 if curve.levels_off else 3) or confidence < self.options.confidence_min:
            return Estimate(source=source)
        return Estimate(cores_useful=curve.cores_useful, cores_useful_confidence=confidence, source=source)

    def _known(self, key: Key, query: Query, gpu_type: str, nodes: int | None) -> CurveMatch | None:
        """Return the curve used for a job: its own class's, else that of other users."""
        own = self._seen.get(key)
        if own and (setting := own.setting(query.phase, gpu_type, nodes)):
            return CurveMatch(self._curve(own, setting))
        if not query.model:
            return None  # a name says nothing about other users' jobs
        best: tuple[bool, int, Key, Seen, Setting] | None = None
        for other, seen in self._seen.of_model(query.model):
            same = other[2:] == key[2:]
            if other == key or not (same or _gpus_each(other) == _gpus_each(key)):
                continue
            if setting := seen.setting(query.phase, gpu_type, nodes):
                found = (same, len(seen.windows[setting]), other, seen, setting)
                best = found if best is None or found[:3] > best[:3] else best
        if best is None:
            return None
        return CurveMatch(self._curve(best[3], best[4]), self.options.others_trust, rates=best[0])

    def _curve(self, seen: Seen, setting: Setting) -> Curve:
        if setting not in seen.curves:
            seen.curves[setting] = fit(seen.windows[setting].points(), beliefs=self._beliefs)
        return seen.curves[setting]

    def dump(self) -> Mapping[str, bytes]:
        """Return the records changed since the last dump; an empty record was dropped."""
        return self._seen.dump()

    def restore(self, records: Mapping[str, bytes]) -> Sequence[str]:
        """Restore dumped records; returns the names of the records that could not be read."""
        return self._seen.restore(records)


def _gpus_each(key: Key) -> float:
    return int(key[2]) / int(key[3])


def _span(low: int, high: int) -> str:
    return str(low) if low == high else f"{low} to {high}"


def _write(key: Key, seen: Seen) -> bytes:
    rates = [
        [*setting, cores, list(rates)]
        for setting, windows in seen.windows.items()
        for cores, rates in windows.rates.items()
    ]
    return json.dumps({"key": key, "rates": rates}, separators=(",", ":")).encode()


def _read(content: bytes) -> tuple[Key, Seen]:
    """Decode a job class.

    Raises:
        ValueError: the record is invalid; also TypeError and KeyError.
    """
    record = json.loads(content)
    seen = Seen()
    for phase, gpu_type, nodes, cores, rates in record["rates"]:
        for rate in rates:
            setting = kept.text(phase), kept.text(gpu_type), kept.nodes(nodes)
            seen.add(setting, kept.cores(cores, 1), kept.rate(rate))
    return kept.kind(record["key"]), seen
