"""What the parts of the queue inform each other of."""

from __future__ import annotations

from collections.abc import Iterable

from cotenant.rpc.events import Event
from cotenant.services.queue.jobs.job_record import Record


class QueueEvents:
    """The events of one queue."""

    def __init__(self) -> None:
        self.changed: Event[[]] = Event()  # something on which the next scheduling cycle depends
        self.ended: Event[[Record]] = Event()
        self.delay_began: Event[[Record, float]] = Event()  # back-off or begin time, with the seconds left
        self.unsatisfiable: Event[[Record, str]] = Event()  # its dependencies cannot be met, and why
        self.reread: Event[[Record]] = Event()  # after an unknown outcome
        self.observed: Event[[Record, float]] = Event()  # at a time, in unix seconds
        self.profile_wanted: Event[[Iterable[str]]] = Event()  # by the predictor, of these jobs
