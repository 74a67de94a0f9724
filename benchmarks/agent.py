"""The cost of the node agent: job starts, usage while jobs run, and leaks of short jobs.

The agent is the real `cotenant serve agent`, with real processes, with control groups if they can be created, and with
a fake NVIDIA driver if a compiler is available; this process plays placement. A start is measured from sending the
assignment until the first output of the job, so it includes the start of a shell. The reference is a bare spawn of the
same shell by this process, alternating with the starts, and a step of Slurm: `srun` of the same shell within an
allocation where this process runs in one, else what was measured in November 2026 (Slurm 22.05, two cores, from the
exec of srun to that of the program; processor time of srun, slurmd and slurmstepd). CPU time is also measured, which
other load on the machine distorts less.

Memory is that of the agent and its NVML process, with shared pages counted once.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import harness  # noqa: E402 - likewise
from tests.end_to_end import remains  # noqa: E402 - the root of the checkout has to be on the path first
from tests.end_to_end.commands import COTENANT, Serving, environment_of  # noqa: E402 - likewise
from tests.unit.node_agent import conditions, fake_driver, jobs  # noqa: E402 - likewise
from tests.unit.node_agent.placement import Placement  # noqa: E402 - likewise

from cotenant.node_agent.enforcement.cgroup_mounts import find_mounts  # noqa: E402 - likewise

BASH = shutil.which("bash") or "/bin/bash"
STARTS, STARTS_QUICK = 300, 60
AT_ONCE = 100
SAMPLED, SAMPLE_SECONDS = 20, 5.0
STEADY_SECONDS, STEADY_SECONDS_QUICK = 60.0, 20.0
SHORT, SHORT_QUICK = 1_000, 150
UNDER_WAY = 20  # concurrent short jobs
KEPT_MAX = 200  # outputs that the agent keeps readable
P50_MS, P99_MS, AT_ONCE_SECONDS = 15.0, 200.0, 5.0
PROCESSOR_MS = 12.0  # of the agent, the zygote, the supervisor and the shell
STEP_MS, STEP_PROCESSOR_MS = 22.0, 20.0  # published: Slurm 22.05, November 2026
CORE_SHARE, AGENT_MIB, SUPERVISOR_MIB = 0.01, 80.0, 12.0
MIB = 1024.0  # KiB


@dataclass(frozen=True, slots=True)
class Bench:
    """The measured agent and its placement."""

    placement: Placement
    agent: psutil.Process
    state_dir: Path
    directory: Path
    node_id: str

    def job(self, job_id: str, script: str, *, pinned: bool = False) -> None:
        """Assign a job with one task to the agent; a pinned job has a dedicated CPU."""
        task = jobs.task(cpus=jobs.CPUS[:1] if pinned else (), memory_bytes=64 << 20)
        self.placement.assign(jobs.assignment(job_id, [BASH, "-c", script], tasks=[task], node_id=self.node_id))

    def stop(self, job_ids: Sequence[str]) -> None:
        """Stop jobs without grace."""
        self.placement.send(stops=[jobs.stop_order(job_id, grace_seconds=0.0) for job_id in job_ids])

    async def ended(self, job_ids: Sequence[str]) -> None:
        """Wait until jobs have ended and the agent has forgotten them, so that they do not affect the next figure."""
        for job_id in job_ids:
            await self.placement.ended(job_id)
        await conditions.until(lambda: not self.attempts())

    def attempts(self) -> list[str]:
        """Return the attempt directories that the agent still has."""
        return os.listdir(self.state_dir / "attempts")

    def own(self) -> list[psutil.Process]:
        """Return the processes of the agent itself, without jobs: the agent and, last, its zygote."""
        others = [child for child in self.agent.children() if not _runs(child, "supervisor.py")]
        return [self.agent, *sorted(others, key=lambda child: _runs(child, "zygote.py"))]

    def zygotes(self) -> list[psutil.Process]:
        """Return the process that forks supervisors."""
        return [child for child in self.agent.children() if _runs(child, "zygote.py")]

    def supervisors(self) -> list[psutil.Process]:
        """Return the supervisors, which run attempts."""
        return [child for child in self.agent.children(recursive=True) if _runs(child, "supervisor.py")]


@asynccontextmanager
async def agent() -> AsyncIterator[Bench]:
    """Run an agent in a separate process."""
    placement, node_id = Placement(), f"bench-{os.getpid()}"
    placement.acknowledge_ends = True
    await placement.start()
    with tempfile.TemporaryDirectory(prefix="agent-") as place:
        directory = Path(place)
        variables = {"COTENANT_STATE_DIR": str(directory / "state"), "COTENANT_LOG": "error"}
        gpus = "fake:8"
        if shutil.which("gcc"):
            gpus, library = "auto", fake_driver.compiled(directory)
            fake_driver.FakeDriver(directory / "driver")
            variables |= {"LD_LIBRARY_PATH": str(library), "FAKE_NVML_STATE": str(directory / "driver")}
        config = directory / "config.toml"
        config.write_text(f"sample_seconds = {SAMPLE_SECONDS}\n")
        names = ("queue", "placement", "predictor", "contention")
        endpoints = ",".join(f"{name}={placement.endpoint}" for name in names)
        words = ["serve", "agent", "--endpoints", endpoints, "--config", str(config), "--node", node_id, "--gpus", gpus]
        serving = Serving([COTENANT, *words], environment_of(directory, **variables), directory / "log")
        try:
            await placement.connected()
            state_dir = directory / "state" / "nodes" / node_id
            yield Bench(placement, psutil.Process(serving.pid), state_dir, directory, node_id)
        finally:
            serving.terminate()
            await placement.stop()
            remains.end(remains.processes_of(directory))
            for group in _node_groups(node_id):
                await asyncio.to_thread(remains.remove, [group])


def _runs(process: psutil.Process, program: str) -> bool:
    """Return whether a process runs this program of the agent; one that has just exited was a supervisor."""
    try:
        return any(word.endswith(program) for word in process.cmdline())
    except psutil.Error:
        return program == "supervisor.py"


def _node_groups(node_id: str) -> list[Path]:
    places = {Path(place) / "cotenant" / node_id for mount in find_mounts() for place in (mount.root, mount.own)}
    return sorted(place for place in places if place.is_dir())


# Starts -----------------------------------------------------------------------------------------------------------


def _timestamp_script(path: Path) -> str:
    """Return a script that writes the time at which it runs."""
    return f"echo $EPOCHREALTIME > {path}"


def _timestamp(path: Path) -> float:
    text = path.read_text() if path.exists() else ""
    return float(text) if text.endswith("\n") else 0.0


def _bare(path: Path) -> int:
    return os.posix_spawn(BASH, [BASH, "-c", _timestamp_script(path)], dict(os.environ))


async def _spawn(bench: Bench, number: int) -> float:
    """Start the same shell from this process; return the seconds until it runs."""
    path, begin = bench.directory / f"bare-{number}", time.time()
    pid = _bare(path)
    await asyncio.to_thread(os.waitpid, pid, 0)
    return _timestamp(path) - begin


async def _start(bench: Bench, number: int) -> float:
    """Start a job on a dedicated CPU through the agent; return the seconds until it runs."""
    path, job_id, begin = bench.directory / f"job-{number}", f"start-{number}", time.time()
    bench.job(job_id, _timestamp_script(path), pinned=True)
    await bench.ended([job_id])
    return _timestamp(path) - begin


async def starts(bench: Bench, count: int) -> list[harness.Row]:
    """Start jobs one after another, alternating with bare processes."""
    await _start(bench, count)  # warm up: the first start pays one-time costs
    agent_seconds, own_seconds, bare_seconds = _spent(bench), _cpu_seconds(bench.agent), _children_seconds()
    began, bare = [], []
    for number in range(count):
        began.append(1000 * await _start(bench, number))
        bare.append(1000 * await _spawn(bench, number))
    agent_seconds, own_seconds = _spent(bench) - agent_seconds, _cpu_seconds(bench.agent) - own_seconds
    bare_seconds = _children_seconds() - bare_seconds
    rows = [
        harness.Row(
            f"start of a job, p{percent}",
            (value := harness.percentile(began, percent)),
            "ms",
            harness.percentile(bare, percent),
            "bare spawn",
            f"≤ {bar:g}",
            value <= bar,
        )
        for percent, bar in ((50, P50_MS), (99, P99_MS))
    ]
    per_job, own, per_spawn = (1000 * seconds / count for seconds in (agent_seconds, own_seconds, bare_seconds))
    step, where = await _step_ms(bench, count)
    bar, holds = f"≤ {PROCESSOR_MS:g}", per_job <= PROCESSOR_MS
    return [
        *rows,
        harness.Row("start of a job beside a step of Slurm, p50", harness.percentile(began, 50), "ms", step, where),
        harness.Row("processor time of a job, start to end", per_job, "ms", per_spawn, "bare spawn", bar, holds),
        harness.Row("of which the agent's", own, "ms", per_spawn, "bare spawn"),
        harness.Row("processor time beside a step of Slurm", per_job, "ms", STEP_PROCESSOR_MS, "srun, November 2026"),
    ]


async def _step_ms(bench: Bench, count: int) -> tuple[float, str]:
    """Return how long a step of Slurm takes to run the same shell, measured within an allocation, and from where."""
    srun = shutil.which("srun")
    if srun is None or "SLURM_JOB_ID" not in os.environ:
        return STEP_MS, "srun, November 2026"
    took = []
    for number in range(count):
        path, begin = bench.directory / f"step-{number}", time.time()
        words = [srun, "--ntasks=1", BASH, "-c", _timestamp_script(path)]
        process = await asyncio.create_subprocess_exec(*words)
        await process.wait()
        took.append(1000 * (_timestamp(path) - begin))
    return harness.percentile(took, 50), "srun"


def _spent(bench: Bench) -> float:
    """Return the CPU seconds of the agent and its zygote, and of all children that they have reaped."""
    return sum(sum(process.cpu_times()[:4]) for process in (bench.agent, *bench.zygotes()))


def _children_seconds() -> float:
    times = os.times()
    return times.children_user + times.children_system


async def simultaneous_starts(bench: Bench) -> harness.Row:
    """Assign many jobs at once and measure until the last one runs."""
    names = [f"crowd-{number}" for number in range(AT_ONCE)]
    begin = time.time()
    for name in names:
        bench.job(name, f"{_timestamp_script(bench.directory / name)}; exec sleep 600")
    await conditions.until(lambda: all(_timestamp(bench.directory / name) for name in names))
    took_seconds = max(_timestamp(bench.directory / name) for name in names) - begin
    bench.stop(names)
    await bench.ended(names)
    bare = await _bare_at_once(bench)
    holds = took_seconds <= AT_ONCE_SECONDS
    return harness.Row(
        f"{AT_ONCE} starts at once", took_seconds, "s", bare, "bare spawns", f"≤ {AT_ONCE_SECONDS:g}", holds
    )


async def _bare_at_once(bench: Bench) -> float:
    begin = time.time()
    paths = [bench.directory / f"bare-crowd-{number}" for number in range(AT_ONCE)]
    pids = [_bare(path) for path in paths]
    for pid in pids:
        await asyncio.to_thread(os.waitpid, pid, 0)
    return max(map(_timestamp, paths)) - begin


# While jobs run ---------------------------------------------------------------------------------------------------


async def steady_state(bench: Bench, seconds: float) -> list[harness.Row]:
    """Run sampled jobs and measure the usage of the agent."""
    names = [f"sampled-{number}" for number in range(SAMPLED)]
    for name in names:
        bench.job(name, "exec sleep 600")
    for name in names:
        await bench.placement.running(name)
    samples = len(bench.placement.samples)
    await conditions.until(lambda: len(bench.placement.samples) > samples)  # work left over from the starts is done
    own, begin = bench.own(), time.perf_counter()
    spent, samples = sum(map(_cpu_seconds, own)), len(bench.placement.samples)
    await asyncio.sleep(seconds)
    share = (sum(map(_cpu_seconds, own)) - spent) / (time.perf_counter() - begin)
    assert len(bench.placement.samples) > samples, "the agent does not sample"
    heaviest = max(conditions.private_kib(process.pid) for process in bench.supervisors()) / MIB
    rows = [
        harness.Row(
            f"agent with {SAMPLED} jobs sampled every {SAMPLE_SECONDS:g} s: processor",
            100 * share,
            "% of a core",
            bar=f"≤ {100 * CORE_SHARE:g}",
            holds=share <= CORE_SHARE,
        ),
        *memory(own),
        harness.Row(
            "supervisor: private memory",
            heaviest,
            "MiB",
            await _bare_python_mib(),
            "bare interpreter",
            f"≤ {SUPERVISOR_MIB:g}",
            heaviest <= SUPERVISOR_MIB,
        ),
    ]
    bench.stop(names)
    await bench.ended(names)
    return rows


def _cpu_seconds(process: psutil.Process) -> float:
    return sum(process.cpu_times()[:2])


def memory(own: Sequence[psutil.Process]) -> list[harness.Row]:
    """Return the memory of the agent's processes, with shared pages counted once, and of each process."""
    private = [conditions.private_kib(process.pid) for process in own]
    resident = [process.memory_info().rss / 1024 for process in own]
    shared = max(whole - part for whole, part in zip(resident, private, strict=True))
    total = (sum(private) + shared) / MIB
    others = "and its process for NVML" if len(own) > 1 else "without a process for NVML"
    return [
        harness.Row(f"agent {others}: memory", total, "MiB", bar=f"≤ {AGENT_MIB:g}", holds=total <= AGENT_MIB),
        *(
            harness.Row(f"{name}: private memory", kib / MIB, "MiB")
            for name, kib in zip(("agent", "process for NVML"), private, strict=False)
        ),
    ]


