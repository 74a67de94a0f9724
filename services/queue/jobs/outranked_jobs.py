"""The jobs that an order leaves out, as columns by sequence number: there may be as many as jobs wait."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from cotenant.core.model.job_table import Floats, Ints

NONE = -1  # the place of a job that is not left out


@dataclass(frozen=True, slots=True)
class OutrankedJobs:
    """Places in the order, from 0, of the jobs that it leaves out, and since when it has done so, in unix seconds.

    >>> before = OutrankedJobs.of(np.array([7, 3]), np.array([0, 1]), now=10.0)
    >>> jobs = OutrankedJobs.of(np.array([3, 5]), np.array([2, 4]), now=20.0, before=before)
    >>> jobs.get(3), jobs.get(5), jobs.get(7)
    ((2, 10.0), (4, 20.0), None)
    """

    _least: int = 0  # the sequence number of the first element of the columns
    _places: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    _since: Floats = field(default_factory=lambda: np.zeros(0))

    @classmethod
    def of(cls, sequence: Ints, places: Ints, now: float, before: OutrankedJobs | None = None) -> OutrankedJobs:
        """Return the jobs with these sequence numbers; those that were left out `before` keep their times."""
        if not len(sequence):
            return cls()
        least = int(sequence.min())
        size = int(sequence.max()) - least + 1
        found = cls(least, np.full(size, NONE, dtype=np.int64), np.full(size, now))
        found._places[sequence - least] = places
        if before is not None:
            known = sequence[before._have(sequence)]
            found._since[known - least] = before._since[known - before._least]
        return found

    def _have(self, sequence: Ints) -> Ints:
        """Return the indexes of the numbers that are those of jobs in here."""
        at = sequence - self._least
        inside = np.flatnonzero((at >= 0) & (at < len(self._places)))
        kept: Ints = inside[self._places[at[inside]] != NONE]
        return kept

    def __contains__(self, sequence: object) -> bool:
        assert isinstance(sequence, int)
        return self.get(sequence) is not None

    def get(self, sequence: int) -> tuple[int, float] | None:
        """Return the place of a job and since when it is left out; None if it is not."""
        at = sequence - self._least
        if not 0 <= at < len(self._places) or self._places[at] == NONE:
            return None
        return int(self._places[at]), float(self._since[at])
