"""Checks at rest: what the store, the users and the jobs have recorded must be consistent."""

from __future__ import annotations

import errno
import json
import math
import os
import sqlite3
from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.verification.chaos.acknowledgements import Acknowledgements

from cotenant.core.model.lifecycle import AttemptState, Phase
from cotenant.history import recording
from cotenant.history.checker import Checker
from cotenant.history.events import Acknowledged, AttemptPut, Came, Commit, Event, GivenUp, JobGone, Left, Resized
from cotenant.history.merging import Part, merged, that_ran

DISK_FULL = os.strerror(errno.ENOSPC)
FORGET_SECONDS_MAX = 5.0  # after a ForgetNode answer, until its effects are committed and known


RECORD_DELAY_SECONDS_MAX = 5.0  # a commit may be recorded this much later than a client heard of it


@dataclass
class UserRecords:
    """What users know."""

    acknowledged: list[Acknowledged] = field(default_factory=list)
    replicas: dict[str, int] = field(default_factory=dict)  # by job
    cancelled: set[str] = field(default_factory=set)
    alone: set[str] = field(default_factory=set)  # jobs whose attempts must never overlap
    acknowledgements: Acknowledgements = field(default_factory=Acknowledgements)
    forgotten_nodes: list[tuple[float, GivenUp]] = field(default_factory=list)  # nodes, and since when
    gone: list[tuple[float, str]] = field(default_factory=list)  # when a user was told that a job does not exist
    wrong: list[str] = field(default_factory=list)

    def take(self, lines: Iterable[str]) -> None:
        """Process recorded answers."""
        for line in map(json.loads, lines):
            if "job" in line:
                self.acknowledged.append(Acknowledged(line["request"], line["job"]))
                self.replicas[line["job"]] = line["replicas"]
                self.alone |= {line["job"]} if line["alone"] else set()
            self.cancelled |= set(line.get("cancel", ()))
            self.acknowledgements.take_answer(line)
            if "forgetting" in line:
                self.forgotten_nodes.append((line["at"], GivenUp(line["forgetting"], math.inf)))
            elif "forgot" in line:
                begin, _ = self.forgotten_nodes.pop()
                self.forgotten_nodes.append((begin, GivenUp(line["forgot"], line["at"] + FORGET_SECONDS_MAX)))
            self.gone += [(line["at"], line["gone"])] if "gone" in line else []
            self.wrong += [f"a user was told {line['wrong']}"] if "wrong" in line else []


@dataclass
class Absence:
    """Nodes that placement may not have heard from because of a fault, and when."""

    node_ids: frozenset[str]
    begin: float
    end: float = math.inf


def with_absences(
    edges: Iterable[tuple[float, Event]], absences: Sequence[Absence], node_ids: Iterable[str]
) -> list[tuple[float, Event]]:
    """Return edge events, with nodes absent from the beginning of a fault until they connect after its end.

    At the end, without faults, none is absent.
    """
    left = [(each.begin, Left(node_id, each.begin)) for each in absences for node_id in sorted(each.node_ids)]
    kept = [
        (at_seconds, event)
        for at_seconds, event in edges
        if not isinstance(event, Came)
        or not any(event.node_id in each.node_ids and each.begin <= at_seconds <= each.end for each in absences)
    ]
    return [*left, *kept, *((math.inf, Came(node_id)) for node_id in node_ids)]


