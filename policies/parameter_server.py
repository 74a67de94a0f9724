"""Rates of jobs with parameter servers: AITurbo's step time, fitted to five or more allocations."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from cotenant.core.model.estimate import Candidate, CandidateEstimate, Estimate, Observation, Query, validated_rate
from cotenant.core.model.job import WHOLE_GPU_MILLI
from cotenant.core.model.refusal import plural
from cotenant.core.model.validation import Violation
from cotenant.core.prediction import record_validation as kept
from cotenant.core.prediction.core_curve import Windows, confidence_of
from cotenant.core.prediction.job_class_memory import JobClassMemory, Key
from cotenant.core.prediction.step_time import Terms, fit_terms

POINTS_MIN = 5  # minimum number of allocations for a prediction [D]
TEAMS_MAX = 64  # remembered of one job class and GPU type; the oldest is dropped
GPU_TYPES_MAX = 8
RATES_MAX = 8  # latest rates of one team
CORES_SPREAD = 0.5  # relative error for twice the cores of a role whose cores never varied [R]
P10 = 1.2815515655446004  # standard deviations from the median to the 10th percentile
NO_ESTIMATE = CandidateEstimate()

Bend = tuple[float, float]  # of an efficiency 1 − loss·e^(−rate·cores): loss and rate
EVEN: Bend = (0.0, 1.0)
BENDS: tuple[Bend, ...] = (EVEN, *product((0.5, 0.8, 0.95), (0.1, 0.25, 0.5, 1.0)))


@dataclass(frozen=True, slots=True, order=True)
class Team:
    """The workers and parameter servers of a job, their cores each, and its GPUs; 0 cores means unknown."""

    workers: int
    servers: int
    worker_cores: int
    server_cores: int
    gpus: float

    def features(self, worker: Bend, server: Bend) -> tuple[float, ...]:
        """Return the terms of a step's time: θ₀ and θ₁ computing, θ₂ and θ₃ serving, θ₄ to θ₆ synchronization.

        The batch is shared by all workers, so each has a share of 1/w; its size is a part of θ₀.
        """
        slow, served = slowness(self.worker_cores, worker), self.workers / self.servers
        serving = slowness(self.server_cores, server) * served
        return slow / self.workers, slow, served, serving, float(self.workers), float(self.servers), self.gpus


def slowness(cores: int, bend: Bend) -> float:
    """Return κ, the slowdown of a role with this many cores compared with enough cores.

    >>> slowness(4, EVEN), round(slowness(1, (0.8, 0.5)), 2)
    (1.0, 1.94)
    """
    loss, rate = bend
    return 1 / (1 - loss * math.exp(-rate * cores)) if cores else 1.0


@dataclass(frozen=True, slots=True)
class Model:
    """The step times of one job class on one GPU type."""

    terms: Terms
    worker: Bend
    server: Bend
    worker_cores: tuple[int, ...]  # measured core counts
    server_cores: tuple[int, ...]
    points: int

    def judge(self, team: Team) -> tuple[float, float]:
        """Return the rate of a team, in steps per second, and its relative standard deviation."""
        row = team.features(self.worker, self.server)
        seconds = self.terms.seconds(row)
        if seconds <= 0:
            return 0.0, math.inf
        asked = ((team.worker_cores, self.worker_cores), (team.server_cores, self.server_cores))
        spread = math.hypot(self.terms.spread(row), *(_beyond(cores, measured) for cores, measured in asked))
        return float(f"{1 / seconds:.9g}"), spread


@dataclass(slots=True)
class Seen:
    """The windows of one job class by GPU type and team, and the models fitted to them."""

    windows: dict[str, dict[Team, Windows]] = field(default_factory=dict)
    models: dict[str, Model] = field(default_factory=dict)

    def add(self, gpu_type: str, team: Team, rate: float) -> None:
        """Record the rate of a window."""
        if gpu_type not in self.windows and len(self.windows) == GPU_TYPES_MAX:
            del self.windows[next(iter(self.windows))]
        teams = self.windows.setdefault(gpu_type, {})
        if team not in teams and len(teams) == TEAMS_MAX:
            del teams[next(iter(teams))]
        teams.setdefault(team, Windows(rates_max=RATES_MAX, counts_max=1)).add(1, rate)
        self.models.clear()

    def gpu_type(self, wanted: str) -> str:
        """Return the wanted GPU type; without one, the type with the most teams."""
        if wanted or not self.windows:
            return wanted
        return max(sorted(self.windows), key=lambda one: len(self.windows[one]))


class ParameterServer:
    """Predict a step time of κ_w(c)·(θ₀·m + θ₁) + (θ₂ + θ₃·κ_ps(c))·w/p + θ₄·w + θ₅·p + θ₆·g seconds.

    The form is AITurbo's (Zhao et al., HPDC 2021) [D]: w workers with a share m of the batch each, p parameter servers,
    g GPUs, and for each role κ(c) = 1 / (1 − a·e^(−b·c)) of its c cores. All θ are fitted by non-negative least squares
    relative to the step time; a and b by grid search, for the roles whose cores varied [R]. With fewer than five
    different teams a job is unpredictable [D]. The batch of a job class is assumed to be constant.

    >>> from cotenant.core.model.estimate import Candidate, Observation, Query
    >>> predictor = ParameterServer()
    >>> for workers, servers in ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (8, 4)):
    ...     seconds = 4.0 / workers + 0.5 + 0.2 * workers / servers
    ...     seen = Candidate(4, 1000, workers=workers, servers=servers, server_cores=2)
    ...     predictor.observe(
    ...         Observation("ann", "dnn", "", 1000 * workers, workers + servers, seen, rate_per_second=1 / seconds)
    ...     )
    >>> query = Query("ann", "dnn", "", 4000, 8, candidates=(Candidate(4, 1000, workers=4, servers=4, server_cores=2),))
    >>> round(1 / predictor.estimate(query).candidates[0].rate_per_second, 1)
    1.7
    """

    name = "parameter-server"
    api_version = 1

    @dataclass(frozen=True, slots=True)
    class Options:
        """How much is remembered, and how much confidence is needed.

        kinds_max: job classes remembered; the least recently used class is dropped first.
        confidence_min: minimum confidence from which a job is predictable.
        """

        kinds_max: int = 10_000
        confidence_min: float = 0.5

        def check(self) -> Iterator[Violation]:
            """Yield a violation for each invalid option."""
            if self.kinds_max < 1:
                yield Violation("kinds_max", f"must be 1 or more, not {self.kinds_max}")
            if not 0 <= self.confidence_min <= 1:
                yield Violation("confidence_min", f"must be from 0 to 1, not {self.confidence_min:g}")

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()
        self._seen: JobClassMemory[Seen] = JobClassMemory(self.options.kinds_max, Seen, _write, _read)

    def observe(self, observation: Observation) -> None:
        """Record a training window's rate of a job with parameter servers.

        Raises:
            ValueError: an invalid figure; nothing of the observation is kept.
        """
        rate, seen = validated_rate(observation), observation.allocation
        team = team_of(observation.replicas, observation.gpu_milli, seen)
        if rate and team and not observation.phase:
            self._seen.change(_key(observation)).add(seen.gpu_type, team, rate)

    def estimate(self, query: Query) -> Estimate:
        """Return the rate of each candidate team and, if the steps are known, the remaining time."""
        steps = max(0, query.steps_total - query.step)
        seen = None if query.phase else self._seen.get(_key(query))
        judged = tuple([self._judge(seen, query, candidate, steps) for candidate in query.candidates])
        if seen is None:
            return Estimate(source="no rate of a similar job with parameter servers was observed", candidates=judged)
        gpu_type = seen.gpu_type(query.gpu_type)
        points = len(seen.windows.get(gpu_type, ()))
        if points < POINTS_MIN:
            told = f"{plural(points, 'team')} of workers and parameter servers observed; {POINTS_MIN} are needed"
            return Estimate(source=told, candidates=judged)
        source = f"a step time fitted to {plural(points, 'team')} of workers and parameter servers"
        own = query.candidates[0] if query.candidates else None
        team = team_of(query.replicas, query.gpu_milli, own) if own else None
        rate, spread = self._model(seen, gpu_type).judge(team) if team else (0.0, math.inf)
        confidence = confidence_of(spread)
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

    def _judge(self, seen: Seen | None, query: Query, candidate: Candidate, steps: int) -> CandidateEstimate:
        team = team_of(query.replicas, query.gpu_milli, candidate)
        gpu_type = seen.gpu_type(candidate.gpu_type) if seen else ""
        if seen is None or team is None or len(seen.windows.get(gpu_type, ())) < POINTS_MIN:
            return NO_ESTIMATE
        rate, spread = self._model(seen, gpu_type).judge(team)
        return CandidateEstimate(rate, steps / rate if steps else None, confidence_of(spread)) if rate else NO_ESTIMATE

    def _model(self, seen: Seen, gpu_type: str) -> Model:
        if gpu_type not in seen.models:
            seen.models[gpu_type] = fitted(seen.windows[gpu_type])
        return seen.models[gpu_type]

    def dump(self) -> Mapping[str, bytes]:
        """Return the records changed since the last dump; an empty record was dropped."""
        return self._seen.dump()

    def restore(self, records: Mapping[str, bytes]) -> Sequence[str]:
        """Restore dumped records; returns the names of the records that could not be read."""
        return self._seen.restore(records)


def team_of(replicas: int, gpu_milli: int, seen: Candidate) -> Team | None:
    """Return the team of an allocation; None for a job without parameter servers.

    Raises:
        ValueError: the figures are invalid.
    """
    if min(seen.workers, seen.servers, seen.cores, seen.server_cores, gpu_milli, seen.gpu_milli) < 0 or replicas < 1:
        raise ValueError(f"invalid job: {plural(replicas, 'replica')}, {gpu_milli} mGPU and {seen}")
    workers = seen.workers or replicas - seen.servers
    if not seen.servers or workers < 1:
        return None
    gpus = (seen.gpu_milli * workers or gpu_milli) / WHOLE_GPU_MILLI
    return Team(workers, seen.servers, seen.cores, seen.server_cores, gpus)


def fitted(teams: Mapping[Team, Windows]) -> Model:
    """Return the best fit over all combinations of efficiencies; the first of equal fits."""
    ordered = sorted(teams)
    points = [teams[team].points()[0] for team in ordered]
    seconds = [1 / point.rate for point in points]
    spreads = [point.spread / math.sqrt(point.windows) for point in points]
    worker_cores = tuple(sorted({team.worker_cores for team in ordered}))
    server_cores = tuple(sorted({team.server_cores for team in ordered}))
    best: tuple[float, Terms, Bend, Bend] | None = None
    for worker, server in product(_bends(worker_cores), _bends(server_cores)):
        terms = fit_terms([team.features(worker, server) for team in ordered], seconds, spreads)
        misfit = round(terms.misfit, 6)
        if best is None or misfit < best[0]:
            best = misfit, terms, worker, server
    assert best is not None
    return Model(*best[1:], worker_cores, server_cores, len(ordered))


def _bends(cores: Iterable[int]) -> tuple[Bend, ...]:
    return BENDS if len(set(cores)) > 1 else (EVEN,)


def _beyond(cores: int, measured: Sequence[int]) -> float:
    """Return the relative error of a core count outside the measured range."""
    if not cores or measured[0] <= cores <= measured[-1] or not measured[0]:
        return 0.0
    nearest = measured[0] if cores < measured[0] else measured[-1]
    return CORES_SPREAD * abs(math.log2(cores / nearest))


def _key(about: Observation | Query) -> Key:
    return about.user, about.model or about.name


def _write(key: Key, seen: Seen) -> bytes:
    rates = [
        [gpu_type, one.workers, one.servers, one.worker_cores, one.server_cores, one.gpus, list(windows.rates[1])]
        for gpu_type, teams in seen.windows.items()
        for one, windows in teams.items()
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
    for gpu_type, workers, servers, worker_cores, server_cores, gpus, rates in record["rates"]:
        counts = kept.replicas(workers), kept.replicas(servers)
        team = Team(*counts, kept.cores(worker_cores), kept.cores(server_cores), kept.between(gpus, 0, kept.GPUS_MAX))
        for rate in rates:
            seen.add(kept.text(gpu_type), team, kept.rate(rate))
    return (user, model), seen
