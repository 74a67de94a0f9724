"""Live twins: small versions of five papers' runs on a real mesh, and the same jobs in the simulator.

Theory of operation. A twin starts a mesh of its own on two CPUs of this machine with declared GPUs, and submits real
processes whose speed depends on their CPUs. They record the time of each step by number of CPUs. From that come the
rates with which the simulator then replays the same jobs, submitted at the same moments, under the same policies with
the same options. The difference of the two average completion times is judged.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from cotenant import simulator
from cotenant.core.model.job import JobKind, JobSpec, Request, Role
from cotenant.core.model.model_name import model_of
from cotenant.core.model.node import NodeShape
from cotenant.reproduction import live_mesh, twin_job
from cotenant.reproduction.model import (
    Asked,
    Better,
    Case,
    Cell,
    Chart,
    Claim,
    Done,
    Figures,
    Findings,
    Measured,
    Shape,
    Stopped,
    Table,
    line_of,
)
from cotenant.reproduction.tables import means
from cotenant.simulator.physics.cores import speed

CPUS, GPUS = 2, 2
STEP_SECONDS = 0.05  # CPU time of a steep job's step, and the pause of a level one's
MODELS = {"steep": "resnet18", "level": "lstm"}  # with curves in the simulator of the same shape as the kinds
TUNED = {"warm_up_seconds": "0.3", "measure_seconds": "1"}  # seconds where jobs of hours use minutes
BUSY_PERCENT, LOOK_SECONDS = 20.0, 0.5  # CPU use by others above which a run means little; seconds of that measurement
PATIENCE = 20.0  # limit of the jobs' time, as a multiple of their time alone, on a busy machine


@dataclass(frozen=True, slots=True)
class TwinJob:
    """A job of a twin: its kind, steps, GPUs and cores (None: open) of each replica, and its arrival.

    `deadline_seconds` counts from its submission.
    """

    kind: str
    steps: int
    gpus: int = 1
    cores: int | None = None
    after_seconds: float = 0.0
    replicas: int = 1
    deadline_seconds: float | None = None

    def role(self) -> Role:
        """Return its role."""
        return Role("worker", self.replicas, Request(1000 * self.gpus, self.cores))


@dataclass(frozen=True, slots=True)
class Twin:
    """The policies of a twin, and its jobs."""

    name: str
    queue: str
    placement: str
    allocator: str
    predictor: str
    jobs: tuple[TwinJob, ...]
    options: Mapping[str, Mapping[str, str]] = field(default_factory=lambda: {"allocator": TUNED})
    contention: str = "coda-eliminator"

    def flags(self) -> list[str]:
        """Return the flags of the mesh."""
        named = ["--queue", self.queue, "--placement", self.placement, "--allocator", self.allocator]
        named += ["--predictor", self.predictor, "--contention", self.contention]
        given = [f"{group}.{key}={value}" for group, own in self.options.items() for key, value in own.items()]
        return ["--gpus", f"fake:{GPUS}", *named, *(part for one in given for part in ("--option", one))]


def _jobs(scale: float, *parts: tuple[str, int, int, int | None, float]) -> tuple[TwinJob, ...]:
    return tuple(TwinJob(kind, round(steps * scale), gpus, cores, after) for kind, steps, gpus, cores, after in parts)


def twins(scale: float) -> tuple[Twin, ...]:
    """Return the twins of the five papers, of ten jobs or more; scale 1 is about ten seconds of work each."""
    coda = _jobs(
        scale,
        ("level", 60, 2, None, 0),
        *(("steep", 20, 0, 1, 0.2 * number) for number in range(1, 6)),
        *(("level", 20, 1, None, 1.0 + 0.2 * number) for number in range(4)),
    )
    xiao = _jobs(
        scale,
        *(("steep" if number % 2 == 0 else "level", 24, 1, None, 0.1 * number) for number in range(10)),
    )
    aiturbo = _jobs(
        scale,
        ("steep", 60, 1, None, 0),
        ("level", 30, 1, None, 0),
        *(("steep" if number % 2 == 0 else "level", 12 + 3 * number, 1, None, 0.2 * number) for number in range(1, 9)),
    )
    due = [(8.0 if number % 3 else 3.0) + 2.0 * scale * number for number in range(10)]
    genie = [replace(job, deadline_seconds=seconds) for job, seconds in zip(xiao, reversed(due), strict=True)]
    philly = [replace(job, replicas=2 if number in (2, 5, 8) else 1) for number, job in enumerate(xiao)]
    backfill, waits = {"mode": "backfill"}, {"server_seconds": "2", "rack_seconds": "2"}
    return (
        Twin("coda", "drf", "multi-array", "coda-adaptive", "history", coda),
        Twin("xiao", "fifo", "consolidate", "xiao", "xiao-piecewise", xiao),
        Twin("aiturbo", "borda-mlfq", "consolidate", "aiturbo", "history", aiturbo),
        Twin("genie", "swaf", "qos", "proportional", "latency,scaling,history", tuple(genie), {}),
        Twin(
            "philly", "fifo", "locality", "proportional", "history", tuple(philly),
            {"queue": backfill, "placement": waits},
        ),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class LiveTwin:
    """One twin, live and simulated."""

    twin: Twin
    seed: int

    def run(self, stopped: Stopped) -> Figures | None:
        """Run it live, then simulate it with the measured rates. Only one runs at a time on a machine."""
        with _machine_lock(stopped) as mine:
            if not mine:
                return None
            others = others_percent()
            with tempfile.TemporaryDirectory(prefix="cotenant-twin-") as directory:
                try:
                    ran, told = run_live(self.twin, Path(directory), stopped)
                except live_mesh.LiveStopped:
                    return None
            others = max(others, others_percent())
        return compared(self.twin, ran, told, self.seed, others=others)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """What a job recorded: the start of its first step, the end of its last, and the seconds of each step by CPUs."""

    begin_seconds: float
    end_seconds: float
    took: Mapping[int, Sequence[float]]


def others_percent() -> float:
    """Return the current use of a twin's CPUs by other processes, while no twin runs."""
    taken = psutil.cpu_percent(LOOK_SECONDS, percpu=True)
    return statistics.fmean(taken[cpu] for cpu in sorted(os.sched_getaffinity(0))[:CPUS])


