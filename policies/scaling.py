"""Rates by number of GPUs and nodes: GENIE's step time, fitted to a few placements."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from cotenant.core.model.estimate import Candidate, CandidateEstimate, Estimate, Observation, Query, validated_rate
from cotenant.core.model.job import WHOLE_GPU_MILLI
from cotenant.core.model.refusal import plural
from cotenant.core.model.validation import Violation
from cotenant.core.prediction import record_validation as kept
from cotenant.core.prediction.core_curve import Point, Windows, confidence_of
from cotenant.core.prediction.job_class_memory import JobClassMemory, Key
from cotenant.core.prediction.step_time import Terms, fit_terms

PLACEMENTS_MAX = 32  # remembered of one job class and GPU type; the oldest is dropped
GPU_TYPES_MAX = 8
RATES_MAX, COUNTS_MAX = 8, 8  # latest rates of one core count, and core counts of one placement
JUDGED_MAX = 256  # placements whose rates are cached of one model
PER_DOUBLING = 0.04  # relative error for each doubling of the GPUs beyond the measured range [R]
SLOWDOWN_SPREAD = 0.25  # variation of the co-location factor between jobs, relative to it [R]
MARGIN = 4.0  # how much better the form with a fixed batch must fit: two standard deviations [R]
P10 = 1.2815515655446004  # standard deviations from the median to the 10th percentile
NO_ESTIMATE = CandidateEstimate()

Placement = tuple[int, int, bool]  # GPUs, nodes, whether the GPUs are shared with other jobs


@dataclass(frozen=True, slots=True)
class Model:
    """The step times of one job class on one GPU type."""

    terms: Terms
    cross: str
    batch_is_fixed: bool
    gpus_max: int  # largest measured number
    placements: int
    slowdown: float  # σ, the factor of sharing a GPU
    slowdown_spread: float
    judged: dict[Placement, tuple[float, float]] = field(default_factory=dict)  # cache: each is requested many times

    def judge(self, placement: Placement) -> tuple[float, float]:
        """Return the rate in a placement, in steps per second, and its relative standard deviation."""
        if placement not in self.judged:
            if len(self.judged) == JUDGED_MAX:
                self.judged.clear()
            self.judged[placement] = self._judge(placement)
        return self.judged[placement]

    def _judge(self, placement: Placement) -> tuple[float, float]:
        gpus, nodes, shared = placement
        row = features(gpus, nodes, self.cross, batch_is_fixed=self.batch_is_fixed)
        seconds = self.terms.seconds(row)
        if seconds <= 0:
            return 0.0, math.inf
        farther = PER_DOUBLING * max(0.0, math.log2(gpus / self.gpus_max))
        spread = math.hypot(self.terms.spread(row), farther, self.slowdown_spread if shared else 0.0)
        return float(f"{1 / seconds / (self.slowdown if shared else 1.0):.9g}"), spread


@dataclass(slots=True)
class Seen:
    """The windows of one job class by GPU type and placement, and the models fitted to them."""

    windows: dict[str, dict[Placement, Windows]] = field(default_factory=dict)
    models: dict[str, Model | None] = field(default_factory=dict)

    def add(self, gpu_type: str, placement: Placement, cores: int, rate: float) -> None:
        """Record the rate of a window."""
        if gpu_type not in self.windows and len(self.windows) == GPU_TYPES_MAX:
            del self.windows[next(iter(self.windows))]
        placements = self.windows.setdefault(gpu_type, {})
        if placement not in placements and len(placements) == PLACEMENTS_MAX:
            del placements[next(iter(placements))]
        windows = placements.setdefault(placement, Windows(rates_max=RATES_MAX, counts_max=COUNTS_MAX))
        windows.add(max(1, cores), rate)
        self.models.clear()

    def gpu_type(self, wanted: str) -> str:
        """Return the wanted GPU type; without one, the type observed in most placements."""
        if wanted or not self.windows:
            return wanted
        return max(sorted(self.windows), key=lambda one: len(self.windows[one]))


class Scaling:
    """Predict a step time on n GPUs of t_c + t_i·log₂(GPUs per node) + t_x·2(k − 1)/k seconds on k nodes.

    GENIE (Chen et al., TPDS 2020) has tₙ = t_c + t_o·log₂ n from one GPU and two nodes [D]; the term within a node and
    the slowdown σ of jobs that share a GPU are ours [R]. Between nodes we use the traffic of a ring, 2(k − 1)/k
    (Patarasu and Yuan 2009) [R]: fitted to one GPU, two GPUs of one node and two nodes of six models (Pollux, OSDI
    2021), it is off by 9 % for the other placements up to 64 GPUs, log₂ k by 17 % [C]; `cross=log` selects GENIE's. If
    the step gets faster with more GPUs, they share one batch, and a part of the computation is divided by n [R].
    Placements that were never measured, such as the first step across nodes, have low confidence, and so have
    placements far beyond the measured range. σ is learned from windows on shares of a GPU; until then it is 1.5, the
    median of Gavel's pairs of jobs (OSDI 2020: 1.47 on V100, 1.70 on P100, 1.87 on K80) [C]. Each placement is
    represented by its core count with the best mean rate.

    >>> from cotenant.core.model.estimate import Candidate, Observation, Query
    >>> predictor = Scaling()
    >>> for gpus, nodes, seconds in ((1, 1, 1.0), (2, 1, 1.1), (2, 2, 1.3)):
    ...     seen = Candidate(4, gpu_milli=1000, nodes=nodes)
    ...     predictor.observe(Observation("ann", "bert", "", 1000 * gpus, gpus, seen, rate_per_second=1 / seconds))
    >>> query = Query("ann", "bert", "", 8000, 8, candidates=(Candidate(4, 1000, nodes=2), Candidate(4, 1000, nodes=8)))
    >>> [round(1 / candidate.rate_per_second, 2) for candidate in predictor.estimate(query).candidates]
    [1.5, 1.52]
    """

    name = "scaling"
    api_version = 1

    @dataclass(frozen=True, slots=True)
    class Options:
        """How much is remembered, and the form of the model.

        kinds_max: job classes remembered; the least recently used class is dropped first.
        confidence_min: minimum confidence from which a job is predictable.
        others_trust: factor on the confidence if only other users' jobs of the model are known.
        cross: growth of communication between nodes: as in a ring, or as GENIE's log₂.
        batch: whether the batch is per GPU or shared by all; `auto` takes what fits.
        slowdown: σ, the slowdown of jobs that share a GPU, until it was observed.
        """

        kinds_max: int = 10_000
        confidence_min: float = 0.5
        others_trust: float = 0.6
        cross: Literal["ring", "log"] = "ring"
        batch: Literal["auto", "per-gpu", "global"] = "auto"
        slowdown: float = 1.5

        def check(self) -> Iterator[Violation]:
            """Yield a violation for each invalid option."""
            if self.kinds_max < 1:
                yield Violation("kinds_max", f"must be 1 or more, not {self.kinds_max}")
            for name in ("confidence_min", "others_trust"):
                if not 0 <= getattr(self, name) <= 1:
                    yield Violation(name, f"must be from 0 to 1, not {getattr(self, name):g}")
            if not 1 <= self.slowdown < math.inf:
                yield Violation("slowdown", f"must be 1 or more, not {self.slowdown:g}")

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()
        self._seen: JobClassMemory[Seen] = JobClassMemory(self.options.kinds_max, Seen, _write, _read)

    def observe(self, observation: Observation) -> None:
        """Record a training window's rate.

        Raises:
            ValueError: an invalid figure; nothing of the observation is kept.
        """
        rate, seen = validated_rate(observation), observation.allocation
        if not rate or observation.phase:
            return
        placement = placement_of(observation.replicas, observation.gpu_milli, seen)
        self._seen.change(_key(observation)).add(seen.gpu_type, placement, seen.cores, rate)

    def estimate(self, query: Query) -> Estimate:
        """Return the rate in each candidate placement and, if the steps are known, the remaining time."""
        steps = 0 if query.phase else max(0, query.steps_total - query.step)
        judged = tuple([self._judge(query, candidate, steps) for candidate in query.candidates])
        seen, trust = self._find(query)
        model = self._model(seen, seen.gpu_type(query.gpu_type)) if seen and not query.phase else None
        if model is None:
            return Estimate(source="no rate of a similar job was observed in any placement", candidates=judged)
        source = f"a step time fitted to {plural(model.placements, 'placement')}" + (" of other users" * (trust < 1))
        first = query.candidates[0] if query.candidates else Candidate(0, query.gpu_milli // max(1, query.replicas))
        rate, spread = model.judge(placement_of(query.replicas, query.gpu_milli, first))
        confidence = confidence_of(spread) * trust
        if not (steps and rate) or confidence < self.options.confidence_min:
            return Estimate(source=source, candidates=judged)
        seconds = steps / rate
        return Estimate(
            True,
            confidence,
            seconds,
            seconds / (1 + P10 * spread),
            seconds / max(1 - P10 * spread, 0.1),
            source=f"{plural(steps, 'step')} left at {rate:.3g} per second, by {source}",
            candidates=judged,
        )

    def _judge(self, query: Query, candidate: Candidate, steps: int) -> CandidateEstimate:
        seen, trust = self._find(query)
        model = self._model(seen, seen.gpu_type(candidate.gpu_type)) if seen and not query.phase else None
        if model is None:
            return NO_ESTIMATE
        gpu_milli = candidate.gpu_milli * query.replicas or query.gpu_milli
        rate, spread = model.judge(placement_of(query.replicas, gpu_milli, candidate))
        return (
            CandidateEstimate(rate, steps / rate if steps else None, confidence_of(spread) * trust)
            if rate
            else NO_ESTIMATE
        )

    def _find(self, query: Query) -> tuple[Seen | None, float]:
        """Return the observations of the job's own class, else of another user's class with the most placements."""
        own = self._seen.get(_key(query))
        if own is not None or not query.model:
            return own, 1.0
        others = self._seen.of_model(query.model)
        placements = [(sum(len(one) for one in seen.windows.values()), key, seen) for key, seen in others]
        best = max(placements, key=lambda one: one[:2], default=None)
        return (best[2], self.options.others_trust) if best else (None, 0.0)

    def _model(self, seen: Seen, gpu_type: str) -> Model | None:
        if gpu_type not in seen.windows:
            return None
        if gpu_type not in seen.models:
            seen.models[gpu_type] = fitted(seen.windows[gpu_type], self.options)
        return seen.models[gpu_type]

    def dump(self) -> Mapping[str, bytes]:
        """Return the records changed since the last dump; an empty record was dropped."""
        return self._seen.dump()

    def restore(self, records: Mapping[str, bytes]) -> Sequence[str]:
        """Restore dumped records; returns the names of the records that could not be read."""
        return self._seen.restore(records)


def features(gpus: int, nodes: int, cross: str, *, batch_is_fixed: bool) -> tuple[float, ...]:
    """Return the terms of a step's time in a placement.

    >>> features(8, 2, "ring", batch_is_fixed=False)
    (1.0, 2.0, 1.0)
    """
    between = math.log2(nodes) if cross == "log" else 2 * (nodes - 1) / nodes
    communication = (math.log2(max(1.0, gpus / nodes)), between)
    return (1.0, 1 / gpus, *communication) if batch_is_fixed else (1.0, *communication)


def placement_of(replicas: int, gpu_milli: int, seen: Candidate) -> Placement:
    """Return the GPUs and nodes of a placement; each replica has at least one GPU, or shares one.

    Raises:
        ValueError: the figures are invalid.
    """
    if replicas < 1 or gpu_milli < 0 or seen.nodes < 1:
        raise ValueError(
            f"invalid job: {plural(replicas, 'replica')}, {gpu_milli} mGPU and {plural(seen.nodes, 'node')}"
        )
    shared = 0 < gpu_milli < WHOLE_GPU_MILLI * replicas
    gpus = max(replicas, gpu_milli // WHOLE_GPU_MILLI)
    return gpus, min(seen.nodes, gpus), shared


def fitted(placements: Mapping[Placement, Windows], options: Scaling.Options) -> Model | None:
    """Return the fitted form; with a batch per GPU unless a shared batch fits much better."""
    best_of = {placement: _best(windows) for placement, windows in placements.items()}
    whole = {placement: 1 / best.rate for placement, best in best_of.items() if not placement[2]}
    shared = {placement: 1 / best.rate for placement, best in best_of.items() if placement[2]}
    if not whole:
        whole = {placement: seconds / options.slowdown for placement, seconds in shared.items()}
    spreads = [best_of[placement].spread / math.sqrt(best_of[placement].windows) for placement in whole]
    forms = {"per-gpu": (False,), "global": (True,), "auto": (False, True)}[options.batch]
    best: tuple[Terms, bool] | None = None
    for batch_is_fixed in forms:
        rows = [features(gpus, nodes, options.cross, batch_is_fixed=batch_is_fixed) for gpus, nodes, _ in whole]
        terms = fit_terms(rows, list(whole.values()), spreads)
        if best is None or terms.misfit < best[0].misfit - MARGIN:
            best = terms, batch_is_fixed
    assert best is not None
    gpus_max = max(gpus for gpus, _, _ in whole)
    model = Model(*best[:1], options.cross, best[1], gpus_max, len(placements), options.slowdown, SLOWDOWN_SPREAD)
    ratios = sorted(seconds * model.judge((gpus, nodes, False))[0] for (gpus, nodes, _), seconds in shared.items())
    if not ratios or any(ratio <= 0 for ratio in ratios):
        return model
    slowdown = max(1.0, math.exp(math.fsum(math.log(ratio) for ratio in ratios) / len(ratios)))
    spread = SLOWDOWN_SPREAD / math.sqrt(len(ratios) + 1)
    return replace(model, slowdown=float(f"{slowdown:.9g}"), slowdown_spread=spread, judged={})


def _best(windows: Windows) -> Point:
    return max(windows.points(), key=lambda point: (point.rate, point.cores))


def _key(about: Observation | Query) -> Key:
    return about.user, about.model or about.name


def _write(key: Key, seen: Seen) -> bytes:
    rates = [
        [gpu_type, *placement, cores, list(rates)]
        for gpu_type, placements in seen.windows.items()
        for placement, windows in placements.items()
        for cores, rates in windows.rates.items()
    ]
    return json.dumps({"key": key, "rates": rates}, separators=(",", ":")).encode()


def _read(content: bytes) -> tuple[Key, Seen]:
    """Decode a job class.

    Raises:
        ValueError: the record is invalid; also TypeError and KeyError.
    """
    record = json.loads(content)
    user, model = (kept.text(part) for part in record["key"])
    seen = Seen()
    for gpu_type, gpus, nodes, shared, cores, rates in record["rates"]:
        placement = kept.whole(gpus, 1, kept.GPUS_MAX), kept.nodes(nodes), bool(shared)
        if placement[1] > placement[0]:
            raise ValueError("invalid placement")
        for rate in rates:
            seen.add(kept.text(gpu_type), placement, kept.cores(cores, 1), kept.rate(rate))
    return (user, model), seen
