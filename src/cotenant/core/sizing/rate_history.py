"""The history of rates by cores: of each run while it lasts, and of each job class beyond it."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cotenant.core.model.estimate import Estimate
from cotenant.core.model.job import JobSpec
from cotenant.core.model.model_name import model_of
from cotenant.core.prediction import record_validation as kept
from cotenant.core.prediction.core_curve import Point, Windows
from cotenant.core.prediction.job_class_memory import JobClassMemory, Key
from cotenant.core.sizing.core_search import DEFAULT_SEARCH, SearchOptions, next_trial
from cotenant.core.sizing.resize import DRIFT, leading_role

KINDS_MAX = 10_000
RATES_MAX, COUNTS_MAX = 8, 32  # latest rates per core count, and core counts per class
DRIFT_SECONDS = 300.0  # a rate must be lower for this long to count as a new one (CODA [R])
REMEMBERED, MEDIAN = 0.9, 0.5  # confidence in N* of the same job class, and of others in its category [R]


@dataclass(slots=True)
class RateHistory:
    """The rates of one run. When they stay low for long, earlier measurements are forgotten, and so is its class.

    >>> track = RateHistory()
    >>> for rate in (10.0, 8.0, 8.0):
    ...     _ = track.add(3, rate, seconds=150.0)
    >>> track.points(), track.drifted
    ((Point(cores=3, rate=8.0, windows=1, spread=0.0),), True)
    """

    windows: Windows = field(default_factory=lambda: Windows(rates_max=RATES_MAX, counts_max=COUNTS_MAX))
    drifted: bool = False
    low_seconds: float = 0.0

    def add(self, cores: int, rate: float, seconds: float, *, contended: bool = False) -> bool:
        """Add a window's rate; returns whether it counts. A contended window does not: it shows the contention."""
        if contended or rate <= 0:
            return False
        before = self.windows.rates.get(cores)
        if before and rate < (1 - DRIFT) * statistics.fmean(before):
            self.low_seconds += seconds
            if self.low_seconds < DRIFT_SECONDS:
                return False
            self.windows = Windows(rates_max=RATES_MAX, counts_max=COUNTS_MAX)
            self.drifted = True
        self.low_seconds = 0.0
        self.windows.add(cores, rate)
        return True

    def points(self) -> tuple[Point, ...]:
        """Return the means of its rates, by cores."""
        return tuple(self.windows.points())


def job_class_of(spec: JobSpec, gpu_type: str = "") -> Key:
    """Return the class of a job: rates by cores are similar for the same user, model (else name), GPUs and GPU type."""
    lead = spec.roles[leading_role(spec)]
    gpus = str(lead.request.gpu_milli), str(lead.replicas)
    return spec.tenant, spec.model or spec.name, *gpus, gpu_type


class RateHistories:
    """The rates by cores of each job class; the class unused for longest is forgotten. Dumped like a predictor.

    >>> tracks, ann = RateHistories(), ("ann", "bert", "1000", "1", "")
    >>> for cores in (3, 2, 1):
    ...     tracks.add(ann, cores, 10.0)
    >>> tracks.enough(ann), tracks.median("language")
    (1, 1)
    """

    def __init__(self, kinds_max: int = KINDS_MAX, how: SearchOptions = DEFAULT_SEARCH) -> None:
        self._how = how
        self._kinds: JobClassMemory[Windows] = JobClassMemory(kinds_max, _windows, _write, _read)
        self._points: dict[Key, tuple[Point, ...]] = {}  # a cache: read far more often than changed
        self._enough: dict[Key, int] = {}  # by class, if known
        self.version = 0  # counts changes of `_enough`

    def add(self, kind: Key, cores: int, rate: float) -> None:
        """Add a window's rate."""
        self._kinds.change(kind).add(cores, rate)
        self._judge(kind)

    def _judge(self, kind: Key) -> None:
        """Record the N* of a class whose rates were measured to level off."""
        self._points.pop(kind, None)
        points = self.points(kind)
        trial = next_trial(points, 1, points[-1].cores, self._how)
        enough = trial.cores if trial.found and trial.cores < points[-1].cores else None
        if enough != self._enough.get(kind):
            self.version += 1
            self._enough.pop(kind, None)
            if enough is not None:
                self._enough[kind] = enough
                if len(self._enough) > KINDS_MAX:
                    del self._enough[next(iter(self._enough))]

    def points(self, kind: Key) -> tuple[Point, ...]:
        """Return the measurements of a class."""
        windows = self._kinds.get(kind)
        if windows is None:
            return ()
        if kind not in self._points:
            if len(self._points) >= KINDS_MAX:
                self._points.clear()
            self._points[kind] = tuple(windows.points())
        return self._points[kind]

    def enough(self, kind: Key) -> int | None:
        """Return N* of a class, per replica of the leading role; None if unknown."""
        return self._enough.get(kind)

    def median(self, category: str, gpu_milli: int = 1000) -> int | None:
        """Return the median of N* in a category with the same GPUs per replica, rounded up; None if unknown."""
        if not category:
            return None
        of_category = [
            enough for kind, enough in self._enough.items() if kind[2] == str(gpu_milli) and _category(kind) == category
        ]
        return -int(-statistics.median(of_category) // 1) if of_category else None

    def informed(self, spec: JobSpec, estimate: Estimate, gpu_types: Iterable[str] = ("",)) -> Estimate:
        """Return an estimate without θ with N* added: that of its class, else the median of its category.

        `gpu_types` are those that the job may get: if its class was measured on several, the largest N* counts.
        """
        if estimate.cores_useful is not None:
            return estimate
        kind = job_class_of(spec)
        own = [enough for one in gpu_types if (enough := self.enough((*kind[:-1], one))) is not None]
        if own:
            return replace(estimate, cores_useful=max(own), cores_useful_confidence=REMEMBERED)
        if (others := self.median(_category(kind), int(kind[2]))) is not None:
            return replace(estimate, cores_useful=others, cores_useful_confidence=MEDIAN)
        return estimate

    def dump(self) -> Mapping[str, bytes]:
        """Return the records that changed since the last dump; an empty record was forgotten."""
        return self._kinds.dump()

    def restore(self, records: Mapping[str, bytes]) -> Sequence[str]:
        """Restore dumped records; returns those that could not be read."""
        unread = self._kinds.restore(records)
        for name, content in records.items():
            if content and name not in unread:
                self._judge(_read(content)[0])
        return unread


def _category(kind: Key) -> str:
    model = model_of(kind[1])
    return model.kind if model else ""


def _windows() -> Windows:
    return Windows(rates_max=RATES_MAX, counts_max=COUNTS_MAX)


def _write(kind: Key, windows: Windows) -> bytes:
    rates = [[cores, [float(f"{rate:.6g}") for rate in seen]] for cores, seen in windows.rates.items()]
    return json.dumps({"kind": list(kind), "rates": rates}, separators=(",", ":")).encode()


def _read(content: bytes) -> tuple[Key, Windows]:
    read = json.loads(content)
    rates = {kept.cores(cores, 1): [kept.rate(rate) for rate in seen] for cores, seen in read["rates"]}
    if not any(rates.values()):
        raise ValueError("a job class without rates")
    *kind, gpu_type = read["kind"]
    return (*kept.kind(kind), kept.text(gpu_type)), Windows(rates, rates_max=RATES_MAX, counts_max=COUNTS_MAX)
