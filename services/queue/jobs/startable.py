"""The jobs that the scheduling cycle may start, by equivalence class."""

from __future__ import annotations

from collections import Counter

from cotenant.core.model.job_table import NO_CODE
from cotenant.services.queue.jobs.job_record import EquivalenceKey, Record


class Startable:
    """Counts waiting jobs by equivalence class, and gives each class a code, for columns of classes.

    The codes are the indexes of `keys`; a class without waiting jobs gives its code back.
    """

    def __init__(self) -> None:
        self.keys: list[EquivalenceKey | None] = []  # by code; None: unused
        self.avoiding: set[str] = set()  # ids of jobs that avoid nodes
        self._counts: Counter[EquivalenceKey] = Counter()
        self._unused: list[int] = []
        self._new: dict[str, Record] = {}  # jobs that wait since `take_new`

    def update(self, record: Record, *, waits: bool) -> None:
        """Update whether a job waits for the cycle, and its class."""
        shape = record.equivalence_key if waits else None
        if shape is not record.counted_as:
            if record.counted_as is not None:
                self._leave(record.counted_as)
                self._new.pop(record.id, None)
            record.count_as(shape)
            if shape is not None:
                self._join(shape)
                self._new[record.id] = record
        if waits and record.avoids:
            self.avoiding.add(record.id)
        else:
            self.avoiding.discard(record.id)

    def _join(self, key: EquivalenceKey) -> None:
        self._counts[key] += 1
        if self._counts[key] > 1:
            return
        if self._unused:
            key.code = self._unused.pop()
            self.keys[key.code] = key
        else:
            key.code = len(self.keys)
            self.keys.append(key)

    def _leave(self, key: EquivalenceKey) -> None:
        self._counts[key] -= 1
        if not self._counts[key]:
            del self._counts[key]
            self.keys[key.code] = None
            self._unused.append(key.code)
            key.code = NO_CODE

    def take_new(self) -> dict[str, Record]:
        """Return the jobs that have begun to wait since the last call."""
        taken, self._new = self._new, {}
        return taken
