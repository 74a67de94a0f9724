"""Agents in jobs of a real Slurm: what they offer, where their jobs run, and how they end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.end_to_end.meshes import Mesh
from tests.end_to_end.waiting import until
from tests.support.slurm_cluster import CGROUP_V1, SlurmCluster, missing_for_slurm, slurm_cluster

from cotenant.v1.job_pb2 import JOB_PHASE_QUEUED, JOB_PHASE_RUNNING, JOB_PHASE_SUCCEEDED

pytestmark = [
    pytest.mark.skipif(bool(missing_for_slurm()), reason=missing_for_slurm()),
    pytest.mark.group("slurm"),
]

GPUS = 4  # of a node of Slurm
REQUEUED_SECONDS_MAX = 10.0
FOREVER = "sleep 1000 & sleep 1001; wait"


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """A mesh whose own node has no GPUs: jobs with GPUs run in pilots."""
    shared = Mesh(tmp_path_factory.mktemp("mesh"), "--gpus", "fake:0")
    try:
        shared.start()
        yield shared
    finally:
        shared.close()


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    """A Slurm that finds processes by parentage."""
    with slurm_cluster(2, gpus=GPUS) as cluster:
        yield cluster


def look(mesh: Mesh, slurm: SlurmCluster, *more: str) -> list[dict[str, Any]]:
    """Look once after pilots of one core and two GPUs each, and return what was told."""
    out = mesh.cli(
        "pilots", "slurm", "--once", "--json", "--time", "10m", "--gres", "gpu:2",
        "--endpoints", mesh.address, "--agent-option=--gpus", f"--agent-option=fake:{GPUS}",
        f"--sbatch-option=--output={mesh.directory}/pilot-%j.log", *more,
        SLURM_CONF=slurm.environment["SLURM_CONF"],
    ).out  # fmt: skip
    return [json.loads(line) for line in out.splitlines()]


def submitted(told: list[dict[str, Any]]) -> list[str]:
    """Return the pilots that were submitted."""
    return [line["submitted"] for line in told if "submitted" in line]


def keep_pilots(mesh: Mesh, slurm: SlurmCluster, count: int, *more: str) -> list[dict[str, Any]]:
    """Submit pilots and return their nodes once they are ready."""
    pilots = submitted(look(mesh, slurm, "--min", str(count), "--max", str(count), *more))
    assert len(pilots) == count
    return [wait_until_ready(mesh, pilot) for pilot in pilots]


def wait_until_ready(mesh: Mesh, pilot: str) -> dict[str, Any]:
    """Return the node of a pilot once it takes work."""
    return until(lambda: ready(mesh, pilot), f"pilot {pilot} is ready")


def ready(mesh: Mesh, job: str) -> dict[str, Any]:
    """Return the node of a pilot if it takes work."""
    nodes: list[dict[str, Any]] = json.loads(mesh.cli("nodes", "--json").out)
    return next((node for node in nodes if node["id"].endswith(f"-{job}") and node["state"] == "ready"), {})


def start_job(mesh: Mesh, *command: str) -> str:
    """Submit a job with one GPU and wait until it runs."""
    job = mesh.cli("submit", "--gpus", "1", "--cpus", "1", "--", "sh", "-c", *command).out.strip()
    until(lambda: mesh.client.job(job).phase == JOB_PHASE_RUNNING, f"{job} runs")
    return job


def where(mesh: Mesh, job: str) -> str:
    """Return the node of a running job."""
    return mesh.client.job(job).attempt.allocations[0].node_id


def processes(mesh: Mesh) -> list[psutil.Process]:
    """Return the processes of the pilots of a mesh and of their jobs."""
    found = []
    for process in psutil.process_iter():
        try:
            if "cotenant-pilot-" in " ".join([*process.cmdline(), *process.environ().values()]):
                found.append(process)
        except psutil.Error:
            continue
    return found


def named(mesh: Mesh, words: str) -> list[psutil.Process]:
    """Return those processes whose command line contains some words."""
    return [process for process in processes(mesh) if words in " ".join(process.cmdline())]


def end_pilots(mesh: Mesh, slurm: SlurmCluster) -> None:
    """End all pilots and wait until Slurm and the mesh know."""
    slurm.call("scancel", "--user=root")
    until(lambda: not slurm.call("squeue", "-h").strip(), "all pilots have ended")
    until(lambda: len(json.loads(mesh.cli("nodes", "--json").out)) == 1, "the pilots' nodes are removed")


@pytest.mark.skipif(not CGROUP_V1.exists(), reason="no control groups of version 1")
def test_scancel_ends_everything_and_the_job_goes_on_in_another_pilot(mesh: Mesh, tmp_path: Path) -> None:
    done = tmp_path / "done"
    with slurm_cluster(2, gpus=GPUS, cgroups=True) as slurm:
        nodes = keep_pilots(mesh, slurm, 2)
        assert [(node["gpus"], node["cores"]) for node in nodes] == [(2, 1), (2, 1)]  # of 4 and all of the machine
        job = start_job(mesh, f"if [ -e {done} ]; then exit 0; fi; touch {done}; {FOREVER}")
        sleeper = until(lambda: named(mesh, "sleep 1001"), "its process")[0]
        pilot = where(mesh, job).rpartition("-")[2]
        groups = [line.split(":") for line in Path(f"/proc/{sleeper.pid}/cgroup").read_text().splitlines()]
        of = {controller: path for _, controller, path in groups}
        assert f"/job_{pilot}/step_batch/cotenant/" in of["cpuset"]
        assert of["freezer"].endswith(f"/job_{pilot}/step_batch")  # by which Slurm finds it

        slurm.call("scancel", pilot)

        until(lambda: mesh.client.job(job).attempt.number == 2, "it is requeued", seconds=REQUEUED_SECONDS_MAX)
        until(lambda: mesh.client.job(job).phase == JOB_PHASE_SUCCEEDED, "it finishes")
        first, second = (*mesh.client.job(job).past_attempts, mesh.client.job(job).attempt)
        assert first.allocations[0].node_id != second.allocations[0].node_id
        assert mesh.client.job(job).failures == 0
        assert not named(mesh, "sleep 100")
        end_pilots(mesh, slurm)
        assert not processes(mesh)
        left = [str(path) for path in Path("/sys/fs/cgroup").glob("*/slurm_n*/uid_0/job_*")]
        assert not left, left


def test_a_killed_agent_is_started_again_and_adopts_its_jobs(mesh: Mesh, slurm: SlurmCluster) -> None:
    keep_pilots(mesh, slurm, 1)
    job = start_job(mesh, FOREVER)
    [agent] = named(mesh, "serve agent")

    agent.kill()

    until(lambda: [one for one in named(mesh, "serve agent") if one != agent], "another agent")
    until(lambda: ready(mesh, where(mesh, job).rpartition("-")[2]), "the node is ready again")
    assert mesh.client.job(job).phase == JOB_PHASE_RUNNING
    assert mesh.client.job(job).attempt.number == 1
    assert len(named(mesh, "sleep 1001")) == 2  # the shell and its child
    mesh.cli("cancel", job)
    end_pilots(mesh, slurm)


@pytest.mark.deep
def test_the_node_of_a_pilot_that_could_not_say_goodbye_is_removed(mesh: Mesh, slurm: SlurmCluster) -> None:
    [node] = keep_pilots(mesh, slurm, 1)
    job = start_job(mesh, FOREVER)
    pilot = node["id"].rpartition("-")[2]
    host = slurm.call("squeue", "-h", "-j", pilot, "-o", "%N").strip()
    slurm.kill(host)  # steps outlive slurmd
    slurm.start_part(host)
    slurm.wait_for_state(pilot, "RUNNING")
    assert mesh.client.job(job).phase == JOB_PHASE_RUNNING
    assert len(named(mesh, "sleep 1001")) == 2  # the shell and its child
    [agent] = named(mesh, "serve agent")
    script = agent.parent()
    assert script is not None

    for process in (agent, script):
        process.kill()

    slurm.wait_for_state(pilot, "FAILED")
    until(lambda: not processes(mesh), "nothing is left", seconds=REQUEUED_SECONDS_MAX)

    def removed() -> bool:
        return {"removed": node["id"]} in look(mesh, slurm, "--max", "1", "--sbatch-option=--hold")

    until(removed, "the node is removed", seconds=REQUEUED_SECONDS_MAX)
    until(lambda: mesh.client.job(job).phase == JOB_PHASE_QUEUED, "its job is requeued", seconds=REQUEUED_SECONDS_MAX)
    assert len(json.loads(mesh.cli("nodes", "--json").out)) == 1
    mesh.cli("cancel", job)
    end_pilots(mesh, slurm)


def test_jobs_are_stopped_before_the_time_of_their_pilot_is_over(
    mesh: Mesh, slurm: SlurmCluster, tmp_path: Path
) -> None:
    keep_pilots(mesh, slurm, 1, "--agent-option=--for=16s", "--drain-before", "8s")
    warned = tmp_path / "warned"
    job = start_job(mesh, f"trap 'touch {warned}; exit 0' TERM; while :; do sleep 0.1; done")

    until(lambda: not slurm.call("squeue", "-h").strip(), "the pilot ends by itself", seconds=30)

    assert warned.exists()
    stopped = mesh.client.job(job)
    assert (
        "nearly over" in stopped.past_attempts[0].stop_detail if stopped.past_attempts else stopped.attempt.stop_detail
    )
    assert stopped.failures == 0
    assert not processes(mesh)
    mesh.cli("cancel", job)
    end_pilots(mesh, slurm)


@pytest.mark.deep
def test_the_words_of_slurm_are_told_when_it_refuses_a_pilot(mesh: Mesh, slurm: SlurmCluster) -> None:
    told = look(mesh, slurm, "--min", "1", "--max", "1", "--partition", "nowhere")
    assert "sbatch: error: invalid partition specified" in told[-1]["refused"]


@pytest.mark.deep
def test_pilots_follow_the_waiting_jobs(mesh: Mesh, slurm: SlurmCluster) -> None:
    keep_pilots(mesh, slurm, 1)
    jobs = [mesh.cli("submit", "--gpus", "2", "--cpus", "1", "--", "sleep", "1000").out.strip() for _ in range(2)]
    until(lambda: mesh.client.job(jobs[1]).refusal.code == "CAPACITY", "the second one waits")
    held = "--max", "3", "--sbatch-option=--hold"
    [pilot] = submitted(look(mesh, slurm, *held))
    assert not submitted(look(mesh, slurm, *held))  # it counts as room, though it is pending
    slurm.call("scontrol", "release", pilot)
    wait_until_ready(mesh, pilot)
    until(lambda: mesh.client.job(jobs[1]).phase == JOB_PHASE_RUNNING, "it runs there")
    [more] = submitted(look(mesh, slurm, "--min", "3", *held))
    assert {"cancelled": [more]} in look(mesh, slurm, *held)  # without demand
    slurm.wait_for_state(more, "CANCELLED")
    mesh.cli("cancel", *jobs)
    end_pilots(mesh, slurm)


def test_nothing_outlives_slurmstepd(mesh: Mesh, slurm: SlurmCluster) -> None:
    [node] = keep_pilots(mesh, slurm, 1)
    assert (node["gpus"], node["cores"]) == (2, 1)  # though nothing confines it
    job = start_job(mesh, FOREVER)
    [agent] = named(mesh, "serve agent")
    step = next(parent for parent in agent.parents() if parent.name() == "slurmstepd")
    script = agent.parent()
    assert script is not None
    for process in (agent, script, step):  # nobody is left to hand back, or to kill the supervisors
        process.kill()

    until(lambda: not processes(mesh), "nothing is left", seconds=REQUEUED_SECONDS_MAX)

    mesh.cli("forget", node["id"], "--powered-off")
    mesh.cli("cancel", job)
