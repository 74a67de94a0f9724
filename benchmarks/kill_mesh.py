"""A mesh of real processes that can be killed at any time, its jobs, and the checks of what they recorded.

Each job locks each of its cores and GPUs and its rank in the gang, and leaves behind a daemon that inherits the locks.
So the kernel itself shows if a resource was owned twice or a process outlived its attempt. With the argument `apart`,
nodes are separate machines and locks are named after them; an `elastic` job locks no cores, because they change.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from random import Random

import grpc
from tests.end_to_end import remains
from tests.end_to_end.clients import Client
from tests.end_to_end.commands import TRACEBACK, Cli, Serving, environment_of
from tests.end_to_end.waiting import lines_of
from tests.support.etcd_server import free_ports
from tests.unit.services.histories import ATTEMPTS, History

from cotenant.core.model.job import JobKind, JobSpec, Request, Role
from cotenant.core.model.lifecycle import Phase
from cotenant.store.port import Change, Changes

SERVICES = ("predictor", "placement", "queue")
UP = {"agent": "placement_connected"}
RETRIES_MAX = 1_000
GPUS_PER_NODE = 2
JOB = """
import fcntl, os, subprocess, sys, time
directory, seconds, daemon = sys.argv[1], float(sys.argv[2]), sys.argv[3] == "daemon"
where = [os.uname().nodename] if "apart" in sys.argv else []
node = "".join(name + "-" for name in where)
job, attempt, rank = (os.environ[name] for name in ("COTENANT_JOB_ID", "COTENANT_ATTEMPT", "RANK"))
def say(*words):
    journal = os.open(directory + "/journal", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(journal, (" ".join([*words, job, attempt, rank, *where]) + "\\n").encode())
    os.close(journal)
own = "" if "elastic" in sys.argv else os.environ["COTENANT_CORES"]
cores = [node + "core-" + core for core in own.split(",") if core]
gpus = [node + gpu for gpu in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if gpu]
for what in [*cores, *gpus, "job-" + job + "-" + rank]:
    lock = os.open(directory + "/held/" + what, os.O_RDWR | os.O_CREAT, 0o600)
    os.set_inheritable(lock, True)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("twice:" + what)
say("start")
if daemon:
    subprocess.Popen(["sleep", "600"], start_new_session=True, close_fds=False, env={**os.environ, "MESH": directory})
time.sleep(seconds)
say("end")
"""
INJECTED_FAULTS = {
    "": "",
    "leaves orphans": (
        "from cotenant.node_agent.runtime import orphan_processes as remains\n"
        "from cotenant.node_agent.supervisor import cgroups\n"
        "remains.kill_orphans = lambda *_, **__: True\n"
        "cgroups.Group.remove = lambda *_, **__: True\n"
    ),
    "forgets attempts": (
        "from cotenant.node_agent.runtime import attempt_directory\n"
        "attempt_directory.find_directories = lambda root: iter(())\n"
    ),
}
MAIN = "import sys; from cotenant.cli.main import main; sys.argv[0] = 'cotenant'; main()"


@dataclass(frozen=True, slots=True)
class Target:
    """A process of an attempt, identified by a pidfd, so that a reused pid is never killed."""

    pidfd: int
    pid: int

    def kill(self) -> bool:
        """Kill the process; return False if it has already exited."""
        try:
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        except ProcessLookupError:
            return False
        finally:
            os.close(self.pidfd)
        return True


class KillMesh:
    """Queue, placement and predictor on SQLite, and an agent per set of CPUs; `broken` names an injected fault."""

    def __init__(self, directory: Path, nodes: Mapping[str, str], broken: str = "") -> None:
        self.directory, self.state_dir, self.nodes = directory, directory / "state", dict(nodes)
        self.history, self.last_revision = History(), 0
        self.processes: dict[str, Serving] = {}
        self.kills: Counter[str] = Counter()
        self.violations: list[str] = []
        self._broken = INJECTED_FAULTS[broken]
        self._requests = 0
        (directory / "held").mkdir(parents=True)
        (directory / "job.py").write_text(JOB)
        config = directory / "config.toml"
        config.write_text(
            "heartbeat_seconds = 0.5\nlost_after_seconds = 120\nretry_seconds = 0.2\nretry_seconds_max = 20\n"
        )
        ports = dict(zip((*SERVICES, "contention"), free_ports(4), strict=True))
        self._addresses = {name: f"127.0.0.1:{port}" for name, port in ports.items()}
        self._endpoints = ",".join(f"{name}={address}" for name, address in self._addresses.items())
        variables = {"COTENANT_STATE_DIR": str(self.state_dir), "COTENANT_CONFIG": str(config)}
        self._config = str(config)
        self._cli = Cli(environment_of(directory, **variables))
        self.client = Client(lambda: (self._addresses["queue"], (self.state_dir / "token").read_text().strip()))

    # Processes -----------------------------------------------------------------------------------------------

    @property
    def parts(self) -> tuple[str, ...]:
        """The services and agents."""
        return (*SERVICES, *self.nodes)

    def start(self, part: str) -> None:
        """Start a service or agent without waiting until it serves, which takes a second or two."""
        words = [
            "serve",
            part if part in SERVICES else "agent",
            "--endpoints",
            self._endpoints,
            "--config",
            self._config,
        ]
        if part in SERVICES:
            words += ["--listen", self._addresses[part], "--store", "sqlite"]
        else:
            words += ["--node", part, "--cpus", self.nodes[part], "--gpus", f"fake:{GPUS_PER_NODE}"]
        code = (self._broken if part in self.nodes else "") + MAIN
        self.processes[part] = Serving(
            [sys.executable, "-c", code, *words], self._cli.environment, self.directory / f"{part}.log"
        )

    def is_up(self, part: str) -> bool:
        """Return whether a service serves, or an agent has joined placement."""
        return UP["agent"] in (said := self.processes[part].said) or f"{part} serves at" in said

    def restart_ended(self) -> None:
        """Restart processes that have exited; this is a violation unless their port was still in use."""
        for part, process in self.processes.items():
            if process.ended():
                if "cannot listen" not in process.said and "in use" not in process.said:
                    self.violations.append(f"{part} exited by itself: {process.said[-300:]}")
                self.start(part)

    def kill(self, part: str) -> None:
        """Kill a service or agent and restart it at once."""
        self.processes[part].kill()
        self.kills["agent" if part in self.nodes else part] += 1
        if part == "placement":
            self.read_history()
        self.start(part)

    def stop(self) -> None:
        """Stop everything gracefully."""
        for part in reversed(self.parts):
            if part in self.processes and (code := self.processes.pop(part).terminate()):
                self.violations.append(f"{part} exited with {code}")

    # Attempts ------------------------------------------------------------------------------------------------

    def states(self) -> Iterator[dict[str, object]]:
        """Yield the state files of running attempts, written by their supervisors."""
        for path in sorted(self.state_dir.glob("nodes/*/attempts/*/state.json")):
            with contextlib.suppress(OSError, ValueError):
                state = json.loads(path.read_bytes())
                if state["state"] == "RUNNING":
                    yield state

    def target(self, kind: str, rng: Random) -> Target | None:
        """Return a running supervisor or process of a job; None if there is none."""
        states = list(self.states())
        if not states:
            return None
        state = rng.choice(states)
        tasks = state["tasks"]
        assert isinstance(tasks, list)
        return self._hold(state["pid"] if kind == "supervisor" else rng.choice(tasks)["pid"])

    def _hold(self, pid: object) -> Target | None:
        assert isinstance(pid, int)
        with contextlib.suppress(OSError):
            pidfd = os.pidfd_open(pid)
            if os.fsencode(self.directory) in Path(f"/proc/{pid}/cmdline").read_bytes():
                return Target(pidfd, pid)
            os.close(pidfd)
        return None

    def kill_supervisors(self) -> int:
        """Kill all supervisors and return their number."""
        targets = [target for state in self.states() if (target := self._hold(state["pid"]))]
        return sum(target.kill() for target in targets)

    def submit(self, replicas: int, gpus: int, *, seconds: float, daemon: bool) -> str:
        """Submit a job, retrying until it is acknowledged; return its id."""
        script = str(self.directory / "job.py")
        words = (script, str(self.directory), f"{seconds:.3f}", "daemon" if daemon else "alone")
        spec = JobSpec(
            name="victim",
            kind=JobKind.TRAINING if gpus else JobKind.CPU,
            roles=(Role(replicas=replicas, request=Request(gpu_milli=1000 * gpus, cores=1)),),
            command=(sys.executable, "-I", "-S", *words),
            grace_seconds=2.0,
            retries_max=RETRIES_MAX,
        )
        self._requests += 1
        while True:
            with contextlib.suppress(grpc.RpcError, AssertionError, OSError):
                return self.client.submit(spec, f"request {self._requests}")

    # What was recorded ---------------------------------------------------------------------------------------

    def read_history(self) -> None:
        """Read what placement has committed since the last call. No process may have its file open."""
        path = self.state_dir / "placement.sqlite"
        if not path.exists():
            return
        with contextlib.closing(sqlite3.connect(path)) as connection:
            rows = connection.execute(
                "SELECT revision, key, value FROM history WHERE revision > ? ORDER BY revision, ordinal",
                (self.last_revision,),
            ).fetchall()
        if rows and self.last_revision and rows[0][0] != self.last_revision + 1:
            self.violations.append(
                f"the history from {self.last_revision} to {rows[0][0]} was compacted before it was read"
            )
        for revision, group in groupby(rows, key=lambda row: int(row[0])):
            changes = tuple(Change(key, value, revision) for _, key, value in group if key.startswith(ATTEMPTS))
            self.history.look(Changes(revision, changes))
            self.last_revision = revision

    def journal(self) -> list[list[str]]:
        """Return the entries of jobs: start, end or twice:RESOURCE, then job id, attempt number and rank."""
        return [line.split() for line in lines_of(self.directory / "journal")]


@dataclass
class Submitter:
    """Keeps `unfinished` jobs in the mesh until it is stopped."""

    mesh: KillMesh
    rng: Random
    unfinished: int
    seconds: tuple[float, float]
    acknowledged: dict[str, int] = field(default_factory=dict)  # replicas by job id
    _done: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Start submitting."""
        self._thread = threading.Thread(target=self._submit_all, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop submitting."""
        self._done.set()
        assert self._thread
        self._thread.join()

    def _submit_all(self) -> None:
        while not self._done.is_set():
            ended = {words[1] for words in self.mesh.journal() if words[0] == "end"}
            if len(self.acknowledged) - len(ended) >= self.unfinished:
                self._done.wait(0.1)
                continue
            replicas, gpus = self.rng.choice([(1, 1), (1, 1), (1, 0), (2, 1)])
            seconds, daemon = self.rng.uniform(*self.seconds), self.rng.random() < 0.5
            job_id = self.mesh.submit(replicas, gpus, seconds=seconds, daemon=daemon)
            if job_id in self.acknowledged:
                self.mesh.violations.append(f"two requests made one job: {job_id}")
            self.acknowledged[job_id] = replicas


# What must be true at the end ----------------------------------------------------------------------------------


def wait_until_done(mesh: KillMesh, jobs: Mapping[str, int], seconds: float) -> None:
    """Wait until all jobs have succeeded; other jobs are violations."""
    deadline, left = time.monotonic() + seconds, dict.fromkeys(jobs, "never seen")
    while left and time.monotonic() < deadline:
        mesh.restart_ended()
        for job_id in list(left):
            try:
                job = mesh.client.job(job_id)
            except grpc.RpcError as error:
                left[job_id] = str(error.code())
                continue
            left[job_id] = f"{job.phase}: {job.phase_reason}"
            if mesh.client.phase(job_id) is Phase.SUCCEEDED:
                del left[job_id]
        time.sleep(0.2)
    mesh.violations += [f"{job_id} is lost or has not succeeded: {why}" for job_id, why in left.items()]


def find_violations(mesh: KillMesh, jobs: Mapping[str, int]) -> list[str]:
    """Return all violations after everything has been stopped, and end leftover processes."""
    mesh.read_history()
    violations = [*mesh.violations, *mesh.history.wrong, *journal_violations(mesh.journal(), jobs)]
    if left := remains.processes_of(mesh.directory):
        violations += [f"process {pid} was left: {command}" for pid, command in left.items()]
        remains.end(left)
    if groups := remains.groups_of(jobs):
        violations += [f"the control group {group} was left" for group in groups]
        remains.remove(groups)
    if mesh.history.live:
        violations.append(f"placement still holds {sorted(mesh.history.live)}")
    violations += [f"{path} was left" for path in mesh.state_dir.glob("nodes/*/attempts/*")]
    logs = [path for path in mesh.directory.glob("*.log") if TRACEBACK in path.read_text(errors="replace")]
    return violations + [f"{path.name} has a traceback" for path in logs]


def journal_violations(journal: list[list[str]], jobs: Mapping[str, int]) -> list[str]:
    """Return the violations that jobs recorded: resources owned twice, tasks started twice, jobs that never ran."""
    violations = [
        f"{words[0]} when {'/'.join(words[1:])} started" for words in journal if words[0].startswith("twice:")
    ]
    starts = Counter(tuple(words[1:]) for words in journal if words[0] == "start")
    violations += [f"{'/'.join(key)} was started {times} times" for key, times in starts.items() if times > 1]
    ended = {tuple(words[1:]) for words in journal if words[0] == "end"}
    for job_id, replicas in jobs.items():
        numbers = {number for job, number, _ in ended if job == job_id}
        whole = any(all((job_id, number, str(rank)) in ended for rank in range(replicas)) for number in numbers)
        if not whole:
            violations.append(f"{job_id} never ran to its end")
    return violations + [f"{key[0]} ran, but was never submitted" for key in starts if key[0] not in jobs]
