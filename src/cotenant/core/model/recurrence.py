"""When a schedule is due: five fields of cron in a time zone, or a period. Times are arguments, in unix seconds.

In a zone with daylight saving time, a line with a fixed hour and minute is due once a day, as with Debian's cron: in
the hour that is skipped, right after it, and in the hour that comes twice, the first time. A line whose minute or hour
begins with * follows elapsed time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from types import MappingProxyType

from cronsim import CronSim, CronSimError

LINE_LENGTH_MAX = 128
PERIOD_SECONDS_MIN, PERIOD_SECONDS_MAX = 60.0, 366 * 86_400.0
FIELDS = ("minute", "hour", "day of month", "month", "day of week")
NAMES: Mapping[str, str] = MappingProxyType(
    {
        "@hourly": "0 * * * *",
        "@daily": "0 0 * * *",
        "@midnight": "0 0 * * *",
        "@weekly": "0 0 * * SUN",
        "@monthly": "0 0 1 * *",
        "@yearly": "0 0 1 1 *",
        "@annually": "0 0 1 1 *",
    }
)
COUNTED_MAX = 1000
CHANGES_APART_SECONDS = 12 * 3600.0  # less than between any two changes of clocks
_PERIOD = re.compile(r"(\d{1,9})(s|m|h|d|w)")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_SPAN_OF_ONE = re.compile(r"(?<!\w)(\w+)-\1/\d+")  # CronSim takes 3-3/1 for 3/1: for every hour from 3 on
_CHECKED_FROM = datetime(2024, 1, 1, tzinfo=UTC)  # any time


@dataclass(frozen=True, slots=True)
class Recurrence:
    """A recurring time: a `line` of cron in a `zone`, or a period of seconds from `start_seconds` on."""

    line: str = ""
    zone: tzinfo = UTC
    period_seconds: float = 0.0
    start_seconds: float = 0.0

    def next_after(self, seconds: float) -> float:
        """Return the first due time after a time; infinity if there is none.

        >>> parse_recurrence("6h", UTC, 1000.0).next_after(1000.0)
        22600.0
        """
        seconds = math.floor(seconds) if self.line else seconds
        if self.period_seconds:
            done = math.floor((seconds - self.start_seconds) / self.period_seconds)
            found = self.start_seconds + (max(0, done) + 1) * self.period_seconds
            return found if found > seconds else found + self.period_seconds  # as floats are rounded
        try:
            return self._next_fixed(seconds) if _is_fixed(self.line) else self._next_elapsed(seconds)
        except (StopIteration, OverflowError, ValueError):  # beyond the calendar
            return math.inf

    def _next_fixed(self, seconds: float) -> float:
        """Return the next due time of a line with a fixed hour and minute: by the wall clock, once a day."""
        due = CronSim(self.line, self._wall(seconds))
        while (found := self._instant(next(due))) <= seconds:
            continue  # in the hour that comes twice, the wall clock shows times that were due
        return found

    def _next_elapsed(self, seconds: float) -> float:
        """Return the next due time of a line that follows elapsed time: from one change of clocks to the next."""
        while True:
            wall = self._wall(seconds)
            found = seconds + (next(CronSim(self.line, wall)) - wall).total_seconds()
            change = self._change_between(seconds, found)
            if change > found:
                return found
            if _matches(self.line, self._wall(change)):
                return change
            seconds = change

    def _wall(self, seconds: float) -> datetime:
        return datetime.fromtimestamp(seconds, self.zone).replace(tzinfo=None)

    def _instant(self, wall: datetime) -> float:
        """Return when a wall clock first shows a time; of a time that it skips, when it has."""
        while (at := wall.replace(tzinfo=self.zone).timestamp()) and self._wall(at) != wall:
            wall += timedelta(minutes=1)
        return at

    def _change_between(self, first: float, last: float) -> float:
        """Return the first change of clocks after `first` and until `last`; infinity if there is none."""
        if self.zone is UTC:
            return math.inf
        while first < last:
            high = min(last, first + CHANGES_APART_SECONDS)
            if self._offset(high) != self._offset(first):
                while high - first > 1:
                    middle = first + (high - first) // 2
                    same = self._offset(middle) == self._offset(first)
                    first, high = (middle, high) if same else (first, middle)
                return high
            first = high
        return math.inf

    def _offset(self, seconds: float) -> timedelta | None:
        return datetime.fromtimestamp(seconds, self.zone).utcoffset()

    def last_until(self, after: float, until: float) -> tuple[float, int]:
        """Return the last due time after `after` and until `until`, and how many there are, counted up to
        `COUNTED_MAX`; (0, 0) if there is none.
        """
        first, count = self.next_after(after), 0
        last = due = first
        while due <= until and count < COUNTED_MAX:
            last, count = due, count + 1
            due = self.next_after(due)
        if not count:
            return 0.0, 0
        return (self._last_before(until) if due <= until else last), count

    def _last_before(self, until: float) -> float:
        """Return the last due time until a time, when there are very many."""
        if self.period_seconds:
            return until - (until - self.start_seconds) % self.period_seconds
        step = 3600.0
        while (found := self.next_after(until - step)) > until:
            step *= 2
        while (later := self.next_after(found)) <= until:
            found = later
        return found


def parse_recurrence(text: str, zone: tzinfo, start_seconds: float) -> Recurrence:
    """Return the recurrence that a text describes.

    >>> parse_recurrence("@daily", UTC, 0.0).line
    '0 0 * * *'

    Raises:
        ValueError: it describes none; the message names the field that is wrong.
    """
    if found := _PERIOD.fullmatch(text.strip()):
        seconds = float(found[1]) * _SECONDS[found[2]]
        if not PERIOD_SECONDS_MIN <= seconds <= PERIOD_SECONDS_MAX:
            raise ValueError(f"a period must be from 1m to 366d, not {text.strip()}")
        return Recurrence(period_seconds=seconds, start_seconds=start_seconds)
    line = NAMES.get(text.strip().lower(), text)
    fields = line.split()
    if len(line) > LINE_LENGTH_MAX or not line.isascii():
        raise ValueError(f"must have at most {LINE_LENGTH_MAX} characters, all of them ASCII")
    if len(fields) != len(FIELDS):
        known = ", ".join(NAMES)
        raise ValueError(
            f"must be a period such as 6h, one of {known}, or five fields ({', '.join(FIELDS)}), "
            f"not {len(fields)} fields"
        )
    _check_line(fields)
    return Recurrence(_SPAN_OF_ONE.sub(r"\1", " ".join(fields)), zone)


def _is_fixed(line: str) -> bool:
    return not any(part.startswith("*") for part in line.split()[:2])


def _matches(line: str, wall: datetime) -> bool:
    return next(CronSim(line, wall - timedelta(seconds=1))) == wall


def _check_line(fields: list[str]) -> None:
    """Raise a `ValueError` that names the field that is wrong, or because of which the line is never due."""
    for place, name in enumerate(FIELDS):
        alone = ["*"] * len(FIELDS)
        alone[place] = fields[place]
        try:
            CronSim(" ".join(alone), _CHECKED_FROM)
        except (CronSimError, ValueError, AssertionError):
            raise ValueError(f"its {name} {fields[place]!r} is not one that there is") from None
    try:
        next(CronSim(" ".join(fields), _CHECKED_FROM))
    except (CronSimError, StopIteration):
        raise ValueError(f"is never due: no month {fields[3]!r} has a day {fields[2]!r}") from None
