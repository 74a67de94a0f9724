"""What keeps a waiting job from being tried at all: jobs that come first, and the limit of its array. No IO.

All of it follows from the records, so that a restart finds it as it was. Jobs behind a gate are not in the cycle's
table: an array of ten thousand jobs of which ten may run at once costs a cycle as much as ten jobs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from cotenant.core.model.dependencies import Condition, Dependency, Verdict, verdict
from cotenant.core.model.job import JobSpec
from cotenant.core.model.job_array import Slots
from cotenant.core.model.lifecycle import ENDED, Phase
from cotenant.core.model.refusal import Refusal, array_full, awaits
from cotenant.services.queue.jobs.transitions import Record

Standing = tuple[int, int]  # of a job or of all jobs of an array: how many have not ended, and how many ended badly


@dataclass(slots=True)
class Array:
    """The jobs of an array that are known, and where they stand."""

    id: str
    count: int
    slots: Slots | None
    ids: dict[str, int] = field(default_factory=dict)  # with their indices
    phases: Counter[Phase] = field(default_factory=Counter)

    @property
    def standing(self) -> Standing:
        """How many have not ended, and how many ended badly."""
        ended = sum(self.phases[phase] for phase in ENDED)
        return self.count - ended, ended - self.phases[Phase.SUCCEEDED]

    @property
    def first(self) -> str:
        """The job of the lowest index."""
        return min(self.ids, key=self.ids.__getitem__)


class Gates:
    """Knows of every job what it waits for, and whom its own end sets free."""

    def __init__(self, records: Mapping[str, Record]) -> None:
        self.arrays: dict[str, Array] = {}
        self._records = records
        self._phases: dict[str, Phase] = {}  # as last learnt
        self._dependents: dict[str, dict[str, None]] = {}  # by job or array, those that have not ended and wait for it
        self._pins: Counter[str] = Counter()
        self._leaving: set[str] = set()

    def learn(self, record: Record, *, backs_off: bool) -> Sequence[str]:
        """Take in how a job stands; returns the jobs for which that may change something."""
        phase, before = record.phase, self._phases.get(record.id)
        self._phases[record.id] = phase
        self._depend(record, phase)
        touched: list[str] = []
        if phase.ended and phase is not before:
            touched += self._dependents.get(record.id, ())
        if task := record.spec.array_task:
            array = self.arrays.get(task.array_id)
            if array is None:
                array = Array(task.array_id, task.count, Slots(task.running_max) if task.running_max else None)
                self.arrays[task.array_id] = array
            if phase is not before:
                touched += self._count(array, record, before, phase)
            if array.slots:
                touched += self._take_slot(array.slots, record, backs_off)
        return touched

    def new_array(self, records: Sequence[Record]) -> Array | None:
        """Make an array that nobody knows yet of jobs that are all of one; None where it is known, or they are not."""
        ids = {task.array_id if (task := record.spec.array_task) else "" for record in records}
        if len(ids) != 1 or "" in ids or ids & self.arrays.keys():
            return None
        task = records[0].spec.array_task
        assert task
        return Array(task.array_id, task.count, Slots(task.running_max) if task.running_max else None)

    def count_in(self, array: Array, record: Record, *, backs_off: bool) -> None:
        """Count a job in that belongs to an array which nobody knows yet."""
        assert record.spec.array_task
        array.ids[record.id] = record.spec.array_task.index
        array.phases[record.phase] += 1
        if array.slots:
            self._take_slot(array.slots, record, backs_off)

    def attach(self, array: Array, records: Sequence[Record]) -> None:
        """Let everybody know an array all of whose jobs were counted in."""
        self.arrays[array.id] = array
        self._phases.update((record.id, record.phase) for record in records)
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

    def _count(self, array: Array, record: Record, before: Phase | None, phase: Phase) -> Sequence[str]:
        dependents = self._dependents.get(array.id, ())
        known = array.standing if dependents else (0, 0)  # who waits for it, if anybody does, wants to know
        if before is not None and record.id in array.ids:
            array.phases[before] -= 1
        assert record.spec.array_task
        array.ids[record.id] = record.spec.array_task.index
        array.phases[phase] += 1
        if not dependents:
            return ()
        left, failed = array.standing
        changed = (not left, bool(failed)) != (not known[0], bool(known[1]))
        return list(dependents) if changed else []

    def _take_slot(self, slots: Slots, record: Record, backs_off: bool) -> Sequence[str]:
        if record.phase.holds_resources:
            return slots.hold(record.id)
        if record.phase is not Phase.QUEUED or backs_off or any(self._unmet(record.spec)):
            return slots.leave(record.id)
        assert record.spec.array_task
        return slots.wait(record.id, priority=record.spec.priority, index=record.spec.array_task.index)

    def forget(self, record: Record) -> None:
        """Drop a job that is known no more."""
        self._phases.pop(record.id, None)
        task = record.spec.array_task
        if task and (array := self.arrays.get(task.array_id)):
            array.ids.pop(record.id, None)
            if not array.ids:
                del self.arrays[task.array_id]

    # Questions -----------------------------------------------------------------------------------------------

    def open(self, record: Record) -> bool:
        """Whether a waiting job may be tried."""
        return not any(self._unmet(record.spec)) and not self._full(record)

    def hopeless(self, record: Record) -> str:
        """Say which of the jobs that were to succeed did not; "" while all still may."""
        for dependency, what in self._unmet(record.spec):
            if what is Verdict.NEVER:
                array = self.arrays.get(dependency.job_id)
                phases = array.phases if array else {self._phases[dependency.job_id]: 1}
                return never(dependency.job_id, phases, array=array is not None)
        return ""

    def refusal(self, record: Record) -> Refusal | None:
        """Why a waiting job may not be tried; None where it may."""
        if refusal := self.unmet(record.spec):
            return refusal
        if not self._full(record):
            return None
        task = record.spec.array_task
        assert task
        array = self.arrays[task.array_id]
        holding = array.slots.holding if array.slots else 0
        return array_full(array.id, task.running_max, holding, array.phases[Phase.QUEUED])

    def unmet(self, spec: JobSpec) -> Refusal | None:
        """Say which jobs have to come first; None where none have."""
        others: dict[Condition, list[str]] = {}
        for dependency, _ in self._unmet(spec):
            named = f"{dependency.job_id} ({self._stands(dependency.job_id)})"
            others.setdefault(dependency.condition, []).append(named)
        return awaits(others) if others else None

    def known(self, thing_id: str) -> bool:
        """Whether there is a job or an array of that id."""
        return thing_id not in self._leaving and (thing_id in self._records or thing_id in self.arrays)

    @contextmanager
    def leaving(self, thing_id: str) -> Iterator[None]:
        """Let nobody begin to wait for what is being forgotten."""
        self._leaving.add(thing_id)
        try:
            yield
        finally:
            self._leaving.discard(thing_id)

    def wanted(self, record: Record) -> bool:
        """Whether others wait for a job or for its array, or are about to."""
        task = record.spec.array_task
        return any(one in self._dependents or self._pins[one] for one in (record.id, task.array_id if task else ""))

    @contextmanager
    def pinned(self, dependencies: Sequence[Dependency]) -> Iterator[None]:
        """Keep jobs from being forgotten while a job is taken in that will wait for them."""
        self._pin(dependencies, 1)
        try:
            yield
        finally:
            self._pin(dependencies, -1)

    def _pin(self, dependencies: Sequence[Dependency], by: int) -> None:
        for dependency in dependencies:
            self._pins[dependency.job_id] += by
            if not self._pins[dependency.job_id]:
                del self._pins[dependency.job_id]

    def _full(self, record: Record) -> bool:
        task = record.spec.array_task
        array = self.arrays.get(task.array_id) if task else None
        return array is not None and array.slots is not None and not array.slots.open(record.id)

    def _unmet(self, spec: JobSpec) -> Iterator[tuple[Dependency, Verdict]]:
        for dependency in spec.dependencies:
            left, failed = self._standing(dependency.job_id)
            what = verdict(dependency.condition, left=left, failed=failed)
            if what is not Verdict.MET:
                yield dependency, what

    def _standing(self, thing_id: str) -> Standing:
        if array := self.arrays.get(thing_id):
            return array.standing
        phase = self._phases.get(thing_id)
        if phase is None:
            return 0, 0  # forgotten, which only those are that nobody waits for
        return int(not phase.ended), int(phase.ended and phase is not Phase.SUCCEEDED)

    def _stands(self, thing_id: str) -> str:
        if array := self.arrays.get(thing_id):
            return _counted(array.phases)
        return str(self._phases.get(thing_id, "unknown"))


def never(thing_id: str, phases: Mapping[Phase, int], *, array: bool) -> str:
    """Say of a job, or of an array by how many of its jobs are in each phase, that it has not succeeded.

    >>> never("0abc", {Phase.FAILED: 1}, array=False)
    'was to start after 0abc had succeeded, which failed'
    """
    if array:
        became = f"did not, all of it: {_counted(phases)}"
    else:
        (phase,) = phases
        became = "was cancelled" if phase is Phase.CANCELLED else phase.value
    return f"was to start after {thing_id} had succeeded, which {became}"


def _counted(phases: Mapping[Phase, int]) -> str:
    return ", ".join(f"{phases[phase]} {phase}" for phase in Phase if phases.get(phase))
