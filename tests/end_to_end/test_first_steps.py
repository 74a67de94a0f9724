"""What a user tries in the first hour, against a real mesh with real processes."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from tests.end_to_end.commands import Cli, environment_of
from tests.end_to_end.meshes import GPUS, Mesh
from tests.end_to_end.scripts import Counter, shell
from tests.end_to_end.waiting import lines_of, until

from cotenant.core.model.lifecycle import Phase
from cotenant.v1.job_service_pb2 import ListJobsRequest
from cotenant.v1.job_service_pb2_grpc import JobServiceStub

ALL_GPUS = ("--gpus", str(GPUS), "--cpus", "1")
ONE_CORE = ("--cpus", "1")
GANG = Path(__file__).with_name("gang.py")


def test_a_job_sees_its_one_core_and_its_one_gpu(cli: Cli) -> None:
    script = 'import os; print(sorted(os.sched_getaffinity(0)), os.environ["CUDA_VISIBLE_DEVICES"])'
    ended = cli("submit", "--gpus", "1", *ONE_CORE, "--wait", "--", sys.executable, "-c", script)
    cores, gpus = ended.out.split()
    job = newest(cli)
    assert cores == str(job["attempt"]["allocations"][0]["tasks"][0]["cores"])
    assert len(json.loads(cores)) == 1
    assert gpus == job["attempt"]["allocations"][0]["tasks"][0]["gpus"][0]["uuid"]


def test_waiting_for_a_failed_job_exits_with_1_and_its_status(cli: Cli) -> None:
    ended = cli("submit", *ONE_CORE, "--wait", *shell("echo last words; exit 5"), code=1)
    assert ended.out == "last words\n"
    assert "exited with status 5" in ended.error or "status 5" in ended.error


def test_bad_usage_exits_with_2(cli: Cli) -> None:
    assert "no such option" in cli("submit", "--gpu", "1", "--", "true", code=2).error
    assert "nothing to run" in cli("submit", "--gpus", "1", code=2).error
    assert "nosuchjob" in cli("show", "nosuchjob", code=2).error


def test_a_missing_mesh_exits_with_3(cli: Cli, tmp_path: Path) -> None:
    assert "cotenant up" in cli("--state-dir", tmp_path, "jobs", code=3).error
    assert cli("--endpoint", "127.0.0.1:1", "jobs", code=3).error


def test_a_job_that_never_fits_is_rejected_with_the_largest_shape(cli: Cli) -> None:
    before = cli.json("jobs", "--all")
    refused = cli("submit", "--gpus", "9", *ONE_CORE, "--", "true", code=1)
    assert "NEVER_FITS" in refused.error
    assert "needs 9 GPUs" in refused.error
    assert f"the largest node has {GPUS} ×" in refused.error
    assert cli.json("jobs", "--all") == before


def test_a_job_is_shown_and_listed_and_its_output_followed(mesh: Mesh, cli: Cli, tmp_path: Path) -> None:
    counter = Counter(tmp_path, "shown")
    script = counter.command
    script[-1] = f"echo begun; {script[-1]}"
    job_id = cli.submit("--gpus", "1", *ONE_CORE, *script)
    mesh.client.wait_for(job_id, Phase.RUNNING)
    counter.wait_for_more()
    following = cli.start("logs", "-f", job_id, log=tmp_path / "following")
    following.wait_for_output("begun")
    (listed,) = cli.json("jobs", "--phase", "running")
    assert (listed["id"], listed["gpus"], listed["cores"]) == (job_id, 1, 1)
    assert "running" in cli("show", job_id).out
    counter.finish()
    assert following.wait() == 0
    assert cli.json("show", job_id)["phase"] == "succeeded"


def test_a_running_job_has_run_since_it_started(mesh: Mesh, cli: Cli, tmp_path: Path) -> None:
    counter = Counter(tmp_path, "running")
    job_id = cli.submit(*ONE_CORE, *counter.command)
    started = mesh.client.wait_for(job_id, Phase.RUNNING).attempt.start_time.ToNanoseconds() / 1e9
    until(lambda: counter.count() >= 5, "some time of running")
    ran = cli.json("show", job_id)["run_seconds"]
    now = subprocess.run(["date", "+%s.%N"], capture_output=True, text=True, check=True).stdout
    assert 0.3 < ran <= float(now) - started
    counter.finish()
    mesh.client.wait_for(job_id, Phase.SUCCEEDED)


def test_a_waiting_job_is_explained_with_numbers(mesh: Mesh, cli: Cli, tmp_path: Path) -> None:
    holder = Counter(tmp_path, "holder")
    held = cli.submit(*ALL_GPUS, *holder.command)
    mesh.client.wait_for(held, Phase.RUNNING)
    waiting = cli.submit("--gpus", "2", *ONE_CORE, "--", "true")
    reported = until(lambda: reason_of(cli, waiting), "reason with numbers")
    assert f"needs 2 GPUs, 0 of {GPUS} free" in reported["reason"]["detail"]
    assert reported["reason"]["numbers"]["wanted_gpu_milli"] == 2000
    assert f"needs 2 GPUs, 0 of {GPUS} free" in cli("explain", waiting).out
    assert "running" in cli("explain", held).out
    holder.finish()
    mesh.client.wait_for(waiting, Phase.SUCCEEDED)


def test_cancel_warns_a_running_job_before_ending_it(mesh: Mesh, cli: Cli, tmp_path: Path) -> None:
    warned = tmp_path / "warned"
    script = f"trap 'echo warned >> {warned}; exit 0' USR1; echo ready; while :; do sleep 0.02; done"
    job_id = cli.submit(*ONE_CORE, "--signal", "USR1", *shell(script))
    mesh.client.wait_for(job_id, Phase.RUNNING)
    until(lambda: "ready" in cli("logs", job_id).out, "output of the job")
    pid = process_of(job_id)
    cli("cancel", job_id)
    mesh.client.wait_for(job_id, Phase.CANCELLED)
    assert lines_of(warned) == ["warned"]
    assert not psutil.pid_exists(pid)


def test_a_job_that_ignores_the_warning_is_killed_after_its_grace(mesh: Mesh, cli: Cli) -> None:
    job_id = cli.submit(*ONE_CORE, "--grace", "0.2s", *shell("trap '' TERM; echo ready; while :; do sleep 0.02; done"))
    mesh.client.wait_for(job_id, Phase.RUNNING)
    until(lambda: "ready" in cli("logs", job_id).out, "output of the job")
    cli("cancel", job_id)
    job = mesh.client.wait_for(job_id, Phase.CANCELLED)
    assert job.attempt.exit.signal == signal.SIGKILL


def test_a_suspended_job_waits_until_it_is_resumed(mesh: Mesh, cli: Cli, tmp_path: Path) -> None:
    counter = Counter(tmp_path, "suspended")
    job_id = cli.submit(*ONE_CORE, *counter.command)
    mesh.client.wait_for(job_id, Phase.RUNNING)
    cli("suspend", job_id)
    mesh.client.wait_for(job_id, Phase.SUSPENDED)
    cli("resume", job_id)
    mesh.client.wait_for(job_id, Phase.RUNNING)
    counter.finish()
    assert mesh.client.wait_for(job_id, Phase.SUCCEEDED).attempt.number == 2


def test_the_two_processes_of_a_gang_reach_each_other(cli: Cli) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("a gang of two needs two cores")
    ended = cli("submit", "--gpus", "1", *ONE_CORE, "--replicas", "2", "--wait", "--", sys.executable, GANG)
    assert "hello 1 of 2" in ended.out


def test_a_cordoned_node_takes_nothing_until_it_is_uncordoned(mesh: Mesh, cli: Cli) -> None:
    (node,) = cli.json("nodes")
    assert cli.json("cordon", node["id"], "--reason", "noisy fan")["state"] == "cordoned"
    job_id = cli.submit(*ONE_CORE, "--", "true")
    until(lambda: cli.json("show", job_id)["reason"]["code"] != "NOT_YET_CONSIDERED", "verdict of a cycle")
    assert mesh.client.phase(job_id) == Phase.QUEUED
    assert "noisy fan" in cli("nodes").out
    cli("uncordon", node["id"])
    mesh.client.wait_for(job_id, Phase.SUCCEEDED)


def test_a_drained_node_is_emptied_and_its_jobs_run_again_later(mesh: Mesh, cli: Cli, tmp_path: Path) -> None:
    (node,) = cli.json("nodes")
    counter = Counter(tmp_path, "drained")
    job_id = cli.submit(*ONE_CORE, "--grace", "1s", *counter.command)
    mesh.client.wait_for(job_id, Phase.RUNNING)
    assert cli.json("drain", node["id"])["state"] in ("draining", "drained")
    mesh.client.wait_for(job_id, Phase.QUEUED)
    cli("uncordon", node["id"])
    counter.finish()
    assert mesh.client.wait_for(job_id, Phase.SUCCEEDED).attempt.number == 2


def test_policies_are_listed_with_active_marks(cli: Cli) -> None:
    policies = {(one["group"].removeprefix("cotenant."), one["name"]): one for one in cli.json("policies")}
    assert policies["queue_policies", "fifo"]["active"]
    assert policies["placement_policies", "consolidate"]["active"]
    assert not policies["queue_policies", "las"]["active"]
    assert all(one["healthy"] for one in policies.values())


def test_whatif_submits_nothing(cli: Cli) -> None:
    before = len(cli.json("jobs", "--all"))
    assert "starts now" in cli("whatif", "--gpus", "2", *ONE_CORE, "--", "true").out
    assert len(cli.json("jobs", "--all")) == before


def test_the_bundled_trace_is_replayed(cli: Cli) -> None:
    reported = cli.json("simulate", "--trace", "sample", "--cluster", "2x8")
    assert reported["finished"] == reported["jobs"] > 0


def test_a_shell_gets_its_completion(cli: Cli) -> None:
    assert "complete -o default -F _cotenant_completion cotenant" in cli(_COTENANT_COMPLETE="source_bash").out


def test_a_call_without_a_token_is_rejected(mesh: Mesh, cli: Cli, tmp_path: Path) -> None:
    stranger = Cli(environment_of(tmp_path))
    reported = stranger("--endpoint", mesh.address, "jobs", code=2)
    assert "token" in reported.error
    with grpc.insecure_channel(mesh.address) as channel, pytest.raises(grpc.RpcError) as refused:
        JobServiceStub(channel).ListJobs(ListJobsRequest(), timeout=10)
    assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED


def test_only_its_owner_can_read_the_token(mesh: Mesh) -> None:
    token = mesh.state_dir / "token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert stat.S_IMODE(mesh.state_dir.stat().st_mode) == 0o700


def test_it_listens_on_loopback_alone(mesh: Mesh) -> None:
    assert mesh.process
    sockets = psutil.Process(mesh.process.pid).net_connections(kind="inet")
    listening = {one.laddr.ip for one in sockets if one.status == psutil.CONN_LISTEN}
    assert {address.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}


def newest(cli: Cli) -> Any:
    return cli.json("jobs", "--all")[0]


def reason_of(cli: Cli, job_id: str) -> Any:
    reported = cli.json("show", job_id)
    return reported if reported["reason"] and reported["reason"]["numbers"] else None


def process_of(job_id: str) -> int:
    """Return the pid of a job's process, found by the job's id in its environment."""
    return next(
        process.pid
        for process in psutil.process_iter(["environ"])
        if (process.info["environ"] or {}).get("COTENANT_JOB_ID") == job_id
    )
