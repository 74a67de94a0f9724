"""Records every commit of the store; no fault affects its connection to the members."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from cotenant.codec.specs import STOP_REASONS
from cotenant.history.events import Commit, JobGone, JobPut, LeaderPut
from cotenant.history.recording import clock
from cotenant.history.stored import ATTEMPTS, LEADER, commit_of
from cotenant.security.tls_files import WatchedTlsFiles
from cotenant.storage.v1 import records_pb2
from cotenant.store.etcd import EtcdStore
from cotenant.store.port import Changes
from cotenant.v1 import job_pb2

T = TypeVar("T")

SILENCE_SECONDS_MAX = 7.5
ANSWER_SECONDS_MAX = 30.0
BALLAST = "chaos-ballast/"  # keys that fill the store, and that no part knows


class Recorder:
    """Follows the store from its first revision on, in a thread."""

    def __init__(self, endpoints: Sequence[str], log: Path, tls: WatchedTlsFiles | None = None) -> None:
        self.commits: list[Commit] = []
        self.wrong: list[str] = []
        self.failed: dict[tuple[str, int], str] = {}  # by attempt: message of its failure
        self.not_launched: Counter[str] = Counter()  # by node: number of attempts it could not launch
        self._refused: set[tuple[str, int]] = set()
        self._reasons: dict[tuple[str, int], str] = {}  # by attempt: stop reason
        self.revision = 0
        self.leaders: dict[str, str] = {}  # by service: the leader's address
        self.ended: set[str] = set()  # jobs that have ended and are still stored
        self._endpoints, self._log, self._tls = list(endpoints), log, tls
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="recorder")
        self._thread.start()
        self._store = self._run_on_loop(self._open())
        self._following = asyncio.run_coroutine_threadsafe(self._follow(), self._loop)

    def _run_on_loop(self, what: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(ANSWER_SECONDS_MAX)

    async def _open(self) -> EtcdStore:
        return EtcdStore(self._endpoints, silence_seconds_max=SILENCE_SECONDS_MAX, tls=self._tls)

    async def _follow(self) -> None:
        with self._log.open("a") as log:
            async for changes in self._store.watch("", after_revision=1):
                if not isinstance(changes, Changes):
                    self.wrong.append(f"history after {self.revision} was compacted before it was recorded")
                    return
                self._record(changes)
                for change in changes.changes:
                    value = b"" if change.key.startswith(BALLAST) else change.value or b""
                    print(changes.revision, change.key, value.hex(), file=log, flush=True)

    def _record(self, changes: Changes) -> None:
        try:
            self.commits.append(commit := commit_of(changes, clock()))
            for done in commit.changes:
                if isinstance(done, JobPut) and done.phase.ended:
                    self.ended.add(done.job_id)
                elif isinstance(done, JobGone):
                    self.ended.discard(done.job_id)
            for change in changes.changes:
                if change.key.startswith(ATTEMPTS) and change.value is not None:
                    attempt = records_pb2.StoredAttempt.FromString(change.value).attempt
                    if attempt.state == job_pb2.ATTEMPT_STATE_FAILED:
                        self.failed[attempt.job_id, attempt.number] = attempt.message
                    elif attempt.state == job_pb2.ATTEMPT_STATE_NOT_LAUNCHED:
                        self._note_not_launched(attempt)
                    if attempt.stop_reason:
                        self._reasons[attempt.job_id, attempt.number] = STOP_REASONS.from_wire(attempt.stop_reason)
                elif change.key.endswith(LEADER):
                    leader = records_pb2.StoredLeader.FromString(change.value or b"")
                    self.leaders[change.key.removesuffix(LEADER)] = leader.address
        except (DecodeError, ValueError) as error:
            self.wrong.append(f"the commit at {changes.revision} cannot be decoded: {error}")
        self.revision = changes.revision

    def _note_not_launched(self, attempt: job_pb2.Attempt) -> None:
        """Count an attempt that was not launched, once; its final record may be written again."""
        if (key := (attempt.job_id, attempt.number)) not in self._refused:
            self._refused.add(key)
            self.not_launched[attempt.launch_failure.node_id] += 1

    @property
    def stopped(self) -> Counter[str]:
        """Return how many attempts were stopped, by reason."""
        return Counter(f"stopped: {reason}" for reason in self._reasons.values())

    @property
    def placement_term(self) -> int:
        """Return the term of the current placement leader."""
        leads = (
            commit.revision
            for commit in reversed(self.commits)
            for change in commit.changes
            if isinstance(change, LeaderPut) and change.service == "placement"
        )
        return next(leads, 1)

    def store_revision(self) -> int:
        """Return the current revision of the store."""
        return self._run_on_loop(self._now())

    async def _now(self) -> int:
        return (await self._store.list("store/")).revision

    def close(self) -> None:
        """Stop following."""
        self._following.cancel()
        self._run_on_loop(self._store.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
