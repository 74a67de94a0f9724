"""Checks the effects of acknowledged requests: updates stay, jobs wait for dependencies, drained nodes stay empty."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cotenant.core.model.dependencies import Condition
from cotenant.core.model.lifecycle import AttemptState, Phase
from cotenant.history.events import AttemptPut, Began, Commit, Event, JobGone, JobPut, NodePut

UNSUCCESSFUL_STATES = (
    AttemptState.STOPPING,
    AttemptState.STOPPED,
    AttemptState.FAILED,
    AttemptState.LOST,
    AttemptState.NOT_LAUNCHED,
)
REQUEST_KINDS = {
    "alone": "jobs that stop when disconnected",
    "service": "services",
    "after": "jobs with dependencies",
    "updated": "updates",
    "suspended": "suspensions",
    "drained": "drains",
    "cordoned": "cordons",
    "moved": "migrations",
    "weighed": "tenant updates",
    "removed": "tenants removed",
    "promised": "services with a new arrival rate",
    "done": "nodes forgotten",
    "pried": "lookups of other tenants' jobs",
}


@dataclass
class Acknowledgements:
    """Acknowledged requests, and their effects."""

    after: dict[str, dict[str, str]] = field(default_factory=dict)  # by job: its dependencies and their conditions
    services: set[str] = field(default_factory=set)
    priorities: dict[str, set[int]] = field(default_factory=dict)  # by job: the priorities it may have
    suspended: list[tuple[str, float, float]] = field(default_factory=list)  # job, begin, end
    closed: list[tuple[str, str]] = field(default_factory=list)  # node, and the job submitted after it was closed
    moved: list[tuple[str, int]] = field(default_factory=list)  # job, and the attempt whose nodes it must avoid
    forgotten: dict[str, Phase] = field(default_factory=dict)  # removed jobs, with their final phases
    counts: Counter[str] = field(default_factory=Counter)  # requests, by kind
    _jobs: dict[str, JobPut] = field(default_factory=dict)  # as last stored
    _created: dict[str, int] = field(default_factory=dict)  # by job: revision
    _ended: dict[str, int] = field(default_factory=dict)
    _first: dict[str, int] = field(default_factory=dict)  # by job: revision of its first attempt
    _numbers: dict[str, int] = field(default_factory=dict)
    _stopped: set[tuple[str, int]] = field(default_factory=set)  # attempts that were stopped, or did not succeed
    _nodes: dict[tuple[str, int], frozenset[str]] = field(default_factory=dict)  # by attempt: its nodes
    _placed: dict[str, list[tuple[int, str]]] = field(default_factory=lambda: defaultdict(list))
    _opened: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))  # by node: when it reopened

    def take_answer(self, line: Mapping[str, Any]) -> None:
        """Process a line that a user has written."""
        self.counts.update(
            REQUEST_KINDS[name] for name in REQUEST_KINDS.keys() & {name for name, value in line.items() if value}
        )
        match line:
            case {"job": job_id}:
                self.after[job_id] = line.get("after", {})
                self.services |= {job_id} if line.get("service") else set()
            case {"asked": job_id, "priority": priority}:
                self.priorities.setdefault(job_id, {0}).add(priority)
            case {"updated": job_id, "priority": priority}:
                self.priorities[job_id] = {priority}
            case {"suspended": job_id, "begin": begin, "end": end}:
                self.suspended.append((job_id, begin, end))
            case {"drained": node_id, "since": job_id} | {"cordoned": node_id, "since": job_id}:
                self.closed.append((node_id, job_id))
            case {"moved": job_id, "number": number}:
                self.moved.append((job_id, number))

    def take_commits(self, commits: Iterable[Commit]) -> None:
        """Process commits."""
        for commit in commits:
            for change in commit.changes:
                match change:
                    case JobPut(job_id=job_id):
                        self._jobs[job_id] = change
                        self._created.setdefault(job_id, commit.revision)
                        if change.phase.ended:
                            self._ended.setdefault(job_id, commit.revision)
                    case JobGone(job_id=job_id) if (job := self._jobs.get(job_id)) and job.phase.ended:
                        self.forgotten[job_id] = job.phase
                    case AttemptPut(job_id=job_id, number=number, state=state) if state in UNSUCCESSFUL_STATES:
                        self._stopped.add((job_id, number))
                    case AttemptPut(job_id=job_id, number=number) if number > self._numbers.get(job_id, 0):
                        self._numbers[job_id] = number
                        self._first.setdefault(job_id, commit.revision)
                        self._nodes[job_id, number] = change.nodes
                        for node_id in change.nodes:
                            self._placed[node_id].append((commit.revision, f"{job_id}/{number}"))
                    case NodePut(node_id=node_id, takes_work=True):
                        self._opened[node_id].append(commit.revision)

    def judge(self, edges: Sequence[tuple[float, Event]]) -> list[str]:
        """Return all violations, given that all jobs have ended, and the edge events since the last rest.

        A start in progress when its job was suspended may still happen; the attempt is then stopped.
        """
        wrong = [what for job_id, before in self.after.items() for what in self._dependency_violation(job_id, before)]
        for job_id, allowed in self.priorities.items():
            if (job := self._jobs.get(job_id)) and job.priority not in allowed:
                wrong.append(f"{job_id} was given priority {sorted(allowed)}, and has {job.priority}")
        uncancelled = (job_id for job_id in sorted(self.services) if self._phase(job_id) is Phase.SUCCEEDED)
        wrong += [f"{job_id}, a service, ended without being cancelled" for job_id in uncancelled]
        wrong += [what for node_id, since in self.closed for what in self._closed_node_violation(node_id, since)]
        wrong += [what for job_id, number in self.moved for what in self._migration_violation(job_id, number)]
        for job_id, begin, end in self.suspended:
            began = [event for at, event in edges if isinstance(event, Began) and begin <= at <= end]
            wrong += [
                f"{job_id}/{event.number} began on {event.node_id} while suspended, and was not stopped"
                for event in began
                if event.job_id == job_id and (job_id, event.number) not in self._stopped
            ]
        self.suspended.clear()
        return wrong

    def why_cancelled(self, job_id: str) -> bool:
        """Return whether the queue may have cancelled a job itself: a dependency ended other than it had to.

        A job that was cancelled may have ended before it ran, even if it had an attempt.
        """
        return any(
            self._never(other, condition)
            or (condition == Condition.AFTER_STARTED and self._phase(other) is not Phase.SUCCEEDED)
            for other, condition in self.after.get(job_id, {}).items()
        )

    def _never(self, job_id: str, condition: str) -> bool:
        """Return whether a job ended so that a condition for its end does not hold."""
        succeeded = self._phase(job_id) is Phase.SUCCEEDED
        return succeeded if condition == Condition.AFTER_FAIL else condition == Condition.AFTER_OK and not succeeded

    def _phase(self, job_id: str) -> Phase | None:
        return self._jobs[job_id].phase if job_id in self._jobs else None

    def _dependency_violation(self, job_id: str, before: Mapping[str, str]) -> list[str]:
        first = self._first.get(job_id)
        if first is None:
            return []
        wrong = [
            f"{job_id} began at {first}, and {other} before it {what} at {at}"
            for other, condition in before.items()
            for what, at in [self._event_before(other, condition)]
            if at is None or first < at
        ]
        if any(self._never(other, condition) for other, condition in before.items()):
            wrong.append(f"{job_id} ran, though a dependency ended other than it had to")
        return wrong

    def _event_before(self, job_id: str, condition: str) -> tuple[str, Any]:
        """Return what had to happen to a job first, and when it did; None if it never did."""
        if condition == Condition.AFTER_STARTED:
            return "began", self._first.get(job_id)
        return "ended", self._ended.get(job_id)

    def _closed_node_violation(self, node_id: str, since: str) -> list[str]:
        """Return attempts placed on a closed node between the first commit surely after its closing and its opening."""
        begin = self._created.get(since)
        if begin is None:
            return []  # a different violation, reported as such
        end = min((revision for revision in self._opened[node_id] if revision > begin), default=None)
        return [
            f"{name} was placed on {node_id} at {revision}, which accepted no work since before {begin}"
            for revision, name in self._placed[node_id]
            if revision > begin and (end is None or revision < end)
        ]

    def _migration_violation(self, job_id: str, number: int) -> list[str]:
        """Return attempts placed on nodes that their job was to avoid. Gangs may be, if no other nodes fit."""
        left = self._nodes.get((job_id, number), frozenset())
        return [
            f"{job_id}/{later} was placed on {', '.join(sorted(nodes & left))}, which attempt {number} had left"
            for (other, later), nodes in self._nodes.items()
            if other == job_id and later > number and len(left) == len(nodes) == 1 and nodes & left
        ]
