"""Stored jobs that wait as they were submitted, added all at once: what equal specs have in common is computed once.

Most jobs of a long queue have a few hundred different specs, and differ only in their ids and times. A record that
has been tried, or whose spec makes it wait for something else than resources, is added on its own instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from cotenant.core.model.job import JobSpec
from cotenant.core.model.job_table import JobRow, JobTable
from cotenant.services.queue.jobs.job_record import EquivalenceKey, Record


class SpecClass(NamedTuple):
    """What jobs of one spec have in common."""

    number: int
    decoded: JobSpec  # as it was read, kept so that no other spec gets its identity
    spec: JobSpec  # the object that all jobs of equal specs share
    key: EquivalenceKey
    first: Record


class NewJobs:
    """The jobs of a store that have never been tried, and the classes of all specs seen."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self._classes: dict[int, SpecClass] = {}  # by the identity of the decoded spec
        self._numbers: list[int] = []  # of the class of each of `records`

    def known(self, spec: JobSpec) -> SpecClass | None:
        """Return the class of a decoded spec, if it was learned."""
        return self._classes.get(id(spec))

    def learn(self, decoded: JobSpec, record: Record) -> SpecClass | None:
        """Learn the class of a record whose spec was `decoded`; None if it may wait for more than resources."""
        if not waits_only_for_resources(decoded):
            return None
        found = SpecClass(len(self._classes), decoded, record.spec, record.equivalence_key, record)
        self._classes[id(decoded)] = found
        return found

    def take(self, record: Record, its_class: SpecClass) -> bool:
        """Take a record that is new; return whether it is."""
        if not record.is_new:
            return False
        self.records.append(record)
        self._numbers.append(its_class.number)
        return True

    def fill(self, table: JobTable, row_of: Callable[[Record], JobRow]) -> None:
        """Add the taken jobs to the table; `row_of` returns the row of one."""
        rows = [replace(row_of(one.first), code=one.key.code) for one in self._classes.values()]
        table.add_all(
            [record.id for record in self.records],
            [record.created_seconds for record in self.records],
            [record.sequence for record in self.records],
            rows,
            self._numbers,
        )


def waits_only_for_resources(spec: JobSpec) -> bool:
    """Return whether jobs of a spec need nothing but resources to start, and ask for the same ones at each attempt."""
    other = spec.dependencies or spec.array_task or spec.secrets or spec.open or spec.elastic
    return not other and spec.begin_seconds is None and spec.pre_run_seconds is None
