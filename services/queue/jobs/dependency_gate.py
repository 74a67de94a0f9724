"""What keeps a waiting job from being scheduled at all: dependencies, and the running limit of its array. No IO.

Everything follows from the records, so a restart finds the same state. Jobs behind the gate are not in the cycle's
table: an array of ten thousand jobs of which ten may run at once costs a cycle as much as ten jobs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from cotenant.core.model.dependencies import Condition, Counts, Dependency, Verdict, verdict
from cotenant.core.model.job import JobSpec
from cotenant.core.model.job_array import ArraySpec, Slots, from_indices
from cotenant.core.model.lifecycle import ENDED, Phase
from cotenant.core.model.refusal import Refusal, array_full, awaits
from cotenant.services.queue.jobs.transitions import Record


class _Status(NamedTuple):
    """A job's phase, and whether it has ever run."""

    phase: Phase
    ran: bool

    @property
    def counts(self) -> Counts:
        """The counts of this job alone."""
        ended = self.phase.ended
        failed = ended and self.phase is not Phase.SUCCEEDED
        return Counts(int(not ended), int(failed), int(not (ended or self.ran)), int(ended and not self.ran))


_STATUSES: Mapping[tuple[Phase, bool], _Status] = MappingProxyType(
    {(phase, ran): _Status(phase, ran) for phase in Phase for ran in (False, True)}
)  # shared by all jobs


@dataclass(slots=True)
class Array:
    """The known jobs of an array, and their phases."""

    id: str
    count: int
    slots: Slots | None
    ids: dict[str, int] = field(default_factory=dict)  # with their indices
    phases: Counter[Phase] = field(default_factory=Counter)
    ran: int = 0  # jobs that have ever run
    never_ran: int = 0  # jobs that ended before they ever ran
    revision: int = 0  # of the last commit of any of its jobs
    last_ended: str = ""  # the job that ended last, so far
    _ended_seconds: float = 0.0  # and when
    _indices: ArraySpec | None = None
    _indexed: int = 0  # how many jobs `_indices` names

    @property
    def left(self) -> int:
        """How many jobs have not ended."""
        return self.count - sum(self.phases[phase] for phase in ENDED)

    @property
    def counts(self) -> Counts:
        """The counts that conditions are about."""
        left = self.left
        failed = self.count - left - self.phases[Phase.SUCCEEDED]
        return Counts(left, failed, self.count - self.ran - self.never_ran, self.never_ran)

    def count_status(self, status: _Status, by: int = 1) -> None:
        """Count one of its jobs, or with -1 no longer."""
        self.phases[status.phase] += by
        self.ran += by * status.ran
        self.never_ran += by * status.counts.never_ran

    @property
    def indices(self) -> ArraySpec:
        """The indices of its jobs, and its limit of running jobs."""
        if self._indices is None or self._indexed != len(self.ids):  # jobs are only added first, and removed last
            self._indices = from_indices(self.ids.values(), self.slots.running_max if self.slots else 0)
            self._indexed = len(self.ids)
        return self._indices

    def note_commit(self, record: Record) -> None:
        """Note the revision of one of its jobs, and whether it is the last that has ended."""
        self.revision = max(self.revision, record.revision)
        if record.phase.ended and record.ended_seconds >= self._ended_seconds:
            self.last_ended, self._ended_seconds = record.id, record.ended_seconds

    @property
    def first(self) -> str:
        """The job with the lowest index."""
        return min(self.ids, key=self.ids.__getitem__)


