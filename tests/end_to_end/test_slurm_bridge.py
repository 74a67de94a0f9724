"""The bridge beside a real Slurm: what the commands that read show of it, and what happens when parts die."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.end_to_end.commands import COTENANT, Cli, Serving, environment_of
from tests.end_to_end.waiting import until
from tests.support.slurm_cluster import CONTROLLER, SlurmCluster, missing_for_slurm, slurm_cluster

from cotenant.services.slurm.commands import SlurmCommands, SlurmRest

pytestmark = [
    pytest.mark.skipif(bool(missing_for_slurm()), reason=missing_for_slurm() or "Slurm is there"),
    pytest.mark.group("slurm-bridge"),
]

PHASES = {  # of ours, by state of Slurm
    "RUNNING": "running",
    "PENDING": "queued",
    "COMPLETED": "succeeded",
    "FAILED": "failed",
    "CANCELLED": "cancelled",
    "SUSPENDED": "suspended",
    "COMPLETING": "stopping",
}
LONG = "sleep 900"
NOBODY = 65534


@dataclass
class Bridge:
    """A bridge beside a Slurm with a mix of jobs, by name."""

    slurm: SlurmCluster
    cli: Cli
    log: Path
    jobs: Mapping[str, str]
    serving: Serving | None = None

    def start(self) -> None:
        """Start the bridge, and find its address."""
        self.serving = self.cli.start("serve", "slurm", "--listen", "127.0.0.1:0", log=self.log)
        line = self.serving.wait_for_output("slurm serves at ")
        self.cli.environment["COTENANT_ENDPOINT"] = line.split()[3].rstrip(":")
        until(lambda: not self._status().returncode, "the first picture")

    def ask(self, *arguments: str) -> Any:
        """Return what a command prints with `--json`."""
        command, *others = arguments  # what follows -- is not an option
        return json.loads(self.cli(command, "--json", *others).out)

    def status(self) -> tuple[bool, str]:
        """Return whether all is well, and the problems."""
        found = json.loads(self._status().stdout)
        return found["well"], " ".join(one["what"] for one in found["problems"])

    def _status(self) -> subprocess.CompletedProcess[str]:
        command = [COTENANT, "status", "--json"]
        return subprocess.run(command, env=self.cli.environment, capture_output=True, text=True, check=False)


def submit_mix(slurm: SlurmCluster) -> dict[str, str]:
    """Submit jobs in all states; return their ids by name."""
    quiet = ("-o", "/dev/null")
    jobs = {
        "train": slurm.submit(LONG, *quiet, "-J", "train", "-N2", "--gres=gpu:2", "-c4", "-t", "30", "-w", "n[1-2]"),
        "held": slurm.submit(LONG, *quiet, "-H", "-c2"),
        "whole": slurm.submit(LONG, *quiet, "-J", "whole", "-N2", "--exclusive", "-t", "10"),
        "done": slurm.submit("exit 0", *quiet, "-t", "1"),
        "bad": slurm.submit("exit 3", *quiet, "-t", "1"),
        "array": slurm.submit(LONG, *quiet, "-J", "arr", "--array=0-4%2", "--gres=gpu:a100:1", "-t", "20", "-w", "n1"),
    }
    jobs["after"] = slurm.submit(LONG, *quiet, "-d", f"afterok:{jobs['train']}")
    jobs["begin"] = slurm.submit(LONG, *quiet, "--begin=now+1hour", "-t", "5")
    jobs["gone"] = slurm.submit(LONG, *quiet, "-H")
    jobs["paused"] = slurm.submit(LONG, *quiet, "-t", "8", "-w", "n2")
    slurm.call("sbatch", *quiet, "-H", "-J", "het", "-c2", ":", "-c1", "--wrap", LONG)
    slurm.wait_for_state(jobs["paused"], "RUNNING")
    slurm.wait_for_state(jobs["bad"], "FAILED")
    slurm.wait_for_state(f"{jobs['array']}_0", "RUNNING")
    slurm.call("scontrol", "suspend", jobs["paused"])
    slurm.call("scancel", jobs["gone"])
    return jobs


@pytest.fixture(scope="module")
def bridge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bridge]:
    """A bridge beside a Slurm of two nodes."""
    home = tmp_path_factory.mktemp("bridge")
    with slurm_cluster(2) as slurm:
        jobs = submit_mix(slurm)
        environment = environment_of(home, SLURM_CONF=str(slurm.directory / "slurm.conf"))
        environment["COTENANT_STATE_DIR"] = str(home / "state")
        made = Bridge(slurm, Cli(environment), home / "bridge.log", jobs)
        made.start()
        try:
            yield made
        finally:
            if made.serving:
                made.serving.terminate()


def squeue(slurm: SlurmCluster) -> dict[str, str]:
    """Return the state of each job by the id that squeue shows."""
    lines = slurm.call("squeue", "-h", "-a", "-r", "-t", "all", "-o", "%i %T %r").splitlines()
    held = {"JobHeldUser", "JobHeldAdmin"}
    return {
        job: "suspended" if reason in held and state == "PENDING" else PHASES[state]
        for job, state, reason in (line.split(maxsplit=2) for line in lines)
    }


def shown(bridge: Bridge) -> dict[str, str]:
    """Return the phase of each job by id, as the bridge shows them."""
    return {job["id"]: job["phase"] for job in bridge.ask("jobs", "--all")}


def test_the_picture_is_what_squeue_shows(bridge: Bridge) -> None:
    assert len(squeue(bridge.slurm)) == 16
    until(lambda: shown(bridge) == squeue(bridge.slurm), "the same jobs in the same phases")


def test_nodes_have_in_use_what_slurm_allocated(bridge: Bridge) -> None:
    lines = bridge.slurm.call("sinfo", "-h", "-N", "-O", "NodeList:10,CPUsState:20,GresUsed:40").splitlines()
    wanted = {
        node: (int(cpus.split("/")[0]), int(gres.split(":")[2].partition("(")[0]))
        for node, cpus, gres in (line.split() for line in lines)
    }
    found = {node["id"]: (node["cores_used"], node["gpus_used"]) for node in bridge.ask("nodes")}
    assert found == wanted


def test_explain_names_what_rules_each_node_out_and_when_it_starts(bridge: Bridge) -> None:
    answer = bridge.ask("explain", bridge.jobs["whole"])
    assert answer["summary"].startswith("waits: CAPACITY")
    assert "n1: 0 of 4 GPUs free, 4 needed" in answer["summary"]
    assert "Slurm says Resources" in answer["summary"]
    assert 20 * 60 < answer["forecast"]["start_seconds"] <= 40 * 60
    assert {one["id"] for one in answer["ending"]} >= {bridge.jobs["train"]}
    assert bridge.ask("explain", bridge.jobs["after"])["job"]["reason"]["code"] == "DEPENDENCY"


def test_a_what_if_says_when_another_job_would_start(bridge: Bridge) -> None:
    (answer,) = bridge.ask("whatif", "--gpus", "4", "--cpus", "4", "--time", "20m", "--", "x")
    assert not answer["starts_now"]
    assert answer["forecast"]["start_seconds"] > 60
    (answer,) = bridge.ask("whatif", "--cpus", "2", "--time", "1m", "--", "x")
    assert answer["starts_now"]


def test_a_snapshot_of_it_can_be_compared(bridge: Bridge, tmp_path: Path) -> None:
    file = tmp_path / "slurm.json"
    bridge.cli("snapshot", "-o", file)
    compared = json.loads(bridge.cli("compare", "--from-snapshot", file, "--arms", "fifo,srsf", "--json").out)
    assert [*compared["arms"]] == ["fifo", "srsf"]
    assert compared["complete"]


@pytest.mark.parametrize(
    ("command", "remedy"),
    [
        (("cancel", "{train}"), "this job belongs to Slurm: scancel {train}"),
        (("suspend", "{array}_1"), "this job belongs to Slurm: scontrol suspend {array}_1"),
        (("drain", "n1"), "this node belongs to Slurm: scontrol update NodeName=n1 State=DRAIN"),
        (("submit", "--", "true"), "this cluster's jobs belong to Slurm: submit it with sbatch"),
    ],
)
def test_what_would_change_something_is_refused(bridge: Bridge, command: tuple[str, ...], remedy: str) -> None:
    words = [word.format(**bridge.jobs) for word in command]
    assert remedy.format(**bridge.jobs) in bridge.cli(*words, code=1).error


@pytest.mark.skipif(not shutil.which("slurmrestd"), reason="slurmrestd is not installed")
def test_slurmrestd_says_the_same_as_the_commands(bridge: Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", bridge.slurm.environment["SLURM_CONF"])
    folder = bridge.slurm.directory / "rest"  # slurmrestd refuses to run as root
    folder.mkdir()
    os.chown(folder, NOBODY, NOBODY)
    path = folder / "socket"
    command = ["slurmrestd", "-a", "rest_auth/local", "-s", "openapi/v0.0.38", f"unix:{path}"]
    with (folder / "log").open("wb") as log:
        rest = subprocess.Popen(
            command, user=NOBODY, group=NOBODY, extra_groups=[], env=bridge.slurm.environment, stdout=log, stderr=log
        )
    try:
        until(path.exists, "slurmrestd listens")
        path.chmod(0o666)

        async def states(slurm: SlurmCommands) -> dict[str, str]:
            return {job.id: job.state for job in (await slurm.jobs()).jobs}

        by_rest, by_commands = asyncio.run(states(SlurmRest(path))), asyncio.run(states(SlurmCommands()))
        assert by_rest == by_commands
        assert [node.name for node in asyncio.run(SlurmRest(path).nodes()).nodes] == ["n1", "n2"]
    finally:
        rest.terminate()
        rest.wait()


def test_a_watch_sees_a_job_end(bridge: Bridge) -> None:
    job = bridge.slurm.submit("sleep 3", "-o", "/dev/null", "-J", "short", "-t", "1", "-w", "n2")
    until(lambda: job in shown(bridge), "the job is shown")
    bridge.cli("wait", job)
    assert bridge.ask("show", job)["phase"] == "succeeded"


def test_jobs_that_ended_predict_those_that_wait(bridge: Bridge) -> None:
    quick = ("-o", "/dev/null", "-J", "quick", "-w", "n2")
    for job in [bridge.slurm.submit("sleep 1", *quick, "-t", "1") for _ in range(3)]:
        bridge.slurm.wait_for_state(job, "COMPLETED")
    waits = bridge.slurm.submit("sleep 1", *quick, "--begin=now+1hour")  # without a time limit

    def estimate() -> float:
        found = bridge.ask("explain", waits)["estimate"] if waits in shown(bridge) else None
        return float(found["remaining_seconds"] or 0.0) if found else 0.0

    assert 0.5 < until(estimate, "an estimate") < 30


def test_the_picture_stays_while_slurmctld_is_away(bridge: Bridge) -> None:
    before = shown(bridge)
    bridge.slurm.kill(CONTROLLER)
    problem = until(lambda: _problem(bridge.status), "status says that Slurm is away")
    assert "what is shown is" in problem
    assert shown(bridge) == before
    bridge.slurm.start_part(CONTROLLER)
    until(lambda: bridge.status()[0], "Slurm is back")


def _problem(status: Callable[[], tuple[bool, str]]) -> str:
    well, problem = status()
    return "" if well else problem


def test_a_killed_bridge_shows_the_same_after_its_restart(bridge: Bridge) -> None:
    assert bridge.serving
    bridge.serving.kill()
    bridge.start()
    until(lambda: shown(bridge) == squeue(bridge.slurm), "the same jobs in the same phases")
