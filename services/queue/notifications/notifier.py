"""Sends the notifications about jobs, as the leader.

What is due follows from the jobs and from the records of notifications, so this keeps no state that a restart needs:
a message that was sent or given up is noted in its record, and the record is deleted after the last one. A message
whose note was lost is sent again, with the same id.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TypeVar

import structlog

from cotenant import telemetry
from cotenant.codec import specs
from cotenant.codec.errors import Problem
from cotenant.codec.job_events import EventKind
from cotenant.core.model.dependencies import Dependency
from cotenant.core.model.notification import ENDS, MAIL, Trigger, due, end_of, scheme_of
from cotenant.rpc.task_group import BackgroundTasks
from cotenant.security.redaction import redact_others
from cotenant.services.queue.jobs.dependency_gate import Array
from cotenant.services.queue.jobs.job_store import ARRAYS, JOBS, JobStore
from cotenant.services.queue.jobs.notification_records import NOTIFICATIONS, load_notifications
from cotenant.services.queue.jobs.transitions import Record, add_event
from cotenant.services.queue.notifications import contents
from cotenant.services.queue.notifications.mail import Mailer
from cotenant.services.queue.notifications.rules import NotificationRules
from cotenant.services.queue.notifications.schedule import Message, Schedule
from cotenant.services.queue.notifications.webhook import Undelivered, Webhooks
from cotenant.storage.v1 import records_pb2
from cotenant.store import schema
from cotenant.store.port import Delete, Put, StoreUnavailable

log = structlog.get_logger()
Result = TypeVar("Result")

THREADS_MAX = 8
STORE_RETRY_SECONDS = 1.0
EVENT_TRIES = 3

SENT = telemetry.counter("cotenant.queue.notifications_sent", "{message}", "Notifications that a receiver accepted.")
FAILED = telemetry.counter("cotenant.queue.notifications_failed", "{try}", "Tries to send a notification that failed.")
DROPPED = telemetry.counter("cotenant.queue.notifications_dropped", "{message}", "Notifications that were given up.")
PENDING = telemetry.gauge(
    "cotenant.queue.notifications_pending", "{message}", "Notifications that are due and not sent."
)


class Notifier:
    """Finds out which notifications are due, and sends them."""

    def __init__(self, job_store: JobStore, rules: NotificationRules) -> None:
        self.rules = rules
        self._job_store, self._state, self._store = job_store, job_store.state, job_store.store
        self._records: dict[str, records_pb2.StoredNotifications] = {}
        self._starts: dict[str, float] = {}
        self._pins: dict[str, ExitStack] = {}  # keep jobs with pending notifications from being deleted
        self._schedule = Schedule(rules.per_minute, rules.pending_max)
        self._threads = ThreadPoolExecutor(THREADS_MAX, "notifications")
        self._webhooks = Webhooks(rules, self._threads)
        self._mailer = Mailer(rules.smtp, self._threads, rules.timeout_seconds) if rules.smtp else None
        self._tasks = BackgroundTasks()
        self._wake, self._noting = asyncio.Event(), asyncio.Lock()

    async def run(self) -> None:
        """Send forever, beginning with what earlier leaders have left."""
        watcher = self._state.watch()
        sending = asyncio.create_task(self._send_due())
        try:
            await self._resume()
            while True:
                changed = await watcher.take()
                for thing_id in dict.fromkeys(filter(None, map(self._thing_of, changed))):
                    await self._look(thing_id)
        finally:
            self._state.unwatch(watcher)
            sending.cancel()
            await self._tasks.close()
            self._threads.shutdown(wait=False, cancel_futures=True)

    # What is due ---------------------------------------------------------------------------------------------

    def _thing_of(self, job_id: str) -> str:
        """Return the array of a job that notifies somebody, or the job itself; "" for any other job."""
        record = self._state.records.get(job_id)
        if record is None or not record.spec.notify:
            return ""
        return record.spec.array_task.array_id if record.spec.array_task else job_id

    async def _resume(self) -> None:
        """Look at every record in the store."""
        for entry in (await _retrying(lambda: self._store.list(NOTIFICATIONS))).entries:
            try:
                stored = load_notifications(entry)
            except (schema.NewerSchema, schema.BadRecord) as error:
                log.warning("notifications_unreadable", key=entry.key, error=str(error))
                continue
            self._records.setdefault(stored.id, stored)
            if self._any_job(stored.id) is None and not await self._exists(stored.id):
                await _retrying(lambda key=entry.key: self._store.transact([], [Delete(key)]))  # type: ignore[misc]  # bound
                del self._records[stored.id]
            else:
                await self._look(stored.id)

    async def _exists(self, thing_id: str) -> bool:
        """Return whether a job or an array is stored, also if it is just being created."""
        for prefix in (JOBS, ARRAYS):
            if await _retrying(lambda key=prefix + thing_id: self._store.get(key)):  # type: ignore[misc]  # bound
                return True
        return False

    def _array(self, thing_id: str) -> Array | None:
        return self._state.dependency_gate.arrays.get(thing_id)

    def _any_job(self, thing_id: str) -> Record | None:
        """Return a job, or some job of an array, of which all have the same spec."""
        array = self._array(thing_id)
        return self._state.records.get(next(iter(array.ids), "") if array else thing_id)

    async def _look(self, thing_id: str) -> None:
        """Add what is due about a job or an array to the schedule."""
        record = self._any_job(thing_id)
        if record is None or not (happened := self._happened(thing_id, record)):
            return
        if (stored := await self._stored(thing_id)) is None:
            return
        if thing_id not in self._pins and not happened.keys().isdisjoint(ENDS):
            self._pins[thing_id] = ExitStack()
            self._pins[thing_id].enter_context(self._state.dependency_gate.pin([Dependency(thing_id)]))
        for one in [*due(stored.targets, specs.triggers_from_wire(stored.triggers), happened, stored.done)]:
            message = Message(thing_id, record.spec.tenant, one, stored.targets[one.target])
            if not self._schedule.knows(message) and not self._schedule.add(message):
                await self._finish(message, "its tenant has too many pending notifications")
        await self._forget_if_done(thing_id)
        PENDING.set(len(self._schedule))
        self._wake.set()

    def _happened(self, thing_id: str, record: Record) -> Mapping[Trigger, float]:
        """Return what has happened to a job or an array, with the times."""
        happened: dict[Trigger, float] = {}
        if Trigger.STARTED in record.spec.notify_on and (started := self._started(thing_id)):
            happened[Trigger.STARTED] = started
        array = self._array(thing_id)
        if array is None and record.phase.ended:
            happened[Trigger(record.phase)] = record.ended_seconds
        elif array is not None and not array.left and (last := self._state.records.get(array.last_ended)):
            happened[end_of(array.phases)] = last.ended_seconds
        return happened

    def _started(self, thing_id: str) -> float:
        """Return when a job, or the first job of an array, ran for the first time; 0 if none has."""
        if thing_id not in self._starts:
            array, records = self._array(thing_id), self._state.records
            found = [record for one in (array.ids if array else (thing_id,)) if (record := records.get(one))]
            since = min((record.started_seconds for record in found if record.started_seconds), default=0.0)
            if not since:
                return 0.0
            self._starts[thing_id] = since
        return self._starts[thing_id]

    async def _stored(self, thing_id: str) -> records_pb2.StoredNotifications | None:
        """Return the record; None if nothing is left to send."""
        if thing_id not in self._records:
            entry = await _retrying(lambda: self._store.get(NOTIFICATIONS + thing_id))
            if entry is None:
                return None
            self._records.setdefault(thing_id, load_notifications(entry))
        return self._records[thing_id]

    # Sending -------------------------------------------------------------------------------------------------

    async def _send_due(self) -> None:
        while True:
            now = time.time()
            while message := self._schedule.take(now):
                self._tasks.start(self._send(message))
            at = self._schedule.wake_at()
            self._wake.clear()
            if at is not None and at <= now:  # it waits for a place, which wakes this
                at = None
            try:
                async with asyncio.timeout(None if at is None else at - now):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def _send(self, message: Message) -> None:
        try:
            await self._try_or_explain(message)
        except Undelivered as error:
            FAILED.add()
            late = time.time() > message.due.since + self.rules.give_up_seconds
            log.warning("notification_failed", job=message.about, host=message.host, reason=str(error))
            if error.passing and not late:
                self._schedule.retry(message, time.time(), random.random())
            else:
                await self._finish(message, str(error))
        else:
            await self._finish(message, "")
        self._wake.set()

    async def _try_or_explain(self, message: Message) -> None:
        """Send a message once; an unexpected error counts as a failed try.

        Raises:
            Undelivered: it was not accepted.
        """
        try:
            await self._try(message)
        except Undelivered:
            raise
        except Exception as error:
            log.exception("notification_broken", job=message.about, host=message.host)
            raise Undelivered(f"an internal error: {type(error).__name__}") from error

    async def _try(self, message: Message) -> None:
        """Send a message once.

        Raises:
            Undelivered: it was not accepted.
        """
        record, event = self._any_job(message.about), message.due.trigger.value
        if record is None:
            raise Undelivered("its job was deleted", passing=False)
        said = self._contents(message, record)
        if scheme_of(message.target) == MAIL:
            if self._mailer is None:
                raise Undelivered("this mesh no longer sends e-mail", passing=False)
            address = message.target.removeprefix(f"{MAIL}:")
            subject, text = contents.subject_of(said, event), contents.text_of(said)
            await self._mailer.send(address, subject, text, message.id)
            return
        key = self.rules.key_of(message.tenant)
        if not key:
            raise Undelivered("this mesh no longer calls webhooks", passing=False)
        body = contents.body_of(message.id, event, said)
        signed = contents.signature(key, int(time.time()), body)
        await self._webhooks.post(message.target, body, {contents.DELIVERY: message.id, contents.SIGNATURE: signed})

    def _contents(self, message: Message, record: Record) -> dict[str, object]:
        if array := self._array(message.about):
            return contents.array_contents(array.id, record.job, array.phases)
        reason = redact_others(record.job.phase_reason, self._hidden_from(message.tenant))
        return contents.job_contents(record.job, reason)

    def _hidden_from(self, tenant: str) -> Callable[[str], str | None]:
        def name_of(job_id: str) -> str | None:
            record = self._any_job(job_id)
            return None if record is None or record.spec.tenant == tenant else record.spec.name

        return name_of

    # Afterwards ----------------------------------------------------------------------------------------------

    async def _finish(self, message: Message, given_up: str) -> None:
        """Note that a message was sent, or given up and why."""
        async with self._noting:
            if stored := await self._stored(message.about):
                stored.done.append(message.due.key)
                put = Put(NOTIFICATIONS + message.about, stored.SerializeToString())
                await _retrying(lambda: self._store.transact([], [put]))
        self._schedule.finish(message)
        PENDING.set(len(self._schedule))
        what = f"{message.due.trigger}, to {message.host}"
        if given_up:
            DROPPED.add()
            log.warning("notification_given_up", job=message.about, host=message.host, reason=given_up)
            await self._add_event(message.about, EventKind.NOT_NOTIFIED, f"{what}: {given_up}")
        else:
            SENT.add()
            log.info("notification_sent", job=message.about, host=message.host, tries=message.tries + 1)
            await self._add_event(message.about, EventKind.NOTIFIED, what)
        await self._forget_if_done(message.about)

    async def _forget_if_done(self, thing_id: str) -> None:
        """Delete the record of a job or an array that has ended, if nothing is left to send."""
        async with self._noting:
            record, stored = self._any_job(thing_id), await self._stored(thing_id)
            if record is None or stored is None:
                return
            happened = self._happened(thing_id, record)
            triggers = specs.triggers_from_wire(stored.triggers)
            if happened.keys().isdisjoint(ENDS) or any(due(stored.targets, triggers, happened, stored.done)):
                return
            await _retrying(lambda: self._store.transact([], [Delete(NOTIFICATIONS + thing_id)]))
            self._records.pop(thing_id, None)
            self._starts.pop(thing_id, None)
            if pin := self._pins.pop(thing_id, None):
                pin.close()

    async def _add_event(self, thing_id: str, kind: EventKind, detail: str) -> None:
        """Add an event to the job, or to the first of an array; it is left out if the job changes all the time."""
        array = self._array(thing_id)
        for _ in range(EVENT_TRIES):
            if (record := self._state.records.get(array.first if array else thing_id)) is None:
                return
            try:
                await self._job_store.change(record, lambda stored: add_event(stored, kind, detail))
            except (StoreUnavailable, Problem):
                await asyncio.sleep(STORE_RETRY_SECONDS)
            else:
                return


async def _retrying(call: Callable[[], Awaitable[Result]]) -> Result:
    """Return what a call to the store returns, once the store is available."""
    while True:
        try:
            return await call()
        except StoreUnavailable as error:
            log.warning("notification_delayed", error=str(error))
            await asyncio.sleep(STORE_RETRY_SECONDS)
