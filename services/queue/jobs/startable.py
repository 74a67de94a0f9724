"""The jobs that the scheduling cycle may start, counted by equivalence class."""

from __future__ import annotations

from collections import Counter

from cotenant.services.queue.jobs.job_record import EquivalenceKey, Record


class Startable:
    """Counts waiting jobs by equivalence class, so that a cycle knows when all classes are refused."""

    def __init__(self) -> None:
        self.classes: Counter[EquivalenceKey] = Counter()
        self.avoiding: set[str] = set()  # ids of jobs that avoid nodes

    def update(self, record: Record, *, waits: bool) -> None:
        """Update whether a job waits for the cycle, and its class."""
        shape = record.equivalence_key if waits else None
        if shape is not record.counted_as:
            if record.counted_as is not None:
                self.classes[record.counted_as] -= 1
                if not self.classes[record.counted_as]:
                    del self.classes[record.counted_as]
            if shape is not None:
                self.classes[shape] += 1
            record.counted_as = shape
        if waits and record.avoids:
            self.avoiding.add(record.id)
        else:
            self.avoiding.discard(record.id)
