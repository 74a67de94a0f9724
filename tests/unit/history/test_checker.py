"""Each rule is violated by a history made for it; histories of a correct model violate none."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.model.dependencies import Condition
from cotenant.core.model.lifecycle import AttemptState, LaunchCause, Phase
from cotenant.history.checker import Rule, check
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
    Told,
    Watched,
    Welcomed,
    Wrote,
)
from cotenant.history.phases import REACHABLE

CORE = {("n", "core 0"): 1000}
OTHER_CORE = {("n", "core 1"): 1000}
WIDER = {**CORE, **OTHER_CORE}
A1 = AttemptPut("a", 1, 2, AttemptState.ASSIGNED, CORE, frozenset({"n"}), (0,), 1)
RUNS, DONE = replace(A1, state=AttemptState.RUNNING), replace(A1, state=AttemptState.SUCCEEDED)
FAILED = replace(A1, state=AttemptState.FAILED)
LOST = replace(A1, state=AttemptState.LOST)
NOT_LAUNCHED = replace(A1, state=AttemptState.NOT_LAUNCHED, launch_cause=LaunchCause.CGROUP)
NO_DIRECTORY = replace(NOT_LAUNCHED, launch_cause=LaunchCause.WORKING_DIRECTORY)
NO_ENVIRONMENT = replace(NOT_LAUNCHED, launch_cause=LaunchCause.ENVIRONMENT)
FAILED_JOB = JobPut("a", Phase.FAILED, attempt=1)
BEGAN = Began("n", "a", 1, 2, CORE)
AWAY_SECONDS = 10.0
ENDS = {"a": Phase.SUCCEEDED}


def commits(*changes: Change, first: int = 2, at: float = 0.0) -> list[Commit]:
    """Return a commit for each change."""
    return [Commit(revision, (change,), at) for revision, change in enumerate(changes, first)]


BROKEN: dict[str, tuple[Rule, list[Event]]] = {
    "a core is given to two": (Rule.OWNERSHIP, [*commits(A1, replace(A1, job_id="b", epoch=3))]),
    "a GPU is given in parts that are too many": (
        Rule.OWNERSHIP,
        [*commits(*(replace(A1, job_id=job, holds={("n", "GPU-0"): 600}) for job in "ab"))],
    ),
    "an agent uses what was not given": (Rule.OWNERSHIP, [*commits(A1), replace(BEGAN, holds={("n", "core 1"): 1000})]),
    "an agent runs two on one core": (
        Rule.OWNERSHIP,
        [*commits(A1, FAILED, replace(A1, job_id="b", epoch=4)), BEGAN, Began("n", "b", 1, 4, CORE)],
    ),
    "an elastic job has more replicas than it takes": (Rule.RANGE, [*commits(replace(A1, elastic=(1, 3, 2)))]),
    "a refused launch fails its job": (Rule.PLATFORM, [*commits(A1, NOT_LAUNCHED, FAILED_JOB)]),
    "what ran is said not to have been launched": (Rule.LIFE, [*commits(A1, RUNS, NOT_LAUNCHED)]),
    "an acknowledged job was never kept": (Rule.LOST, [Acknowledged("r", "a")]),
    "a job that waits is forgotten": (
        Rule.LOST,
        [*commits(JobPut("a", Phase.QUEUED), JobGone("a")), Acknowledged("r", "a")],
    ),
    "a request makes two jobs": (
        Rule.ONCE,
        [*commits(JobPut("a", Phase.QUEUED, ("r",)), JobPut("b", Phase.QUEUED, ("r",)))],
    ),
    "a request is answered with two jobs": (
        Rule.ONCE,
        [
            *commits(JobPut("a", Phase.QUEUED), JobPut("b", Phase.QUEUED)),
            Acknowledged("r", "a"),
            Acknowledged("r", "b"),
        ],
    ),
    "an attempt is replaced while it lives": (Rule.ONCE, [*commits(A1, replace(A1, number=2, epoch=3))]),
    "a job that has succeeded runs again": (
        Rule.ONCE,
        [*commits(A1, FAILED, JobPut("a", Phase.SUCCEEDED, attempt=1), replace(A1, number=2, epoch=5))],
    ),
    "an attempt begins twice on a node": (Rule.ONCE, [*commits(A1), BEGAN, BEGAN]),
    "a job runs twice at once": (
        Rule.ONCE,
        [*commits(A1, FAILED), BEGAN, *commits(replace(A1, number=2, epoch=4), first=4), Began("n", "a", 2, 4)],
    ),
    "a gang misses a rank": (Rule.GANG, [*commits(replace(A1, ranks=(0, 2), size=3))]),
    "a gang succeeds without a node": (Rule.GANG, [*commits(A1, DONE)]),
    "an agent follows an older epoch": (
        Rule.EPOCH,
        [*commits(A1, FAILED, replace(A1, number=2, epoch=4)), Told("n", "a", 4), BEGAN],
    ),
    "an agent resizes by an older epoch": (
        Rule.EPOCH,
        [*commits(A1), BEGAN, Told("n", "a", 3), Resized("n", "a", 1, 2)],
    ),
    "an agent takes an older term": (Rule.EPOCH, [Welcomed("n", 5), Welcomed("n", 4)]),
    "revisions go back": (
        Rule.LIFE,
        [*commits(JobPut("a", Phase.QUEUED), first=3), *commits(JobPut("b", Phase.QUEUED))],
    ),
    "an ended job lives again": (
        Rule.LIFE,
        [*commits(JobPut("a", Phase.QUEUED), JobPut("a", Phase.CANCELLED), JobPut("a", Phase.QUEUED))],
    ),
    "a job goes back to an older attempt": (
        Rule.LIFE,
        [*commits(JobPut("a", Phase.QUEUED, attempt=2), JobPut("a", Phase.QUEUED, attempt=1))],
    ),
    "placement goes back to an older attempt": (
        Rule.LIFE,
        [*commits(replace(FAILED, number=2), AttemptGone("a"), replace(A1, epoch=4))],
    ),
    "an attempt lives again": (Rule.LIFE, [*commits(A1), BEGAN, *commits(FAILED, RUNS, first=3)]),
    "an attempt is forgotten while it lives": (Rule.LIFE, [*commits(A1, AttemptGone("a"))]),
    "an old leader writes": (
        Rule.TERM,
        [*commits(LeaderPut("queue", "x"), LeaderPut("queue", "y")), Wrote(4, "queue", "x")],
    ),
    "nobody leads, and one writes": (
        Rule.TERM,
        [*commits(LeaderPut("queue", "x"), LeaderGone("queue")), Wrote(4, "queue", "x")],
    ),
    "what runs is given up": (Rule.RESTART, [*commits(A1, RUNS), BEGAN, *commits(LOST, first=4)]),
    "what runs is given up too early": (
        Rule.RESTART,
        [*commits(A1, RUNS), BEGAN, Left("n", 0.0), *commits(LOST, first=4, at=AWAY_SECONDS - 1)],
    ),
    "what runs is lost long after its node was given up": (
        Rule.RESTART,
        [*commits(A1, RUNS), BEGAN, GivenUp("n", 8.0), *commits(LOST, first=4, at=9.0)],
    ),
    "a job is over while its attempt lives": (Rule.LIFE, [*commits(A1, JobPut("a", Phase.CANCELLED))]),
    "a job that is held back begins": (Rule.LIFE, [*commits(JobPut("a", Phase.SUSPENDED), A1)]),
    "a job begins that was cancelled": (Rule.LOST, [Cancelled("a"), *commits(A1)]),
    "a change is lost": (
        Rule.LOST,
        [*commits(JobPut("a", Phase.QUEUED, priority=2), JobPut("a", Phase.QUEUED)), Prioritized("a", 2)],
    ),
    "a job begins before another": (
        Rule.TURN,
        [*commits(JobPut("b", Phase.QUEUED), JobPut("a", Phase.QUEUED, waits_for=(("b", Condition.AFTER),)), A1)],
    ),
    "a job begins after one that failed": (
        Rule.TURN,
        [
            *commits(
                JobPut("b_1", Phase.CANCELLED), JobPut("a", Phase.QUEUED, waits_for=(("b", Condition.AFTER_OK),)), A1
            )
        ],
    ),
    "a job begins after the failure of one that succeeded": (
        Rule.TURN,
        [
            *commits(
                JobPut("b", Phase.SUCCEEDED), JobPut("a", Phase.QUEUED, waits_for=(("b", Condition.AFTER_FAIL),)), A1
            )
        ],
    ),
    "a job begins before the start of another": (
        Rule.TURN,
        [
            *commits(
                JobPut("b", Phase.QUEUED), JobPut("a", Phase.QUEUED, waits_for=(("b", Condition.AFTER_STARTED),)), A1
            )
        ],
    ),
    "a job is tried again too soon": (
        Rule.TURN,
        [*commits(JobPut("a", Phase.QUEUED, not_before_seconds=5.0), A1, at=4.9)],
    ),
    "a job begins on a node that is drained": (Rule.TURN, [*commits(NodePut("n", takes_work=False), A1)]),
    "a read goes back": (Rule.READ, [Listed("c", 5, {}), Listed("c", 4, {})]),
    "a read misses an end": (Rule.READ, [*commits(JobPut("a", Phase.FAILED)), Listed("c", 2, {})]),
    "a read tells of more than its revision had": (
        Rule.READ,
        [*commits(JobPut("a", Phase.FAILED), first=5), Listed("c", 4, {"a": Phase.FAILED})],
    ),
    "a read tells of another end": (Rule.READ, [*commits(JobPut("a", Phase.FAILED)), Listed("c", 2, ENDS)]),
    "a watch goes back": (
        Rule.READ,
        [Watched("c", 1, "a", Phase.SUCCEEDED), Watched("c", 1, "a", Phase.RUNNING)],
    ),
    "what lives is ended as unknown": (Rule.RESTART, [*commits(A1, RUNS), BEGAN, Over("n", "a", 1, superseded=True)]),
}

FINE: dict[str, list[Event]] = {
    "a job that begins once all that it waits for is so": [
        *commits(
            NodePut("n", takes_work=False),
            NodePut("n", takes_work=True),
            JobPut("b", Phase.FAILED),
            JobPut("a", Phase.QUEUED, waits_for=(("b", Condition.AFTER),), not_before_seconds=5.0),
            replace(A1, epoch=6),
            at=5.0,
        )
    ],
    "a job that begins after a failure in an array, and after a start": [
        *commits(
            JobPut("b_0", Phase.FAILED),
            JobPut("b_1", Phase.SUCCEEDED),
            JobPut("c", Phase.RUNNING, attempt=1),
            JobPut(
                "a",
                Phase.QUEUED,
                waits_for=(("b", Condition.AFTER_FAIL), ("c", Condition.AFTER_STARTED)),
            ),
            replace(A1, epoch=4),
        )
    ],
    "a job that begins while the job whose start it waits for runs": [
        *commits(
            JobPut("b", Phase.QUEUED),
            replace(A1, job_id="b", epoch=3, holds=OTHER_CORE),
            replace(RUNS, job_id="b", epoch=3, holds=OTHER_CORE),
            JobPut("a", Phase.QUEUED, waits_for=(("b", Condition.AFTER_STARTED),)),
            replace(A1, epoch=6),
        )
    ],
    "reads and watches that go on": [
        *commits(JobPut("a", Phase.SUCCEEDED), JobPut("b", Phase.FAILED)),
        Listed("c", 2, ENDS),
        Listed("d", 3, {**ENDS, "b": Phase.FAILED}),
        Watched("c", 1, "a", Phase.SUCCEEDED),
        Watched("c", 2, "a", Phase.RUNNING),
        Watched("c", 2, "a", Phase.SUCCEEDED),
    ],
    "half an array that nobody was told of": [*commits(JobPut("a", Phase.QUEUED), JobGone("a"))],
    "a life": [
        *commits(JobPut("a", Phase.QUEUED, ("r",)), replace(A1, epoch=3)),
        Acknowledged("r", "a"),
        Told("n", "a", 3),
        replace(BEGAN, epoch=3),
        *commits(replace(RUNS, epoch=3), first=4),
        Over("n", "a", 1),
        *commits(
            replace(DONE, epoch=3), JobPut("a", Phase.SUCCEEDED, ("r",), 1), AttemptGone("a"), JobGone("a"), first=5
        ),
    ],
    "a node that was away for long": [
        *commits(A1, RUNS),
        BEGAN,
        Left("n", 0.0),
        *commits(LOST, first=4, at=AWAY_SECONDS),
    ],
    "a node that an operator gave up": [
        *commits(A1, RUNS),
        BEGAN,
        GivenUp("n", 9.0),
        *commits(LOST, replace(A1, number=2, epoch=5, nodes=frozenset({"m"})), first=4, at=9.0),
        Began("m", "a", 2, 5),
    ],
    "a node that was given up during a resize and heard of it too late": [
        *commits(A1, RUNS, replace(RUNS, epoch=4, holds=WIDER)),
        BEGAN,
        GivenUp("n", 9.0),
        *commits(replace(LOST, epoch=4), first=5, at=9.0),
        Told("n", "a", 4),
        Resized("n", "a", 1, 4, WIDER),
    ],
    "a node that lost everything": [*commits(A1, RUNS), BEGAN, Rebooted("n"), Came("n"), *commits(LOST, first=4)],
    "a node that cannot launch": [*commits(A1, NOT_LAUNCHED, JobPut("a", Phase.QUEUED, attempt=1))],
    "a working directory that no node has": [*commits(A1, NO_DIRECTORY, FAILED_JOB)],
    "a Python environment that no node has": [*commits(A1, NO_ENVIRONMENT, FAILED_JOB)],
    "a leader in its term": [
        *commits(LeaderPut("queue", "x")),
        Wrote(3, "queue", "x"),
        *commits(LeaderPut("queue", "y"), first=4),
        Wrote(5, "queue", "y"),
    ],
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_history_that_violates_a_rule_is_found(name: str) -> None:
    rule, events = BROKEN[name]
    found = check(events, lost_after_seconds=AWAY_SECONDS)
    assert {one.rule for one in found} == {rule}, [str(one) for one in found]


def test_every_rule_is_violated_by_some_history() -> None:
    assert {rule for rule, _ in BROKEN.values()} == set(Rule)


@pytest.mark.parametrize("name", FINE)
def test_a_history_without_violations_passes(name: str) -> None:
    assert check(FINE[name], lost_after_seconds=AWAY_SECONDS) == []


def test_a_settled_history_has_no_unfinished_work() -> None:
    waiting: list[Event] = [
        *commits(JobPut("a", Phase.QUEUED), A1, JobPut("b", Phase.CANCELLED)),
        Acknowledged("r", "a"),
    ]
    assert check(waiting) == []
    assert [one.rule for one in check(waiting, settled=True)] == [Rule.LOST, Rule.ONCE, Rule.LIFE]


def test_reachable_phases_follow_the_lifecycle_table() -> None:
    assert REACHABLE[Phase.SUCCEEDED] == {Phase.SUCCEEDED}
    assert REACHABLE[Phase.SUSPENDED] == {Phase.SUSPENDED, Phase.QUEUED, Phase.CANCELLED}
    assert REACHABLE[Phase.QUEUED] == set(Phase)


class Model:
    """The simplest correct mesh: everything happens at once, and in order."""

    def __init__(self, rng: Random) -> None:
        self.rng, self.revision, self.events = rng, 1, list[Event]()
        self.free = {(node, f"core {core}") for node in "mn" for core in range(4)}
        self.live: dict[str, AttemptPut] = {}
        self.numbers: dict[str, int] = {}
        self.open: list[str] = []

    def commit(self, *changes: Change) -> None:
        self.revision += 1
        self.events.append(Commit(self.revision, changes))

    def submit(self) -> None:
        job = f"job {len(self.numbers)}"
        self.numbers[job] = 0
        self.open.append(job)
        self.commit(JobPut(job, Phase.QUEUED, (f"request of {job}",)))
        self.events += [Acknowledged(f"request of {job}", job)] * self.rng.randint(1, 2)

    def begin(self) -> None:
        waiting = [job for job in self.open if job not in self.live]
        size = self.rng.randint(1, 3)
        if not waiting or size > len(self.free):
            return
        job = self.rng.choice(waiting)
        things = self.rng.sample(sorted(self.free), size)
        self.free -= set(things)
        self.numbers[job] += 1
        nodes = frozenset(node for node, _ in things)
        holds = dict.fromkeys(things, 1000)
        attempt = AttemptPut(
            job, self.numbers[job], self.revision + 1, AttemptState.ASSIGNED, holds, nodes, tuple(range(size)), size
        )
        self.live[job] = attempt
        self.commit(attempt)
        for node in sorted(nodes):
            mine = {thing: milli for thing, milli in holds.items() if thing[0] == node}
            self.events += [Told(node, job, attempt.epoch), Began(node, job, attempt.number, attempt.epoch, mine)]

    def end(self) -> None:
        if not self.live:
            return
        attempt = self.live.pop(self.rng.choice(sorted(self.live)))
        job, failed = attempt.job_id, self.rng.random() < 0.3
        self.events += [Over(node, job, attempt.number) for node in sorted(attempt.nodes)]
        self.free |= set(attempt.holds)
        self.commit(replace(attempt, state=AttemptState.FAILED if failed else AttemptState.SUCCEEDED))
        self.commit(JobPut(job, Phase.QUEUED if failed else Phase.SUCCEEDED, (f"request of {job}",), attempt.number))
        self.commit(AttemptGone(job))
        if not failed:
            self.open.remove(job)


@given(st.integers(), st.integers(5, 60))
def test_a_correct_model_violates_nothing(seed: int, steps: int) -> None:
    model = Model(Random(seed))
    for _ in range(steps):
        model.rng.choice([model.submit, model.begin, model.end])()
    assert check(model.events) == []
    while model.open:
        model.begin()
        model.end()
    assert check(model.events, settled=True) == []


@given(st.integers(), st.data())
def test_a_commit_that_comes_late_is_found(seed: int, data: st.DataObject) -> None:
    model = Model(Random(seed))
    for _ in range(20):
        model.rng.choice([model.submit, model.begin, model.end])()
    places = [place for place, event in enumerate(model.events) if isinstance(event, Commit)]
    if len(places) < 2:
        return
    place = data.draw(st.sampled_from(places[:-1]))
    moved = model.events.pop(place)
    assert check([*model.events, moved])