def run_live(
    twin: Twin, directory: Path, stopped: Stopped = lambda: False
) -> tuple[list[live_mesh.Ran], list[StepTimes]]:
    """Run a twin's jobs on a mesh of its own.

    Raises:
        LiveFailed: the mesh, or a job, failed.
        LiveStopped: stopped; nothing is left running.
    """
    cpus = sorted(os.sched_getaffinity(0))[:CPUS]
    if len(cpus) < CPUS:
        raise live_mesh.LiveFailed(f"a twin needs {CPUS} CPUs, and this process may use {len(cpus)}")
    blocks = max(2, round(STEP_SECONDS / _block_seconds()))
    specs = [(job.after_seconds, _spec(job, blocks, directory / f"{n}.json")) for n, job in enumerate(twin.jobs)]
    alone_seconds = STEP_SECONDS * sum(job.steps for job in twin.jobs)
    with live_mesh.mesh(directory, cpus, twin.flags()) as mesh:
        ran = mesh.run(specs, seconds_max=PATIENCE * alone_seconds, stopped=stopped)
    return ran, [_read_step_times(directory / f"{number}.json") for number in range(len(specs))]


def _spec(job: TwinJob, blocks: int, told: Path) -> JobSpec:
    program = [sys.executable, twin_job.__file__, job.kind, str(job.steps), str(blocks), str(STEP_SECONDS), str(told)]
    return JobSpec(
        name=job.kind,
        kind=JobKind.TRAINING if job.gpus else JobKind.CPU,
        roles=(job.role(),),
        command=tuple(program),
        model=MODELS[job.kind],
        steps_total=job.steps,
        deadline_seconds=job.deadline_seconds,  # from its submission, as `Live.run` takes it
        profiled=False,  # the simulator has no profiles either: the allocator's own trials find the cores
    )


def _read_step_times(path: Path) -> StepTimes:
    found = json.loads(path.read_text())
    return StepTimes(found["begin"], found["end"], {int(cpus): took for cpus, took in found["took"].items()})


def _block_seconds() -> float:
    """Return the CPU time of hashing one block."""
    times = 20
    begin = time.thread_time()
    for _ in range(times):
        hashlib.sha256(twin_job.BLOCK).digest()
    return (time.thread_time() - begin) / times


