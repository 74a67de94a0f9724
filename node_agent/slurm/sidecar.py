"""The sidecar of a Slurm node: it looks at the steps again and again, moves them, and puts everything back at its end.

Three things put steps back: the sidecar when it ends; a guardian process, which notices by a pipe that the sidecar died
of anything; and the next sidecar, if both were killed. A lock on our control group lets one act at a time.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import structlog

from cotenant.node_agent.slurm.core_sharing import WINDOW_SECONDS, CoreSharing, JobUse, Share
from cotenant.node_agent.slurm.step_groups import Step, StepGroups, cpu_seconds, environment, why_fixed
from cotenant.node_agent.supervisor.cgroups import GroupError

log = structlog.get_logger()

INTERVAL_SECONDS = 1.0
LOCK_SECONDS_MAX = 10.0
RETRY_SECONDS = 0.1
GPU_VARIABLES = ("SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS", "SLURM_STEP_GPUS")
FAILED_SECONDS = 60.0  # for which a job is left alone whose cores could not be changed

Told = Callable[[Mapping[str, str]], int | None]  # θ of a job, by the environment of its processes


class AnotherRuns(Exception):
    """Another sidecar acts on this node."""


@dataclass(frozen=True, slots=True)
class SidecarConfig:
    """How a sidecar acts. `say` receives a line for each change, or with `dry_run` for each that would be made."""

    interval_seconds: float = INTERVAL_SECONDS
    window_seconds: float = WINDOW_SECONDS
    lend_idle: bool = False
    dry_run: bool = False
    say: Callable[[str], None] = field(default=lambda line: None)
    told: Told = field(default=lambda environment: None)


class Sidecar:
    """One look after the other. Blocking: it does nothing else."""

    def __init__(self, groups: StepGroups, config: SidecarConfig) -> None:
        self._groups, self._config = groups, config
        self._sharing = CoreSharing(config.window_seconds, lend_idle=config.lend_idle)
        self._used: dict[int, tuple[float, float]] = {}  # CPU seconds and the moment, by the step's inode
        self._shares: Mapping[str, Share] = {}
        self._facts: dict[str, tuple[frozenset[int], bool, int | None]] = {}
        self._failed: dict[str, float] = {}
        self._left: dict[str, str] = {}  # why jobs are left alone, as said

    def look(self, now: float) -> Mapping[str, Share]:
        """Look once, act, and return the shares of jobs that do not have just their own cores."""
        steps: dict[str, list[Step]] = defaultdict(list)
        for step in self._groups.steps():
            steps[step.job].append(step)
        jobs = [self._use(now, job, found) for job, found in steps.items()]
        shares = self._sharing.decide(now, jobs, os.sched_getaffinity(0))
        self._say(jobs, shares)
        if not self._config.dry_run:
            self._apply(now, steps, shares)
        inodes = {step.inode for found in steps.values() for step in found}
        self._used = {inode: used for inode, used in self._used.items() if inode in inodes}
        self._facts = {job: facts for job, facts in self._facts.items() if job in steps}
        self._left = {job: why for job, why in self._left.items() if job in steps}
        self._failed = {job: until for job, until in self._failed.items() if job in steps and until > now}
        self._shares = shares
        return shares

    def _use(self, now: float, job: str, steps: Sequence[Step]) -> JobUse:
        cores = tuple(sorted({core for step in steps for core in step.cores}))
        share, used, fixed, known, pids = self._shares.get(job), 0.0, "", True, list[int]()
        for step in steps:
            mine = self._groups.pids(step.path)
            pids += mine
            seconds = cpu_seconds(mine)
            before = self._used.get(step.inode)
            self._used[step.inode] = seconds, now
            if before and now > before[1]:
                used += max(0.0, seconds - before[0]) / (now - before[1])
            else:
                known = False
            if step.cores != cores:
                fixed = "its steps have cores of their own"
            elif self._groups.suspended(step.path):
                fixed = "it is suspended"
        if pids and not fixed:
            fixed = why_fixed(pids, cores, share.cores if share else cores)
        if job in self._failed:
            fixed = fixed or "its cores could not be changed"
        gpus, told = self._facts_of(job, steps, pids)
        names = frozenset(f"{step.path}:{step.inode}" for step in steps)
        return JobUse(job, cores, used if known and pids else None, gpus, told, names, fixed)

    def _facts_of(self, job: str, steps: Sequence[Step], pids: Sequence[int]) -> tuple[bool, int | None]:
        """Return whether a job has GPUs, and θ of its kind; read again when it has new steps."""
        inodes = frozenset(step.inode for step in steps)
        known = self._facts.get(job)
        if known and known[0] == inodes:
            return known[1:]
        variables = next((found for pid in pids if "SLURM_JOB_ID" in (found := environment(pid))), None)
        if variables is None:
            return False, None
        gpus = any(variables.get(name) for name in GPU_VARIABLES)
        self._facts[job] = inodes, gpus, self._config.told(variables)
        return self._facts[job][1:]

    def _say(self, jobs: Sequence[JobUse], shares: Mapping[str, Share]) -> None:
        verb = "would move" if self._config.dry_run else "moved"
        for job in jobs:
            share, before = shares.get(job.job), self._shares.get(job.job)
            if job.fixed and self._left.get(job.job) != job.fixed:
                self._left[job.job] = job.fixed
                self._config.say(f"left job {job.job} alone: {job.fixed}")
            if (share.cores if share else ()) == (before.cores if before else ()):
                continue
            cores = share.cores if share else job.cores
            why = share.reason if share else job.fixed or "it has its own cores again"
            self._config.say(f"{verb} job {job.job} to cores {','.join(map(str, cores))}: {why}")

    def _apply(self, now: float, steps: Mapping[str, Sequence[Step]], shares: Mapping[str, Share]) -> None:
        """Take cores away first, then give: no core is promised to two."""
        live = {step.path for found in steps.values() for step in found}
        for path in self._groups.moved():
            job = path.partition("/job_")[2].partition("/")[0]
            if path not in live or job not in shares:
                with _tolerated(path):
                    self._groups.put_back(path)
        for job, share in sorted(shares.items(), key=lambda one: len(one[1].lent)):
            for step in steps[job]:
                try:
                    self._groups.give(step, share.cores)
                except GroupError as error:
                    log.warning("slurm_step_not_moved", step=step.path, error=str(error))
                    self._failed[job] = now + FAILED_SECONDS
                    with _tolerated(step.path):
                        self._groups.put_back(step.path)


@contextmanager
def _tolerated(path: str) -> Iterator[None]:
    try:
        yield
    except GroupError as error:
        log.warning("slurm_step_not_put_back", step=path, error=str(error))


def run(groups: StepGroups, config: SidecarConfig) -> None:
    """Act until SIGTERM or SIGINT; then put everything back.

    Raises:
        AnotherRuns: another sidecar acts on this node.
        GroupError: no control groups can be made.
    """
    ended = False

    def end(signal_number: int, frame: object) -> None:
        nonlocal ended
        ended = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    with acting(groups, config) as sidecar:
        while not ended:
            began = time.monotonic()
            sidecar.look(began)
            until = began + config.interval_seconds
            while not ended and (left := until - time.monotonic()) > 0:
                time.sleep(min(left, 0.2))


@contextmanager
def acting(groups: StepGroups, config: SidecarConfig) -> Iterator[Sidecar]:
    """Guard what is moved, and put everything back at the end. A dry run moves nothing and needs no lock."""
    if config.dry_run:
        yield Sidecar(groups, config)
        return
    lock = _lock(groups)
    try:
        groups.put_all_back()
        guardian, pipe = _guard(groups)
        try:
            yield Sidecar(groups, config)
        finally:
            for path in groups.put_all_back():
                log.warning("slurm_step_left", step=path)
            with suppress(OSError):
                os.write(pipe, b"done")
            os.close(pipe)
            with suppress(ChildProcessError):
                os.waitpid(guardian, 0)
    finally:
        groups.remove()
        os.close(lock)


def put_back(groups: StepGroups) -> list[str]:
    """Put everything back that a sidecar left; return what could not be. Raises `AnotherRuns`, `GroupError`."""
    lock = _lock(groups)
    try:
        return groups.put_all_back()
    finally:
        groups.remove()
        os.close(lock)


def _lock(groups: StepGroups) -> int:
    deadline = time.monotonic() + LOCK_SECONDS_MAX
    while True:
        lock = os.open(groups.create(), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            if time.monotonic() > deadline:
                raise AnotherRuns("another sidecar acts on this node") from None
            time.sleep(RETRY_SECONDS)
            continue
        if os.fstat(lock).st_ino == groups.create().stat().st_ino:
            return lock
        os.close(lock)  # the one before removed it in between


def _guard(groups: StepGroups) -> tuple[int, int]:
    """Start the guardian; return its pid and the pipe that it watches.

    It inherits the lock, so that it acts alone. A word in the pipe says that nothing is left to do.
    """
    read_end, write_end = os.pipe()
    guardian = os.fork()
    if guardian == 0:
        try:
            os.close(write_end)
            os.setsid()
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            if not os.read(read_end, 4):  # the sidecar died
                groups.put_all_back()
                groups.remove()
        finally:
            os._exit(0)
    os.close(read_end)
    return guardian, write_end
