"""The order of a list of jobs (AIP-132), and the jobs that come next in it.

Theory of operation. A job's key is the values of the order's fields, and its id, which makes it unique. A page needs
only the jobs with the lowest keys behind the last one of the previous page. They are selected in slices: some jobs at a
time are added to the candidates, which are sorted and cut to the length of a page. So no list, however long, is ever
sorted at once, and nothing is kept between two pages.

Ids increase with time, so the order of submission is the order of ids, in which jobs are indexed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from cotenant.core.model.validation import Violation, shown
from cotenant.rpc.paging import Key, Value
from cotenant.rpc.slices import Slices
from cotenant.services.queue.jobs.transitions import Record

CREATE_TIME = "create_time"
AT_ONCE = 500  # jobs that are added to the candidates before these are sorted again
_INVERTED = bytes(255 - byte for byte in range(256))
_END = b"\xff"  # of an inverted text: higher than the inverse of any byte of UTF-8, so that longer texts come first

FIELDS: Mapping[str, Callable[[Record, float], Value]] = MappingProxyType(
    {
        "start_time": lambda record, now: record.started_seconds or None,
        "end_time": lambda record, now: record.ended_seconds or None,
        "priority": lambda record, now: record.spec.priority,
        "name": lambda record, now: record.spec.name,
        "attained_gpu_seconds": lambda record, now: record.attained_gpu_seconds(now),
    }
)
KNOWN = (CREATE_TIME, *FIELDS)


class JobOrder:
    """The order that `order_by` asks for; wrong parts are added to `violations`.

    >>> JobOrder(" priority desc,name", []).scope
    'priority desc,name,create_time desc'
    >>> JobOrder("", []).by_id, JobOrder("create_time, name", []).scope
    (True, 'create_time')
    """

    def __init__(self, order_by: str, violations: list[Violation]) -> None:
        self._fields: list[tuple[str, bool]] = []  # with whether it descends
        self.descending = True  # by id, of jobs that are equal in all fields
        self.valid = True
        seen: set[str] = set()
        for part in order_by.split(",") if order_by.strip() else ():
            name, descending, wrong = _parsed(part, seen)
            if wrong:
                self.valid = False
                violations.append(Violation("order_by", wrong))
            elif name == CREATE_TIME:
                self.descending = descending
            elif CREATE_TIME not in seen:  # else no jobs are equal so far
                self._fields.append((name, descending))
            seen.add(name)
        self.by_id = not self._fields

    @property
    def scope(self) -> str:
        """The order in a canonical form."""
        return ",".join(
            f"{name} desc" if descending else name
            for name, descending in (*self._fields, (CREATE_TIME, self.descending))
        )

    async def next_keys(self, records: Iterable[Record | None], after: Key | None, most: int) -> Sequence[Key]:
        """Return the keys of the jobs that come next behind the key `after`, at most so many, in order.

        Yields to other calls while it looks.
        """
        now, slices = time.time(), Slices()
        begin = None if after is None else self._rank(after)
        best: list[tuple[tuple[object, ...], Key]] = []
        added = 0
        for record in records:
            await slices.step()
            if record is None:
                continue  # deleted in between
            key: Key = (*(FIELDS[name](record, now) for name, _ in self._fields), record.id)
            rank = self._rank(key)
            if begin is not None and rank <= begin:
                continue
            best.append((rank, key))
            added += 1
            if added == AT_ONCE:
                best, added = sorted(best)[:most], 0
        return [key for _, key in sorted(best)[:most]]

    def _rank(self, key: Key) -> tuple[object, ...]:
        """Return what sorts in this order: a missing time counts as later than all others."""
        directions = (*(descending for _, descending in self._fields), self.descending)
        return tuple(_ranked(value, descending) for value, descending in zip(key, directions, strict=True))

    def fits(self, key: Key) -> bool:
        """Return whether a key from a page token has this order's values."""
        if len(key) != len(self._fields) + 1:
            return False
        texts = [name == "name" for name, _ in self._fields]
        return all(isinstance(value, str) == text for value, text in zip(key, [*texts, True], strict=True))


def _parsed(part: str, seen: set[str]) -> tuple[str, bool, str]:
    """Return a field of an order, whether it descends, and what is wrong with it."""
    name, _, suffix = " ".join(part.split()).partition(" ")
    if name not in KNOWN:
        return name, False, f"{shown(name)} is not a field to sort by; those are {', '.join(KNOWN)}"
    if suffix not in ("", "asc", "desc"):
        return name, False, f"{shown(part.strip())} must be a field, or a field and `desc`"
    return name, suffix == "desc", f"names {name} twice" if name in seen else ""


def _ranked(value: Value, descending: bool) -> object:
    if isinstance(value, str):
        text = value.encode(errors="surrogatepass")
        return text.translate(_INVERTED) + _END if descending else text
    number = math.inf if value is None else value
    return -number if descending else number
