"""The same mixed jobs on Slurm as it is, on Slurm with the bridge beside it, and on Cotenant alone.

The jobs are models that sleep: a GPU job of `work` seconds at full speed takes work × max(1, θ / CPUs), by the CPUs
that it was allotted (SLURM_CPUS_ON_NODE, or the cores of its assignment), and θ is hidden from all schedulers. CPU jobs
take as long as they take. Nodes are declared: four of 16 CPUs and 4 GPUs on this machine; nothing computes, so what is
measured is scheduling, not contention. Of the GPU jobs, three in five name no CPUs and get Slurm's one, the others say
`-c 2` and are left alone (CODA found one or two cores per GPU in 76 % of jobs [P]). Users name no time limits.

The bridge acts with `--act cores --act order`. It first meets the jobs without any history ("learning"), then once more
with what it learned. Two lanes run beside each other, so that one command takes ten minutes. Cotenant alone has an
executor for each node that cannot resize, so cores are a GPU's share and nothing is searched for. Needs
root and Debian's Slurm packages.
"""

from __future__ import annotations

import json
import os
import random
import re
import runpy
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import grpc  # noqa: E402 - the root of the checkout has to be on the path first
from benchmarks import harness  # noqa: E402 - likewise
from benchmarks.local_mesh import LocalMesh  # noqa: E402 - likewise
from tests.support.slurm_cluster import SlurmCluster, missing_for_slurm, slurm_cluster  # noqa: E402 - likewise

from cotenant.cli.mesh.slurm_acts import script  # noqa: E402 - likewise
from cotenant.rpc.access import find  # noqa: E402 - likewise
from cotenant.v1 import job_pb2, resources_pb2  # noqa: E402 - likewise
from cotenant.v1.job_service_pb2 import CreateJobRequest  # noqa: E402 - likewise
from cotenant.v1.job_service_pb2_grpc import JobServiceStub  # noqa: E402 - likewise

NODES, CPUS, GPUS = 4, 16, 4
SIZES = {False: (200, 100.0), True: (80, 40.0)}  # jobs, and the seconds within which they are submitted
PROBES = 20  # empty jobs, for the submit rate
SECONDS_MAX = 900.0
FALL_MIN = 0.25  # of the mean completion time beside Slurm
LATE_MAX = 0.1  # of the planned time; submissions that take longer are less load, and arms are then not comparable
FIGURES = (
    "submissions",
    "makespan",
    "mean completion time",
    "GPU jobs' speed",
    "CPU jobs' wait",
    "submit rate",
    "start latency",
)
MODEL = """\
#!/bin/bash
# NAME WORK_MS THETA DIRECTORY: sleeps as long as the work takes on the CPUs that were allotted.
cpus=${MODEL_CPUS:-${SLURM_CPUS_ON_NODE:-1}}
start=$EPOCHREALTIME
ms=$(( $3 > cpus ? $2 * $3 / cpus : $2 ))
printf -v seconds '%d.%03d' $((ms / 1000)) $((ms % 1000))
sleep $seconds
echo "$start $EPOCHREALTIME $cpus ${SLURM_JOB_ID:-0}" > "$4/$1.part" && mv "$4/$1.part" "$4/$1"
"""


@dataclass(frozen=True, slots=True)
class ModelJob:
    """A job: `theta` is 1 for CPU jobs, `cpus` what its user names, 0 if nothing."""

    name: str
    kind: str
    gpus: int
    cpus: int
    work_seconds: float
    theta: int
    submit_seconds: float


@dataclass
class Outcome:
    """What one arm measured, in seconds; the jobs by name with submission, start, end, CPUs and the job's id."""

    runs: dict[str, tuple[float, float, float, int, str]] = field(default_factory=dict)
    submits_per_second: float = 0.0
    start_latency_seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)


def workload(count: int, seconds: float, seed: int = 1) -> list[ModelJob]:
    """Return jobs of a few kinds that come again and again, at random times."""
    rng = random.Random(seed)
    thetas, works = (1, 2, 3, 4, 4, 5, 6, 8, 3, 6), (6.0, 8.0, 10.0, 12.0, 7.0, 9.0, 6.0, 8.0, 11.0, 7.0)
    kinds = [
        (f"train{n}", 2 if n == 4 else 1, 2 if n % 5 in (2, 4) else 0, work, theta)
        for n, (theta, work) in enumerate(zip(thetas, works, strict=True))
    ]
    others = [(f"prep{n}", 0, cpus, work, 1) for n, (cpus, work) in enumerate([(2, 6.0), (4, 15.0), (8, 10.0)])]
    jobs = []
    for number in range(count):
        kind, gpus, cpus, work, theta = rng.choice(kinds if rng.random() < 0.6 else others)
        at, noise = rng.uniform(0, seconds), rng.uniform(0.95, 1.05)
        jobs.append(ModelJob(f"{number:04d}-{kind}", kind, gpus, cpus, work * noise, theta, at))
    return sorted(jobs, key=lambda job: job.submit_seconds)


