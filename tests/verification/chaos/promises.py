"""What must come of what users and operators asked for: changes that stay, jobs that wait, nodes that stay empty."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cotenant.core.model.dependencies import Condition
from cotenant.core.model.lifecycle import AttemptState, Phase
from cotenant.history.events import AttemptPut, Began, Commit, Event, JobGone, JobPut, NodePut

NOT_TO_ITS_END = (
    AttemptState.STOPPING,
    AttemptState.STOPPED,
    AttemptState.FAILED,
    AttemptState.LOST,
    AttemptState.NOT_LAUNCHED,
)
ASKED = {
    "alone": "jobs that stop when disconnected",
    "service": "services",
    "after": "jobs that come after others",
    "updated": "updates",
    "suspended": "suspensions",
    "drained": "drains",
    "cordoned": "cordons",
    "moved": "moves",
    "weighed": "updates of tenants",
    "removed": "tenants removed",
    "promised": "services whose arrivals were changed",
    "done": "nodes given up",
    "pried": "looks for others' jobs",
}


@dataclass
class Acknowledgements:
    """What was answered, and what became of it."""

    after: dict[str, dict[str, str]] = field(default_factory=dict)  # by job: the jobs before it, with their conditions
    services: set[str] = field(default_factory=set)
    priorities: dict[str, set[int]] = field(default_factory=dict)  # by job: those that it may have
    suspended: list[tuple[str, float, float]] = field(default_factory=list)  # which job was, from when to when
    closed: list[tuple[str, str]] = field(default_factory=list)  # which node was, before which job was submitted
    moved: list[tuple[str, int]] = field(default_factory=list)  # which job, from the nodes of which attempt
    forgotten: dict[str, Phase] = field(default_factory=dict)  # jobs that the queue keeps no more, as they ended
    counts: Counter[str] = field(default_factory=Counter)  # of what was asked for
    _jobs: dict[str, JobPut] = field(default_factory=dict)  # as last kept
    _made: dict[str, int] = field(default_factory=dict)  # by job: at which revision
    _ended: dict[str, int] = field(default_factory=dict)
    _first: dict[str, int] = field(default_factory=dict)  # by job: of its first attempt
    _numbers: dict[str, int] = field(default_factory=dict)
    _stopped: set[tuple[str, int]] = field(default_factory=set)  # attempts that were told to stop, or did not end well
    _places: dict[tuple[str, int], frozenset[str]] = field(default_factory=dict)  # by attempt: its nodes
    _given: dict[str, list[tuple[int, str]]] = field(default_factory=lambda: defaultdict(list))  # by node
    _opened: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))  # by node: when it took work again

    def take_answer(self, line: Mapping[str, Any]) -> None:
        """Take in what a user wrote down."""
        self.counts.update(ASKED[name] for name in ASKED.keys() & {name for name, value in line.items() if value})
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
        """Take in what was committed."""
        for commit in commits:
            for change in commit.changes:
                match change:
                    case JobPut(job_id=job_id):
                        self._jobs[job_id] = change
                        self._made.setdefault(job_id, commit.revision)
                        if change.phase.ended:
                            self._ended.setdefault(job_id, commit.revision)
                    case JobGone(job_id=job_id) if (job := self._jobs.get(job_id)) and job.phase.ended:
                        self.forgotten[job_id] = job.phase
                    case AttemptPut(job_id=job_id, number=number, state=state) if state in NOT_TO_ITS_END:
                        self._stopped.add((job_id, number))
                    case AttemptPut(job_id=job_id, number=number) if number > self._numbers.get(job_id, 0):
                        self._numbers[job_id] = number
                        self._first.setdefault(job_id, commit.revision)
                        self._places[job_id, number] = change.nodes
                        for node_id in change.nodes:
                            self._given[node_id].append((commit.revision, f"{job_id}/{number}"))
                    case NodePut(node_id=node_id, takes_work=True):
                        self._opened[node_id].append(commit.revision)

    def judge(self, edges: Sequence[tuple[float, Event]]) -> list[str]:
        """All that was not kept, given that all jobs have ended, and what edges recorded since the last rest.

        A start that was under way when its job was suspended may still happen; then it is stopped.
        """
        wrong = [what for job_id, before in self.after.items() for what in self._dependency_violation(job_id, before)]
        for job_id, allowed in self.priorities.items():
            if (job := self._jobs.get(job_id)) and job.priority not in allowed:
                wrong.append(f"{job_id} was given priority {sorted(allowed)}, and has {job.priority}")
        by_themselves = (job_id for job_id in sorted(self.services) if self._phase(job_id) is Phase.SUCCEEDED)
        wrong += [f"{job_id}, a service, ended by itself" for job_id in by_themselves]
        wrong += [what for node_id, since in self.closed for what in self._closed_node_violation(node_id, since)]
        wrong += [what for job_id, number in self.moved for what in self._migration_violation(job_id, number)]
        for job_id, begin, end in self.suspended:
            began = [event for at, event in edges if isinstance(event, Began) and begin <= at <= end]
            wrong += [
                f"{job_id}/{event.number} began on {event.node_id} while it was suspended, and was not stopped"
                for event in began
                if event.job_id == job_id and (job_id, event.number) not in self._stopped
            ]
        self.suspended.clear()
        return wrong

    def why_cancelled(self, job_id: str) -> bool:
        """Whether the queue may have cancelled a job by itself: what it was to come after did not succeed."""
        return any(
            condition == Condition.AFTER_OK and self._phase(other) is not Phase.SUCCEEDED
            for other, condition in self.after.get(job_id, {}).items()
        )

    def _phase(self, job_id: str) -> Phase | None:
        return self._jobs[job_id].phase if job_id in self._jobs else None

    def _dependency_violation(self, job_id: str, before: Mapping[str, str]) -> list[str]:
        first = self._first.get(job_id)
        if first is None:
            return []
        wrong = [
            f"{job_id} began at {first}, and {other} before it ended at {self._ended.get(other)}"
            for other in before
            if first < self._ended.get(other, first + 1)
        ]
        if self.why_cancelled(job_id):
            wrong.append(f"{job_id} ran, though what it comes after did not succeed")
        return wrong

    def _closed_node_violation(self, node_id: str, since: str) -> list[str]:
        """What was given to a node that took no work, from the first commit that surely came later until it did."""
        begin = self._made.get(since)
        if begin is None:
            return []  # which is another fault, and told as that
        end = min((revision for revision in self._opened[node_id] if revision > begin), default=None)
        return [
            f"{name} was placed on {node_id} at {revision}, which took no work from before {begin} on"
            for revision, name in self._given[node_id]
            if revision > begin and (end is None or revision < end)
        ]

    def _migration_violation(self, job_id: str, number: int) -> list[str]:
        """Attempts of a job that were placed where it was to keep away from. Gangs may, where nothing else would do."""
        left = self._places.get((job_id, number), frozenset())
        return [
            f"{job_id}/{later} was placed on {', '.join(sorted(nodes & left))}, from where attempt {number} was moved"
            for (other, later), nodes in self._places.items()
            if other == job_id and later > number and len(left) == len(nodes) == 1 and nodes & left
        ]
