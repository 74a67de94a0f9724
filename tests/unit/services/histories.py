"""Invariants of the whole store history and of what agents ran."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from benchmarks.agents import ENDED, SimulatedAgent

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.storage.v1 import records_pb2
from cotenant.store.port import Changes, Store
from cotenant.v1 import job_pb2, resources_pb2

ATTEMPTS = "placement/attempts/"
Key = tuple[str, int]


@dataclass
class History:
    """Follows the records of attempts, revision by revision, and the reports of agents as they arrive."""

    live: dict[str, job_pb2.Attempt] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    ran: Counter[tuple[str, int, str]] = field(default_factory=Counter)
    running: dict[str, dict[Key, job_pb2.Attempt]] = field(default_factory=dict)  # by node
    wrong: list[str] = field(default_factory=list)
    resizing: dict[str, list[resources_pb2.NodeAllocation]] = field(default_factory=dict)
    resizes: int = 0
    regenerated: set[Key] = field(default_factory=set)  # attempts that were stopped for another number of replicas
    moved: set[Key] = field(default_factory=set)  # attempts that were stopped for a migration
    revisions: int = 0
    _task: asyncio.Task[None] | None = None

    def follow(self, store: Store) -> None:
        """Check every commit from the beginning on."""
        self._task = asyncio.create_task(self._follow(store))

    async def stop(self) -> None:
        """Stop checking."""
        if self._task:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _follow(self, store: Store) -> None:
        async for changes in store.watch(ATTEMPTS, after_revision=1):
            if not isinstance(changes, Changes):
                self.wrong.append("history was compacted before it was looked at")
                return
            self.look(changes)

    def look(self, changes: Changes) -> None:
        """Apply one commit."""
        self.revisions += 1
        for change in changes.changes:
            self._take(change.key.removeprefix(ATTEMPTS), change.value)
        self._check(changes.revision)

    def _take(self, job_id: str, value: bytes | None) -> None:
        stored = records_pb2.StoredAttempt.FromString(value) if value else records_pb2.StoredAttempt()
        attempt = stored.attempt if value else None
        before = self.live.pop(job_id, None)
        self.resizing.pop(job_id, None)
        if attempt and attempt.number < self.numbers.get(job_id, 0):
            self.wrong.append(f"{job_id} went back to attempt {attempt.number}")
        if before and (attempt is None or attempt.number != before.number):
            self.wrong.append(f"{job_id}/{before.number} was replaced while it was alive")
        if attempt:
            self.numbers[job_id] = attempt.number
            if attempt.stop_reason == job_pb2.STOP_REASON_MIGRATED:
                self.moved.add((job_id, attempt.number))
            if attempt.stop_reason == job_pb2.STOP_REASON_RESIZED:
                self.regenerated.add((job_id, attempt.number))
            if attempt.state not in (*ENDED, job_pb2.ATTEMPT_STATE_LOST):
                self.live[job_id] = attempt
                self.resizing[job_id] = list(stored.resizing)
                self.resizes += bool(stored.resizing) and not attempt.epoch

    def _check(self, revision: int) -> None:
        """Check that live attempts never share a core, nor more than the whole of a GPU."""
        owners: Counter[tuple[str, str]] = Counter()
        for job_id, attempt in self.live.items():
            owners.update(_owned(attempt, self.resizing.get(job_id, [])))
        self.wrong += [f"at {revision}: {what} is owned {milli}/1000" for what, milli in owners.items() if milli > 1000]

    # What agents do ------------------------------------------------------------------------------------------

    def watch(self, agent: SimulatedAgent) -> None:
        """Check what an agent starts."""
        agent.on_report = lambda report: self._report(agent, report)
        agent.on_resize = lambda key: self._resized(agent, key)
        agent.on_forget = lambda: self.running.setdefault(agent.node_id, {}).clear()

    def _report(self, agent: SimulatedAgent, report: agent_pb2.AttemptReport) -> None:
        here = self.running.setdefault(agent.node_id, {})
        key = (report.job_id, report.number)
        if report.state != job_pb2.ATTEMPT_STATE_RUNNING:
            here.pop(key, None)
            return
        self.ran[(*key, agent.node_id)] += 1
        for node_id, others in self.running.items():
            self.wrong += [
                f"{key} runs on {agent.node_id} beside {other} on {node_id}"
                for other in others
                if other[0] == key[0] and other[1] != key[1]
            ]
        self._use(agent, key, "starts")

    def _resized(self, agent: SimulatedAgent, key: Key) -> None:
        if key in self.running.get(agent.node_id, {}):
            self._use(agent, key, "is resized")

    def _use(self, agent: SimulatedAgent, key: Key, when: str) -> None:
        """Check that nothing an attempt uses on a node is used by another attempt there."""
        here = self.running.setdefault(agent.node_id, {})
        here[key] = job_pb2.Attempt(job_id=key[0], number=key[1])
        here[key].allocations.add().CopyFrom(agent.assignments[key].allocation)
        owners: Counter[tuple[str, str]] = Counter()
        for attempt in here.values():
            owners.update(_owned(attempt))
        self.wrong += [
            f"{what} is used {milli}/1000 when {key} {when}" for what, milli in owners.items() if milli > 1000
        ]


def _owned(attempt: job_pb2.Attempt, resizing: Sequence[resources_pb2.NodeAllocation] = ()) -> Counter[tuple[str, str]]:
    """Return what an attempt holds; during a resize, the cores before and after, once per task."""
    owned: Counter[tuple[str, str]] = Counter()
    before = {(part.node_id, task.rank): set(task.core_ids) for part in attempt.allocations for task in part.tasks}
    for part in resizing:
        for task in part.tasks:
            for core in set(task.core_ids) - before[part.node_id, task.rank]:
                owned[part.node_id, f"core {core}"] += 1000
    for part in attempt.allocations:
        for task in part.tasks:
            for core in task.core_ids:
                owned[part.node_id, f"core {core}"] += 1000
            for share in task.gpus:
                owned[part.node_id, share.uuid] += share.milli
    return owned
