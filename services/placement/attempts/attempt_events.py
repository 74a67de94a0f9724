"""Stream of attempt changes for watchers, such as the queue."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.internal.v1 import placement_service_pb2 as placement_pb2
from cotenant.internal.v1.attempt_pb2 import ObservedAttempt
from cotenant.v1 import job_pb2

HISTORY_MAX = 10_000
BACKLOG_MAX = 2_000  # events queued for a slow watcher before they are replaced by a snapshot
BATCH_ATTEMPTS_MAX = 200  # attempts in one message, when many events are queued
Event = placement_pb2.WatchAttemptsResponse


class _Watcher:
    def __init__(self) -> None:
        self.events: deque[Event] = deque()
        self.progress: dict[str, job_pb2.Progress] = {}
        self.profiled: deque[agent_pb2.ProfileReport] = deque(maxlen=BACKLOG_MAX)
        self.wake = asyncio.Event()


class AttemptEvents:
    """All attempts as last committed, the recent changes, and the watchers.

    Revisions of events never decrease: an attempt published after a later commit gets that commit's revision, so that
    a watcher that resumes from a revision has missed nothing before it.
    """

    def __init__(self) -> None:
        self._attempts: dict[str, ObservedAttempt] = {}
        self._history: deque[Event] = deque()
        self._forgotten = 0  # the last revision that the history no longer covers
        self._revision = 0
        self._watchers: dict[_Watcher, None] = {}  # in order of arrival
        self._closed = False

    def start(self, revision: int, attempts: Iterable[ObservedAttempt]) -> None:
        """Start from the attempts that exist at a revision; the caller must not change them later."""
        self._attempts = {observed.attempt.job_id: observed for observed in attempts}
        self._revision = self._forgotten = max(revision, self._revision)
        self._history.clear()
        for watcher in self._watchers:
            self._catch_up(watcher)

    def publish(self, revision: int, attempts: Sequence[ObservedAttempt]) -> None:
        """Publish attempts committed at a revision."""
        self._revision = max(self._revision, revision)
        event = Event(revision=self._revision, attempts=attempts)
        for observed in event.attempts:
            self._attempts[observed.attempt.job_id] = observed
        self._history.append(event)
        while len(self._history) > HISTORY_MAX:
            self._forgotten = self._history.popleft().revision
        self._send(event)

    def forget(self, job_id: str, number: int) -> None:
        """Leave an attempt out of future snapshots."""
        known = self._attempts.get(job_id)
        if known and known.attempt.number == number:
            del self._attempts[job_id]

    def committed(self, job_id: str) -> ObservedAttempt | None:
        """Return a job's attempt as last committed, without later uncommitted changes; None if there is none."""
        return self._attempts.get(job_id)

    def publish_capacity(self) -> None:
        """Announce that capacity changed: nodes came, went or changed."""
        self._send(Event(revision=self._revision, capacity_changed=True))

    def publish_progress(self, job_id: str, progress: job_pb2.Progress) -> None:
        """Publish a job's progress; a slow watcher receives only the latest."""
        for watcher in self._watchers:
            watcher.progress[job_id] = progress
            watcher.wake.set()

    def publish_profiled(self, report: agent_pb2.ProfileReport) -> None:
        """Publish a profile report; a watcher that is far behind receives only the latest ones."""
        for watcher in self._watchers:
            watcher.profiled.append(report)
            watcher.wake.set()

    def _send(self, event: Event) -> None:
        for watcher in self._watchers:
            if len(watcher.events) < BACKLOG_MAX:
                watcher.events.append(event)
                watcher.wake.set()
            else:
                self._catch_up(watcher)

    def _catch_up(self, watcher: _Watcher) -> None:
        watcher.events.clear()
        watcher.events.append(self._snapshot())
        watcher.wake.set()

    def close(self) -> None:
        """End all watches."""
        self._closed = True
        for watcher in self._watchers:
            watcher.wake.set()

    def _snapshot(self) -> Event:
        return Event(revision=self._revision, attempts=self._attempts.values(), snapshot=True, capacity_changed=True)

    async def watch(self, after_revision: int) -> AsyncIterator[Event]:
        """Yield the changes after a revision, starting with a snapshot if the history does not reach back to it.

        Changes at that revision itself are repeated, since the caller may have seen only some of them.
        """
        watcher = _Watcher()
        if after_revision and self._forgotten < after_revision <= self._revision:
            watcher.events.extend(event for event in self._history if event.revision >= after_revision)
        else:
            watcher.events.append(self._snapshot())
        self._watchers[watcher] = None
        try:
            while not self._closed:
                while watcher.events:
                    yield _next_batch(watcher.events)
                if watcher.progress:
                    latest, watcher.progress = watcher.progress, {}
                    yield Event(
                        revision=self._revision,
                        progress=[placement_pb2.JobProgress(job_id=job, progress=one) for job, one in latest.items()],
                    )
                if watcher.profiled:
                    reports = list(watcher.profiled)
                    watcher.profiled.clear()
                    yield Event(revision=self._revision, profiled=reports)
                await watcher.wake.wait()
                watcher.wake.clear()
        finally:
            self._watchers.pop(watcher, None)


def _next_batch(events: deque[Event]) -> Event:
    """Return the next queued events merged into one, because a message costs its receiver as much as its content.

    Attempts stay in order. A snapshot is sent alone, because attempts that are missing from it are gone.
    """
    first = events.popleft()
    if first.snapshot or not events or events[0].snapshot:
        return first
    batch = Event()
    batch.CopyFrom(first)  # the history keeps the original
    while events and not events[0].snapshot and len(batch.attempts) + len(events[0].attempts) <= BATCH_ATTEMPTS_MAX:
        batch.MergeFrom(events.popleft())
    return batch