async def _bare_python_mib() -> float:
    script = "import sys; sys.stdout.write('here'); sys.stdout.flush(); sys.stdin.read()"
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*jobs.PYTHON, script, stdin=pipe, stdout=pipe)
    assert process.stdout
    await process.stdout.readexactly(4)
    mebibytes = conditions.private_kib(process.pid) / MIB
    await process.communicate(b"")
    return mebibytes


# Afterwards -------------------------------------------------------------------------------------------------------


async def leaks(bench: Bench, count: int) -> list[harness.Row]:
    """Run many short jobs and count what they leave behind."""
    before = _leftovers(bench)
    begin, spent = time.perf_counter(), _spent(bench)
    names = [f"short-{number}" for number in range(count)]
    todo = iter(names)

    async def run_in_sequence() -> None:
        for name in todo:
            bench.job(name, "echo short")
            await bench.placement.ended(name)

    await asyncio.gather(*(run_in_sequence() for _ in range(UNDER_WAY)))
    took_seconds, spent = time.perf_counter() - begin, _spent(bench) - spent
    await conditions.until(lambda: not bench.attempts())
    await conditions.until(lambda: not bench.supervisors())
    after = _leftovers(bench)
    return [
        *(
            harness.Row(
                f"{what} left by {count} short jobs",
                (left := max(0, after[what] - before[what])),
                "",
                bar="0",
                holds=not left,
            )
            for what in before
        ),
        harness.Row(f"{count} short jobs", count / took_seconds, "1/s"),
        harness.Row("processor time of a short job, one of many", 1000 * spent / count, "ms"),
    ]


