"""How fast a job runs on how many cores: Xiao's curve, from the windows that were seen."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cotenant.core.model.estimate import Candidate, CandidateEstimate, Estimate, Observation, Query, rate_of
from cotenant.core.model.refusal import plural
from cotenant.core.model.validation import Violation
from cotenant.core.prediction import record_validation as kept
from cotenant.core.prediction.core_curve import DEFAULTS, Beliefs, Curve, Windows, fit
from cotenant.core.prediction.job_class_memory import Key, Remembered, kind_of

SETTINGS_MAX = 16  # phases, GPU types and spreads of one kind; the oldest makes room
RATES_MAX, COUNTS_MAX = 8, 32  # latest rates of one core count, and core counts of one setting
FOUND_MAX = 64  # questions about one kind whose setting is remembered
P10 = 1.2815515655446004  # standard deviations from the median to the 10th percentile
UNJUDGED = CandidateEstimate()

Setting = tuple[str, str, int]  # phase, GPU type, nodes
Asked = tuple[str, str, int | None, int, tuple[Candidate, ...]]


@dataclass(slots=True)
class Seen:
    """The windows of one kind of job by setting, and the curves through them, which are asked for far more often."""

    windows: dict[Setting, Windows] = field(default_factory=dict)
    curves: dict[Setting, Curve] = field(default_factory=dict)
    found: dict[tuple[str, str, int | None], Setting | None] = field(default_factory=dict)
    answer: tuple[Asked, Estimate] | None = None  # the last one; jobs of a kind are mostly asked about alike

    def setting(self, phase: str, gpu_type: str, nodes: int | None) -> Setting | None:
        """Find the setting that is asked for; where type or nodes are left open, the one with the most windows."""
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
        """Take in the rate of a window."""
        if setting not in self.windows and len(self.windows) == SETTINGS_MAX:
            oldest = next(iter(self.windows))
            del self.windows[oldest]
            self.curves.pop(oldest, None)
        self.windows.setdefault(setting, Windows(rates_max=RATES_MAX, counts_max=COUNTS_MAX)).add(cores, rate)
        self.curves.pop(setting, None)
        self.found.clear()
        self.answer = None

    def drop(self, setting: Setting) -> None:
        """Let the windows of a setting go."""
        self.windows.pop(setting, None)
        self.curves.pop(setting, None)
        self.found.clear()
        self.answer = None


@dataclass(frozen=True, slots=True)
class Known:
    """A curve that speaks for a job, how far it is trusted, and whether its rates are the job's or only its θ."""

    curve: Curve
    trust: float = 1.0
    rates: bool = True

    def judge(self, cores: int, steps: int) -> CandidateEstimate:
        """Judge an allocation of so many cores; 0 cores are not decided yet."""
        if not self.rates or cores < 1:
            return UNJUDGED
        rate, confidence = self.curve.rate(cores), self.curve.confidence(cores) * self.trust
        if rate <= 0:
            return UNJUDGED
        if cores > self.curve.points[-1].cores and not self.curve.levels_off:
            confidence /= 2  # it may go on rising
        return CandidateEstimate(rate, steps / rate if steps else None, confidence)