class SlurmArm:
    """Submits to a Slurm."""

    def __init__(self, cluster: SlurmCluster) -> None:
        self.cluster = cluster

    def submit(self, job: ModelJob, command: Sequence[str]) -> None:
        """Submit a job by sbatch."""
        options = ["-o", "/dev/null", "-J", job.kind]
        options += [f"--gres=gpu:{job.gpus}"] * bool(job.gpus) + [f"-c{job.cpus}"] * bool(job.cpus)
        self.cluster.submit(" ".join(command), *options)


class CotenantArm:
    """Submits to a mesh."""

    def __init__(self, mesh: LocalMesh) -> None:
        access = find(mesh.directory, {})
        self._token = (("authorization", f"Bearer {access.token}"),)
        self._stub = JobServiceStub(grpc.insecure_channel(access.endpoints.queue))

    def submit(self, job: ModelJob, command: Sequence[str]) -> None:
        """Submit a job by one call."""
        request = resources_pb2.ResourceRequest(gpu_milli=1000 * job.gpus)
        if job.cpus:
            request.cores = job.cpus
        role = job_pb2.Role(replicas=1, resources=request)
        spec = job_pb2.JobSpec(name=job.kind, roles=[role], command=command, preemptible=False)
        self._stub.CreateJob(CreateJobRequest(spec=spec), metadata=self._token, timeout=30)


Arm = SlurmArm | CotenantArm


def measure_arm(arm: Arm, jobs: Sequence[ModelJob], directory: Path) -> Outcome:
    """Submit all jobs at their times, wait for their ends, and return what they wrote."""
    directory.mkdir()
    model = directory / "model.sh"
    model.write_text(MODEL)
    outcome = Outcome()

    def submit(job: ModelJob) -> None:
        words = ["bash", str(model), job.name, str(int(job.work_seconds * 1000)), str(job.theta), str(directory)]
        arm.submit(job, words)

    def wait(names: Sequence[str]) -> None:
        deadline = time.monotonic() + SECONDS_MAX
        while missing := [name for name in names if not (directory / name).exists()]:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{len(missing)} jobs have not ended, such as {missing[0]}")
            time.sleep(0.1)

    alone = [ModelJob(f"alone{n}", "alone", 0, 1, 0.0, 1, 0.0) for n in range(5)]
    latencies = []
    for job in alone:
        at = time.time()
        submit(job)
        wait([job.name])
        latencies.append(float((directory / job.name).read_text().split()[0]) - at)
    outcome.start_latency_seconds = statistics.median(latencies)
    probes = [ModelJob(f"probe{n}", "probe", 0, 1, 0.0, 1, 0.0) for n in range(PROBES)]
    begin = time.monotonic()
    for job in probes:
        submit(job)
    outcome.submits_per_second = PROBES / (time.monotonic() - begin)
    wait([job.name for job in probes])
    begin, submitted = time.time(), dict[str, float]()
    for job in jobs:
        time.sleep(max(0.0, begin + job.submit_seconds - time.time()))
        submitted[job.name] = time.time()
        submit(job)
    wait([job.name for job in jobs])
    for job in jobs:
        start, end, cpus, number = (directory / job.name).read_text().split()
        outcome.runs[job.name] = submitted[job.name], float(start), float(end), int(cpus), number
    return outcome


# Arms ----------------------------------------------------------------------------------------------------------