@contextmanager
def _machine_lock(stopped: Stopped) -> Iterator[bool]:
    """Wait until no other twin runs on this machine; False if stopped."""
    with Path(__file__).open("rb") as mark:
        while not stopped():
            try:
                fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(live_mesh.POLL_SECONDS)
            else:
                yield True
                return
        yield False


def compared(
    twin: Twin, ran: Sequence[live_mesh.Ran], told: Sequence[StepTimes], seed: int, *, others: float = 0.0
) -> Figures:
    """Simulate the jobs with their measured rates, and compare the average completion times.

    `others`: use of the CPUs by other processes, in percent.
    """
    first = min(one.submitted_seconds for one in ran)
    result = simulator.simulate(
        simulator.Trace(twin.name, "none", tuple(replayed(twin, ran, told))),
        simulator.Cluster(twin.name, (NodeShape(GPUS, CPUS),), ("",)),
        queue=twin.queue,
        placement=twin.placement,
        allocator=twin.allocator,
        predictor=twin.predictor,
        options={"simulator": {"speed": "cores"}, **twin.options},
        seed=seed,
    )
    live_met = [
        one.ended_seconds - one.submitted_seconds <= job.deadline_seconds
        for job, one in zip(twin.jobs, ran, strict=True)
        if job.deadline_seconds is not None
    ]
    jct_seconds = statistics.fmean(one.ended_seconds - one.submitted_seconds for one in ran)
    simulated = float(result.avg_jct_seconds or 0.0)
    outside = statistics.fmean(_outside_seconds(one, own) for one, own in zip(ran, told, strict=True))
    return Figures(
        {
            "live_seconds": jct_seconds,
            "simulated_seconds": simulated,
            "ratio": jct_seconds / simulated,
            "off_percent": 100.0 * abs(jct_seconds / simulated - 1.0),
            "outside_seconds": outside,
            "others_percent": others,
            "live_makespan_seconds": max(one.ended_seconds for one in ran) - first,
            "simulated_makespan_seconds": float(result.makespan_seconds or 0.0),
            "live_met_percent": 100.0 * statistics.fmean(live_met) if live_met else math.nan,
            "simulated_met_percent": math.nan if result.qos_guarantee_percent is None else result.qos_guarantee_percent,
        }
    )


def replayed(twin: Twin, ran: Sequence[live_mesh.Ran], told: Sequence[StepTimes]) -> Iterator[simulator.TraceJob]:
    """Yield the jobs for the simulator: with work in seconds, at reference speed if they have GPUs."""
    by_kind: dict[str, list[StepTimes]] = {}
    for job, own in zip(twin.jobs, told, strict=True):
        by_kind.setdefault(job.kind, []).append(own)
    rates = {kind: reference_rate(kind, those) for kind, those in by_kind.items()}
    first = min(one.submitted_seconds for one in ran)
    for number, (job, one, own) in enumerate(zip(twin.jobs, ran, told, strict=True)):
        at_start = _speed(job.kind, next(iter(own.took)))  # on the CPUs with which it started
        work = job.steps / rates[job.kind] + _outside_seconds(one, own) * at_start
        kind, submitted = JobKind.TRAINING, one.submitted_seconds - first
        if not job.gpus:  # the simulator has no curve for it, and it keeps its cores
            kind, work = JobKind.CPU, work / at_start
        due = None if job.deadline_seconds is None else submitted + job.deadline_seconds
        yield simulator.TraceJob(
            str(number), submitted, work, (job.role(),), kind, model=MODELS[job.kind], deadline_seconds=due
        )


def _outside_seconds(one: live_mesh.Ran, own: StepTimes) -> float:
    """Return the time from the assignment to the first step, and from the last step to the end."""
    return max(0.0, own.begin_seconds - one.assigned_seconds + one.ended_seconds - own.end_seconds)


def reference_rate(kind: str, told: Sequence[StepTimes]) -> float:
    """Return the rate at reference speed, in steps per second, that best explains the step times of a kind.

    >>> reference_rate("level", [StepTimes(0.0, 2.0, {1: [0.5, 0.5], 2: [0.5, 0.5]})])
    2.0
    """
    steps = sum(len(took) for one in told for took in one.took.values())
    work_seconds = sum(_speed(kind, cpus) * sum(took) for one in told for cpus, took in one.took.items())
    return steps / work_seconds