class XiaoPiecewise:
    """Expect S(C) = P₀·log C + P₁·C steps per second on C cores below θ, and P₂ from θ on.

    The form is from Xiao et al., "Scheduling CPU for GPU-based Deep Learning Jobs" (SoCC 2018) [P]; θ is the sweet
    point: more cores do not help. How the curve is found from a few noisy windows, and how sure it is, stands in
    `cotenant.core.prediction.core_curve` [R]. The confidence in a rate is the chance that it is within 15 % of the
    truth: with a larger deviation the job would be measured again [R].

    Each phase (training, validation) has a curve of its own [P], and so has each GPU type and number of nodes. Jobs
    are alike that share user, model (else name), GPUs and replicas; where such a one was never seen, the same model of
    other users on the same GPU type serves with less confidence: with rates where GPUs and replicas are the same, else
    with θ alone where the GPUs per replica are. Memory is taken to be enough: AlexNet's gain beyond 9 cores needs
    125 GB per GPU in the profiles of Synergy (OSDI 2022) [D], and what is seen under too little bends the curve early.

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
        """How much is remembered, and what is held plausible.

        kinds_max: kinds of jobs remembered; the one unused for longest is forgotten first.
        confidence_min: from this confidence on a job is predictable, and θ told.
        others_trust: by this factor confidence is lower where only other users' jobs are known.
        noise: the standard deviation of one window's rate, relative to it, where the windows do not show more.
        form: by how much real curves depart from the form, relative to the rate.
        """

        kinds_max: int = 10_000
        confidence_min: float = 0.5
        others_trust: float = 0.6
        noise: float = DEFAULTS.noise
        form: float = DEFAULTS.form

        def check(self) -> Iterator[Violation]:
            """Name every option that makes no sense."""
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
        self._seen: Remembered[Seen] = Remembered(self.options.kinds_max, Seen, _write, _read)
        self._due: dict[tuple[Key, Setting], None] = {}  # curves through which there are new windows

    def observe(self, observation: Observation) -> None:
        """Take in a window's rate; a window without one, or on cores that are not told, says nothing.

        Raises:
            ValueError: a figure that cannot be; nothing of the observation is kept.
        """
        rate, seen = rate_of(observation), observation.allocation
        if seen.cores < 0 or seen.nodes < 1:
            raise ValueError(f"no job runs on {plural(seen.cores, 'core')} and {plural(seen.nodes, 'node')}")
        if rate and seen.cores:
            setting = (observation.phase, seen.gpu_type, seen.nodes)
            key = kind_of(observation)
            self._seen.change(key).add(setting, seen.cores, rate)
            self._due[key, setting] = None
            if len(self._due) > self.options.kinds_max:
                del self._due[next(iter(self._due))]

    def prepare(self, fits_max: int) -> int:
        """Fit some of the curves through which there are new windows, before somebody asks."""
        for key, setting in list(self._due)[:fits_max]:
            del self._due[key, setting]
            seen = self._seen.get(key)
            if seen and setting in seen.windows:
                curve = self._curve(seen, setting)
                for point in curve.points:
                    curve.confidence(point.cores)
                self._theta(Known(curve))
        return len(self._due)

    def forget_rates(self, like: Observation) -> None:
        """Let the windows of a kind go in one setting."""
        if self._seen.get(kind_of(like)):
            setting = (like.phase, like.allocation.gpu_type, like.allocation.nodes)
            self._seen.change(kind_of(like)).drop(setting)

    def estimate(self, query: Query) -> Estimate:
        """Tell θ, the rate under each candidate, and how long the steps that are left take."""
        key, steps = kind_of(query), max(0, query.steps_total - query.step)
        own = self._seen.get(key)
        if own is None:
            return self._estimate(key, query, steps)
        asked = query.phase, query.gpu_type, query.cores, steps, query.candidates
        if own.answer and own.answer[0] == asked:
            return own.answer[1]
        estimate = self._estimate(key, query, steps)
        wanted = {(query.gpu_type, None), *[(one.gpu_type, one.nodes) for one in query.candidates]}
        if not query.model or all(own.setting(query.phase, *one) for one in wanted):
            own.answer = asked, estimate  # else it hangs on what others' jobs do, of which nothing is known here
        return estimate

    def _estimate(self, key: Key, query: Query, steps: int) -> Estimate:
        known = self._known(key, query, query.gpu_type, None)
        judged = self._judged(key, query, steps)
        if known is None:
            return Estimate(source="no rate of a job like this one was seen on known cores", candidates=judged)
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
        """Judge each candidate by the curve of its GPU type and nodes, which is looked for once."""
        known: dict[tuple[str, int], Known | None] = {}
        judged = []
        for candidate in query.candidates:
            setting = candidate.gpu_type, candidate.nodes
            if setting not in known:
                known[setting] = self._known(key, query, *setting)
            curve = known[setting]
            judged.append(curve.judge(candidate.cores, steps) if curve else UNJUDGED)
        return tuple(judged)

    def _theta(self, known: Known) -> Estimate:
        """Tell the useful cores where they are known well enough."""
        curve = known.curve
        counts, (low, high) = len(curve.points), curve.interval
        confidence = curve.theta_confidence * known.trust
        whose = "" if known.trust == 1 else " of other users' jobs"
        source = f"θ is {_span(low, high)} cores, from {plural(counts, 'core count')}{whose}"
        if not curve.levels_off:
            source = f"the rate was not seen to level off by {plural(curve.points[-1].cores, 'core')}{whose}"
        if counts < (2 if curve.levels_off else 3) or confidence < self.options.confidence_min:
            return Estimate(source=source)
        return Estimate(cores_useful=curve.cores_useful, cores_useful_confidence=confidence, source=source)

    def _known(self, key: Key, query: Query, gpu_type: str, nodes: int | None) -> Known | None:
        """Find the curve that speaks for a job: its own kind's, else that of other users."""
        own = self._seen.get(key)
        if own and (setting := own.setting(query.phase, gpu_type, nodes)):
            return Known(self._curve(own, setting))
        if not query.model:
            return None  # a name tells nothing of other users' jobs
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
        return Known(self._curve(best[3], best[4]), self.options.others_trust, rates=best[0])

    def _curve(self, seen: Seen, setting: Setting) -> Curve:
        if setting not in seen.curves:
            seen.curves[setting] = fit(seen.windows[setting].points(), beliefs=self._beliefs)
        return seen.curves[setting]

    def dump(self) -> Mapping[str, bytes]:
        """Write down what changed since the last dump; a record without content was forgotten."""
        return self._seen.dump()

    def restore(self, records: Mapping[str, bytes]) -> Sequence[str]:
        """Take back what was dumped; names the records that could not be read."""
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
    """Read a kind back.

    Raises:
        ValueError: it is none, or some figure in it cannot be; also TypeError and KeyError.
    """
    record = json.loads(content)
    seen = Seen()
    for phase, gpu_type, nodes, cores, rates in record["rates"]:
        for rate in rates:
            setting = kept.text(phase), kept.text(gpu_type), kept.nodes(nodes)
            seen.add(setting, kept.cores(cores, 1), kept.rate(rate))
    return kept.kind(record["key"]), seen
