"""Job arrays: one job run once for each index, with a limit on how many run at a time. Pure."""

from __future__ import annotations

import re
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

COUNT_MAX = 10_000
INDEX_MAX = 999_999
RANGES_MAX = 1_000
NAMED_MAX = 2 * COUNT_MAX  # ranges may overlap, but not without end
STEPS_MIN = 4  # indices with equal gaps that are written as one range: 1,3,5 is plainer than 1-5:2
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?")
_LIMIT = re.compile(r"\d{1,9}")


@dataclass(frozen=True, slots=True)
class IndexRange:
    """The indices first, first + step and so on, up to last."""

    first: int
    last: int
    step: int = 1

    @property
    def indices(self) -> range:
        """All indices of the range."""
        return range(self.first, self.last + 1, self.step)

    def __str__(self) -> str:
        """Return the range as users write it."""
        if self.first == self.last:
            return str(self.first)
        return f"{self.first}-{self.last}" + (f":{self.step}" if self.step != 1 else "")


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """The indices of an array; with `running_max` 0, any number of its jobs may hold resources at once."""

    ranges: tuple[IndexRange, ...]
    running_max: int = 0

    @property
    def indices(self) -> list[int]:
        """All indices in ascending order, without duplicates."""
        return sorted({index for part in self.ranges for index in part.indices})

    def __str__(self) -> str:
        """Return the array as users write it.

        >>> str(read_array("7, 0-8:2 %3"))
        '7,0-8:2%3'
        """
        return ",".join(map(str, self.ranges)) + (f"%{self.running_max}" if self.running_max else "")


@dataclass(frozen=True, slots=True)
class ArrayTask:
    """The position of a job in its array."""

    array_id: str
    index: int
    count: int
    running_max: int = 0


def read_array(text: str) -> ArraySpec:
    """Return the array that a text describes.

    >>> spec = read_array("1,3,5-9%2")
    >>> spec.indices, spec.running_max
    ([1, 3, 5, 6, 7, 8, 9], 2)

    Raises:
        ValueError: the text is not an array, or the array is too large.
    """
    indices, given, limit = "".join(text.split()).partition("%")
    ranges = [_RANGE.fullmatch(part) for part in indices.split(",")]
    if None in ranges or (given and not _LIMIT.fullmatch(limit)):
        raise ValueError(f"must be indices such as 0-99, 1,3,5-9 or 0-99%10 for 10 at once, not {text[:40]!a}")
    if given and not int(limit):
        raise ValueError("must let at least 1 job run at once, not 0")
    found = (one.groups() for one in ranges if one)
    parts = tuple(IndexRange(int(first), int(last or first), int(step or 1)) for first, last, step in found)
    spec = ArraySpec(parts, int(limit or 0))
    if wrong := invalid_reason(spec):
        raise ValueError(wrong)
    return spec


def from_indices(indices: Iterable[int], running_max: int = 0) -> ArraySpec:
    """Return an array with these indices, written as few ranges.

    >>> str(from_indices([4, 0, 1, 2])), str(from_indices([1, 3, 5, 6, 7])), str(from_indices(range(0, 99, 2)))
    ('0-2,4', '1,3,5-7', '0-98:2')
    """
    ranges: list[IndexRange] = []
    ordered, begin = sorted(indices), 0
    while begin < len(ordered):
        step = ordered[begin + 1] - ordered[begin] if begin + 1 < len(ordered) else 1
        end = begin
        while end + 1 < len(ordered) and ordered[end + 1] - ordered[end] == step:
            end += 1
        if step > 1 and end - begin + 1 < STEPS_MIN:
            end, step = begin, 1
        ranges.append(IndexRange(ordered[begin], ordered[end], step))
        begin = end + 1
    return ArraySpec(tuple(ranges), running_max)


