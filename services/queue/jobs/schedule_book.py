"""The schedules that the queue keeps, by id, and when they are due. No IO."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, tzinfo
from zoneinfo import ZoneInfo

from cotenant.codec import specs
from cotenant.core.model.job import JobSpec
from cotenant.core.model.recurrence import Recurrence, parse_recurrence
from cotenant.storage.v1 import records_pb2
from cotenant.store import schema
from cotenant.store.port import Entry
from cotenant.v1 import schedule_service_pb2 as pb

SCHEDULES = "queue/schedules/"


@dataclass(frozen=True, slots=True)
class ScheduleRecord:
    """A stored schedule, its recurrence and its job, and the revision of the record."""

    stored: records_pb2.StoredSchedule
    recurrence: Recurrence
    spec: JobSpec
    revision: int

    @property
    def schedule(self) -> pb.Schedule:
        """The schedule, as stored."""
        return self.stored.schedule

    @property
    def handled_seconds(self) -> float:
        """Due times up to this one were handled, or are not to be."""
        return self.stored.handled_time.ToNanoseconds() / 1e9

    @property
    def due_seconds(self) -> float:
        """The next due time; infinity while it is paused."""
        return math.inf if self.schedule.paused else self.recurrence.next_after(self.handled_seconds)


class ScheduleBook:
    """Schedules by id."""

    def __init__(self) -> None:
        self._records: dict[str, ScheduleRecord] = {}
        self._due: dict[str, float] = {}

    @property
    def records(self) -> Mapping[str, ScheduleRecord]:
        """All schedules."""
        return self._records

    def put(self, record: ScheduleRecord) -> None:
        """Add a schedule or replace it."""
        self._records[record.schedule.id] = record
        self._due[record.schedule.id] = record.due_seconds

    def remove(self, schedule_id: str) -> None:
        """Remove a schedule, if it is known."""
        self._records.pop(schedule_id, None)
        self._due.pop(schedule_id, None)

    def due_seconds(self, schedule_id: str) -> float:
        """Return the next due time of a schedule; infinity while it is paused."""
        return self._due[schedule_id]

    def due(self, now: float) -> list[ScheduleRecord]:
        """Return the schedules that are due, the earliest first."""
        found = sorted((at, schedule_id) for schedule_id, at in self._due.items() if at <= now)
        return [self._records[schedule_id] for _, schedule_id in found]

    def next_seconds(self) -> float:
        """Return the earliest due time of all; infinity if there is none."""
        return min(self._due.values(), default=math.inf)

    def uploads(self) -> Iterator[tuple[str, str]]:
        """Yield the tenants and ids of uploaded folders that schedules need."""
        for record in self._records.values():
            if record.spec.upload:
                yield record.spec.tenant, record.spec.upload


def zone_of(name: str) -> tzinfo:
    """Return a time zone by its name; "" is UTC.

    Raises:
        ValueError: there is none of that name.
    """
    if name in ("", "UTC"):
        return UTC
    try:
        return ZoneInfo(name)
    except (ValueError, OSError, KeyError):
        raise ValueError(f"the queue knows no time zone {name[:64]!a}; an example is Europe/Berlin") from None


def read_schedule(stored: records_pb2.StoredSchedule, revision: int) -> ScheduleRecord:
    """Return a record with what follows from it. Raises `ValueError` if its recurrence is invalid."""
    schedule = stored.schedule
    start = schedule.create_time.ToNanoseconds() / 1e9
    recurrence = parse_recurrence(schedule.every, zone_of(schedule.time_zone), start)
    return ScheduleRecord(stored, recurrence, specs.spec_from_wire(schedule.spec), revision)


def load_schedule(entry: Entry) -> ScheduleRecord:
    """Return the schedule of an entry.

    Raises:
        NewerSchema: a newer version wrote it.
        BadRecord: it is invalid.
    """
    stored = schema.read(records_pb2.StoredSchedule, entry)
    with schema.reading(entry):
        if entry.key != SCHEDULES + stored.schedule.id:
            raise ValueError(f"its id is {stored.schedule.id!r}")
        return read_schedule(stored, entry.mod_revision)


def run_of(record: ScheduleRecord, suffix: str) -> JobSpec:
    """Return the job of a due time, whose name ends with `suffix`."""
    name = f"{record.spec.name or 'job'}-{suffix}"
    labels = dict(record.spec.labels) | {"schedule": record.schedule.id}
    return replace(record.spec, name=name, labels=tuple(sorted(labels.items())))
