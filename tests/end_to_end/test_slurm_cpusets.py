"""The sidecar of a real Slurm node: steps keep the cores that they need, and everything is put back."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.end_to_end.commands import Cli, Serving, environment_of
from tests.end_to_end.waiting import until
from tests.support.slurm_cluster import CGROUP_V1, SlurmCluster, missing_for_slurm, slurm_cluster

CPUSETS = Path("/sys/fs/cgroup/cpuset")
OURS = CPUSETS / "cotenant-slurm"
QUIET = ("-o", "/dev/null")


def missing() -> str:
    """Return why steps cannot be moved here, or nothing if they can."""
    if reason := missing_for_slurm():
        return reason
    if not CGROUP_V1.exists():
        return "there are no cpusets of version 1"
    return "two cores are needed" if len(os.sched_getaffinity(0)) < 2 else ""


pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing() or "Slurm is there"),
    pytest.mark.group("slurm-cpusets"),
]


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    """A Slurm whose steps are confined to their cores."""
    with slurm_cluster(1, cgroups=True) as cluster:
        yield cluster


@dataclass
class Node:
    """The node, and a sidecar on it if one was started."""

    slurm: SlurmCluster
    cli: Cli
    home: Path
    sidecars: list[Serving] = field(default_factory=list)

    def start(self, *options: str) -> Serving:
        """Start a sidecar that decides quickly."""
        words = ("slurm-bridge", "node", "--node", "n1", "--interval", "200ms", "--window", "1s", *options)
        serving = self.cli.start(*words, log=self.home / f"sidecar{len(self.sidecars)}.log")
        self.sidecars.append(serving)
        serving.wait_for_output("watching the steps")
        return serving

    def submit(self, script: str, *options: str) -> str:
        """Submit a job; return its id when it runs and its script has begun."""
        begun = self.home / f"begun{time.monotonic_ns()}"
        job = self.slurm.submit(f"touch {begun}\n{script}", *QUIET, *options)
        self.slurm.wait_for_state(job, "RUNNING")
        until(begun.exists, "the script has begun")
        return job

    def sleepers(self, job: str) -> list[int]:
        """Return the processes `sleep` of a job."""
        found = []
        for directory in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if (directory / "comm").read_text().strip() == "sleep":
                    variables = (directory / "environ").read_bytes().split(b"\0")
                    if f"SLURM_JOB_ID={job}".encode() in variables:
                        found.append(int(directory.name))
        return found

    def cores(self, job: str) -> list[int]:
        """Return the sizes of the affinities of a job's sleeps; of one that ended meanwhile nothing."""
        found = []
        for pid in self.sleepers(job):
            with suppress(OSError):
                found.append(len(os.sched_getaffinity(pid)))
        return found

    def places(self, job: str) -> set[str]:
        """Return the cpusets of a job's sleeps."""
        found = set()
        for pid in self.sleepers(job):
            with suppress(OSError):
                text = Path(f"/proc/{pid}/cgroup").read_text()
                found |= set(re.findall(r":cpuset:(\S+)", text))
        return found

    def books(self, job: str) -> str:
        """Return what Slurm says of a job's CPUs."""
        found = re.search(r"NumCPUs=(\d+)", self.slurm.call("scontrol", "-o", "show", "job", job))
        return found[1] if found else ""


@pytest.fixture
def node(slurm: SlurmCluster, tmp_path: Path) -> Iterator[Node]:
    """The node without a job and without a sidecar, before and after."""
    made = Node(slurm, Cli(environment_of(tmp_path, SLURM_CONF=str(slurm.directory / "slurm.conf"))), tmp_path)
    yield made
    for serving in made.sidecars:
        if not serving.ended():
            serving.terminate()
    slurm.call("scancel", "--user=root")
    until(lambda: not slurm.call("squeue", "-h").strip(), "no job is left")
    slurm.wait_for_nodes()
    until(lambda: not OURS.exists(), "our control groups are gone")
    assert "unable to write" not in (slurm.directory / "log" / "slurmd-n1.log").read_text()


def test_a_job_keeps_the_cores_that_it_uses_until_the_sidecar_ends(node: Node) -> None:
    job = node.submit("sleep 900", "-c2")
    assert node.cores(job) == [2]
    until(lambda: node.places(job), "its processes have begun")
    (before,) = node.places(job)
    serving = node.start("--act", "cpusets")
    until(lambda: node.cores(job) == [1], "the job is slimmed")
    serving.wait_for_output(f"moved job {job} to cores 0: it used 0.0 of its 2 cores at most")
    assert node.books(job) == "2"
    serving.terminate()
    assert node.cores(job) == [2]
    assert node.places(job) == {before}
    assert not OURS.exists()


