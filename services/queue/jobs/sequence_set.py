"""A set of job sequence numbers, as marks: with very many jobs, a set of numbers costs more than the order."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from cotenant.core.model.job_table import Flags, Ints


@dataclass(frozen=True, slots=True)
class SequenceSet:
    """A set of job sequence numbers."""

    least: int = 0
    marks: Flags = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))

    @classmethod
    def of(cls, sequence: Ints) -> SequenceSet:
        """Return the set of some sequence numbers."""
        if not len(sequence):
            return cls()
        least = int(sequence.min())
        marks = np.zeros(int(sequence.max()) - least + 1, dtype=np.bool_)
        marks[sequence - least] = True
        return cls(least, marks)

    def __contains__(self, sequence: object) -> bool:
        assert isinstance(sequence, int)
        place = sequence - self.least
        return 0 <= place < len(self.marks) and bool(self.marks[place])

    def marked(self, sequence: Ints) -> Flags:
        """Return which of some sequence numbers it contains."""
        places = sequence - self.least
        inside = (places >= 0) & (places < len(self.marks))
        inside[inside] = self.marks[places[inside]]
        return inside