def _speed(kind: str, cores: int) -> float:
    model = model_of(MODELS[kind])
    assert model
    return speed(model, gpus=1, cores_per_gpu=cores) or 1.0


class Twins:
    """Whether simulation and live runs agree."""

    name = "twins"
    title = "Live twins: the same jobs on a real mesh and in the simulator"
    reference = "our own; small versions of CODA, Xiao, AITurbo, GENIE and Philly"
    claims: Sequence[Claim] = (
        Claim("jct", "average JCT, live off simulated", 10.0, "%", Better.LOWER, "our own bar: at most so far apart"),
    )
    assumptions = (
        f"a mesh of its own in a child process, with SQLite, on {CPUS} CPUs of this machine and {GPUS} declared GPUs",
        "jobs are real processes: `steep` ones do a fixed amount of work in each step on as many threads as they have"
        " CPUs, `level` ones wait for a declared accelerator",
        "the simulator uses the rates that the same run measured, for each kind the one that explains all steps best;"
        " their dependence on cores is that of ResNet-18 and of an LSTM: nearly proportional, and level",
        "the time from the assignment to the first step and from the last step to the end counts as work, because"
        " the simulator starts and ends jobs at once",
        "warm-up and measurement of the allocators are a second instead of minutes, in both",
        "jobs arrive at the same times as live, ten to a twin",
        "the contention policy is on live; in the simulator, where these jobs do not contend, it has nothing to do",
        "GENIE's jobs have deadlines from their submission; Philly's gangs of two replicas wait for two GPUs of the one"
        " server: there is no second one to relax to",
    )
    unsaid = (
        "not modeled: the time from submission to assignment if resources are free, the time between a process' end"
        " and the next assignment, and the CPU use of the mesh itself",
        "other processes on this machine slow down live jobs unevenly, which measured rates average out",
    )

    def cases(self, asked: Asked) -> Sequence[Case]:
        """Return each twin, with `quick` once."""
        seeds = asked.seeds[:1] if asked.quick else asked.seeds
        return [
            Case(twin.name, "live", seed, LiveTwin(twin, seed), repeatable=False)
            for seed in seeds
            for twin in twins(1.0 if asked.quick else 2.0)
        ]

    def findings(self, asked: Asked, done: Done) -> Findings:
        """Return live beside simulated."""
        names = [twin.name for twin in twins(1.0)]
        (claim,) = self.claims
        measured = tuple(
            Measured(claim, name, "live", "simulated", done.spread(name, "live", "off_percent"), why=_why(done, name))
            for name in names
        )
        return Findings(measured, (_table(done, names),), (_chart(done, names),))


def _why(done: Done, name: str) -> str:
    """Warn if the machine was busy."""
    others = done.mean(name, "live", "others_percent")
    told = f"other processes used {others:.0f} % of the CPUs just before or after: an idle machine would say more"
    return told if others >= BUSY_PERCENT else ""


FIGURES = {
    "live_seconds": ("average JCT, live (s)", ".2f"),
    "simulated_seconds": ("simulated (s)", ".2f"),
    "ratio": ("live ÷ simulated", ".3f"),
    "outside_seconds": ("start and end (s)", ".2f"),
    "others_percent": ("CPUs used by others (%)", ".0f"),
    "live_makespan_seconds": ("makespan, live (s)", ".2f"),
    "simulated_makespan_seconds": ("simulated makespan (s)", ".2f"),
    "live_met_percent": ("deadlines met, live (%)", ".0f"),
    "simulated_met_percent": ("simulated deadlines met (%)", ".0f"),
}


def _table(done: Done, names: Sequence[str]) -> Table:
    titles, formats = zip(*FIGURES.values(), strict=True)
    rows: tuple[tuple[Cell, ...], ...] = tuple((name, *means(done, name, "live", FIGURES)) for name in names)
    return Table("twins", "Live beside simulated", ("twin", *titles), ("", *formats), rows, "Means over the rounds.")


def _chart(done: Done, names: Sequence[str]) -> Chart:
    lines = tuple(
        line_of(label, [done.spread(name, "live", figure) for name in names])
        for label, figure in (("live", "live_seconds"), ("simulated", "simulated_seconds"))
    )
    title, caption = "Average completion time, live and simulated", "Closer to each other is better."
    return Chart("twins", title, caption, Shape.BARS, "", "seconds", tuple(names), lines)


PAPER = Twins()
