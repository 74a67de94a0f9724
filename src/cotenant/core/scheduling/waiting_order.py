"""The waiting jobs of each class in the order in which they run, kept from cycle to cycle.

Theory of operation. Jobs of one class need the same, so where the first of them finds no room, the others find none:
what a cycle decides depends on the running jobs and on the first waiting jobs of each class, the *front*. If the order
of the waiting jobs is fixed (`policy.protocols.FixedWhileWaiting`), each class is a sorted list into which a job is
inserted once, when it begins to wait, and a cycle costs as much as its front is long, however many jobs wait behind it.

How many jobs of a class the front needs is not known before. Admission by counting goes through the order and never
gives back what it took, so behind the first job of a class that it left out it would leave out all of that class. A
front is therefore long enough if it was left with a job of each class to spare; otherwise it is drawn again, with twice
as many of the classes that were used up.

A job that begins to wait has no place yet: it is part of every front until it is ranked, by the order of that front.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

import numpy as np

from cotenant.core.model.job_table import Flags, Ints, JobTable
from cotenant.core.scheduling.cycle import Admission

Place = tuple[int, int, float, float, int, str]  # minus the priority, level, score, arrival, sequence, id
SORTED_SHARE = 16  # if more than one of this many places is new, sorting a line is faster than inserting


@dataclass(frozen=True, slots=True)
class Front:
    """The waiting jobs that a cycle looks at: those without a place yet, then the first jobs of each class.

    `unranked` counts the first. `last` has, for each class with more jobs than these, the position of its last one.
    """

    job_ids: list[str]
    unranked: int
    last: dict[int, int]

    def used_up(self, selected: Flags) -> list[int]:
        """Return the classes of which all jobs here should run, so that more of them might; `selected` by position."""
        return [code for code, position in self.last.items() if selected[position]]


class WaitingOrder:
    """The waiting jobs by class, each class in its order; classes are numbers that their owner gives.

    All jobs of a class need the same and, where tenants have limits, belong to one tenant. A job whose row changes
    while it waits is removed and added again.

    >>> waiting = WaitingOrder()
    >>> waiting.add("a", 0)
    >>> waiting.front({}).job_ids
    ['a']
    """

    def __init__(self) -> None:
        self._lines: dict[int, list[Place]] = {}  # by class, sorted
        self._places: dict[str, Place] = {}
        self._unranked: dict[str, int] = {}  # the class of each

    def add(self, job_id: str, code: int) -> None:
        """Add a job that waits in a class from now on."""
        self._unranked[job_id] = code

    def remove(self, job_id: str, code: int) -> None:
        """Remove a job that waits in a class no longer."""
        if self._unranked.pop(job_id, None) is None:
            line, place = self._lines[code], self._places.pop(job_id)
            del line[bisect_left(line, place)]

    def first_class(self, table: JobTable, admission_of: Callable[[Ints], Admission]) -> int | None:
        """Return the class of the first of all waiting jobs; None if none waits."""
        if self._unranked:
            front = self.front({})
            self._rank(front, admission_of(_rows(front, table)), 0)
        heads = [(line[0], code) for code, line in self._lines.items() if line]
        return min(heads)[1] if heads else None

    def admit(self, table: JobTable, enough: Mapping[int, int], admission_of: Callable[[Ints], Admission]) -> Admission:
        """Return the admission of the running jobs and of a front that is long enough.

        `enough` is by class how many jobs might find a place in what is free, and one more; only where running jobs
        make room are more needed. `admission_of` makes the admission of some rows of the table.
        """
        running, counts = table.running_rows(), dict(enough)
        while True:
            front = self.front(counts)
            admission = admission_of(np.concatenate([running, _rows(front, table)]))
            self._rank(front, admission, len(running))
            selected = admission.choice.selected
            used_up = [] if selected is None else front.used_up(selected[len(running) :])
            if not used_up:
                return admission
            counts.update({code: 2 * counts[code] for code in used_up})

    def front(self, counts: Mapping[int, int]) -> Front:
        """Return all jobs that have no place yet, and this many of the first jobs of each class."""
        job_ids, last = list(self._unranked), {}
        for code, count in counts.items():
            if line := self._lines.get(code):
                job_ids += [place[-1] for place in islice(line, count)]
                if len(line) > count:
                    last[code] = len(job_ids) - 1
        return Front(job_ids, len(self._unranked), last)

    def _rank(self, front: Front, admission: Admission, before: int) -> None:
        """Give the unranked jobs of a front their places; their rows follow those `before`."""
        jobs, order, rows = admission.jobs, admission.order, slice(before, before + front.unranked)
        columns = (-jobs.priority, order.level, order.score, jobs.arrival_seconds, jobs.sequence)
        places: Iterator[Place] = zip(
            *(column[rows].tolist() for column in columns), front.job_ids[: front.unranked], strict=True
        )
        coming: dict[int, list[Place]] = {}
        for place in places:
            self._places[place[-1]] = place
            coming.setdefault(self._unranked.pop(place[-1]), []).append(place)
        for code, some in coming.items():
            _insert(self._lines.setdefault(code, []), some)


def _insert(line: list[Place], places: list[Place]) -> None:
    """Insert places into a sorted line; many are sorted with it at once."""
    if len(places) * SORTED_SHARE > len(line):
        line += places
        line.sort()
        return
    for place in places:
        insort(line, place)


def _rows(front: Front, table: JobTable) -> Ints:
    return np.array([table.row(job_id) for job_id in front.job_ids], dtype=np.int64)