class DependencyGate:
    """Tracks for every job which jobs it waits for, and which jobs its own end releases."""

    def __init__(self, records: Mapping[str, Record]) -> None:
        self.arrays: dict[str, Array] = {}
        self._records = records
        self._statuses: dict[str, _Status] = {}  # as of the last update
        self._dependents: dict[str, dict[str, None]] = {}  # by job or array: the unfinished jobs that depend on it
        self._pins: Counter[str] = Counter()
        self._removing: set[str] = set()

    def update(self, record: Record, *, backs_off: bool) -> Sequence[str]:
        """Update a job's phase; returns the jobs that this may affect."""
        status, before = _status_of(record), self._statuses.get(record.id)
        self._statuses[record.id] = status
        self._depend(record, status.phase)
        touched: list[str] = []
        if status is not before and (status.phase.ended or before is None or status.ran is not before.ran):
            touched += self._dependents.get(record.id, ())
        if task := record.spec.array_task:
            array = self.arrays.get(task.array_id)
            if array is None:
                array = Array(task.array_id, task.count, Slots(task.running_max) if task.running_max else None)
                self.arrays[task.array_id] = array
            array.note_commit(record)
            if status is not before:
                touched += self._count(array, record, before, status)
            if array.slots:
                touched += self._take_slot(array.slots, record, backs_off)
        return touched

    def add_new(self, job_ids: Iterable[str]) -> None:
        """Add waiting jobs that have never run, depend on nothing and belong to no array."""
        self._statuses.update(dict.fromkeys(job_ids, _STATUSES[Phase.QUEUED, False]))

    def new_array(self, records: Sequence[Record]) -> Array | None:
        """Return a new array of jobs that all belong to it; None if the array is known, or the jobs belong to no single
        one.
        """
        ids = {task.array_id if (task := record.spec.array_task) else "" for record in records}
        if len(ids) != 1 or "" in ids or ids & self.arrays.keys():
            return None
        task = records[0].spec.array_task
        assert task
        return Array(task.array_id, task.count, Slots(task.running_max) if task.running_max else None)

    def count_task(self, array: Array, record: Record, *, backs_off: bool) -> None:
        """Count a job of an array that is not added yet."""
        assert record.spec.array_task
        array.ids[record.id] = record.spec.array_task.index
        array.count_status(_status_of(record))
        array.note_commit(record)
        if array.slots:
            self._take_slot(array.slots, record, backs_off)

    def add_array(self, array: Array, records: Sequence[Record]) -> None:
        """Add an array whose jobs were all counted."""
        self.arrays[array.id] = array
        self._statuses.update((record.id, _status_of(record)) for record in records)
        if records[0].spec.dependencies:
            for record in records:
                self._depend(record, record.phase)

    def _depend(self, record: Record, phase: Phase) -> None:
        for dependency in record.spec.dependencies:
            if not phase.ended:
                self._dependents.setdefault(dependency.job_id, {})[record.id] = None
            elif others := self._dependents.get(dependency.job_id):
                others.pop(record.id, None)
                if not others:
                    del self._dependents[dependency.job_id]

    def _count(self, array: Array, record: Record, before: _Status | None, status: _Status) -> Sequence[str]:
        dependents = self._dependents.get(array.id, ())
        known = array.counts if dependents else Counts()  # needed only for dependents
        if before is not None and record.id in array.ids:
            array.count_status(before, -1)
        assert record.spec.array_task
        array.ids[record.id] = record.spec.array_task.index
        array.count_status(status)
        if not dependents:
            return ()
        changed = any(bool(new) is not bool(old) for new, old in zip(array.counts, known, strict=True))
        return list(dependents) if changed else []

    def _take_slot(self, slots: Slots, record: Record, backs_off: bool) -> Sequence[str]:
        if record.phase.holds_resources:
            return slots.hold(record.id)
        if record.phase is not Phase.QUEUED or backs_off or any(self._unmet(record.spec)):
            return slots.leave(record.id)
        assert record.spec.array_task
        return slots.wait(record.id, priority=record.spec.priority, index=record.spec.array_task.index)

    def forget(self, record: Record) -> None:
        """Remove a deleted job."""
        self._statuses.pop(record.id, None)
        task = record.spec.array_task
        if task and (array := self.arrays.get(task.array_id)):
            array.ids.pop(record.id, None)
            if not array.ids:
                del self.arrays[task.array_id]

    # Lookups -------------------------------------------------------------------------------------------------

    def open(self, record: Record) -> bool:
        """Return whether a waiting job may be scheduled."""
        return not any(self._unmet(record.spec)) and not self._array_is_full(record)

    def unsatisfiable_reason(self, record: Record) -> str:
        """Return which dependency ended so that its condition can never hold; "" while all may still hold."""
        for dependency, what in self._unmet(record.spec):
            if what is Verdict.NEVER:
                array = self.arrays.get(dependency.job_id)
                phases = array.phases if array else {self._statuses[dependency.job_id].phase: 1}
                return unmet_reason(dependency, phases, array=array is not None)
        return ""

    def refusal(self, record: Record) -> Refusal | None:
        """Return why a waiting job may not be scheduled; None if it may."""
        if refusal := self.awaited_jobs(record.spec):
            return refusal
        if not self._array_is_full(record):
            return None
        task = record.spec.array_task
        assert task
        array = self.arrays[task.array_id]
        holding = array.slots.holding if array.slots else 0
        return array_full(array.id, task.running_max, holding, array.phases[Phase.QUEUED])

    def awaited_jobs(self, spec: JobSpec) -> Refusal | None:
        """Return the refusal that names the unfinished dependencies; None if there are none."""
        others: dict[Condition, list[str]] = {}
        for dependency, _ in self._unmet(spec):
            named = f"{dependency.job_id} ({self._state_of(dependency.job_id)})"
            others.setdefault(dependency.condition, []).append(named)
        return awaits(others) if others else None

    def known(self, thing_id: str) -> bool:
        """Return whether there is a job or an array with that id."""
        return thing_id not in self._removing and (thing_id in self._records or thing_id in self.arrays)

    @contextmanager
    def removing(self, thing_id: str) -> Iterator[None]:
        """Keep new jobs from depending on a job or array that is being deleted."""
        self._removing.add(thing_id)
        try:
            yield
        finally:
            self._removing.discard(thing_id)

    def has_dependents(self, record: Record) -> bool:
        """Return whether jobs depend on a job or on its array, or are about to."""
        task = record.spec.array_task
        return any(one in self._dependents or self._pins[one] for one in (record.id, task.array_id if task else ""))

    @contextmanager
    def pin(self, dependencies: Sequence[Dependency]) -> Iterator[None]:
        """Keep dependencies from being deleted while the job that names them is created."""
        self._count_pins(dependencies, 1)
        try:
            yield
        finally:
            self._count_pins(dependencies, -1)

    def _count_pins(self, dependencies: Sequence[Dependency], by: int) -> None:
        for dependency in dependencies:
            self._pins[dependency.job_id] += by
            if not self._pins[dependency.job_id]:
                del self._pins[dependency.job_id]

    def _array_is_full(self, record: Record) -> bool:
        task = record.spec.array_task
        array = self.arrays.get(task.array_id) if task else None
        return array is not None and array.slots is not None and not array.slots.open(record.id)

    def _unmet(self, spec: JobSpec) -> Iterator[tuple[Dependency, Verdict]]:
        for dependency in spec.dependencies:
            what = verdict(dependency.condition, self._counts(dependency))
            if what is not Verdict.MET:
                yield dependency, what

    def _counts(self, dependency: Dependency) -> Counts:
        if array := self.arrays.get(dependency.job_id):
            return array.counts
        if status := self._statuses.get(dependency.job_id):
            return status.counts
        # Deleted: only jobs without dependents are, and only if they were archived as the condition requires.
        return Counts(failed=1) if dependency.condition is Condition.AFTER_FAIL else Counts()

    def _state_of(self, thing_id: str) -> str:
        if array := self.arrays.get(thing_id):
            return _counts_in_words(array.phases)
        status = self._statuses.get(thing_id)
        return str(status.phase) if status else "unknown"


