"""The jobs that the scheduling cycle may start, counted by what they ask for."""

from __future__ import annotations

from collections import Counter

from cotenant.services.queue.jobs.job_record import Record, ShapeKey


class Startable:
    """Counts the shapes of waiting jobs, so that a cycle knows when each of them was refused."""

    def __init__(self) -> None:
        self.shapes: Counter[ShapeKey] = Counter()
        self.avoiding: set[str] = set()  # ids of those that keep away from nodes

    def note(self, record: Record, *, waits: bool) -> None:
        """Take in whether a job waits for the cycle, and what it asks for now."""
        shape = record.shape if waits else None
        if shape is not record.waits_as:
            if record.waits_as is not None:
                self.shapes[record.waits_as] -= 1
                if not self.shapes[record.waits_as]:
                    del self.shapes[record.waits_as]
            if shape is not None:
                self.shapes[shape] += 1
            record.waits_as = shape
        if waits and record.avoids:
            self.avoiding.add(record.id)
        else:
            self.avoiding.discard(record.id)
