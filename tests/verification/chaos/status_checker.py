"""Checks that `cotenant status` names lasting faults, and reports no problem once they are over."""

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
from tests.verification.chaos.mesh import EXPIRED, NO_STORE, Mesh
from tests.verification.chaos.name_server import DOMAIN
from tests.verification.chaos.plan import ETCD, LASTING_SECONDS, NODES, OPERATOR, PYTHON, SERVICES, Fault, Hook, Step

from cotenant.cli.mesh.slowness import THIS_MACHINE

NAMED_SECONDS_MAX, HEALTHY_SECONDS_MAX = 30.0, 60.0
ASK_SECONDS, ANSWER_SECONDS_MAX = 3.0, 40.0  # on a machine with other load
REFUSALS_MIN = 3  # refused launches before a node must be named
NEVER_NAMED = Hook.USER  # each user that cannot be found counts once, and a run has two: a node is held after three
UNKNOWN_LOCATIONS = ("nodes", "jobs")  # location of a problem if the state of all nodes or jobs is unknown

UNREACHABLE_WORDS = (
    "away",
    "does not answer",
    "connect",
    "deadline",
)  # wording if another fault has made the part unreachable
# Words that the problem must contain; for other faults any problem of the part counts.
PROBLEM_WORDS: Mapping[Fault, tuple[str, ...]] = {
    Fault.EXPIRE: ("certificate",),
    Fault.FULL_STORE: ("space", "full", "quota"),
    Fault.OLD_STORE: ("older", "earlier", "back"),
    Fault.OTHER_STORE: ("another", "other", "different"),
    Fault.STUTTER: ("behind", "late", *UNREACHABLE_WORDS),
    Fault.SLOW_STORE: ("to answer", "answer within", *UNREACHABLE_WORDS),
    Fault.NAME_ERROR: ("cannot resolve", *UNREACHABLE_WORDS),
}
# Faults that `status` must name, for these kinds of parts.
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
    Fault.NAME_ERROR: ("queue", "contention", "agent"),  # the others call no part by name
}
# Smaller faults need not be named: the loop must lag by 1 s, and the store, whose answers take two such
# delays, by 100 ms more than the callers' own loops on a busy machine. The effect of CPU starvation
# depends on the load, so a starved part never has to be named.
AMOUNT_MIN: Mapping[Fault, float] = {Fault.STUTTER: 1.3, Fault.SLOW_STORE: 0.25}

CLOCK = "its clock is "
CLOCK_SECONDS = (1.0, 3.0)  # smaller offsets must not be named, larger ones must

Problem = Mapping[str, str]


@dataclass
class ExpectedProblem:
    """A fault that must be named.

    The problem's location must contain one of `where`; `before` is the number of earlier refused launches.
    """

    step: Step
    where: tuple[str, ...]
    begin: float
    before: int
    refused: float | None = None  # when the node had refused enough launches
    log_begin: int = 0

    def is_named(self, problems: Sequence[Problem], *, is_down: bool = False) -> bool:
        """Return whether a problem names the fault: that the part is away, if the fault keeps it from starting."""
        words = PROBLEM_WORDS.get(self.step.fault, ("",)) + UNREACHABLE_WORDS * is_down
        return any(
            any(where in problem["where"] for where in self.where)
            and any(word in problem["what"].lower() for word in words)
            for problem in problems
        )


@dataclass
class StatusChecker:
    """Runs `status` during lasting faults. `wrong` has unnamed faults; `counts` how often faults had to be named."""

    mesh: Mesh
    not_launched: Mapping[str, int] = field(default_factory=dict)  # by node: number of attempts it could not launch
    wrong: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    named_seconds: dict[str, float] = field(default_factory=dict)  # by fault: the longest time
    last_problems: Sequence[Problem] = ()
    last_error: str = ""  # of a `status` that printed no JSON
    _expected: dict[int, ExpectedProblem] = field(default_factory=dict)
    _process: subprocess.Popen[str] | None = None
    _started_at: float = float("-inf")
    _fresh_after: float = float("-inf")  # `is_healthy` ignores answers to earlier runs

    def begin(self, step: Step) -> None:
        """Expect a fault to be named, if its kind must be and it lasts long enough."""
        kind = step.part.partition("-")[0]
        enough = abs(step.amount) >= AMOUNT_MIN.get(step.fault, 0.0)
        lasts = step.seconds >= LASTING_SECONDS[0]
        if lasts and enough and kind in MUST_BE_NAMED.get(step.fault, ()) and step.point != NEVER_NAMED:
            where = self._locations(step.part)
            self._expected[step.number] = ExpectedProblem(
                step,
                where,
                time.monotonic(),
                self.not_launched.get(where[0], 0),
                log_begin=self.mesh.log_size(step.part),
            )

    def end(self, step: Step) -> None:
        """Note the end of a fault."""
        if self._expected.pop(step.number, None):
            self.counts[f"ended before it was named: {step.fault}"] += 1

    def update(self) -> None:
        """Run `status`, or process its answer."""
        if not self._expected:
            return
        status = self._answer()
        if status is not None:
            self._check_expected(status)

    def is_healthy(self) -> bool:
        """Return whether a fresh `status` reports no problem except clocks, and all nodes.

        Clocks stay as faults have left them, so exactly those that are off must be named.
        """
        status = self._answer()
        if status is None or self._started_at < self._fresh_after:
            return False
        self.last_problems = [one for one in status["problems"] if not one["what"].startswith(CLOCK)]
        self.last_error = "; ".join(self._clock_errors(status["problems"]))
        return not self.last_problems and not self.last_error and sum((status["nodes"] or {}).values()) == len(NODES)

    def require_fresh_answer(self) -> None:
        """Ignore answers of `status` runs that began before now."""
        self._fresh_after = time.monotonic()

    def close(self) -> None:
        """Stop a running `status`."""
        if self._process:
            self._process.kill()
            self._process.wait()

    def _clock_errors(self, problems: Sequence[Problem]) -> list[str]:
        """Return errors of clocks: off and not named, or correct and named. All parts are up and answer."""
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
        """Return the locations under which `status` may report a part."""
        if part == ETCD:
            return ("store",)
        return (self.mesh.node_ids[part],) if part in NODES else (self.mesh.address(part), f"{part}.{DOMAIN}")

    def _answer(self) -> dict[str, Any] | None:
        """Return the answer of `status` once there is one; start it if it is not running."""
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
            if expected.is_named(problems, is_down=self._cannot_start(expected)):
                took = self._started_at - expected.begin
                self.counts[f"named: {expected.step.fault}"] += 1
                fault = str(expected.step.fault)
                self.named_seconds[fault] = max(took, self.named_seconds.get(fault, 0.0))
                del self._expected[number]
            elif self._is_late(expected) and not (unknown and expected.step.part in NODES):
                found = "; ".join(f"{one['where']}: {one['what']}" for one in problems) or "none"
                self.wrong.append(
                    f"status does not name {expected.where[0]} ({expected.step}); its problems are {found}"
                )
                del self._expected[number]

    def _cannot_start(self, expected: ExpectedProblem) -> bool:
        """Return whether the part has died, and its expired certificate keeps it from starting.

        By a clock that is behind it is still valid; then the store refuses it.
        """
        if expected.step.fault is not Fault.EXPIRE:
            return False
        log = self.mesh.log_since(expected.step.part, expected.log_begin)
        return EXPIRED in log or NO_STORE in log

    def _is_late(self, expected: ExpectedProblem) -> bool:
        """Return whether it should have been named by now; a node that an operator has forgotten need not be."""
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
