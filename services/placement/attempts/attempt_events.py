"""Changes of attempts, for those who watch: the queue."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence

from cotenant.v1 import job_pb2
from cotenant.v1 import node_service_pb2 as node_pb2
from cotenant.v1 import placement_service_pb2 as placement_pb2

HISTORY_MAX = 10_000
BEHIND_MAX = 2_000  # events that wait for a slow watcher before it is given a whole picture instead
TOGETHER_MAX = 200  # attempts that are told of in one message, where many events wait
Event = placement_pb2.WatchAttemptsResponse


class _Watcher:
    def __init__(self) -> None:
        self.events: deque[Event] = deque()
        self.progress: dict[str, job_pb2.Progress] = {}
        self.profiled: deque[node_pb2.ProfileReport] = deque(maxlen=BEHIND_MAX)
        self.wake = asyncio.Event()


class Feed:
    """All attempts as they were committed last, the last changes, and everyone who watches.

    What is told rises in revision: an attempt that is told of late, after a younger commit, is told under the younger
    revision, so that whoever goes on from a revision has missed nothing before it.
    """

    def __init__(self) -> None:
        self._attempts: dict[str, job_pb2.Attempt] = {}
        self._history: deque[Event] = deque()
        self._forgotten = 0  # the revision up to which the history does not reach back
        self._revision = 0
        self._watchers: dict[_Watcher, None] = {}  # in the order in which they came
        self._closed = False

    def start(self, revision: int, attempts: Iterable[job_pb2.Attempt]) -> None:
        """Begin at a revision with what there is then."""
        self._attempts = {attempt.job_id: _copy(attempt) for attempt in attempts}
        self._revision = self._forgotten = max(revision, self._revision)
        self._history.clear()
        for watcher in self._watchers:
            self._catch_up(watcher)

    def publish(self, revision: int, attempts: Sequence[job_pb2.Attempt]) -> None:
        """Tell of attempts committed at a revision."""
        self._revision = max(self._revision, revision)
        event = Event(revision=self._revision, attempts=attempts)
        for attempt in event.attempts:
            self._attempts[attempt.job_id] = attempt
        self._history.append(event)
        while len(self._history) > HISTORY_MAX:
            self._forgotten = self._history.popleft().revision
        self._tell(event)

    def forget(self, job_id: str, number: int) -> None:
        """Leave an attempt out of pictures from now on."""
        known = self._attempts.get(job_id)
        if known and known.number == number:
            del self._attempts[job_id]

    def kept(self, job_id: str) -> job_pb2.Attempt | None:
        """A job's attempt as it was committed last, whatever has been heard of it since; None where none was."""
        return self._attempts.get(job_id)

    def publish_capacity(self) -> None:
        """Tell that nodes came, went or changed."""
        self._tell(Event(revision=self._revision, capacity_changed=True))

    def publish_progress(self, job_id: str, progress: job_pb2.Progress) -> None:
        """Tell how far a job has come; a watcher that is behind hears only the last of it."""
        for watcher in self._watchers:
            watcher.progress[job_id] = progress
            watcher.wake.set()

    def publish_profiled(self, report: node_pb2.ProfileReport) -> None:
        """Tell what came of a profile; a watcher that is far behind hears only the last of it."""
        for watcher in self._watchers:
            watcher.profiled.append(report)
            watcher.wake.set()

    def _tell(self, event: Event) -> None:
        for watcher in self._watchers:
            if len(watcher.events) < BEHIND_MAX:
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
        """Yield changes after a revision; begin with a whole picture where they are not all known.

        Changes at that very revision come once more, since the caller may have seen only a part of them.
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
                    yield _together(watcher.events)
                if watcher.progress:
                    told, watcher.progress = watcher.progress, {}
                    yield Event(
                        revision=self._revision,
                        progress=[placement_pb2.JobProgress(job_id=job, progress=said) for job, said in told.items()],
                    )
                if watcher.profiled:
                    reports = list(watcher.profiled)
                    watcher.profiled.clear()
                    yield Event(revision=self._revision, profiled=reports)
                await watcher.wake.wait()
                watcher.wake.clear()
        finally:
            self._watchers.pop(watcher, None)


def _together(events: deque[Event]) -> Event:
    """Take what waits, as one event: each message costs the one who hears it as much as what it tells.

    Attempts stay in order. A whole picture goes alone, for what is not in it is gone.
    """
    first = events.popleft()
    if first.snapshot or not events or events[0].snapshot:
        return first
    told = Event()
    told.CopyFrom(first)  # the history has it as it was
    while events and not events[0].snapshot and len(told.attempts) + len(events[0].attempts) <= TOGETHER_MAX:
        told.MergeFrom(events.popleft())
    return told


def _copy(attempt: job_pb2.Attempt) -> job_pb2.Attempt:
    copy = job_pb2.Attempt()
    copy.CopyFrom(attempt)
    return copy