class Judge:
    """Checks what was recorded, rest by rest; `wrong` holds each error once.

    `node_ids` are those of the machines with agents.
    """

    def __init__(self, node_ids: Mapping[str, str], lost_after_seconds: float) -> None:
        self.checker = Checker(lost_after_seconds)
        self.users = UserRecords()
        self.archived: dict[str, float] = {}  # jobs and arrays that the queue has removed, and since when
        self.given_up: set[str] = set()  # jobs with a lost attempt, which may still run elsewhere
        self.commits = self.edges = 0
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._node_ids = node_ids

    def take(
        self,
        commits: Sequence[Commit],
        answers: Sequence[str],
        edges: Sequence[str],
        journal: Sequence[Sequence[str]],
        absences: Sequence[Absence],
        killed: Collection[tuple[str, int]] = (),
    ) -> None:
        """Check the record since the last rest, given that all jobs have ended; of the journal, all of it.

        Only attempts in `killed`, of which a process was killed, may fail.
        """
        self.commits, self.edges = self.commits + len(commits), self.edges + len(edges)
        before = len(self.users.acknowledged)
        self.users.take(answers)
        for commit in commits:
            self.given_up |= {
                change.job_id
                for change in commit.changes
                if isinstance(change, AttemptPut) and change.state is AttemptState.LOST
            }
            for change in commit.changes:
                if isinstance(change, JobGone):
                    self.archived.setdefault(change.job_id.partition("_")[0], commit.at_seconds)
        self.users.acknowledgements.take_commits(commits)
        ran = that_ran(recording.read(edges), self._ran(journal))
        self.counts["resizes on nodes"] += sum(isinstance(event, Resized) for _, event in ran)
        for event in merged(
            commits, [*self.users.forgotten_nodes, *with_absences(ran, absences, self._node_ids.values())]
        ):
            self.checker.take(event)
        self.users.forgotten_nodes.clear()
        for acknowledged in self.users.acknowledged[before:]:
            self.checker.take(acknowledged)
        found = [str(broken) for broken in self.checker.finish(settled=True)]
        for at_seconds, thing_id in self.users.gone:
            if self.archived.get(thing_id, math.inf) > at_seconds + RECORD_DELAY_SECONDS_MAX:
                found.append(f"a user was told that {thing_id} does not exist, although it did")
        self.users.gone.clear()
        phases = {job_id: job.phase for job_id, job in self.checker.jobs.items()}
        found += [*self.users.wrong, *judge_journal(journal, self.users, phases, self.given_up, killed)]
        found += self.users.acknowledgements.judge(ran)
        self.wrong += [what for what in dict.fromkeys(found) if what not in self.wrong]

    def _ran(self, journal: Sequence[Sequence[str]]) -> dict[Part, int]:
        """Yield how often each part of an attempt ran, by its processes' journal: as often as any of its ranks."""
        starts = Counter((words[4], words[1], int(words[2]), words[3]) for words in journal if words[0] == "start")
        ran: dict[Part, int] = {}
        for (machine, job_id, number, _), times in starts.items():
            part = (self._node_ids.get(machine, machine), job_id, number)
            ran[part] = max(times, ran.get(part, 0))
        return ran


def judge_journal(
    journal: Sequence[Sequence[str]],
    users: UserRecords,
    phases: Mapping[str, Phase],
    given_up: set[str],
    killed: Collection[tuple[str, int]] = (),
) -> list[str]:
    """Check what jobs observed: nothing held or started twice, and every success ran to its end."""
    may = {f"twice:job-{job_id}-" for job_id in given_up - users.alone}
    wrong = [
        f"{words[0]} when {'/'.join(words[1:4])} started"
        for words in journal
        if words[0].startswith("twice:") and words[0].rstrip("0123456789") not in may
    ]
    starts = Counter(tuple(words[1:4]) for words in journal if words[0] == "start")
    wrong += [f"{'/'.join(key)} was started {times} times" for key, times in starts.items() if times > 1]
    wrong += [f"{key[0]} ran, but was never submitted" for key in starts if key[0] not in users.replicas]
    ended = {tuple(words[1:4]) for words in journal if words[0] == "end"}
    may_fail = {job_id for job_id, _ in killed}
    numbers: dict[str, set[str]] = {}
    for job_id, number, _ in ended:
        numbers.setdefault(job_id, set()).add(number)
    for job_id, replicas in users.replicas.items():
        phase = phases.get(job_id)
        whole = any(
            all((job_id, number, str(rank)) in ended for rank in range(replicas)) for number in numbers.get(job_id, ())
        )
        if phase is Phase.SUCCEEDED and not whole:
            wrong.append(f"{job_id} succeeded, but never ran to its end")
        may_be_cancelled = job_id in users.cancelled or users.acknowledgements.why_cancelled(job_id)
        if phase is Phase.FAILED and job_id in may_fail:
            continue
        if phase is Phase.FAILED or (phase is Phase.CANCELLED and not may_be_cancelled):
            wrong.append(f"{job_id} {phase} without a reason")
    return wrong


def archived_in(paths: Iterable[Path]) -> dict[str, str]:
    """Return the final phases of the jobs in archive files."""
    found: dict[str, str] = {}
    for path in filter(Path.exists, paths):
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as archive, suppress(sqlite3.OperationalError):
            found |= archive.execute("SELECT id, phase FROM jobs")  # a file that was just created has no table
    return found


def judge_archive(forgotten: Mapping[str, Phase], archived: Mapping[str, str]) -> list[str]:
    """Return jobs that the queue has removed and that no archive has with their final phase."""
    return [
        f"{job_id} {phase} was removed, and is {archived.get(job_id, 'nowhere')} in the archives"
        for job_id, phase in forgotten.items()
        if archived.get(job_id) != phase
    ]


def judge_failures(failed: Mapping[tuple[str, int], str], killed: Container[tuple[str, int]]) -> list[str]:
    """Return attempts that failed though no process of theirs was killed. A restart kills none; a full disk may."""
    return [
        f"{job_id}/{number} failed, and none of its processes was killed: {message}"
        for (job_id, number), message in failed.items()
        if (job_id, number) not in killed and DISK_FULL not in message
    ]
