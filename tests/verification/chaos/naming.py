"""Whether `cotenant status` names what is sick while it is, and nothing once it is well again."""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.end_to_end.waiting import lines_of
from tests.verification.chaos.call_log import ANSWERS
from tests.verification.chaos.names import DOMAIN
from tests.verification.chaos.parts import Mesh
from tests.verification.chaos.plan import ETCD, LASTING_SECONDS, NODES, OPERATOR, PYTHON, SERVICES, Fault, Hook, Step

from cotenant.cli.mesh.slowness import THIS_MACHINE

NAMED_SECONDS_MAX, HEALTHY_SECONDS_MAX = 30.0, 60.0
ASK_SECONDS, ANSWER_SECONDS_MAX = 3.0, 40.0  # on a machine that has other things to do as well
REFUSALS_MIN = 3  # launches that a node has to have refused for so long before it has to be named
NEVER_NAMED = Hook.USER  # each user who is not found counts once, and a run has two: a node is held after three
UNKNOWN_LOCATIONS = ("nodes", "jobs")  # in the place of a part's name: nobody could say how they are

UNREACHABLE_WORDS = (
    "away",
    "does not answer",
    "connect",
    "deadline",
)  # a part that another fault has taken away is named so
# What the problem that names a part has to say, where any problem of that part's would not do.
PROBLEM_WORDS: Mapping[Fault, tuple[str, ...]] = {
    Fault.EXPIRE: ("certificate",),
    Fault.FULL_STORE: ("space", "full", "quota"),
    Fault.OLD_STORE: ("older", "earlier", "back"),
    Fault.OTHER_STORE: ("another", "other", "different"),
    Fault.STUTTER: ("behind", "late", *UNREACHABLE_WORDS),
    Fault.SLOW_STORE: ("to answer", "answer within", *UNREACHABLE_WORDS),
    Fault.NAME_ERROR: ("cannot resolve", *UNREACHABLE_WORDS),
}
# Faults that `status` has to name, each with the kinds of parts for which it has to.
MUST_BE_NAMED: Mapping[Fault, tuple[str, ...]] = {
    Fault.KILL: ("etcd", "queue", "placement", "predictor", "contention", "agent"),
    Fault.PAUSE: ("etcd", "queue", "placement", "predictor", "contention", "agent"),
    Fault.ISOLATE: ("agent",),
    Fault.FILL: ("agent",),
    Fault.REFUSE_LAUNCH: ("agent",),
    Fault.BLACK_HOLE: ("etcd", "queue", "placement", "predictor", "contention"),
    Fault.EXPIRE: ("queue", "placement", "predictor", "contention", "agent"),
    Fault.FULL_STORE: ("etcd",),
    Fault.OLD_STORE: ("etcd",),
    Fault.OTHER_STORE: ("etcd",),
    Fault.STUTTER: ("queue", "placement", "predictor", "contention", "agent"),
    Fault.SLOW_STORE: ("etcd",),
    Fault.NAME_ERROR: ("queue", "contention", "agent"),  # the others call nobody by name
}
# Less than that is too little to be named: the loop has to be behind by 1 s, and the store, each of whose answers takes
# two such delays, by 100 ms beside what the callers' own loops take on a machine that is busy with all of this. What a
# part that is starved of CPU needs is up to the load, so that it does not have to be named.
AMOUNT_MIN: Mapping[Fault, float] = {Fault.STUTTER: 1.3, Fault.SLOW_STORE: 0.25}

CLOCK = "its clock is "
CLOCK_SECONDS = (1.0, 3.0)  # a clock that is off by less is not named, one that is off by more is

Problem = Mapping[str, str]


@dataclass
class ExpectedProblem:
    """A fault that has to be named.

    `where` is what the place of the problem has to contain one of; `before` is how many launches the node had refused.
    """

    step: Step
    where: tuple[str, ...]
    begin: float
    before: int
    refused: float | None = None  # when the node had refused enough launches

    def is_named(self, problems: Sequence[Problem]) -> bool:
        """Whether some problem is that fault's."""
        words = PROBLEM_WORDS.get(self.step.fault, ("",))
        return any(
            any(where in problem["where"] for where in self.where)
            and any(word in problem["what"].lower() for word in words)
            for problem in problems
        )