def invalid_reason(spec: ArraySpec) -> str:
    """Return why an array is invalid; "" if it is valid."""
    if not 1 <= len(spec.ranges) <= RANGES_MAX:
        return f"must have from 1 to {RANGES_MAX} ranges of indices, not {len(spec.ranges)}"
    for part in spec.ranges:
        if not (0 <= part.first <= part.last and part.step >= 1):
            return f"has the range {part}, which is empty"
        if part.last > INDEX_MAX:
            return f"has the index {part.last}; {INDEX_MAX} is the highest"
        if len(part.indices) > COUNT_MAX:
            return f"has {len(part.indices)} jobs; {COUNT_MAX} are allowed at most"
    if spec.running_max < 0:
        return f"must let at least 1 job run at once, not {spec.running_max}"
    named = sum(len(part.indices) for part in spec.ranges)
    if named > NAMED_MAX:
        return f"names {named} indices, some of them several times; {NAMED_MAX} are allowed at most"
    count = len(spec.indices)
    return f"has {count} jobs; {COUNT_MAX} are allowed at most" if count > COUNT_MAX else ""


@dataclass(slots=True)
class Slots:
    """Which jobs of an array may be tried, so that jobs holding resources and jobs offered some never exceed the limit.

    Waiting jobs are ordered by priority, then by index. The choice is made again whenever a job starts or stops holding
    resources, so the limit holds for any sequence of events.

    >>> slots = Slots(running_max=2)
    >>> for index in range(3):
    ...     _ = slots.wait(f"a_{index}", priority=0, index=index)
    >>> [slots.open(f"a_{index}") for index in range(3)]
    [True, True, False]
    >>> _ = slots.hold("a_0")
    >>> slots.leave("a_1")
    ['a_2']
    """

    running_max: int
    _waiting: list[tuple[int, int, str]] = field(default_factory=list)  # in order
    _turns: dict[str, tuple[int, int, str]] = field(default_factory=dict)
    _holding: set[str] = field(default_factory=set)

    @property
    def holding(self) -> int:
        """The number of jobs that hold resources."""
        return len(self._holding)

    @property
    def open_count(self) -> int:
        """The number of waiting jobs that may be tried."""
        return min(self._free, len(self._waiting))

    def held_back(self, most: int) -> list[str]:
        """Return the first waiting jobs beyond the limit, in order."""
        return [job_id for _, _, job_id in self._waiting[self._free : self._free + most]]

    def open(self, job_id: str) -> bool:
        """Return whether a waiting job may be tried."""
        turn = self._turns.get(job_id)
        return turn is not None and bisect_left(self._waiting, turn) < self._free

    @property
    def _free(self) -> int:
        return max(0, self.running_max - len(self._holding))

    def wait(self, job_id: str, *, priority: int, index: int) -> Sequence[str]:
        """Add a waiting job that nothing else holds back; returns the other jobs that this may affect."""
        turn = -priority, index, job_id
        return [] if self._turns.get(job_id) == turn else self._change(job_id, turn=turn)

    def hold(self, job_id: str) -> Sequence[str]:
        """Record that a job holds resources."""
        return [] if job_id in self._holding else self._change(job_id, holds=True)

    def leave(self, job_id: str) -> Sequence[str]:
        """Record that a job neither holds nor may be given resources."""
        return self._change(job_id) if job_id in self._holding or job_id in self._turns else []

    def _change(self, job_id: str, *, turn: tuple[int, int, str] | None = None, holds: bool = False) -> Sequence[str]:
        before = self._free
        self._holding.discard(job_id)
        if (old := self._turns.pop(job_id, None)) is not None:
            del self._waiting[bisect_left(self._waiting, old)]
        if turn is not None:
            self._turns[job_id] = turn
            insort(self._waiting, turn)
        if holds:
            self._holding.add(job_id)
        first, last = sorted((before, self._free))
        near = self._waiting[max(0, first - 1) : last + 1]  # only these may have become open, or closed
        return [other for _, _, other in near if other != job_id]
