"""What to measure next: at which core counts the rate of a kind of job is known, and at which it should be."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

from cotenant.core.refusals import plural
from cotenant.services.predictor.words import Kind

POINTS_ENOUGH = 4
KINDS_MAX = 10_000
STEPS = 50


def plan(known: Collection[int], cores_max: int) -> list[int]:
    """Say which core counts from 1 to `cores_max` to measure next, the most telling first.

    A simple design: `cores_max` first, since it bounds the gain of all others; then, again and again, the geometric
    middle of the widest gap, since rates level off as cores are added. Nothing where four counts are known.

    >>> plan(known=[], cores_max=32)
    [32, 6, 2, 14]
    >>> plan(known=[32, 6, 2, 14], cores_max=32)
    []
    """
    known = {cores for cores in known if 1 <= cores <= cores_max}
    planned: list[int] = []
    while len(known) + len(planned) < min(POINTS_ENOUGH, cores_max):
        planned.append(_next({*known, *planned}, cores_max))
    return planned


def _next(taken: Collection[int], cores_max: int) -> int:
    if cores_max not in taken:
        return cores_max
    edges = sorted({1, *taken})
    low, high = max(
        ((low, high) for low, high in pairwise(edges) if high - low > 1),
        key=lambda gap: (gap[1] / gap[0], gap),
        default=(1, 1),
    )
    return min(max(round(math.sqrt(low * high)), low + 1), high - 1) if high > low else 1


class Measured:
    """Remembers at which core counts the rate of each kind of job was seen; the kind unused for longest is forgotten.

    It is dumped and restored like a predictor.
    """

    def __init__(self, kinds_max: int = KINDS_MAX) -> None:
        self._kinds_max = kinds_max
        self._cores: OrderedDict[str, set[int]] = OrderedDict()
        self._changed: set[str] = set()

    def saw(self, kind: Kind, cores: int) -> None:
        """Remember that the rate of a kind of job was seen at a core count."""
        key = _key(kind)
        seen = self._touch(key)
        if cores >= 1 and cores not in seen:
            seen.add(cores)
            self._changed.add(key)

    def at(self, kind: Kind) -> Collection[int]:
        """The core counts at which the rate of a kind of job was seen."""
        return self._cores.get(_key(kind), frozenset())

    def dump(self) -> Mapping[str, bytes]:
        """Write down what changed since the last dump; a record without content was forgotten."""
        changed, self._changed = self._changed, set()
        return {key: _write(self._cores[key]) if key in self._cores else b"" for key in sorted(changed)}

    def restore(self, records: Mapping[str, bytes]) -> Sequence[str]:
        """Take back what was dumped; names the records that could not be read."""
        unread = []
        for key, content in records.items():
            try:
                cores = _read(content)
            except (ValueError, RecursionError):
                unread.append(key)
            else:
                self._touch(key).update(cores)
        return unread

    def _touch(self, key: str) -> set[int]:
        seen = self._cores.setdefault(key, set())
        self._cores.move_to_end(key)
        while len(self._cores) > self._kinds_max:
            forgotten, _ = self._cores.popitem(last=False)
            self._changed.add(forgotten)
        return seen


def reason_of(known: Collection[int], planned: Sequence[int]) -> str:
    """Say in one sentence why these are planned.

    >>> reason_of([8], [32, 3])
    'the rate is known at 1 core count; these tell most of where it levels off'
    """
    counts = plural(len(known), "core count")
    if not planned:
        return f"the rate is known at {counts}, which is enough"
    return f"the rate is known at {counts}; these tell most of where it levels off"


def _key(kind: Kind) -> str:
    user, model, name, gpu_milli, replicas = kind
    return f"{user}/{model or name}/{gpu_milli}/{replicas}"


def _write(cores: Collection[int]) -> bytes:
    return json.dumps({"cores": sorted(cores)}).encode()


def _read(content: bytes) -> set[int]:
    match json.loads(content):
        case {"cores": [*cores]} if all(isinstance(count, int) and count >= 1 for count in cores):
            return set(cores)
    raise ValueError("this is no record of measured core counts")