@dataclass
class StatusChecker:
    """Asks for `status` while such a fault lasts. `wrong` is what was not named; `counts` how often it had to be."""

    mesh: Mesh
    not_launched: Mapping[str, int] = field(default_factory=dict)  # by node: how many attempts it could not launch
    wrong: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    named_seconds: dict[str, float] = field(default_factory=dict)  # by fault: the longest that it took
    last_problems: Sequence[Problem] = ()
    last_error: str = ""  # of a `status` that printed no JSON
    _expected: dict[int, ExpectedProblem] = field(default_factory=dict)
    _process: subprocess.Popen[str] | None = None
    _started_at: float = float("-inf")
    _fresh_after: float = float("-inf")  # no answer to a question of before counts for `is_healthy`

    def begin(self, step: Step) -> None:
        """Expect a fault to be named, if it lasts long enough and is of a kind that has to be."""
        kind = step.part.partition("-")[0]
        enough = abs(step.amount) >= AMOUNT_MIN.get(step.fault, 0.0)
        lasts = step.seconds >= LASTING_SECONDS[0]
        if lasts and enough and kind in MUST_BE_NAMED.get(step.fault, ()) and step.point != NEVER_NAMED:
            where = self._locations(step.part)
            self._expected[step.number] = ExpectedProblem(
                step, where, time.monotonic(), self.not_launched.get(where[0], 0)
            )

    def end(self, step: Step) -> None:
        """Take note that a fault has ended."""
        if self._expected.pop(step.number, None):
            self.counts[f"not to be named in time: {step.fault}"] += 1

    def update(self) -> None:
        """Ask, or take the answer."""
        if not self._expected:
            return
        status = self._answer()
        if status is not None:
            self._check_expected(status)

    def is_healthy(self) -> bool:
        """Whether `status`, asked since the last `require_fresh_answer`, finds nothing wrong but clocks, and all nodes there.

        Clocks stay as faults have left them, so those that are off have to be named, and no others.
        """
        status = self._answer()
        if status is None or self._started_at < self._fresh_after:
            return False
        self.last_problems = [one for one in status["problems"] if not one["what"].startswith(CLOCK)]
        self.last_error = "; ".join(self._clock_errors(status["problems"]))
        return not self.last_problems and not self.last_error and sum((status["nodes"] or {}).values()) == len(NODES)

    def require_fresh_answer(self) -> None:
        """Let no answer count that was asked for before now."""
        self._fresh_after = time.monotonic()

    def close(self) -> None:
        """Ask no more."""
        if self._process:
            self._process.kill()
            self._process.wait()

    def _clock_errors(self, problems: Sequence[Problem]) -> list[str]:
        """Name clocks that are off and not named, or named and right: all of them are there and answer."""
        offsets = {(THIS_MACHINE,): 0.0} | {self._locations(part): self.mesh.clock_offset(part) for part in PYTHON}
        in_order = sorted(offsets.values())
        median = min(in_order[(len(in_order) - 1) // 2], in_order[len(in_order) // 2], key=abs)
        named = [one["where"] for one in problems if one["what"].startswith(CLOCK)]
        wrong = []
        for where, offset in offsets.items():
            is_named = any(word in one for word in where for one in named)
            off = abs(offset - median)
            if (off > CLOCK_SECONDS[1] and not is_named) or (off < CLOCK_SECONDS[0] and is_named):
                wrong.append(f"{where[0]}: its clock is off by {off:.1f} s and {'' if is_named else 'not '}named")
        return wrong

    def _locations(self, part: str) -> tuple[str, ...]:
        """What `status` may call a part."""
        if part == ETCD:
            return ("store",)
        return (self.mesh.node_ids[part],) if part in NODES else (self.mesh.address(part), f"{part}.{DOMAIN}")

    def _answer(self) -> dict[str, Any] | None:
        """What `status` answered just now; asks where nothing is asked."""
        now = time.monotonic()
        if self._process is None:
            if now - self._started_at >= ASK_SECONDS:
                self._process, self._started_at = self._start(), now
            return None
        if self._process.poll() is None:
            if now - self._started_at > ANSWER_SECONDS_MAX:
                self.wrong.append(f"`cotenant status` has not answered within {ANSWER_SECONDS_MAX:.0f} s")
                self.close()
                self._process = None
            return None
        asked, self._process = self._process, None
        out, err = asked.communicate()
        if "Traceback" in err:
            self.wrong.append(f"`cotenant status` has a traceback: {err[-500:]}")
        try:
            status: dict[str, Any] = json.loads(out)
        except ValueError:
            self.counts["status: no answer"] += 1
            self.last_error = err.strip()[-500:]
            return None
        return status

    def _start(self) -> subprocess.Popen[str]:
        endpoints = ",".join(f"{service}={self.mesh.service_address(service)}" for service in SERVICES)
        command = [
            *self.mesh.machines.all[OPERATOR].prefix,
            *self.mesh.program,
            "status",
            "--json",
            f"--endpoint={endpoints}",
        ]
        environment, pipe = self.mesh.environment(OPERATOR), subprocess.PIPE
        return subprocess.Popen(command, stdout=pipe, stderr=pipe, env=environment, text=True)

    def _check_expected(self, status: Mapping[str, Any]) -> None:
        problems: Sequence[Problem] = status["problems"]
        unknown = any(problem["where"] in UNKNOWN_LOCATIONS for problem in problems)
        for number, expected in list(self._expected.items()):
            if expected.is_named(problems):
                took = self._started_at - expected.begin
                self.counts[f"named: {expected.step.fault}"] += 1
                fault = str(expected.step.fault)
                self.named_seconds[fault] = max(took, self.named_seconds.get(fault, 0.0))
                del self._expected[number]
            elif self._is_late(expected) and not (unknown and expected.step.part in NODES):
                told = "; ".join(f"{one['where']}: {one['what']}" for one in problems) or "none"
                self.wrong.append(
                    f"status does not name {expected.where[0]} ({expected.step}); its problems are {told}"
                )
                del self._expected[number]

    def _is_late(self, expected: ExpectedProblem) -> bool:
        """Whether it should be named by now; a node that an operator gave up is named no more."""
        since = expected.begin
        if expected.step.fault is Fault.REFUSE_LAUNCH:
            if expected.refused is None:
                refused = self.not_launched.get(expected.where[0], 0) - expected.before
                expected.refused = self._started_at if refused >= REFUSALS_MIN else None
                return False
            since = expected.refused
        return self._started_at - since > NAMED_SECONDS_MAX and not self._is_forgotten(expected)

    def _is_forgotten(self, expected: ExpectedProblem) -> bool:
        return any(
            json.loads(line).get("forgot") in expected.where
            for line in lines_of(self.mesh.directory / ANSWERS)
            if '"forgot"' in line
        )