@contextmanager
def bridge(cluster: SlurmCluster, state: Path) -> Iterator[None]:
    """Run the bridge beside a Slurm."""
    words = ["cotenant", "serve", "slurm", "--listen", "127.0.0.1:0", "--interval", "1s", "--act", "cores"]
    words += ["--act", "order", "--cpus-per-gpu", "8", "--cores-table", str(cluster.directory / "table")]
    environment = {**cluster.environment, "COTENANT_STATE_DIR": str(state), "HOME": str(state)}
    state.mkdir(exist_ok=True)
    with (state / "bridge.log").open("ab") as log:
        process = subprocess.Popen(words, env=environment, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 60
        while not (cluster.directory / "table").exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the bridge wrote no table: {(state / 'bridge.log').read_text()[-2000:]}")
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait(60)


def on_slurm(jobs: Sequence[ModelJob], directory: Path, state: Path | None = None) -> Outcome:
    """Measure Slurm; with a state directory, with the bridge beside it."""
    lua = script(Path("/@RUN@/table")).replace("/@RUN@", "@RUN@") if state else ""
    with slurm_cluster(NODES, gpus=GPUS, lua=lua, more=("MaxJobCount=20000",)) as cluster:
        arm = SlurmArm(cluster)
        if state:
            with bridge(cluster, state):
                outcome = measure_arm(arm, jobs, directory)
        else:
            outcome = measure_arm(arm, jobs, directory)
        outcome.wrong = wrong_books(cluster, outcome)
    return outcome


def wrong_books(cluster: SlurmCluster, outcome: Outcome) -> list[str]:
    """Return what Slurm's own records have wrong after all jobs ended."""
    deadline = time.monotonic() + 30
    while cluster.call("squeue", "-h").strip() and time.monotonic() < deadline:
        time.sleep(0.2)
    wrong = [f"still listed: {line}" for line in cluster.call("squeue", "-h").splitlines()]
    for line in cluster.call(
        "sinfo", "-h", "-N", "-O", "NodeList:10,StateLong:20,CPUsState:20,GresUsed:40"
    ).splitlines():
        node, state, in_use, gres = line.split()
        if state != "idle" or not in_use.startswith("0/") or not re.search(r"gpu:a100:0\b", gres):
            wrong.append(f"{node} is {state} with {in_use} CPUs and {gres}")
    books = {
        found["JobId"]: found
        for line in cluster.call("scontrol", "-o", "show", "jobs").splitlines()
        if (found := dict(re.findall(r"(?:^|\s)(JobId|JobState|NumCPUs|Restarts)=(\S+)", line)))
    }
    for name, (_, _, _, cpus, number) in outcome.runs.items():
        book: Mapping[str, str] = books.get(number, {})
        if book.get("JobState") != "COMPLETED" or book.get("NumCPUs") != str(cpus) or book.get("Restarts") != "0":
            wrong.append(f"{name}, job {number}: had {cpus} CPUs, Slurm says {dict(book)}")
    return wrong


def on_cotenant(jobs: Sequence[ModelJob], directory: Path, state: Path) -> Outcome:
    """Measure a mesh with an executor of declared CPUs and GPUs for each node."""
    state.mkdir()
    settings = 'gpus = "fake:0"\nshare_machine = true\nqueue = "srsf"\nallocator = "proportional"\n'
    mesh = LocalMesh(state, settings)
    executors = []
    try:
        mesh.run("cordon", *(node["id"] for node in mesh.json("nodes")))
        access = find(state, {})
        environment = os.environ | {"COTENANT_ENDPOINT": access.endpoints.placement, "COTENANT_TOKEN": access.token}
        for number in range(1, NODES + 1):
            name = f"virtual{number}"
            words = [sys.executable, str(Path(__file__)), "--node", name, str(state / f"{name}.json")]
            with (state / f"{name}.log").open("wb") as log:
                executors.append(subprocess.Popen(words, env=environment, stdout=log, stderr=log))

        def connected() -> bool:
            names: list[str] = [node["id"] for node in mesh.json("nodes")]
            return sum(name.startswith("virtual") for name in names) == NODES

        mesh.until(connected, "the nodes", SECONDS_MAX)
        return measure_arm(CotenantArm(mesh), jobs, directory)
    finally:
        mesh.close()
        for executor in executors:
            executor.terminate()
            executor.wait(30)


def run_node(node: str, memory: Path) -> None:
    """Run the example executor as a node of declared CPUs and GPUs; its jobs find their CPUs in MODEL_CPUS."""
    example: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "examples" / "executor.py"))
    plain = example["environment"]
    executor: Any = example["Executor"]
    names: dict[str, Any] = executor.run.__globals__

    def inventory() -> resources_pb2.Inventory:
        cores = [resources_pb2.Core(id=cpu, cpus=[cpu]) for cpu in range(CPUS)]
        gpus = [resources_pb2.Gpu(uuid=f"{node}-{n}", model="a100", declared=True) for n in range(GPUS)]
        return resources_pb2.Inventory(cores=cores, gpus=gpus, memory_bytes=2**36, address="127.0.0.1")

    names["inventory"] = inventory  # in place of this machine's cores
    names["environment"] = lambda order, task: plain(order, task) | {"MODEL_CPUS": str(len(task.core_ids))}
    threading.stack_size(256 * 1024)
    made: Any = executor(node, memory)
    made.run()


# Figures -------------------------------------------------------------------------------------------------------


