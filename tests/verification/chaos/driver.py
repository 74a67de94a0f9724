"""Injects planned faults into a mesh, ends them all from time to time, and then checks the record."""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tests.end_to_end import remains
from tests.end_to_end.commands import TRACEBACK
from tests.end_to_end.waiting import lines_of
from tests.verification.chaos import call_log, jobs
from tests.verification.chaos.armed_points import SETTLE_SECONDS_MAX
from tests.verification.chaos.fault_injector import FaultInjector
from tests.verification.chaos.judge import Judge, archived_in, judge_archive, judge_failures
from tests.verification.chaos.load_process import POLL_SECONDS, LoadProcess
from tests.verification.chaos.machines import Machines
from tests.verification.chaos.mesh import HEARTBEAT_SECONDS, HISTORY, LOST_AFTER_SECONDS, Mesh
from tests.verification.chaos.plan import CLIENT, DEFAULT, DRAWN, MEMBERS, PYTHON, REPLICAS, Fault, Step, draw_steps
from tests.verification.chaos.recorder import Recorder
from tests.verification.chaos.status_checker import HEALTHY_SECONDS_MAX, StatusChecker
from tests.verification.chaos.store_faults import MENDED_SECONDS_MAX

from cotenant.cli.mesh.settings import ARCHIVE_FILE
from cotenant.store.open import tls_of

START_SECONDS_MAX, CALM_SECONDS_MAX, LEFT_SECONDS_MAX = 180.0, 180.0, 60.0
JOB_PROGRAMS = ("job.py", "supervisor.py", "sleep 600")
DRAWN_RATIO_MAX = 4  # times the requested steps: if so few have an effect, something else is wrong