@pytest.mark.deep
def test_a_new_step_is_noticed_and_moved_too(node: Node) -> None:
    job = node.submit("srun --overlap -n1 -c2 sleep 900 & sleep 900", "-c2")
    node.start("--act", "cpusets")
    until(lambda: sorted(node.cores(job)) == [1, 1], "both steps are slimmed")
    # A new step has all cores of its job, and the job with it.
    assert "0-1" in node.slurm.call(
        "srun", "--overlap", "--jobid", job, "-n1", "-c2", "grep", "Cpus_allowed_list", "/proc/self/status"
    )
    until(lambda: sorted(node.cores(job)) == [1, 1], "the job is slimmed again")
    node.slurm.call("scancel", job)  # while they are in our groups
    node.slurm.wait_for_state(job, "CANCELLED")
    until(lambda: not node.sleepers(job), "its processes have ended")
    until(lambda: not list(OURS.glob("n1/*job*")), "its groups are gone")


@pytest.mark.deep
@pytest.mark.parametrize("both", [False, True], ids=["the sidecar", "its guardian too"])
def test_what_a_killed_sidecar_moved_is_put_back(node: Node, both: bool) -> None:
    job = node.submit("sleep 900", "-c2")
    until(lambda: node.places(job), "its processes have begun")
    (before,) = node.places(job)
    serving = node.start("--act", "cpusets")
    until(lambda: node.cores(job) == [1], "the job is slimmed")
    children = Path(f"/proc/{serving.pid}/task/{serving.pid}/children").read_text().split()
    if both:
        for child in children:
            os.kill(int(child), signal.SIGKILL)
    serving.kill()
    if both:
        assert node.cores(job) == [1]
        node.cli("slurm-bridge", "node", "--node", "n1", "--put-back")
    until(lambda: node.cores(job) == [2], "the job has its cores again")
    assert node.places(job) == {before}
    until(lambda: not OURS.exists(), "our groups are gone")


@pytest.mark.deep
def test_a_suspended_job_has_its_cores_and_a_requeued_one_begins_anew(node: Node) -> None:
    job = node.submit("sleep 900", "-c2", "--requeue")
    node.start("--act", "cpusets")
    until(lambda: node.cores(job) == [1], "the job is slimmed")
    node.slurm.call("scontrol", "suspend", job)
    until(lambda: node.cores(job) == [2], "it has its cores while it is suspended")
    node.slurm.call("scontrol", "resume", job)
    until(lambda: node.cores(job) == [1], "it is slimmed again")
    (first,) = node.sleepers(job)
    node.slurm.call("scontrol", "requeue", job)
    node.slurm.wait_for_state(job, "PENDING")
    assert first not in node.sleepers(job)
    node.slurm.call("scontrol", "update", f"JobId={job}", "StartTime=now")
    until(lambda: node.sleepers(job) and node.cores(job) == [1], "its second run is slimmed")
    assert node.books(job) == "2"


@pytest.mark.deep
def test_a_gpu_job_borrows_a_core_until_slurm_gives_it_away(node: Node) -> None:
    table = node.home / "table"
    header = f"cotenant-cores\t1\t{int(time.time())}\t600\t0\t0\t0"
    table.write_text(f"{header}\n0\tmain\t1\ttrain\t2\t1\t90\t2 cores: more cores gain less than 5%\nend\n")
    job = node.submit("sleep 900", "-c1", "-J", "train", "--gres=gpu:1")
    assert node.cores(job) == [1]
    serving = node.start("--act", "cpusets", "--lend-idle", "--cores-table", str(table))
    until(lambda: node.cores(job) == [2], "the job has borrowed the idle core")
    serving.wait_for_output("it needs 2 cores, and others do not use theirs")
    step = node.slurm.call("srun", "--overlap", "--jobid", job, "-n1", "true")  # Slurm can still begin steps
    assert step == ""
    node.submit("sleep 900", "-c1")
    until(lambda: node.cores(job) == [1], "the core was returned")


def test_a_dry_run_moves_nothing(node: Node) -> None:
    job = node.submit("sleep 900", "-c2")
    serving = node.start("--dry-run")
    serving.wait_for_output(f"would move job {job} to cores 0: it used 0.0 of its 2 cores at most")
    assert node.cores(job) == [2]
    assert not OURS.exists()


@pytest.mark.deep
def test_threads_that_are_bound_stay_where_they_are(node: Node) -> None:
    job = node.submit("taskset -c 1 sleep 900 & sleep 900", "-c2")
    until(lambda: sorted(node.cores(job)) == [1, 2], "both have begun")
    serving = node.start("--act", "cpusets")
    serving.wait_for_output(f"left job {job} alone: it binds its threads to cores of its own")
    assert sorted(node.cores(job)) == [1, 2]
