"""What was measured of each kind of job: the latest rates by cores, from which the next measurements are planned."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from cotenant.core.curves import Point, Windows
from cotenant.services.predictor.words import Kind

KINDS_MAX = 10_000
GPU_TYPES_MAX = 16  # of one kind
RATES_MAX = 8  # of one kind and core count
STEPS = 50

ByGpuType = dict[str, Windows]


class Measured:
    """Remembers the rates of each kind of job by GPU type and cores; the kind unused for longest is forgotten.

    It is dumped and restored like a predictor.
    """

    def __init__(self, kinds_max: int = KINDS_MAX) -> None:
        self._kinds_max = kinds_max
        self._rates: OrderedDict[str, ByGpuType] = OrderedDict()
        self._changed: set[str] = set()

    def saw(self, kind: Kind, gpu_type: str, cores: int, rate_per_second: float) -> None:
        """Remember the rate of a kind of job on a number of cores; a job without cores of its own tells nothing."""
        if cores < 1:
            return
        key = _key(kind)
        by_type = self._touch(key)
        if gpu_type not in by_type and len(by_type) == GPU_TYPES_MAX:
            del by_type[next(iter(by_type))]
        by_type.setdefault(gpu_type, Windows(rates_max=RATES_MAX)).add(cores, rate_per_second)
        self._changed.add(key)

    def at(self, kind: Kind, gpu_type: str) -> Sequence[Point]:
        """What was measured of a kind of job on a GPU type; where none is wanted, on the type that was seen most."""
        by_type = self._rates.get(_key(kind), {})
        if not gpu_type and by_type:
            gpu_type = max(sorted(by_type), key=lambda one: len(by_type[one]))
        return by_type[gpu_type].points() if gpu_type in by_type else []

    def dump(self) -> Mapping[str, bytes]:
        """Write down what changed since the last dump; a record without content was forgotten."""
        changed, self._changed = self._changed, set()
        return {key: _write(self._rates[key]) if key in self._rates else b"" for key in sorted(changed)}

    def restore(self, records: Mapping[str, bytes]) -> Sequence[str]:
        """Take back what was dumped; names the records that could not be read."""
        unread = []
        for key, content in records.items():
            try:
                by_type = _read(content)
            except (ValueError, TypeError, OverflowError, RecursionError):  # whatever a bad record brings
                unread.append(key)
            else:
                self._touch(key).update(by_type)
        return unread

    def _touch(self, key: str) -> ByGpuType:
        seen = self._rates.setdefault(key, {})
        self._rates.move_to_end(key)
        while len(self._rates) > self._kinds_max:
            forgotten, _ = self._rates.popitem(last=False)
            self._changed.add(forgotten)
        return seen


def _key(kind: Kind) -> str:
    user, model, name, gpu_milli, replicas = kind
    return f"{user}/{model or name}/{gpu_milli}/{replicas}"


def _write(by_type: ByGpuType) -> bytes:
    rates = [
        [gpu_type, cores, list(seen)] for gpu_type, windows in by_type.items() for cores, seen in windows.rates.items()
    ]
    return json.dumps({"rates": rates}, separators=(",", ":")).encode()


def _read(content: bytes) -> ByGpuType:
    by_type: ByGpuType = {}
    match json.loads(content):
        case {"rates": [*rates]}:
            for gpu_type, cores, seen in rates:
                windows = by_type.setdefault(str(gpu_type), Windows(rates_max=RATES_MAX))
                for rate in seen:
                    windows.add(int(cores), float(rate))
            return by_type
    raise ValueError("this is no record of measured rates")
