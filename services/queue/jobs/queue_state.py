"""The queue's state in memory: all jobs, the table of active jobs, and the watchers. No IO."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from weakref import ReferenceType, WeakKeyDictionary, WeakValueDictionary, ref

from cotenant.codec import refusals, specs
from cotenant.core.model.job import JobSpec, Shape
from cotenant.core.model.job_table import NO_CODE, Capacity, JobRow, JobTable
from cotenant.core.model.lifecycle import Phase
from cotenant.core.model.node import NodeShape
from cotenant.core.model.refusal import Code, Refusal, Wait, begins_later, wait_of
from cotenant.core.policy.protocols import Order
from cotenant.core.prediction.earned_trust import JudgedPredictions
from cotenant.core.scheduling.fair_share import Standing
from cotenant.rpc.slices import Slices
from cotenant.services.queue.jobs import gpu_speeds
from cotenant.services.queue.jobs.dependency_gate import DependencyGate
from cotenant.services.queue.jobs.job_index import JobIndex
from cotenant.services.queue.jobs.job_record import Prediction
from cotenant.services.queue.jobs.messages import clone as clone
from cotenant.services.queue.jobs.messages import stored_message as stored_message
from cotenant.services.queue.jobs.new_jobs import NewJobs
from cotenant.services.queue.jobs.objective_status import ExpectedStart, write_status
from cotenant.services.queue.jobs.queue_events import QueueEvents
from cotenant.services.queue.jobs.resize_costs import ResizeMeter
from cotenant.services.queue.jobs.retry_backoff import RetryBackoff, begins_in_seconds
from cotenant.services.queue.jobs.schedule_book import ScheduleBook
from cotenant.services.queue.jobs.secret_gate import SecretGate
from cotenant.services.queue.jobs.sequence_set import SequenceSet
from cotenant.services.queue.jobs.startable import Startable
from cotenant.services.queue.jobs.store_footprint import StoreFootprint
from cotenant.services.queue.jobs.tenant_quota import TenantQuota
from cotenant.services.queue.jobs.transitions import EquivalenceKey, Record, borrows, held_by
from cotenant.services.queue.jobs.turnover import Turnover
from cotenant.services.queue.jobs.usage_accounting import UsageAccounting
from cotenant.services.queue.jobs.wait_reasons import NOT_YET, WaitReasons
from cotenant.services.queue.jobs.watchers import Watcher as Watcher
from cotenant.v1 import job_pb2, tenant_service_pb2

LOADED_AT_ONCE = 200  # jobs
ADDED_AT_ONCE = 200
UNPREDICTED = Prediction(math.nan, 0.0, "")
IN_TABLE = frozenset({Phase.QUEUED, Phase.STARTING, Phase.RUNNING})


class State:
    """Jobs by id, in order of admission."""

    def __init__(self, usage_half_life_seconds: float = 0.0, *, counts_worth: bool = False) -> None:
        """Begin without jobs; `counts_worth`: GPUs count by what their type is worth to the job that holds them."""
        self.events = QueueEvents()
        self.usage = UsageAccounting(usage_half_life_seconds)
        self.records: dict[str, Record] = {}
        self.dependency_gate = DependencyGate(self.records)
        self.secrets, self.schedules = SecretGate(), ScheduleBook()
        self.judged = JudgedPredictions()
        self.job_index = JobIndex()
        self.table = JobTable()
        self.tenants: dict[str, tuple[tenant_service_pb2.Tenant, int]] = {}  # with their revisions
        self.shapes: tuple[NodeShape, ...] = ()
        self.elastic = False
        self.resizable: dict[str, Record] = {}  # elastic jobs that wait or hold resources
        self.resize_meter = ResizeMeter()
        self.keeps_replicas = ""  # why elastic jobs keep their replicas; "" if they are resized
        self.held: dict[str, Record] = {}  # jobs that hold resources
        self.migrating: dict[str, Record] = {}  # migrated jobs that have not been planned since
        self.reasons = WaitReasons()
        self.ranked: Sequence[str] = ()  # waiting jobs, in the order of the last cycle
        self.beyond = SequenceSet()  # sequence numbers of jobs beyond their tenant's share in the last cycle
        self.shares: Mapping[str, Standing] = {}  # of tenants at their fair share in the last cycle
        self.last_order: tuple[list[str], Order] | None = None  # ids by row, and the policy's order
        self.stoppable: Sequence[
            tuple[str, int]
        ] = ()  # in the last cycle, with the number of waiting jobs that precede each
        self.expected_starts: Mapping[str, ExpectedStart] = {}  # of waiting jobs with a deadline, as forecast last
        self.unestimated: dict[str, None] = {}  # jobs for which the predictor was not asked yet
        self.startable = Startable()
        self._backoff = RetryBackoff()
        self._watchers: dict[Watcher, None] = {}  # in order of arrival
        self._sequence = 0
        self._shapes: WeakValueDictionary[Shape, EquivalenceKey] = WeakValueDictionary()
        self._specs: WeakKeyDictionary[JobSpec, ReferenceType[JobSpec]] = WeakKeyDictionary()
        self._tenant_numbers: dict[str, int] = {}
        self._counts_worth = counts_worth
        self.tenant_quota, self.footprint = TenantQuota(), StoreFootprint()
        self.turnover = Turnover()
        self.tenants_changed = 0  # number of changes

    @property
    def capacity(self) -> Capacity:
        """The cluster's capacity, as last reported by placement."""
        return self.table.capacity

    @capacity.setter
    def capacity(self, capacity: Capacity) -> None:
        self.table.capacity = capacity

    @property
    def ids(self) -> Sequence[str]:
        """Ids of all jobs, sorted; they increase with time."""
        return self.job_index.all

    @property
    def tenant_ids(self) -> list[str]:
        """Tenants that have had jobs, in the order of their numbers in the table."""
        return list(self._tenant_numbers)

    def update_tenant(self, tenant_id: str) -> None:
        """Update a tenant's weight in the table, and invalidate views: its parent may have changed."""
        self.tenants_changed += 1
        weight = self._weight(tenant_id)
        for job_id in self.table.ids:
            if self.records[job_id].spec.tenant == tenant_id:
                self.table.update(job_id, tenant_weight=weight)

    def _weight(self, tenant_id: str) -> float:
        return (self.tenants[tenant_id][0].weight or 1.0) if tenant_id in self.tenants else 1.0

    # Jobs ----------------------------------------------------------------------------------------------------

    def load(self, records: Sequence[Record]) -> None:
        """Add all stored jobs, in their order."""
        for _ in self.load_in_slices(records):
            pass

    def load_in_slices(self, records: Sequence[Record]) -> Iterator[None]:
        """Add all stored jobs, in their order; yield now and then, so that other tasks run."""
        slices = Slices(most=LOADED_AT_ONCE)
        new, others, now = NewJobs(), list[Record](), time.time()
        for record in records:
            its_class = new.known(record.spec)
            if its_class:
                self._sequence += 1
                record.sequence, record.spec, record.equivalence_key = self._sequence, its_class.spec, its_class.key
            else:
                decoded = record.spec
                self._assign_sequence(record)
                its_class = new.learn(decoded, record)
            self._publish(record)
            if not (its_class and new.take(record, its_class)):
                self.dependency_gate.update(record, backs_off=self.delayed(record))
                others.append(record)
            if slices.due():
                yield
        self.job_index.add_all(records)
        yield
        for record in new.records:
            self.footprint.count(record)
            self.startable.update(record, waits=True)
            record.age(now, fragmented=False)
            if slices.due():
                yield
        self.startable.take_new()  # their waits are counted up to now
        self.dependency_gate.add_new(record.id for record in new.records)
        new.fill(self.table, self.row)
        yield
        for record in others:
            self.sync(record)
            record.compact()
            if slices.due():
                yield
        self.events.changed()

    def add(self, record: Record) -> None:
        """Add a job."""
        self._assign_sequence(record)
        self._publish(record)
        self.job_index.add(record)
        self.sync(record)

    def add_in_slices(self, records: Sequence[Record]) -> Iterator[None]:
        """Add many jobs that belong together: all appear at once, and are scheduled slice by slice.

        The caller must exhaust the iterator: until then the last of them are not scheduled, or none is visible.
        """
        slices = Slices(most=ADDED_AT_ONCE)
        array = self.dependency_gate.new_array(records)
        alike: dict[Hashable, EquivalenceKey] = {}
        for record in records:
            self._assign_sequence(record, alike)
            if array:
                self.dependency_gate.count_task(array, record, backs_off=self.delayed(record))
            if slices.due():
                yield
        for record in records:
            self._publish(record)
        self.job_index.add_all(records)
        if array:
            self.dependency_gate.add_array(array, records)
        else:
            for record in records:
                self.dependency_gate.update(record, backs_off=self.delayed(record))
        yield
        for record in records:
            self.sync(record)
            record.compact()
            if slices.due():
                yield

    def _assign_sequence(self, record: Record, alike: dict[Hashable, EquivalenceKey] | None = None) -> None:
        """Assign sequence number and equivalence key; `alike` caches the keys by what is compared the fastest."""
        self._sequence += 1
        record.sequence = self._sequence
        if record.spec.array_task is None:
            record.spec = self._intern(record.spec)
        known = None
        if alike is not None and not (_sized_later(record.spec) or record.spec.pre_run_seconds is not None):
            known = alike.get(_likeness(record.spec))
        record.equivalence_key = known or self._shapes.setdefault(record.requested_spec.shape, record.equivalence_key)
        if alike is not None:
            alike[_likeness(record.spec)] = record.equivalence_key

    def _intern(self, spec: JobSpec) -> JobSpec:
        """Return one object for equal specs while a job has it: the specs of many jobs are equal."""
        known = self._specs.get(spec)
        if known is not None and (shared := known()) is not None:
            return shared
        self._specs[spec] = ref(spec)
        return spec

    def _publish(self, record: Record) -> None:
        self.records[record.id] = record
        self.tenant_quota.live[record.spec.tenant] += not record.end_reported
        if not (record.phase.ended or record.spec.array_task):
            self.unestimated[record.id] = None

    def take_unestimated(self, most: int) -> list[Record]:
        """Return jobs to be estimated now, and remove them from the list."""
        taken = [job_id for job_id, _ in zip(self.unestimated, range(most), strict=False)]
        for job_id in taken:
            del self.unestimated[job_id]
        return [record for job_id in taken if (record := self.records.get(job_id)) and not record.phase.ended]

    def level(self, job_id: str) -> tuple[int, float]:
        """Return the level and the score that the last cycle's order gave a job."""
        if self.last_order is None or job_id not in self.last_order[0]:
            return 0, 0.0
        row = self.last_order[0].index(job_id)
        return int(self.last_order[1].level[row]), float(self.last_order[1].score[row])

    def votes(self, job_id: str) -> Mapping[str, float]:
        """Return what the last cycle's policy made the level and the score of a job of; empty if it names nothing."""
        if self.last_order is None or self.last_order[1].votes is None or job_id not in self.last_order[0]:
            return {}
        return self.last_order[1].votes(self.last_order[0].index(job_id))

    def remove(self, job_id: str) -> None:
        """Remove a deleted job."""
        record = self.records.pop(job_id)
        self.resizable.pop(job_id, None)
        self.resize_meter.forget(job_id)
        self.footprint.forget(record)
        self.dependency_gate.forget(record)
        self._backoff.forget(job_id)
        self.job_index.remove(record)
        for watcher in self._watchers:
            if not watcher.only or watcher.only == job_id:
                watcher.notify_removed(record)

    def sync(self, record: Record) -> None:
        """Update the table, the indexes, the watchers and the cycle after a change of a job."""
        phase, job_id = record.phase, record.id
        if self.records.get(job_id) is not record:
            return  # deleted in between
        self.footprint.count(record)
        self.usage.sync(record)
        self.job_index.set_phase(record)
        if record.spec.elastic:
            self._update_resizable(record)
        if record.spec.pre_run_seconds is not None or _sized_later(record.spec):
            self._update_equivalence(record)
        if record.spec.open and phase is Phase.QUEUED and record.estimated_after not in (None, record.attempt_number):
            self.unestimated[job_id] = None  # its replicas are sized by what was observed while it ran
        delayed = phase is Phase.QUEUED and self.delayed(record)
        if delayed:
            self.events.delay_began(record, max(self._backoff.left_seconds(record), begins_in_seconds(record)))
        touched = self.dependency_gate.update(record, backs_off=delayed)
        waits = delayed or (phase is Phase.QUEUED and not self.open(record))
        if phase in IN_TABLE and not waits:
            self._add_row(record)
            self._update_running(record, running=phase is not Phase.QUEUED)
        elif job_id in self.table:
            self.table.remove(job_id)
        self._update_startable(record)
        if phase.holds_resources:
            self.held[job_id] = record
        else:
            self.held.pop(job_id, None)
        if record.migrating:
            self.migrating[job_id] = record
        else:
            self.migrating.pop(job_id, None)
        if phase.ended and not record.end_reported:
            record.end_reported, record.estimate = True, None
            self.tenant_quota.live[record.spec.tenant] -= 1
            self.turnover.measure(record)
            self.events.ended(record)
        if (waits or phase is Phase.SUSPENDED) and (why := self.dependency_gate.unsatisfiable_reason(record)):
            self.events.unsatisfiable(record, why)
        self._notify(job_id)
        self.events.changed()
        for other in touched:
            self.sync_known(other)  # while jobs are loaded, some dependents are not added yet

    def sync_known(self, job_id: str) -> None:
        """Sync a job if it is known."""
        if known := self.records.get(job_id):
            self.sync(known)

    def _update_equivalence(self, record: Record) -> None:
        """Update the equivalence key of a job whose requests can change."""
        shape = self._shapes.setdefault(record.requested_spec.shape, EquivalenceKey())
        if shape is not record.equivalence_key:
            record.equivalence_key = shape
            if record.id in self.table:
                self.table.remove(record.id)

    def _update_startable(self, record: Record) -> None:
        waits = record.phase is Phase.QUEUED and record.id in self.table
        self.startable.update(record, waits=waits)
        if waits:
            self.table.update(record.id, code=record.equivalence_key.code)

    def rows_apart(self) -> list[int]:
        """Return the rows of waiting jobs whose reason in the last cycle may differ from that of their class."""
        reasons, table = self.reasons, self.table
        own = [table.row(job_id) for job_id in reasons.own if job_id in table and not table.running(job_id)]
        divided = [key.code for key in reasons.classes.divided if key.code != NO_CODE] if reasons.head is None else []
        return [*own, *table.rows_of(divided)] if divided else own

    def age(self, now: float) -> None:
        """Count for all waiting jobs the time since the last cycle, as fragmented or not.

        It is counted by class, and one by one only for jobs that have begun to wait since, or whose own reason may
        differ from that of others of their class.
        """
        before, apart = self.reasons, self.startable.take_new()
        for job_id in [self.table.ids[row] for row in self.rows_apart()]:
            apart[job_id] = self.records[job_id]
        counted = [record.fragmented_seconds for record in apart.values()]
        before.age_classes(now)
        for record, seconds in zip(apart.values(), counted, strict=True):
            record.fragmented_seconds = seconds
            before.age(record, now)

    def _notify(self, job_id: str) -> None:
        for watcher in self._watchers:
            if not watcher.only or watcher.only == job_id:
                watcher.notify(job_id)

    def refresh_row(self, record: Record, *, estimate: bool = False) -> None:
        """Update the table after a change of a job's spec; `estimate`: the change needs a new estimate."""
        if estimate and record.phase is Phase.QUEUED:
            self.unestimated[record.id] = None
        self._update_equivalence(record)
        if record.id in self.table:
            self.table.remove(record.id)
        self.sync(record)

    def row(self, record: Record) -> JobRow:
        """Return a job's row for the table."""
        spec, requested_spec = record.spec, record.requested_spec
        return JobRow(
            record.id,
            arrival_seconds=record.created_seconds,
            sequence=record.sequence,
            **requested_spec.resources(auto=1)._asdict(),
            replicas=requested_spec.replicas,
            priority=spec.priority,
            tenant=self._tenant_numbers.setdefault(spec.tenant, len(self._tenant_numbers)),
            tenant_weight=self._weight(spec.tenant),
            deadline_seconds=spec.deadline_seconds if spec.deadline_seconds is not None else float("inf"),
            preemptible=spec.preemptible,
        )

    def _add_row(self, record: Record) -> None:
        if record.id in self.table:
            return
        if record.spec.array_task and record.estimate is None:
            self.unestimated[record.id] = None  # not earlier: most tasks of a large array may wait for long
        self.table.add(self.row(record))
        counts = self._counts_worth and record.run_seconds
        worth = gpu_speeds.gpu_worth(record, self.shapes, record.job.past_attempts) if counts else 1.0
        self.table.attain(record.id, record.run_seconds, worth)
        if record.attempt_number:
            self.table.update(record.id, waiting_since=record.waiting_since, borrows=borrows(record))
        self.estimate(record)

    def _update_resizable(self, record: Record) -> None:
        if record.phase is not Phase.QUEUED:
            record.replicas_chosen = record.replicas_most = None  # they were for the start
        if record.phase is not Phase.RUNNING:
            record.resize_note = ""
        self.resize_meter.changed(record, time.time())
        if record.phase.ended or record.phase is Phase.SUSPENDED:
            self.resizable.pop(record.id, None)
            self.resize_meter.forget(record.id)
        else:
            self.resizable[record.id] = record

    def choose_replicas(self, record: Record, count: int) -> None:
        """Set the number of replicas with which a waiting elastic job would start."""
        if record.elastic_replicas == count and record.replicas_chosen is not None:
            return
        record.replicas_chosen = count
        self._update_equivalence(record)
        if record.phase is Phase.QUEUED and record.id not in self.table:
            self._add_row(record)
            self._update_startable(record)

    def estimate(self, record: Record) -> None:
        """Update the table with a job's estimate, and with the replicas that it asks for now."""
        if record.spec.open and record.phase is Phase.QUEUED and record.id in self.table:
            self._update_equivalence(record)
            if record.id not in self.table:
                self._add_row(record)
                self._update_startable(record)
                return
        if record.id in self.table:
            told = record.prediction or UNPREDICTED
            self.table.update(record.id, predicted_seconds=told.seconds, confidence=told.confidence)
            if self.table.running(record.id):
                self._count_worth(record)

    def _update_running(self, record: Record, *, running: bool) -> None:
        runs = bool(self.table.running(record.id))
        if running and not runs:
            self.table.start(record.id, _running_since(record, time.time()), borrows=borrows(record))
            record.start_prediction = record.prediction
        elif runs and not running:
            self.table.remove(record.id)
            self._add_row(record)
        if running:
            self.table.update(record.id, cores=held_by(record).cores)
            self._count_worth(record)

    def _count_worth(self, record: Record) -> None:
        """Update what a running job's GPUs are worth to it."""
        if self._counts_worth:
            worth = gpu_speeds.gpu_worth(record, self.shapes, [record.job.attempt])
            self.table.update(record.id, gpu_worth=worth)

    def backing_off(self, record: Record) -> bool:
        """Return whether a job is in back-off."""
        return self._backoff.left_seconds(record) > 0

    def delayed(self, record: Record) -> bool:
        """Return whether a job may start only later: it is in back-off, or its begin time is still to come."""
        return self.backing_off(record) or begins_in_seconds(record) > 0

    def open(self, record: Record) -> bool:
        """Return whether a waiting job has all but resources: its dependencies are met, and its secrets are set."""
        return self.dependency_gate.open(record) and self.secrets.open(record)

    # Messages and refusals -----------------------------------------------------------------------------------

    def message(self, record: Record) -> job_pb2.Job:
        """Return a job as callers see it: with its refusal, and the attained service up to now."""
        job = stored_message(record)
        if not record.phase.ended:
            write_status(job, record, time.time(), self.judged, self.expected_starts.get(record.id))
        if record.phase is Phase.QUEUED:
            refusal, since = self.refusal(record)
            job.refusal.CopyFrom(refusals.to_text(refusal))
            job.refusal.since.FromNanoseconds(int(since * 1e9))
        elif record.phase is Phase.RUNNING:
            job.attained_gpu_seconds = record.attained_gpu_seconds(time.time())
        return job

    def refusal(self, record: Record) -> tuple[Refusal, float]:
        """Return why a job waits, and since when that has been the reason."""
        waits_since = record.waiting_since
        if left_seconds := self._backoff.left_seconds(record):
            return Refusal(
                Code.BACK_OFF,
                f"{record.job.phase_reason}; waits {left_seconds:.0f} s before the next attempt",
                "the time passes",
            ), waits_since
        if shut := self.dependency_gate.refusal(record):
            return shut, waits_since
        if begins_in_seconds(record) > 0:
            return begins_later(record.spec.begin_seconds or 0.0), waits_since
        if lacking := self.secrets.refusal(record.spec):
            return lacking, waits_since
        refusal, since = self.reasons.of(record, time.time()) or (NOT_YET, waits_since)
        if record.sequence in self.beyond:
            standing = self.shares.get(record.spec.tenant)
            refusal = standing.refine(refusal) if standing else replace(refusal, over_share=True)
        return refusal, max(since, waits_since)

    def wait(self, record: Record) -> Wait:
        """Return the wait category of a queued job, consistent with `refusal`."""
        if (record.not_before_seconds or record.spec.begin_seconds) and self.delayed(record):
            return Wait.DEPENDENCY
        if not self.open(record):
            return Wait.DEPENDENCY
        return wait_of(self.reasons.code(record), over_share=record.sequence in self.beyond)

    def watch(self, only: str = "", concerned: Callable[[Record], bool] = lambda record: True) -> Watcher:
        """Start to watch all jobs, or one; `unwatch` ends it. See `Watcher` for removed jobs."""
        watcher = Watcher(only, concerned)
        self._watchers[watcher] = None
        return watcher

    def unwatch(self, watcher: Watcher) -> None:
        """Stop watching."""
        self._watchers.pop(watcher, None)


def _running_since(record: Record, now: float) -> float:
    """Return since when a job counts as running, by this process's clock, in unix seconds.

    The attempt's times are from the clocks of other machines. What starts now has not run yet, whatever these say: if
    they were an hour slow, each start would seem to have run for an hour, and the next waiting job would take its
    place, for ever.
    """
    if record.phase is Phase.STARTING:
        return now
    attempt = record.job.attempt
    return min(now, specs.seconds(attempt.start_time if attempt.HasField("start_time") else attempt.assign_time))


def _sized_later(spec: JobSpec) -> bool:
    """Return whether a job's number of replicas is chosen after its submission."""
    return bool(spec.open) or spec.elastic


def _likeness(spec: JobSpec) -> Hashable:
    """Return what differs if the shapes of two specs do; hashing a shape is slow."""
    return id(spec.roles), spec.locality, spec.spread, spec.preemptible