def _leftovers(bench: Bench) -> dict[str, int]:
    """Count everything that jobs could leave behind, except outputs that are kept on purpose."""
    groups = [path for group in _node_groups(bench.node_id) for path, _, _ in os.walk(group)]
    children = bench.agent.children(recursive=True)
    here = [str(bench.state_dir / name) for name in ("kept", "sockets")]
    files = [
        os.path.join(folder, name)
        for folder, _, names in os.walk(bench.state_dir)
        if not folder.startswith(tuple(here))
        for name in names
    ]
    return {
        "groups": len(groups),
        "descriptors": bench.agent.num_fds(),
        "zombies": sum(child.status() == psutil.STATUS_ZOMBIE for child in children),
        "processes": len(remains.processes_of(bench.state_dir)),
        "sockets": len(os.listdir(bench.state_dir / "sockets")),
        "files": len(files),
        "outputs beyond those kept": max(0, len(os.listdir(bench.state_dir / "kept")) - KEPT_MAX),
    }


async def _measure(quick: bool) -> list[harness.Row]:
    async with agent() as bench:
        rows = await starts(bench, STARTS_QUICK if quick else STARTS)
        rows.append(await simultaneous_starts(bench))
        rows += await steady_state(bench, STEADY_SECONDS_QUICK if quick else STEADY_SECONDS)
        rows += await leaks(bench, SHORT_QUICK if quick else SHORT)
        if not _node_groups(bench.node_id):
            rows.append(harness.Row("no control groups here: starts and leaks are without them", 0.0, ""))
    return rows


def measure(quick: bool) -> list[harness.Row]:
    """Measure one agent from its first job to its last."""
    return asyncio.run(_measure(quick))


if __name__ == "__main__":
    harness.main(measure, __doc__ or "")