def figures(jobs: Sequence[ModelJob], outcome: Outcome) -> dict[str, float]:
    """Return the figures of an arm."""
    runs = [(job, *outcome.runs[job.name]) for job in jobs]
    first = min(submitted for _, submitted, *_ in runs)
    speeds = [job.work_seconds / (end - start) for job, _, start, end, _, _ in runs if job.gpus]
    return {
        "submissions": max(submitted for _, submitted, *_ in runs) - first,
        "makespan": max(end for _, _, _, end, _, _ in runs) - first,
        "mean completion time": statistics.mean(end - submitted for _, submitted, _, end, _, _ in runs),
        "GPU jobs' speed": 100 * statistics.mean(speeds),
        "CPU jobs' wait": statistics.mean(start - submitted for job, submitted, start, *_ in runs if not job.gpus),
        "submit rate": outcome.submits_per_second,
        "start latency": outcome.start_latency_seconds,
    }


UNITS = {"GPU jobs' speed": "% of full", "submit rate": "1/s"}


def in_lanes(arms: Mapping[str, Callable[[], Outcome]]) -> dict[str, Outcome]:
    """Run the arms in two lanes beside each other: those with the bridge, of which one learns, and the others.

    The jobs sleep, so that a lane costs the other little, and what is compared is measured in the same minutes.
    """
    lanes = [[arm for arm in arms if ("bridge" in arm) is beside] for beside in (False, True)]
    outcomes: dict[str, Outcome] = {}

    def run(lane: Sequence[str]) -> None:
        for arm in lane:
            began = time.monotonic()
            outcomes[arm] = arms[arm]()
            print(f"{arm}: done in {time.monotonic() - began:.0f} s, load {os.getloadavg()[0]:.1f}", file=sys.stderr)

    with ThreadPoolExecutor(len(lanes)) as pool:
        for done in [pool.submit(run, lane) for lane in lanes]:
            done.result()
    return outcomes


def measure(quick: bool) -> Sequence[harness.Row]:
    """Measure all arms."""
    if missing := missing_for_slurm():
        raise SystemExit(f"error: {missing}")
    count, seconds = SIZES[quick]
    jobs, rows = workload(count, seconds), list[harness.Row]()
    with tempfile.TemporaryDirectory(prefix="slurm-benchmark-") as folder:
        home = Path(folder)
        home.chmod(0o755)
        arms: dict[str, Callable[[], Outcome]] = {
            "Slurm": lambda: on_slurm(jobs, home / "plain"),
            "Slurm, bridge learning": lambda: on_slurm(jobs, home / "learning", home / "state"),
            "Slurm, bridge": lambda: on_slurm(jobs, home / "beside", home / "state"),
            "Cotenant": lambda: on_cotenant(jobs, home / "alone", home / "mesh"),
        }
        outcomes = in_lanes(arms)
        results: dict[str, dict[str, float]] = {}
        for arm in arms:
            outcome = outcomes[arm]
            results[arm] = figures(jobs, outcome)
            print(arm, json.dumps({name: round(value, 2) for name, value in results[arm].items()}), file=sys.stderr)
            if arm != "Cotenant":
                for line in outcome.wrong[:20]:
                    print(f"{arm}: {line}", file=sys.stderr)
                none = not outcome.wrong
                rows.append(harness.Row(f"wrong books, {arm}", len(outcome.wrong), "records", bar="none", holds=none))
        if keep := os.environ.get("COTENANT_BENCHMARK_KEEP"):
            shutil.copytree(home, keep, dirs_exist_ok=True)
    plain = results["Slurm"]
    for figure in FIGURES:
        for arm, found in results.items():
            bar, holds = "", None
            if figure == "mean completion time" and arm == "Slurm, bridge":
                bar = f"at least {FALL_MIN:.0%} below Slurm's"
                holds = found[figure] <= (1 - FALL_MIN) * plain[figure]
            if figure == "submissions":
                bar = f"within {(1 + LATE_MAX) * seconds:.0f} s, else arms are not comparable"
                holds = found[figure] <= (1 + LATE_MAX) * seconds
            reference = None if arm == "Slurm" else plain[figure]
            name = "" if arm == "Slurm" else "Slurm"
            unit = UNITS.get(figure, "s")
            rows.append(harness.Row(f"{figure}, {arm}", found[figure], unit, reference, name, bar, holds))
    return rows


if __name__ == "__main__":
    if sys.argv[1:2] == ["--node"]:
        run_node(sys.argv[2], Path(sys.argv[3]))
    else:
        harness.main(measure, "The same jobs on Slurm, on Slurm with the bridge beside it, and on Cotenant alone")