_REQUIRED: Mapping[Condition, str] = MappingProxyType(
    {Condition.AFTER_OK: "success", Condition.AFTER_FAIL: "failure", Condition.AFTER_STARTED: "start"}
)


def unmet_reason(dependency: Dependency, phases: Mapping[Phase, int], *, array: bool) -> str:
    """Return why a dependency on a job or an array, given its job counts by phase, cannot be met.

    >>> unmet_reason(Dependency("0abc"), {Phase.FAILED: 1}, array=False)
    'depends on the success of 0abc, which failed'
    >>> unmet_reason(Dependency("0abc", Condition.AFTER_STARTED), {Phase.CANCELLED: 1}, array=False)
    'depends on the start of 0abc, which was cancelled before it ran'
    """
    what = f"depends on the {_REQUIRED[dependency.condition]} of"
    if array:
        return f"{what} array {dependency.job_id}: {_counts_in_words(phases)}"
    (phase,) = phases
    became = "was cancelled" if phase is Phase.CANCELLED else phase.value
    before = " before it ran" if dependency.condition is Condition.AFTER_STARTED else ""
    return f"{what} {dependency.job_id}, which {became}{before}"


def _status_of(record: Record) -> _Status:
    ran = record.started_seconds > 0 or record.phase is Phase.SUCCEEDED  # even if no report said when it started
    return _STATUSES[record.phase, ran]


def _counts_in_words(phases: Mapping[Phase, int]) -> str:
    return ", ".join(f"{phases[phase]} {phase}" for phase in Phase if phases.get(phase))