@dataclass
class RunResult:
    """The result of a run."""

    seed: int
    tls: bool = False
    steps: int = 0  # with an effect
    faults: dict[str, int] = field(default_factory=dict)  # the same by kind
    drawn: dict[str, int] = field(default_factory=dict)  # including those without an effect
    wrong: list[str] = field(default_factory=list)
    jobs: int = 0
    attempts: int = 0
    commits: int = 0
    edges: int = 0
    starts: int = 0
    garbled: int = 0
    rests: int = 0
    seconds: float = 0.0
    settling_seconds: float = 0.0
    well_seconds: float = 0.0  # longest time from the last fault before a rest until `status` was healthy
    named: dict[str, int] = field(default_factory=dict)  # how often `status` named a lasting fault
    named_seconds: dict[str, float] = field(default_factory=dict)  # and the longest time it took
    refusals: dict[str, int] = field(default_factory=dict)
    reached: dict[str, int] = field(default_factory=dict)  # effective fail points and their actions
    points: dict[str, list[int]] = field(default_factory=dict)  # by point: times armed, reached, effective
    done: dict[str, int] = field(default_factory=dict)  # requests of users and stops, by kind


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of a run; `broken` names a deliberately broken build, and with `tls` all parts use TLS.

    With `names` parts reach each other by host names.

    Planned pauses between steps are multiplied by `pace`. Only the fail points in `points` are armed.
    """

    seed: int
    steps: int
    rest_every: int
    faults: frozenset[Fault] = DEFAULT
    broken: str = ""
    tls: bool = False
    pace: float = 1.0
    points: Collection[str] = DRAWN
    names: bool = False
    lasting_share: float | None = None  # of faults that `status` must name


class Driver:
    """A run."""

    def __init__(self, directory: Path, options: RunOptions, log: Callable[[str], None]) -> None:
        seed = options.seed
        self.directory, self.result, self._log = directory, RunResult(seed, options.tls), log
        jobs.prepare(directory)
        rng = Random(f"machines {seed}")
        self.machines = Machines(directory, rng)
        self.mesh = Mesh(directory, self.machines, options.broken, tls=options.tls, names=options.names)
        self.status_checker = StatusChecker(self.mesh)
        self.judge = Judge(self.mesh.node_ids, LOST_AFTER_SECONDS - 2 * HEARTBEAT_SECONDS)
        self._options = options
        self._seen = [0, 0, 0]  # commits, answers and edge events already checked

    def run(self, steps: Iterable[Step]) -> RunResult:
        """Do steps until enough had an effect; end at the first rest that finds an error."""
        begin, options = time.monotonic(), self._options
        try:
            self._set_up()
            for step in steps:
                self._wait(time.monotonic() + step.after_seconds * options.pace)
                self._log(str(step))
                self.fault_injector.begin(step)
                enough = self.fault_injector.effective_counts().total() >= options.steps
                last = enough or step.number == DRAWN_RATIO_MAX * options.steps
                rests = last or step.number % options.rest_every == 0
                if rests and (not self._quiesce(is_last=last) or last):
                    break
        finally:
            self.result.seconds = time.monotonic() - begin
            self._tear_down()
        return self.result

    # Beginning and end ---------------------------------------------------------------------------------------

    def _set_up(self) -> None:
        for name in MEMBERS:
            self.mesh.start(name)
        for name in MEMBERS:
            member = self.mesh.parts[name].member
            assert member
            member.wait_until_healthy()
        certificates = self.mesh.certificates
        tls = tls_of(certificates.variables(CLIENT)) if certificates else None
        self.recorder = Recorder(self.mesh.store, self.directory / "commits", tls)
        self.fault_injector = FaultInjector(self.mesh, self.recorder, Random(f"moments {self.result.seed}"))
        self.status_checker.not_launched = self.recorder.not_launched
        self.fault_injector.on_begin, self.fault_injector.on_end = self.status_checker.begin, self.status_checker.end
        for name in PYTHON:
            self.mesh.start(name)
        self._until("all parts serve", lambda: all(map(self.mesh.serving, PYTHON)), START_SECONDS_MAX)
        self.load = LoadProcess(self.mesh, self.result.seed)

    def _tear_down(self) -> None:
        with contextlib.suppress(AttributeError):
            self.load.close()
        self.status_checker.close()
        self.mesh.close()
        with contextlib.suppress(AttributeError):
            self.recorder.close()
        self.machines.emulator.close()
        remains.end(set(remains.processes_of(self.directory)))
        remains.remove(remains.groups_of(self.judge.users.replicas))
        self.result.starts = self.mesh.starts.total()
        self.result.garbled = self.machines.emulator.garbled.total()
        self.result.jobs, self.result.commits = len(self.judge.users.replicas), self.judge.commits
        self.result.edges = self.judge.edges
        with contextlib.suppress(AttributeError):
            self.result.points = self._points()
            self.result.reached = dict(self.fault_injector.armed_points.reached)
            self.result.done = dict(
                self.judge.users.acknowledgements.counts + self.judge.counts + self.recorder.stopped
            )
            self.result.named = dict(self.status_checker.counts)
            self.result.named_seconds = self.status_checker.named_seconds
            self.result.done["archived jobs"] = len(self.judge.users.acknowledgements.forgotten)
        self.result.attempts = len({tuple(words[1:3]) for words in self._journal()})

    def _points(self) -> dict[str, list[int]]:
        armed_points, fired = self.fault_injector.armed_points, Counter[str]()
        for what, times in armed_points.reached.items():
            fired[what.partition(" ")[0]] += times
        return {point: [armed_points.armed[point], self.mesh.pass_count(point), fired[point]] for point in DRAWN}

    def _until(self, what: str, holds: Callable[[], bool], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not holds():
            self._poll()
            if time.monotonic() > deadline:
                self.result.wrong.append(f"{what}: not within {seconds:.0f} s")
                return False
            time.sleep(POLL_SECONDS)
        return True

    def _poll(self) -> None:
        self.fault_injector.poll()
        self.status_checker.update()
        self.result.wrong += [*self.fault_injector.wrong, *self.status_checker.wrong, *self.mesh.restart_ended_parts()]
        self.fault_injector.wrong.clear()
        self.status_checker.wrong.clear()
        if hasattr(self, "load") and self.load.ended():
            raise RuntimeError(f"the load ended: {(self.directory / 'logs' / 'client.log').read_text()[-2000:]}")

    # Steps ---------------------------------------------------------------------------------------------------

    def _wait(self, until: float) -> None:
        """Wait, and end faults whose time is over."""
        while (now := time.monotonic()) < until:
            self._poll()
            time.sleep(min(POLL_SECONDS, max(0.0, until - now)))

    # Rest ----------------------------------------------------------------------------------------------------

    def _journal(self) -> list[list[str]]:
        return [line.split() for line in lines_of(self.directory / "journal")]

    def _quiesce(self, *, is_last: bool) -> bool:
        """End all faults, wait until all jobs have ended, and check; return False if anything is wrong."""
        self._wait(self.fault_injector.end_of_named_faults())
        begin = time.monotonic()
        self.fault_injector.end_all()
        self._until("the store is repaired", self.fault_injector.store.is_mended, MENDED_SECONDS_MAX)
        self._settle_armed_points()
        self.fault_injector.armed_points.asks_leaders = False
        self._wait_until_healthy()
        if is_last:
            self.fault_injector.armed_points.end()
        self.result.drawn, self.result.faults = (
            dict(self.fault_injector.drawn),
            dict(self.fault_injector.effective_counts()),
        )
        self.result.steps = sum(self.result.faults.values())
        self.load.send("hush")
        if self._until("all jobs end", self.load.is_idle, CALM_SECONDS_MAX):
            self._until("attempts are forgotten", lambda: not self._attempts_left(), LEFT_SECONDS_MAX)
            self._until("no process is left", lambda: not self._leftover_processes(), LEFT_SECONDS_MAX)
            self.result.wrong += [
                f"leftover process {pid}: {command}" for pid, command in self._leftover_processes().items()
            ]
            self._judge()
        self.result.refusals = self.load.refusals
        self.load.send("go")
        self.fault_injector.armed_points.asks_leaders = True
        self.result.rests += 1
        took = time.monotonic() - begin
        self.result.settling_seconds += took
        did = f"{self.result.steps} of {sum(self.result.drawn.values())} steps had an effect"
        self._log(
            f"     at rest after {took:.1f} s: {did}, {self.judge.commits} commits, "
            f"{len(self.judge.users.replicas)} jobs"
        )
        return not self.result.wrong

    def _wait_until_healthy(self) -> None:
        """Wait until `status` reports no problem, while users continue."""
        begin = time.monotonic()
        self.status_checker.require_fresh_answer()
        while not self.status_checker.is_healthy():
            self._poll()
            if time.monotonic() > begin + HEALTHY_SECONDS_MAX:
                found = "; ".join(f"{one['where']}: {one['what']}" for one in self.status_checker.last_problems)
                self.result.wrong.append(
                    f"{HEALTHY_SECONDS_MAX:.0f} s after the last fault status is not healthy: "
                    f"{found or self.status_checker.last_error}"
                )
                return
            time.sleep(POLL_SECONDS)
        self.result.well_seconds = max(self.result.well_seconds, time.monotonic() - begin)

    def _settle_armed_points(self) -> None:
        """Give processes time to reach armed fail points, and to resume, now that no other fault prevents it.

        A point that none reaches stays armed: the code path is rare.
        """
        deadline = time.monotonic() + SETTLE_SECONDS_MAX
        while self.fault_injector.armed_points.is_settling() and time.monotonic() < deadline:
            self._poll()
            time.sleep(POLL_SECONDS)

    def _attempts_left(self) -> bool:
        return any(any(self.machines.all[node].disk.glob("state/nodes/*/attempts/*")) for node in self.mesh.node_ids)

    def _leftover_processes(self) -> dict[int, str]:
        """Return processes of jobs that are left after all jobs have ended."""
        ours = {*self.mesh.pids(), self.load.pid}
        return {
            pid: command
            for pid, command in remains.processes_of(self.directory).items()
            if pid not in ours and any(word in command for word in JOB_PROGRAMS)
        }

    def _judge(self) -> None:
        revision = self.recorder.store_revision()
        self._until("the recorder has caught up", lambda: self.recorder.revision >= revision, LEFT_SECONDS_MAX)
        pieces = [lines_of(self.directory / call_log.ANSWERS), lines_of(self.directory / HISTORY)]
        commits = list(self.recorder.commits)
        answers, edges = (piece[seen:] for piece, seen in zip(pieces, self._seen[1:], strict=True))
        absences, killed = self.fault_injector.absences, self.fault_injector.killed
        self.judge.take(commits[self._seen[0] :], answers, edges, self._journal(), absences, killed)
        self.fault_injector.absences = [absence for absence in self.fault_injector.absences if absence.end == math.inf]
        self._seen = [len(commits), *map(len, pieces)]
        groups = remains.groups_of(self.judge.users.replicas)
        found = [
            *self.judge.wrong,
            *self.recorder.wrong,
            *judge_failures(self.recorder.failed, self.fault_injector.killed),
        ]
        archives = [self.machines.all[name].disk / "state" / ARCHIVE_FILE for name in REPLICAS if "queue" in name]
        found += judge_archive(self.judge.users.acknowledgements.forgotten, archived_in(archives))
        found += [f"leftover control group {group}" for group in groups]
        found += [
            f"{path.name} has a traceback"
            for path in sorted((self.directory / "logs").glob("*.log"))
            if TRACEBACK in path.read_text(errors="replace")
        ]
        self.result.wrong += [what for what in found if what not in self.result.wrong]


def run(directory: Path, options: RunOptions, log: Callable[[str], None]) -> RunResult:
    """Create a mesh in an empty directory and run the faults."""
    driver = Driver(directory, options, log)
    faults = {fault for fault in options.faults if driver.mesh.clock or fault is not Fault.CLOCK}
    return driver.run(draw_steps(options.seed, faults, options.points, options.lasting_share))
