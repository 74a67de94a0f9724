"""Checks the answers of replicas and watches against the stored jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cotenant.core.model.lifecycle import ENDED, Phase
from cotenant.history.events import Listed, Watched


class Reads:
    """Tracks ended jobs and what clients saw; `on_wrong` is called with each wrong answer."""

    def __init__(self, on_wrong: Callable[[str], None]) -> None:
        self._on_wrong = on_wrong
        self._ended: dict[str, tuple[int, Phase]] = {}  # revision and phase of the end
        self._listed: dict[str, int] = {}  # by client, the last revision it saw
        self._watched: dict[str, tuple[int, dict[str, Phase]]] = {}  # by client, the latest phases in its stream

    def kept(self, job_id: str, phase: Phase, revision: int) -> None:
        """Record a write of a job."""
        if phase in ENDED:
            self._ended.setdefault(job_id, (revision, phase))

    def listed(self, event: Listed) -> None:
        """Check a list of all ended jobs."""
        if event.revision < (before := self._listed.get(event.client, 0)):
            self._on_wrong(f"{event.client} was told of {event.revision} after {before}")
        self._listed[event.client] = event.revision
        ended = {job_id: phase for job_id, (revision, phase) in self._ended.items() if revision <= event.revision}
        for job_id in sorted(ended.keys() | event.phases.keys()):
            if ended.get(job_id) is not event.phases.get(job_id):
                told = event.phases.get(job_id)
                self._on_wrong(f"{event.client} was told that {job_id} is {told} at {event.revision}")

    def watched(self, event: Watched) -> None:
        """Check an update of a watch: an end is final."""
        stream, told = self._watched.get(event.client, (0, {}))
        if event.stream != stream:
            told = {}
            self._watched[event.client] = event.stream, told
        before = told.get(event.job_id)
        if before in ENDED and event.phase is not before:
            self._on_wrong(f"{event.client} was told that {event.job_id} is {event.phase} after {before}")
        told[event.job_id] = event.phase

    def finish(self, kept: Mapping[str, Phase]) -> None:
        """Check that every watcher has seen the final state of all jobs once nothing changes."""
        for client, (_, told) in self._watched.items():
            for job_id, phase in kept.items():
                if told.get(job_id) is not phase:
                    self._on_wrong(f"{client} was told last that {job_id} is {told.get(job_id)}")
