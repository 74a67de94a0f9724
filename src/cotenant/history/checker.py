"""Checks a history, event by event, against the invariants of a mesh.

Theory of operation. The store's revisions order all commits, so each commit is checked against all before it; actions
of agents are checked against the commits and orders before them. Only one thing is inferred from clocks: whether a node
was away for so long that its attempts might be given up.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from cotenant.core.model.dependencies import Condition
from cotenant.core.model.lifecycle import ENDED, AttemptState, Phase
from cotenant.history.events import (
    Acknowledged,
    AttemptGone,
    AttemptPut,
    Began,
    Came,
    Cancelled,
    Change,
    Commit,
    Event,
    GivenUp,
    Holds,
    JobGone,
    JobPut,
    LeaderGone,
    LeaderPut,
    Left,
    Listed,
    NodePut,
    Over,
    Prioritized,
    Rebooted,
    Resized,
    Resource,
    Told,
    Watched,
    Welcomed,
    Wrote,
)
from cotenant.history.launches import Launches
from cotenant.history.phases import REACHABLE
from cotenant.history.reads import Reads

WHOLE = 1000
ROUNDING_SECONDS = 0.001
OVER = ENDED | {Phase.SUSPENDED}  # phases of a job without a live attempt
Key = tuple[str, int]  # job ID and attempt number


class Rule(StrEnum):
    """The invariants."""

    OWNERSHIP = "no core and no GPU has two owners"
    LOST = "nothing acknowledged is lost"
    ONCE = "a request creates at most one job, and a job runs once at a time"
    GANG = "a gang runs completely or not at all"
    EPOCH = "agents reject stale terms and epochs"
    LIFE = "jobs and attempts follow their life cycles"
    TERM = "nothing is written under an expired term"
    RESTART = "a restart ends no running attempt"
    TURN = "a job starts only when it is due, on a node that accepts work"
    READ = "reads are complete at their revision, and never go back"
    PLATFORM = "a refused launch fails no job"
    RANGE = "an elastic job keeps to its range"


@dataclass(frozen=True, slots=True)
class RuleViolation:
    """A violated rule: at which event, and what happened."""

    rule: Rule
    place: int
    what: str

    def __str__(self) -> str:
        return f"event {self.place}: {self.what} ({self.rule})"


class Checker:
    """Processes a history; violations are in `broken` as soon as they are known."""

    def __init__(self, lost_after_seconds: float = 0.0) -> None:
        self.broken: list[RuleViolation] = []
        self.jobs: dict[str, JobPut] = {}  # as last written, deleted ones too
        self.live: dict[str, AttemptPut] = {}
        self.revision = 0
        self._lost_after_seconds = lost_after_seconds
        self._place = 0
        self._numbers: dict[str, int] = {}
        self._owners: Counter[Resource] = Counter()
        self._requests: dict[str, str] = {}
        self._acknowledged: dict[str, str] = {}
        self._dropped: dict[str, str] = {}  # deleted before they ended: of arrays that were not stored completely
        self._leaders: dict[str, list[tuple[int, str]]] = defaultdict(list)  # by service: revisions and leaders
        self._wrote: list[tuple[int, Wrote]] = []
        self._committed: dict[tuple[str, int, int], Holds] = {}  # by attempt and epoch
        self._ran: set[str] = set()  # jobs of which an attempt has begun to run
        self._parts: dict[Key, set[str]] = defaultdict(set)  # nodes on which an attempt has started
        self._on_node: dict[str, dict[Key, Holds]] = defaultdict(dict)
        self._epochs: dict[tuple[str, str], int] = {}
        self._terms: dict[str, int] = {}
        self._away: dict[str, float] = {}
        self._given_up: dict[str, float] = {}  # nodes given up by an operator: until when
        self._abandoned: set[Key] = set()  # attempts lost with them, which may keep running
        self._forgotten: set[tuple[str, Key]] = set()  # attempts ended by a reboot of their node
        self._cancelled: set[str] = set()
        self._priorities: dict[str, int] = {}  # as last acknowledged
        self._closed: set[str] = set()  # nodes that accept no work
        self._reads = Reads(partial(self._break, Rule.READ))
        self._launches = Launches(partial(self._break, Rule.PLATFORM))

    def kept(self) -> list[JobPut]:
        """Return jobs as last written, except for arrays that were not stored completely."""
        return [job for job_id, job in self.jobs.items() if job_id not in self._dropped]

    def take(self, event: Event) -> None:
        """Process the next event."""
        self._place += 1
        match event:
            case Commit():
                self._commit(event)
            case Wrote():
                self._wrote.append((self._place, event))
            case Acknowledged():
                self._acknowledge(event)
            case Cancelled():
                self._cancelled.add(event.job_id)
            case Prioritized():
                self._priorities[event.job_id] = event.priority
            case Listed():
                self._reads.listed(event)
            case Watched():
                self._reads.watched(event)
            case Welcomed():
                self._welcome(event)
            case Told():
                seen = self._epochs.get((event.node_id, event.job_id), 0)
                self._epochs[event.node_id, event.job_id] = max(seen, event.epoch)
            case Began():
                self._begin(event)
            case Resized():
                self._resize(event)
            case Over():
                self._over(event)
            case Left():
                self._away.setdefault(event.node_id, event.at_seconds)
            case GivenUp():
                self._given_up[event.node_id] = event.until_seconds
            case Came():
                self._away.pop(event.node_id, None)
            case Rebooted():
                self._forgotten |= {(event.node_id, key) for key in self._on_node.pop(event.node_id, {})}

    def finish(self, *, settled: bool = False) -> list[RuleViolation]:
        """Check what only the end can show; with `settled`, all work must have ended.

        In that case every request must have been repeated until it was answered.
        """
        self._place += 1
        for request_id, job_id in self._acknowledged.items():
            if job_id not in self.jobs:
                self._break(Rule.LOST, f"{job_id}, acknowledged for {request_id}, was never kept")
            elif job_id in self._dropped:
                self._break(Rule.LOST, f"{self._dropped[job_id]} was forgotten, which {request_id} was answered with")
            elif settled and self.jobs[job_id].phase not in ENDED:
                self._break(Rule.LOST, f"{job_id}, acknowledged for {request_id}, has not ended")
        for place, wrote in self._wrote:
            self._check_term(place, wrote)
        for job_id, priority in self._priorities.items():
            if (job := self.jobs.get(job_id)) and job.priority != priority:
                self._break(Rule.LOST, f"{job_id} has priority {job.priority}, and {priority} was acknowledged last")
        if settled:
            self._reads.finish({job.job_id: job.phase for job in self.kept()})
            made = set(self._acknowledged.values())
            for job_id in self.jobs.keys() - made - self._dropped.keys():
                self._break(Rule.ONCE, f"{job_id} was kept, and no request was answered with it")
            for attempt in self.live.values():
                self._break(Rule.LIFE, f"{attempt.job_id}/{attempt.number} still holds something")
        return self.broken

    def _break(self, rule: Rule, what: str) -> None:
        self.broken.append(RuleViolation(rule, self._place, what))

    # Commits -------------------------------------------------------------------------------------------------

    def _commit(self, commit: Commit) -> None:
        if commit.revision <= self.revision:
            self._break(Rule.LIFE, f"revision {commit.revision} came after {self.revision}")
        self.revision = max(self.revision, commit.revision)
        touched: set[Resource] = set()
        nodes = {change.node_id: change.takes_work for change in commit.changes if isinstance(change, NodePut)}
        self._closed -= {node_id for node_id, takes_work in nodes.items() if takes_work}
        for change in commit.changes:
            self._change(change, commit, touched)
        self._closed |= {node_id for node_id, takes_work in nodes.items() if not takes_work}
        for thing in sorted(touched):
            if self._owners[thing] > WHOLE:
                what = f"at {commit.revision} {' '.join(thing)} is owned {self._owners[thing]}/{WHOLE}"
                self._break(Rule.OWNERSHIP, what)

    def _change(self, change: Change, commit: Commit, touched: set[Resource]) -> None:
        match change:
            case JobPut():
                self._put_job(change, commit.revision)
            case JobGone():
                known = self.jobs.get(change.job_id)
                if known and known.phase not in ENDED:
                    self._dropped.setdefault(change.job_id, f"at {commit.revision} {change.job_id} {known.phase}")
            case AttemptPut():
                self._put_attempt(change, commit, touched)
            case AttemptGone():
                if old := self.live.pop(change.job_id, None):
                    self._break(Rule.LIFE, f"at {commit.revision} {old.job_id}/{old.number} was forgotten while alive")
                    self._owners.subtract(old.holds)
            case LeaderPut():
                self._leaders[change.service].append((commit.revision, change.identity))
            case LeaderGone():
                self._leaders[change.service].append((commit.revision, ""))

    def _put_job(self, job: JobPut, revision: int) -> None:
        before = self.jobs.get(job.job_id)
        if before and job.phase not in REACHABLE[before.phase]:
            self._break(Rule.LIFE, f"at {revision} {job.job_id} went from {before.phase} to {job.phase}")
        if before and job.attempt < before.attempt:
            self._break(Rule.LIFE, f"at {revision} {job.job_id} went back to attempt {job.attempt}")
        for request_id in job.request_ids:
            made = self._requests.setdefault(request_id, job.job_id)
            if made != job.job_id:
                self._break(Rule.ONCE, f"at {revision} {request_id} made {job.job_id} beside {made}")
        live = self.live.get(job.job_id)
        if live and job.phase in OVER:
            self._break(Rule.LIFE, f"at {revision} {job.job_id} is {job.phase}, and {live.number} is {live.state}")
        self._launches.put_job(job, revision)
        self._reads.kept(job.job_id, job.phase, revision)
        self.jobs[job.job_id] = job

    def _put_attempt(self, attempt: AttemptPut, commit: Commit, touched: set[Resource]) -> None:
        name, last = f"at {commit.revision} {attempt.job_id}/{attempt.number}", self._numbers.get(attempt.job_id, 0)
        before = self.live.pop(attempt.job_id, None)
        if before:
            self._owners.subtract(before.holds)
        if attempt.number < last:
            self._break(Rule.LIFE, f"{name} came after attempt {last}")
        elif before and attempt.number != before.number:
            self._break(Rule.ONCE, f"{name} took the place of {before.number}, which was alive")
        elif attempt.number == last and before is None and not attempt.state.ended:
            self._break(Rule.LIFE, f"{name} was alive again")
        if attempt.number > last:
            self._start(attempt, commit, name)
        self._numbers[attempt.job_id] = max(last, attempt.number)
        if sorted(attempt.ranks) != list(range(attempt.size)):
            self._break(Rule.GANG, f"{name} has the ranks {sorted(attempt.ranks)} of {attempt.size}")
        if attempt.state not in (AttemptState.ASSIGNED, AttemptState.NOT_LAUNCHED):
            self._ran.add(attempt.job_id)
        epoch = (attempt.job_id, attempt.number, attempt.epoch)
        # an attempt that ends during a resize takes nothing back from what its nodes were told
        if not attempt.state.ended or epoch not in self._committed:
            self._committed[epoch] = attempt.holds
        if attempt.state is AttemptState.LOST and (before or attempt.number > last):
            self._check_lost(attempt, commit, name)
        if attempt.elastic and not attempt.elastic[0] <= attempt.elastic[1] <= attempt.elastic[2]:
            self._break(Rule.RANGE, f"{name} has {attempt.elastic[1]} replicas of {attempt.elastic[::2]}")
        self._launches.put_attempt(attempt)
        if attempt.state is AttemptState.NOT_LAUNCHED and before and before.state is AttemptState.RUNNING:
            self._break(Rule.LIFE, f"{name} ran, and then was not launched")
        if attempt.state is AttemptState.SUCCEEDED and (
            missing := attempt.nodes - self._parts[attempt.job_id, attempt.number]
        ):
            self._break(Rule.GANG, f"{name} succeeded, and never began on {', '.join(sorted(missing))}")
        if not attempt.state.ended:
            self.live[attempt.job_id] = attempt
            self._owners.update(attempt.holds)
            touched.update(attempt.holds)

    def _start(self, attempt: AttemptPut, commit: Commit, name: str) -> None:
        """Check the conditions for the first write of an attempt."""
        if attempt.job_id in self._cancelled:
            self._break(Rule.LOST, f"{name} began after somebody was told that the job is cancelled")
        if closed := attempt.nodes & self._closed:
            self._break(Rule.TURN, f"{name} began on {', '.join(sorted(closed))}")
        job = self.jobs.get(attempt.job_id)
        if job is None:
            return
        if job.phase in OVER:
            rule = Rule.ONCE if job.phase is Phase.SUCCEEDED else Rule.LIFE
            self._break(rule, f"{name} began once the job was {job.phase}")
        if commit.at_seconds < job.not_before_seconds - ROUNDING_SECONDS:
            self._break(Rule.TURN, f"{name} began {job.not_before_seconds - commit.at_seconds:.3f} s too soon")
        for thing_id, condition in job.waits_for:
            array = f"{thing_id}_"
            others = [self.jobs[one] for one in self.jobs if one == thing_id or one.startswith(array)]
            for other in self._unmet(condition, others):
                self._break(Rule.TURN, f"{name} began while {other.job_id}, for which it waits, was {other.phase}")

    def _unmet(self, condition: Condition, others: Sequence[JobPut]) -> Iterable[JobPut]:
        """Return those of the awaited jobs because of which a condition does not hold."""
        if condition is Condition.AFTER_STARTED:  # the queue writes an attempt into a job's record only when it ends
            return [one for one in others if not one.attempt and one.job_id not in self._ran]
        if condition is Condition.AFTER_FAIL and all(one.phase is Phase.SUCCEEDED for one in others):
            return others
        ended = {Phase.SUCCEEDED} if condition is Condition.AFTER_OK else ENDED
        return [one for one in others if one.phase not in ended]

    def _check_lost(self, attempt: AttemptPut, commit: Commit, name: str) -> None:
        """Check that a lost attempt was ended by a reboot, or was on a node away for long enough or given up."""
        key = (attempt.job_id, attempt.number)
        if any(commit.at_seconds <= self._given_up.get(node_id, -1.0) for node_id in attempt.nodes):
            self._abandoned.add(key)
            return
        for node_id in attempt.nodes:
            since = self._away.get(node_id)
            if since is not None and commit.at_seconds - since >= self._lost_after_seconds:
                return
            if (node_id, key) in self._forgotten:
                return
        if all(key in self._on_node[node_id] for node_id in attempt.nodes):
            self._break(Rule.RESTART, f"{name} was given up, and runs")

    def _check_term(self, place: int, wrote: Wrote) -> None:
        leader = ""
        for since, identity in self._leaders[wrote.service]:
            if since > wrote.revision:
                break
            leader = identity
        if leader != wrote.identity:
            who = leader or "nobody"
            what = f"{wrote.identity} wrote records of {wrote.service} at {wrote.revision} while {who} led"
            self.broken.append(RuleViolation(Rule.TERM, place, what))

    # Clients and agents --------------------------------------------------------------------------------------

    def _acknowledge(self, event: Acknowledged) -> None:
        known = self._acknowledged.setdefault(event.request_id, event.job_id)
        if known != event.job_id:
            self._break(Rule.ONCE, f"{event.request_id} was answered with {event.job_id} after {known}")

    def _welcome(self, event: Welcomed) -> None:
        seen = self._terms.get(event.node_id, 0)
        if event.term < seen:
            self._break(Rule.EPOCH, f"{event.node_id} took term {event.term} after {seen}")
        self._terms[event.node_id] = max(seen, event.term)

    def _obey(self, event: Began | Resized) -> None:
        """Check an obeyed order: it is not older than an order seen before, and it was committed."""
        name = f"{event.job_id}/{event.number} on {event.node_id}"
        seen = self._epochs.get((event.node_id, event.job_id))
        if seen is not None and event.epoch < seen:
            self._break(Rule.EPOCH, f"{name} follows epoch {event.epoch} after {seen}")
        self._epochs[event.node_id, event.job_id] = max(seen or 0, event.epoch)
        committed = self._committed.get((event.job_id, event.number, event.epoch))
        if committed is None or any(milli > committed.get(thing, 0) for thing, milli in event.holds.items()):
            self._break(Rule.OWNERSHIP, f"{name} uses under epoch {event.epoch} what was not given to it")

    def _begin(self, event: Began) -> None:
        self._obey(event)
        key = (event.job_id, event.number)
        if key in self._on_node[event.node_id]:
            self._break(Rule.ONCE, f"{event.job_id}/{event.number} began twice on {event.node_id}")
        for node_id, others in self._on_node.items():
            for other in sorted(others.keys() - self._abandoned):
                if other[0] == event.job_id and other[1] != event.number and node_id not in self._away:
                    self._break(Rule.ONCE, f"{event.job_id}/{event.number} began while {other[1]} runs on {node_id}")
        self._parts[key].add(event.node_id)
        self._use(event.node_id, key, event.holds)

    def _resize(self, event: Resized) -> None:
        self._obey(event)
        key = (event.job_id, event.number)
        if key in self._on_node[event.node_id]:
            self._use(event.node_id, key, event.holds)

    def _use(self, node_id: str, key: Key, holds: Holds) -> None:
        self._on_node[node_id][key] = holds
        used: Counter[Resource] = Counter()
        for one in self._on_node[node_id].values():
            used.update(one)
        for thing in sorted(holds):
            if used[thing] > WHOLE:
                self._break(Rule.OWNERSHIP, f"{' '.join(thing)} is used {used[thing]}/{WHOLE} once {key} runs there")

    def _over(self, event: Over) -> None:
        here = self._on_node[event.node_id].pop((event.job_id, event.number), None)
        live = self.live.get(event.job_id)
        if here is None or not event.superseded or live is None:
            return
        if live.number == event.number and event.node_id in live.nodes and live.state is not AttemptState.STOPPING:
            what = f"{event.job_id}/{event.number} was ended on {event.node_id} as unknown, and lives"
            self._break(Rule.RESTART, what)


def check(events: Iterable[Event], *, lost_after_seconds: float = 0.0, settled: bool = False) -> list[RuleViolation]:
    """Check a whole history.

    >>> check([Acknowledged("request 1", "a")])[0].what
    'a, acknowledged for request 1, was never kept'
    """
    checker = Checker(lost_after_seconds)
    for event in events:
        checker.take(event)
    return checker.finish(settled=settled)
