"""Does to a mesh what a plan says, lets it come to rest now and then, and judges what was recorded by then."""

from __future__ import annotations

import contextlib
import heapq
import json
import math
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from tests.chaos import jobs, load
from tests.chaos.halting import Halts
from tests.chaos.judging import Absence, Judge, judge_failures
from tests.chaos.link import Wire
from tests.chaos.machines import Machines
from tests.chaos.parts import BEAT_SECONDS, HISTORY, LOST_AFTER_SECONDS, Mesh
from tests.chaos.plan import CLIENT, MEMBERS, NODES, PARTS, PYTHON, Fault, Step, cut_off, plan
from tests.chaos.recorder import Recorder
from tests.chaos.users import POLL_SECONDS, Users
from tests.end_to_end import remains
from tests.end_to_end.commands import TRACEBACK, Serving
from tests.end_to_end.waiting import lines_of

from cotenant.history.recording import clock
from cotenant.store.open import credentials_of

START_SECONDS_MAX, CALM_SECONDS_MAX, LEFT_SECONDS_MAX = 180.0, 180.0, 60.0
GARBLED, GARBLED_BY_TLS = 0.5, 0.05  # which share of the packets that can be: of each, where TLS tells of it
OF_JOBS = ("job.py", "supervisor.py", "sleep 600")
WRONG_MAX = 20


