"""Changes of attempts, for those who watch: the queue."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

from cotenant.v1 import job_pb2
from cotenant.v1 import placement_service_pb2 as placement_pb2

HISTORY_MAX = 10_000
Event = placement_pb2.WatchAttemptsResponse


class _Watcher:
    def __init__(self) -> None:
        self.events: deque[Event] = deque()
        self.progress: dict[str, job_pb2.Progress] = {}
        self.wake = asyncio.Event()


class Feed:
    """The last changes, and everyone who watches. Attempts are passed on as they were at their revision."""

    def __init__(self, picture: Callable[[], Iterable[job_pb2.Attempt]]) -> None:
        self._picture = picture
        self._history: deque[Event] = deque(maxlen=HISTORY_MAX)
        self._forgotten = 0  # the revision up to which the history does not reach back
        self._revision = 0
        self._watchers: set[_Watcher] = set()
        self._closed = False

    def start(self, revision: int) -> None:
        """Begin at a revision; what was before it is known by the picture alone."""
        self._revision = self._forgotten = revision
        self._history.clear()
        for watcher in self._watchers:
            watcher.events.append(self._snapshot())
            watcher.wake.set()

    def publish(self, revision: int, attempts: Sequence[job_pb2.Attempt]) -> None:
        """Tell of attempts committed at a revision."""
        event = Event(revision=revision, attempts=attempts)
        if len(self._history) == HISTORY_MAX:
            self._forgotten = self._history[0].revision
        self._history.append(event)
        self._revision = max(self._revision, revision)
        self._tell(event)

    def publish_capacity(self) -> None:
        """Tell that nodes came, went or changed."""
        self._tell(Event(revision=self._revision, capacity_changed=True))

    def publish_progress(self, job_id: str, progress: job_pb2.Progress) -> None:
        """Tell how far a job has come; a watcher that is behind hears only the last of it."""
        for watcher in self._watchers:
            watcher.progress[job_id] = progress
            watcher.wake.set()

    def _tell(self, event: Event) -> None:
        for watcher in self._watchers:
            watcher.events.append(event)
            watcher.wake.set()

    def close(self) -> None:
        """End all watches."""
        self._closed = True
        for watcher in self._watchers:
            watcher.wake.set()

    def _snapshot(self) -> Event:
        return Event(revision=self._revision, attempts=self._picture(), snapshot=True, capacity_changed=True)

    async def watch(self, after_revision: int) -> AsyncIterator[Event]:
        """Yield changes after a revision; begin with a whole picture where they are not all known.

        Changes at that very revision come once more, since the caller may have seen only a part of them.
        """
        watcher = _Watcher()
        if after_revision and self._forgotten <= after_revision <= self._revision:
            watcher.events.extend(event for event in self._history if event.revision >= after_revision)
        else:
            watcher.events.append(self._snapshot())
        self._watchers.add(watcher)
        try:
            while not self._closed:
                while watcher.events:
                    yield watcher.events.popleft()
                if watcher.progress:
                    told, watcher.progress = watcher.progress, {}
                    yield Event(
                        revision=self._revision,
                        progress=[placement_pb2.JobProgress(job_id=job, progress=said) for job, said in told.items()],
                    )
                await watcher.wake.wait()
                watcher.wake.clear()
        finally:
            self._watchers.discard(watcher)
