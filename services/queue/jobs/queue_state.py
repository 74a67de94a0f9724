"""All jobs that the queue knows, the table of active ones, and everyone who watches. No IO."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from weakref import ReferenceType, WeakKeyDictionary, WeakValueDictionary, ref

from cotenant.codec import refusals, specs
from cotenant.core.model.job import JobSpec, Shape
from cotenant.core.model.job_table import Capacity, JobRow, JobTable
from cotenant.core.model.lifecycle import Phase
from cotenant.core.model.node import NodeShape
from cotenant.core.model.refusal import Code, Refusal, Wait, wait_of
from cotenant.core.policy.protocols import Order
from cotenant.core.scheduling.fair_share import Standing
from cotenant.rpc.slices import Slices
from cotenant.services.queue.jobs.dependency_gate import Gates
from cotenant.services.queue.jobs.job_index import Listing
from cotenant.services.queue.jobs.messages import clone as clone
from cotenant.services.queue.jobs.messages import kept_message as kept_message
from cotenant.services.queue.jobs.retry_backoff import BackOffs
from cotenant.services.queue.jobs.startable import Startable
from cotenant.services.queue.jobs.store_footprint import Footprint
from cotenant.services.queue.jobs.tenant_quota import Room
from cotenant.services.queue.jobs.transitions import Record, ShapeKey, held_by
from cotenant.services.queue.jobs.turnover import Turnover
from cotenant.services.queue.jobs.wait_reasons import NOT_YET, Reasons
from cotenant.services.queue.jobs.watchers import Watcher as Watcher
from cotenant.v1 import job_pb2, tenant_service_pb2

LOADED_AT_ONCE = 200  # jobs
ADDED_AT_ONCE = 200
IN_TABLE = frozenset({Phase.QUEUED, Phase.STARTING, Phase.RUNNING})


class State:
    """Jobs by id, in the order in which they were taken in."""

    def __init__(self) -> None:
        self.wake: Callable[[], None] = lambda: None  # set by whoever schedules
        self.ended: Callable[[Record], None] = lambda record: None  # set by whoever learns from ends
        self.later: Callable[[float, Record], None] = lambda seconds, record: None  # set by whoever knows the time
        self.hopeless: Callable[[Record, str], None] = lambda record, why: None  # set by whoever ends jobs
        self.records: dict[str, Record] = {}
        self.gates = Gates(self.records)
        self.listing = Listing()
        self.table = JobTable()
        self.tenants: dict[str, tuple[tenant_service_pb2.Tenant, int]] = {}  # with the revision of each
        self.shapes: tuple[NodeShape, ...] = ()
        self.elastic = False
        self.held: dict[str, Record] = {}  # jobs that hold resources
        self.moving: dict[str, Record] = {}  # jobs that were moved, and have not asked for their new places yet
        self.reasons = Reasons()
        self.ranked: Sequence[str] = ()  # waiting jobs, in the last cycle's order
        self.beyond: Container[int] = ()  # sequences of jobs beyond their tenant's share, in the last cycle's eyes
        self.shares: Mapping[str, Standing] = {}  # of tenants that held their fair share in the last cycle
        self.last_order: tuple[list[str], Order] | None = None  # ids by row, and the policy's answer
        self.stoppable: Sequence[tuple[str, int]] = ()  # by the last cycle, with how many that wait come before each
        self.unestimated: dict[str, None] = {}  # jobs of which the predictor was not asked yet
        self.startable = Startable()
        self._back_offs = BackOffs()
        self._watchers: dict[Watcher, None] = {}  # in the order in which they came
        self._sequence = 0
        self._shapes: WeakValueDictionary[Shape, ShapeKey] = WeakValueDictionary()
        self._specs: WeakKeyDictionary[JobSpec, ReferenceType[JobSpec]] = WeakKeyDictionary()
        self._tenant_numbers: dict[str, int] = {}
        self.room, self.footprint = Room(), Footprint()
        self.turnover = Turnover()
        self.tenants_changed = 0  # how often

    @property
    def capacity(self) -> Capacity:
        """What the jobs may share, as placement told last."""
        return self.table.capacity

    @capacity.setter
    def capacity(self, capacity: Capacity) -> None:
        self.table.capacity = capacity

    @property
    def ids(self) -> Sequence[str]:
        """Ids of all jobs, sorted; they rise with time."""
        return self.listing.all

    @property
    def tenant_ids(self) -> list[str]:
        """Tenants that have had jobs, in the order of the numbers that the table knows them by."""
        return list(self._tenant_numbers)

    def reweigh(self, tenant_id: str) -> None:
        """Let the table know that a tenant's weight may have changed, and views that it may belong to another one."""
        self.tenants_changed += 1
        weight = self._weight(tenant_id)
        for job_id in self.table.ids:
            if self.records[job_id].spec.tenant == tenant_id:
                self.table.update(job_id, tenant_weight=weight)

    def _weight(self, tenant_id: str) -> float:
        return (self.tenants[tenant_id][0].weight or 1.0) if tenant_id in self.tenants else 1.0

    # Jobs ----------------------------------------------------------------------------------------------------

    def load(self, records: Sequence[Record]) -> None:
        """Take in all jobs that were kept, in their order."""
        for _ in self.loading(records):
            pass

    def loading(self, records: Sequence[Record]) -> Iterator[None]:
        """Take in all jobs that were kept, in their order; stop now and then, so that others may go on."""
        slices = Slices(most=LOADED_AT_ONCE)
        for record in records:
            self.gates.learn(record, backs_off=self.backing_off(record))
            if slices.due():
                yield
        for record in records:
            self.add(record)
            record.rest()
            if slices.due():
                yield

    def add(self, record: Record) -> None:
        """Take a job in."""
        self._number(record)
        self._show(record)
        self.listing.add(record)
        self.sync(record)

    def adding(self, records: Sequence[Record]) -> Iterator[None]:
        """Take in many jobs that belong together: all are there at once, and get their turns some at a time.

        Whoever stops in between has to go on: until then the last of them are not tried, or none is there.
        """
        slices = Slices(most=ADDED_AT_ONCE)
        array = self.gates.new_array(records)
        alike: dict[int, ShapeKey] = {}
        for record in records:
            self._number(record, alike)
            if array:
                self.gates.count_in(array, record, backs_off=self.backing_off(record))
            if slices.due():
                yield
        for record in records:
            self._show(record)
        self.listing.add_all(records)
        if array:
            self.gates.attach(array, records)
        else:
            for record in records:
                self.gates.learn(record, backs_off=self.backing_off(record))
        yield
        for record in records:
            self.sync(record)
            record.rest()
            if slices.due():
                yield

    def _number(self, record: Record, alike: dict[int, ShapeKey] | None = None) -> None:
        """Give a job its place among all, and its shape; `alike` has those of jobs with the very same roles."""
        self._sequence += 1
        record.sequence = self._sequence
        if record.spec.array_task is None:
            record.spec = self._shared(record.spec)
        known = None
        if alike is not None and not (record.spec.open or record.spec.pre_run_seconds is not None):
            known = alike.get(id(record.spec.roles))
        record.shape = known or self._shapes.setdefault(record.asks.shape, record.shape)
        if alike is not None:
            alike[id(record.spec.roles)] = record.shape

    def _shared(self, spec: JobSpec) -> JobSpec:
        """Return one object for equal specs while a job has it: many jobs differ in nothing that their users wrote."""
        known = self._specs.get(spec)
        if known is not None and (shared := known()) is not None:
            return shared
        self._specs[spec] = ref(spec)
        return spec

    def _show(self, record: Record) -> None:
        self.records[record.id] = record
        self.room.live[record.spec.tenant] += not record.told_ended
        if not (record.phase.ended or record.spec.array_task):
            self.unestimated[record.id] = None

    def take_unestimated(self, most: int) -> list[Record]:
        """Jobs about which the predictor should be asked now; they are asked about once."""
        taken = [job_id for job_id, _ in zip(self.unestimated, range(most), strict=False)]
        for job_id in taken:
            del self.unestimated[job_id]
        return [record for job_id in taken if (record := self.records.get(job_id)) and not record.phase.ended]

    def level(self, job_id: str) -> tuple[int, float]:
        """The level and the score that the last cycle's order gave a job."""
        if self.last_order is None or job_id not in self.last_order[0]:
            return 0, 0.0
        row = self.last_order[0].index(job_id)
        return int(self.last_order[1].level[row]), float(self.last_order[1].score[row])

    def remove(self, job_id: str) -> None:
        """Forget an ended job."""
        record = self.records.pop(job_id)
        self.footprint.forget(record)
        self.gates.forget(record)
        self._back_offs.forget(job_id)
        self.listing.remove(record)
        self._tell(job_id)

    def sync(self, record: Record) -> None:
        """Let the table, the watchers and the cycle know what a job has become."""
        phase, job_id = record.phase, record.id
        if self.records.get(job_id) is not record:
            return  # forgotten meanwhile
        self.footprint.count(record)
        self.listing.place(record)
        if record.spec.pre_run_seconds is not None or record.spec.open:
            self._reshape(record)
        if record.spec.open and phase is Phase.QUEUED and record.estimated_after not in (None, record.attempt_number):
            self.unestimated[job_id] = None  # as many replicas as it needs by what it showed while it ran
        backs_off = phase is Phase.QUEUED and self.backing_off(record)
        if backs_off:
            self.later(self._back_offs.left_seconds(record), record)
        touched = self.gates.learn(record, backs_off=backs_off)
        waits = backs_off or (phase is Phase.QUEUED and not self.gates.open(record))
        if phase in IN_TABLE and not waits:
            self._enter(record)
            self._run(record, running=phase is not Phase.QUEUED)
        elif job_id in self.table:
            self.table.remove(job_id)
        self.startable.note(record, waits=record.phase is Phase.QUEUED and record.id in self.table)
        if phase.holds_resources:
            self.held[job_id] = record
        else:
            self.held.pop(job_id, None)
        if record.moving:
            self.moving[job_id] = record
        else:
            self.moving.pop(job_id, None)
        if phase.ended and not record.told_ended:
            record.told_ended, record.estimate = True, None
            self.room.live[record.spec.tenant] -= 1
            self.turnover.note(record)
            self.ended(record)
        if ((waits and not backs_off) or phase is Phase.SUSPENDED) and (why := self.gates.hopeless(record)):
            self.hopeless(record, why)
        self._tell(job_id)
        self.wake()
        for other in touched:
            if known := self.records.get(other):  # while all are loaded some are learnt of that are not here yet
                self.sync(known)

    def _reshape(self, record: Record) -> None:
        """Note what a job asks for, where that is not always the same."""
        shape = self._shapes.setdefault(record.asks.shape, ShapeKey())
        if shape is not record.shape:
            record.shape = shape
            if record.id in self.table:
                self.table.remove(record.id)

    def _tell(self, job_id: str) -> None:
        for watcher in self._watchers:
            if not watcher.only or watcher.only == job_id:
                watcher.tell(job_id)

    def renew(self, record: Record, *, estimate: bool = False) -> None:
        """Let the table know that a job's spec has changed; `estimate`: in a way that asks for another estimate."""
        if estimate and record.phase is Phase.QUEUED:
            self.unestimated[record.id] = None
        if record.id in self.table:
            self.table.remove(record.id)
        self.sync(record)

    def row(self, record: Record) -> JobRow:
        """A job as it enters the table."""
        spec, asks = record.spec, record.asks
        return JobRow(
            record.id,
            arrival_seconds=specs.seconds(record.job.create_time),
            sequence=record.sequence,
            gpu_milli=asks.gpu_milli,
            cores=sum(role.replicas * (role.request.cores or 1) for role in asks.roles),
            memory_bytes=sum(role.replicas * role.request.memory_bytes for role in asks.roles),
            replicas=asks.replicas,
            priority=spec.priority,
            tenant=self._tenant_numbers.setdefault(spec.tenant, len(self._tenant_numbers)),
            tenant_weight=self._weight(spec.tenant),
            deadline_seconds=spec.deadline_seconds if spec.deadline_seconds is not None else float("inf"),
            preemptible=spec.preemptible,
        )

    def _enter(self, record: Record) -> None:
        if record.id in self.table:
            return
        job = record.job
        if record.spec.array_task and record.estimate is None:
            self.unestimated[record.id] = None  # only now, for most of a large array may wait for long
        self.table.add(self.row(record))
        self.table.attain(record.id, specs.seconds(job.run_time))
        if job.attempt.HasField("end_time"):
            self.table.update(record.id, waiting_since=specs.seconds(job.attempt.end_time))
        self.estimate(record)

    def estimate(self, record: Record) -> None:
        """Let the table know what the predictor says of a job, and how many replicas it asks for now."""
        if record.spec.open and record.phase is Phase.QUEUED and record.id in self.table:
            self._reshape(record)
            if record.id not in self.table:
                self._enter(record)
                self.startable.note(record, waits=record.phase is Phase.QUEUED and record.id in self.table)
                return
        if record.id in self.table and record.estimate and record.estimate.predictable:
            self.table.update(
                record.id,
                predicted_seconds=record.ran_before_estimate_seconds + specs.seconds(record.estimate.remaining),
                confidence=record.estimate.confidence,
            )

    def _run(self, record: Record, *, running: bool) -> None:
        runs = bool(self.table.running(record.id))
        if running and not runs:
            attempt = record.job.attempt
            since = attempt.start_time if attempt.HasField("start_time") else attempt.assign_time
            self.table.start(record.id, specs.seconds(since))
        elif runs and not running:
            self.table.remove(record.id)
            self._enter(record)
        if running:
            self.table.update(record.id, cores=held_by(record).cores)

    def backing_off(self, record: Record) -> bool:
        """Whether a job waits for the time at which it may be tried again."""
        return self._back_offs.left_seconds(record) > 0

    # What is told --------------------------------------------------------------------------------------------

    def message(self, record: Record, *, phases: bool = False) -> job_pb2.Job:
        """A job as callers see it: with its reason to wait, and what it attains at this moment.

        With `phases` also how many jobs of its array are in each phase.
        """
        job = kept_message(record)
        if record.phase is Phase.QUEUED:
            refusal, since = self.refusal(record)
            job.refusal.CopyFrom(refusals.to_people(refusal))
            job.refusal.since.FromNanoseconds(int(since * 1e9))
        elif record.phase is Phase.RUNNING:
            ran = max(0.0, time.time() - specs.seconds(job.attempt.start_time))
            job.attained_gpu_seconds += ran * record.asks.gpu_milli / 1000
        if phases and record.spec.array_task:
            counts = self.gates.arrays[record.spec.array_task.array_id].phases
            for phase in Phase:
                if counts[phase]:
                    job.array_phases.add(phase=specs.PHASES.to_wire(phase), count=counts[phase])
        return job

    def refusal(self, record: Record) -> tuple[Refusal, float]:
        """Why a job waits, and since when that has been the reason."""
        waits_since = record.waiting_since
        if left_seconds := self._back_offs.left_seconds(record):
            return Refusal(
                Code.BACK_OFF,
                f"{record.job.phase_reason}; waits {left_seconds:.0f} s before the next attempt",
                "the time passes",
            ), waits_since
        if shut := self.gates.refusal(record):
            return shut, waits_since
        refusal, since = self.reasons.of(record, time.time()) or (NOT_YET, waits_since)
        if record.sequence in self.beyond:
            standing = self.shares.get(record.spec.tenant)
            refusal = standing.refine(refusal) if standing else replace(refusal, over_share=True)
        return refusal, max(since, waits_since)

    def wait(self, record: Record) -> Wait:
        """The kind of wait of a job that is queued, as `refusal` would tell it."""
        if record.not_before_seconds and self.backing_off(record):
            return Wait.DEPENDENCY
        if not self.gates.open(record):
            return Wait.DEPENDENCY
        return wait_of(self.reasons.code(record), over_share=record.sequence in self.beyond)

    def watch(self, only: str = "") -> Watcher:
        """Begin to watch all jobs, or one; `unwatch` ends it."""
        watcher = Watcher(only)
        self._watchers[watcher] = None
        return watcher

    def unwatch(self, watcher: Watcher) -> None:
        """Stop watching."""
        self._watchers.pop(watcher, None)