@dataclass
class Told:
    """What came of a run."""

    seed: int
    tls: bool = False
    steps: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    jobs: int = 0
    attempts: int = 0
    commits: int = 0
    edges: int = 0
    starts: int = 0
    kills: int = 0  # of supervisors and processes of jobs
    garbled: int = 0
    rests: int = 0
    seconds: float = 0.0
    settling_seconds: float = 0.0
    refusals: dict[str, int] = field(default_factory=dict)
    reached: dict[str, int] = field(default_factory=dict)  # fail points at which something happened
    done: dict[str, int] = field(default_factory=dict)  # what users asked for and what was stopped, by what it is


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be done; `broken` names a build that is broken on purpose, and with `tls` all parts use it.

    Pauses between steps last `pace` times as long as they are planned.
    """

    seed: int
    steps: int
    rest_every: int
    faults: frozenset[Fault] = frozenset(Fault)
    broken: str = ""
    tls: bool = False
    pace: float = 1.0


class Driver:
    """A run."""

    def __init__(self, directory: Path, wanted: Wanted, say: Callable[[str], None]) -> None:
        seed = wanted.seed
        self.directory, self.told, self._say = directory, Told(seed, wanted.tls), say
        jobs.prepare(directory)
        rng = Random(f"machines {seed}")
        self.machines = Machines(directory, rng)
        self.mesh = Mesh(directory, self.machines, wanted.broken, tls=wanted.tls)
        self.halts = Halts(self.mesh)
        self.judge = Judge(self.mesh.node_ids, LOST_AFTER_SECONDS - 2 * BEAT_SECONDS)
        self._absences: list[Absence] = []
        self._killed: set[tuple[str, int]] = set()  # attempts of which we have killed something
        self._impostor: Serving | None = None
        self._rng = Random(f"moments {seed}")
        self._ends: list[tuple[float, int, Callable[[], None]]] = []
        self._seen = [0, 0, 0]  # commits, answers and edges' events that were judged

    def run(self, steps: Sequence[Step], rest_every: int, pace: float) -> Told:
        """Do all steps; what was wrong is in what is returned, and the run ends at the first rest that found any."""
        begin = time.monotonic()
        try:
            self._set_up()
            for step in steps:
                self._wait(time.monotonic() + step.after_seconds * pace)
                self._say(str(step))
                self.told.faults[step.fault] += 1
                self._do(step)
                self.told.steps += 1
                if (step.number % rest_every == 0 or step is steps[-1]) and not self._come_to_rest():
                    break
        finally:
            self.told.seconds = time.monotonic() - begin
            self._tear_down()
        return self.told

    # Beginning and end ---------------------------------------------------------------------------------------

    def _set_up(self) -> None:
        for name in MEMBERS:
            self.mesh.start(name)
        for name in MEMBERS:
            member = self.mesh.parts[name].member
            assert member
            member.wait_until_healthy()
        certificates = self.mesh.certificates
        credentials = credentials_of(certificates.variables(CLIENT)) if certificates else None
        self.recorder = Recorder(self.mesh.store, self.directory / "commits", credentials)
        for name in PYTHON:
            self.mesh.start(name)
        self._until("all parts serve", lambda: all(map(self.mesh.serving, PYTHON)), START_SECONDS_MAX)
        self.users = Users(self.mesh, self.told.seed)

    def _tear_down(self) -> None:
        with contextlib.suppress(AttributeError):
            self.users.close()
        self.mesh.close()
        with contextlib.suppress(AttributeError):
            self.recorder.close()
        self.machines.emulator.close()
        remains.end(set(remains.processes_of(self.directory)))
        remains.remove(remains.groups_of(self.judge.users.replicas))
        self.told.starts = self.mesh.starts.total()
        self.told.garbled = self.machines.emulator.garbled
        self.told.jobs, self.told.commits = len(self.judge.users.replicas), self.judge.commits
        self.told.edges, self.told.reached = self.judge.edges, dict(self.mesh.fired)
        with contextlib.suppress(AttributeError):
            self.told.done = dict(self.judge.users.promises.counts + self.judge.counts + self.recorder.stopped)
        self.told.attempts = len({tuple(words[1:3]) for words in self._journal()})

    def _until(self, what: str, holds: Callable[[], bool], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not holds():
            self._look_after()
            if time.monotonic() > deadline:
                self.told.wrong.append(f"{what}: not within {seconds:.0f} s")
                return False
            time.sleep(POLL_SECONDS)
        return True

    def _look_after(self) -> None:
        self.told.wrong += [*self.mesh.look_after(), *self.halts.look()]
        if hasattr(self, "users") and self.users.ended():
            raise RuntimeError(f"the load ended: {(self.directory / 'logs' / 'client.log').read_text()[-2000:]}")

    # Steps ---------------------------------------------------------------------------------------------------

    def _wait(self, until: float) -> None:
        """Let time pass, and faults end whose time has come."""
        while (now := time.monotonic()) < until or (self._ends and self._ends[0][0] <= now):
            if self._ends and self._ends[0][0] <= now:
                heapq.heappop(self._ends)[2]()
                continue
            self._look_after()
            time.sleep(min(POLL_SECONDS, max(0.0, until - now)))

    def _end_after(self, step: Step, end: Callable[[], None]) -> None:
        absence = self._absences[-1]

        def over() -> None:
            end()
            absence.end = clock()

        absence.end = math.inf
        heapq.heappush(self._ends, (time.monotonic() + step.seconds, step.number, over))

    def _do(self, step: Step) -> None:
        now = clock()
        self._absences.append(Absence(frozenset(self.mesh.node_ids[node] for node in cut_off(step)), now, now))
        mesh, part, peer = self.mesh, step.part, step.peer
        match step.fault:
            case Fault.KILL:
                mesh.kill(part)
                self._end_after(step, lambda: mesh.come_back(part))
            case Fault.NO_MAJORITY:
                mesh.kill(part, peer)
                self._end_after(step, lambda: mesh.come_back(part, peer))
            case Fault.RESTART:
                self.told.wrong += filter(None, [mesh.restart(part)])
            case Fault.KILL_JOB | Fault.KILL_SUPERVISOR:
                self._kill_attempt(part, step.fault)
            case Fault.PAUSE:
                mesh.pause(part)
                self._end_after(step, lambda: mesh.go_on(part))
            case Fault.FILL:
                mesh.fill(part)
                self._end_after(step, lambda: mesh.give_room(part))
            case Fault.CLOCK:
                mesh.set_clock(part, step.amount)
            case Fault.FAIL_POINT:
                self._absences[-1].end = math.inf
                self.told.wrong += filter(None, [self.halts.arm(step, self._absences[-1])])
            case Fault.OLD_LEADER:
                self._replace(step)
            case Fault.CUT | Fault.CUT_ONE_WAY | Fault.ISOLATE | Fault.LOSE:
                self._drop(step)
            case Fault.DELAY | Fault.GARBLE:
                self._disturb(step)

    def _replace(self, step: Step) -> None:
        """Let agents alone meet somebody who led before the one whom they know, unless there is one already."""
        if self._impostor:
            return
        pairs = [(other, step.part) for other in (*PARTS, CLIENT) if other not in (step.part, *NODES)]
        self.machines.drop(pairs)
        self._impostor = impostor = self.mesh.replace(step.part, self.recorder.placement_term - 1)

        def over() -> None:
            self._impostor = None
            impostor.kill()
            self.machines.drop_no_more(pairs)
            self.mesh.come_back(step.part)

        self._end_after(step, over)

    def _drop(self, step: Step) -> None:
        share = step.amount or 1.0
        pairs = [(step.part, step.peer)]
        if step.fault is Fault.ISOLATE:
            pairs = [(step.part, other) for other in (*PARTS, CLIENT) if other != step.part]
        if step.fault is not Fault.CUT_ONE_WAY:
            pairs += [(target, source) for source, target in pairs]
        self.machines.drop(pairs, share)
        self._end_after(step, lambda: self.machines.drop_no_more(pairs, share))

    def _disturb(self, step: Step) -> None:
        pairs, wire = (
            [(step.part, step.peer)],
            Wire(garbled=GARBLED_BY_TLS if self.told.tls else GARBLED, anywhere=self.told.tls),
        )
        if step.fault is Fault.DELAY:
            pairs, wire = [*pairs, (step.peer, step.part)], Wire(delay_seconds_max=step.amount)
        self.machines.disturb(pairs, wire)
        self._end_after(step, lambda: self.machines.disturb_no_more(pairs, wire))

    def _kill_attempt(self, node: str, fault: Fault) -> None:
        """Kill a supervisor or a process of a job, on a node if one runs there, else on any."""
        states = list(self._running(node)) or [state for each in self.mesh.node_ids for state in self._running(each)]
        if not states:
            return
        state = self._rng.choice(states)
        self.told.kills += 1
        self._killed.add((state["job_id"], state["number"]))
        pid = state["pid"] if fault is Fault.KILL_SUPERVISOR else self._rng.choice(state["tasks"])["pid"]
        with contextlib.suppress(OSError):
            pidfd = os.pidfd_open(pid)
            try:
                if os.fsencode(self.directory) in Path(f"/proc/{pid}/cmdline").read_bytes():
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            finally:
                os.close(pidfd)

    def _running(self, node: str) -> Iterator[dict[str, Any]]:
        """What supervisors on a node have recorded of attempts that run."""
        for path in sorted(self.machines.all[node].disk.glob("state/nodes/*/attempts/*/state.json")):
            with contextlib.suppress(OSError, ValueError):
                state = json.loads(path.read_bytes())
                if state["state"] == "RUNNING":
                    yield state

    # Rest ----------------------------------------------------------------------------------------------------

    def _journal(self) -> list[list[str]]:
        return [line.split() for line in lines_of(self.directory / "journal")]

    def _come_to_rest(self) -> bool:
        """End all faults, wait until all jobs have ended, and judge; False where something is wrong."""
        begin = time.monotonic()
        while self._ends:
            heapq.heappop(self._ends)[2]()
        self.halts.end()
        self.users.say("hush")
        if self._until("all jobs end", self.users.is_calm, CALM_SECONDS_MAX):
            self._until("attempts are forgotten", lambda: not self._attempts_left(), LEFT_SECONDS_MAX)
            self._until("no process is left", lambda: not self._left(), LEFT_SECONDS_MAX)
            self.told.wrong += [f"process {pid} was left: {command}" for pid, command in self._left().items()]
            self._judge()
        self.told.refusals = self.users.refusals
        self.users.say("go")
        self.told.rests += 1
        took = time.monotonic() - begin
        self.told.settling_seconds += took
        self._say(
            f"     at rest after {took:.1f} s: {self.judge.commits} commits, {len(self.judge.users.replicas)} jobs"
        )
        return not self.told.wrong

    def _attempts_left(self) -> bool:
        return any(any(self.machines.all[node].disk.glob("state/nodes/*/attempts/*")) for node in self.mesh.node_ids)

    def _left(self) -> dict[int, str]:
        """Processes that are neither parts nor ours: of jobs, when all have ended."""
        ours = {*self.mesh.pids(), self.users.pid}
        return {
            pid: command
            for pid, command in remains.processes_of(self.directory).items()
            if pid not in ours and any(word in command for word in OF_JOBS)
        }

    def _judge(self) -> None:
        revision = self.recorder.store_revision()
        self._until("the recorder has seen all", lambda: self.recorder.revision >= revision, LEFT_SECONDS_MAX)
        pieces = [lines_of(self.directory / load.ANSWERS), lines_of(self.directory / HISTORY)]
        commits = list(self.recorder.commits)
        answers, edges = (piece[seen:] for piece, seen in zip(pieces, self._seen[1:], strict=True))
        self.judge.take(commits[self._seen[0] :], answers, edges, self._journal(), self._absences)
        self._absences = []
        self._seen = [len(commits), *map(len, pieces)]
        groups = remains.groups_of(self.judge.users.replicas)
        found = [*self.judge.wrong, *self.recorder.wrong, *judge_failures(self.recorder.failed, self._killed)]
        found += [f"the control group {group} was left" for group in groups]
        found += [
            f"{path.name} has a traceback"
            for path in sorted((self.directory / "logs").glob("*.log"))
            if TRACEBACK in path.read_text(errors="replace")
        ]
        self.told.wrong += [what for what in found if what not in self.told.wrong]


def run(directory: Path, wanted: Wanted, say: Callable[[str], None]) -> Told:
    """Make a mesh in an empty directory, and do to it what is wanted."""
    driver = Driver(directory, wanted, say)
    faults = {fault for fault in wanted.faults if driver.mesh.clock or fault is not Fault.CLOCK}
    return driver.run(plan(wanted.seed, wanted.steps, faults), wanted.rest_every, wanted.pace)
