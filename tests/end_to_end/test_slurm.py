"""Slurm's commands against a real mesh of two nodes, driven as scripts and Python tools drive them."""

from __future__ import annotations

import json
import os
import pwd
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.end_to_end.commands import SECONDS_MAX, TRACEBACK, Outcome
from tests.end_to_end.meshes import Mesh
from tests.end_to_end.waiting import until

from cotenant.cli.slurm.main import COMMANDS
from cotenant.core.model.job_number import id_of

ENDED = "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"


class Slurm:
    """Runs the installed commands in a folder of their user."""

    def __init__(self, mesh: Mesh, folder: Path) -> None:
        self.folder = folder
        commands = folder / "bin"
        mesh.cli("slurm", "install", commands)
        self.environment = {**mesh.cli.environment, "PATH": f"{commands}:{os.environ['PATH']}"}

    def __call__(
        self,
        *words: str,
        code: int = 0,
        stdin: str = "",
        seconds: float = SECONDS_MAX,
        cwd: Path | None = None,
        **more: str,
    ) -> Outcome:
        """Run a command that must exit with this code."""
        done = subprocess.run(
            words,
            cwd=cwd or self.folder,
            env={**self.environment, **more},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        assert TRACEBACK not in done.stderr, done.stderr
        assert done.returncode == code, f"{words} exited with {done.returncode}:\n{done.stdout}{done.stderr}"
        return Outcome(done.returncode, done.stdout, done.stderr)

    def submit(self, *words: str, **more: Any) -> str:
        """Submit a job and return its number."""
        return self("sbatch", "--parsable", *words, **more).out.strip()

    def script(self, name: str, text: str) -> str:
        """Write a script and return its name."""
        (self.folder / name).write_text(text)
        return name

    def states(self, number: str) -> list[str]:
        """Return the states of a job or of the tasks of an array."""
        return self("sacct", "-X", "-n", "-P", "-j", number, "-o", "State").out.split()

    def ended(self, number: str) -> list[str]:
        """Wait until a job or array has ended, and return its states."""

        def ends() -> list[str]:
            found = self.states(number)
            return found if set(found) <= set(ENDED) else []

        return until(ends, f"end of {number}")

    def read(self, name: str) -> str:
        """Return what a file in the folder has; "" if there is none."""
        path = self.folder / name
        return path.read_text() if path.exists() else ""


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    shared = Mesh(tmp_path_factory.mktemp("mesh"), "--gpus", "fake:4", "--nodes", "2")
    try:
        shared.start()
        yield shared
    finally:
        shared.close()


@pytest.fixture(scope="module")
def slurm(mesh: Mesh, tmp_path_factory: pytest.TempPathFactory) -> Slurm:
    return Slurm(mesh, tmp_path_factory.mktemp("user"))


def test_a_script_runs_as_under_slurm(slurm: Slurm) -> None:
    script = slurm.script(
        "job.sh",
        "#!/bin/bash\n#SBATCH --job-name=train --gres=gpu:2 -c 1 --mem=64M\n#SBATCH -t 10 --mail-type=END\n"
        "#SBATCH -o out/%x-%j.log -e out/%j.err\n"
        "echo $SLURM_JOB_ID $SLURM_JOB_NAME $SLURM_CPUS_PER_TASK $SLURM_GPUS_ON_NODE $1 $LR\n"
        "[ $SLURM_SUBMIT_DIR = $PWD ] && echo here\n"
        "srun -n 3 --output=out/%j.%t sh -c 'echo $SLURM_PROCID of $SLURM_NTASKS rank $RANK'\n"
        "echo oops >&2\nexit 3\n",
    )
    (slurm.folder / "out").mkdir()
    submitted = slurm("sbatch", "--job-name=mine", script, "first", LR="0.1")
    assert "--mail-type=END (mail about the job)" in submitted.err
    number = submitted.out.removeprefix("Submitted batch job ").strip()
    assert slurm.ended(number) == ["FAILED"]
    assert slurm.read(f"out/mine-{number}.log") == f"{number} mine 1 2 first 0.1\nhere\n"
    assert slurm.read(f"out/{number}.err") == "oops\n"
    assert [slurm.read(f"out/{number}.{task}") for task in range(3)] == [f"{n} of 3 rank {n}\n" for n in range(3)]
    table = slurm("sacct", "-j", number, "-P", "-o", "JobID,JobName,State,ExitCode,AllocCPUS,ReqMem,Timelimit").out
    assert table.splitlines()[1:] == [
        f"{number}|mine|FAILED|3:0|1|64M|00:10:00",
        f"{number}.batch|batch|FAILED|3:0|1||",
    ]
    whole, batch = slurm("sacct", "-n", "-P", "-j", number, "-o", "MaxRSS,TotalCPU,UserCPU,SystemCPU").out.splitlines()
    assert whole.startswith("|")
    assert re.fullmatch(r"[1-9]\d*K(\|\d\d:\d\d\.\d{3}){3}", batch)
    assert not batch.endswith("|00:00.000|00:00.000|00:00.000")
    shown = slurm("scontrol", "show", "job", number).out
    assert f"StdOut={slurm.folder}/out/mine-{number}.log\n" in shown
    assert "TresPerNode=gres/gpu:2\n" in shown


def test_output_is_in_cotenants_log_as_well(slurm: Slurm, mesh: Mesh) -> None:
    number = slurm.submit("--wrap", "echo both", "-o", "/nowhere/%j")
    slurm.ended(number)
    assert mesh.cli("logs", id_of(int(number))).out.splitlines() == [
        f"slurmstepd: error: Could not open stdout file /nowhere/{number}",
        "both",
    ]


def test_an_array_has_one_line_while_it_waits_and_a_file_for_each_task(slurm: Slurm) -> None:
    number = slurm.submit(
        "--array=1-5:2%2", "-H", "--wrap", "echo $SLURM_ARRAY_JOB_ID $SLURM_ARRAY_TASK_ID $SLURM_JOB_ID"
    )
    assert slurm("squeue", "-h", "-j", number, "-o", "%i %t %r").out == f"{number}_[1,3,5%2] PD JobHeldUser\n"
    slurm("scancel", f"{number}_3")
    slurm("scontrol", "release", f"{number}_[1,5]")
    assert slurm.ended(number) == ["COMPLETED", "CANCELLED", "COMPLETED"]
    raw = slurm("sacct", "-X", "-n", "-P", "-j", f"{number}_5", "-o", "JobIDRaw").out.strip()
    assert slurm.read(f"slurm-{number}_5.out") == f"{number} 5 {raw}\n"
    assert raw.startswith(number)


def test_tasks_on_several_nodes_start_from_one_script(slurm: Slurm) -> None:
    script = slurm.script(
        "two.sh",
        '#!/bin/bash\n#SBATCH -N 2 --ntasks-per-node=1 -o two.out\necho begin $SLURM_JOB_NUM_NODES; export X="it\'s"\n'
        "srun -n 4 sh -c 'echo task $SLURM_PROCID node $SLURM_NODEID $X of $WORLD_SIZE'\n"
        "srun sh -c 'exit $((SLURM_PROCID * 7))'; echo status $?\n",
    )
    slurm("sbatch", "--wait", script)
    first, *tasks, last = [line for line in slurm.read("two.out").splitlines() if "srun: error" not in line]
    assert (first, last) == ("begin 2", "status 7")
    assert sorted(tasks) == [f"task {task} node {task // 2} it's of 4" for task in range(4)]
    assert not list(slurm.folder.glob(".slurm_job-*"))


@pytest.mark.deep
def test_jobs_wait_for_others_and_for_a_release(slurm: Slurm) -> None:
    first = slurm.submit("-H", "-J", "one", "--wrap", "exit 1")
    good = slurm.submit("-d", f"afterok:{first}", "--wrap", "true")
    bad = slurm.submit("-d", f"afternotok:{first},afterany:{first}", "--wrap", "true")
    single = slurm.submit("-d", "singleton", "-J", "one", "--wrap", "true")
    lines = slurm("squeue", "--me", "-h", "-o", "%A %R").out.splitlines()
    assert lines == [f"{first} (JobHeldUser)", *(f"{number} (Dependency)" for number in (good, bad, single))]
    slurm("scontrol", "release", first)
    assert [slurm.ended(number) for number in (first, good, bad, single)] == [
        ["FAILED"],
        ["CANCELLED"],
        ["COMPLETED"],
        ["COMPLETED"],
    ]


def test_waiting_jobs_are_shown_and_changed(slurm: Slurm) -> None:
    number = slurm.submit("--begin=now+1day", "-t", "1-0", "-q", "high", "--comment", "a b", "--wrap", "true")
    slurm("scontrol", "update", f"jobid={number}", "Priority=7", "JobName=renamed")
    assert slurm("squeue", "-h", "-u", "nobody-else").out == ""
    assert slurm("squeue", "-h", "-n", "renamed", "-O", "Name:10,TimeLimit:.12,Reason:.10").out == (
        "renamed     1-00:00:00 BeginTime\n"
    )
    [view] = json.loads(slurm("squeue", "--json", "-j", number).out)["jobs"]
    assert (view["job_id"], view["job_state"], view["comment"]) == (int(number), ["PENDING"], "a b")
    for change, limit in (("TimeLimit=90", "1:30:00"), ("TimeLimit=+30", "2:00:00"), ("TimeLimit=-1:00", "1:59:00")):
        slurm("scontrol", "update", f"jobid={number}", change)
        assert slurm("squeue", "-h", "-j", number, "-o", "%l").out == f"{limit}\n"
    told = slurm("scontrol", "update", f"jobid={number}", "TimeLimit=-3:00:00", code=1)
    assert "the present limit is 01:59:00" in told.err + told.out
    slurm("scancel", "--name=renamed", "--state=PENDING")
    assert slurm.ended(number) == ["CANCELLED"]


def test_a_signal_reaches_the_steps_before_the_job_is_requeued(slurm: Slurm) -> None:
    program = (
        "import signal,sys,time\n"
        "def stop(*_): print('saved', flush=True); sys.exit(0)\n"
        "signal.signal(signal.SIGUSR1, stop); print('ready', flush=True); time.sleep(60)\n"
    )
    slurm.script("step.py", program)
    text = f"#!/bin/bash\n#SBATCH --open-mode=append -o signal.out --signal=USR1@20\nsrun {sys.executable} step.py\n"
    number = slurm.submit(slurm.script("signal.sh", text))
    until(lambda: "ready" in slurm.read("signal.out"), "the program")
    until(lambda: slurm.states(number) == ["RUNNING"], "the job runs")
    slurm("scontrol", "requeue", number)
    until(lambda: slurm.read("signal.out").split() == ["ready", "saved", "ready"], "the second attempt")
    slurm("scancel", number)
    assert slurm.ended(number) == ["CANCELLED"]


def test_srun_prints_the_output_and_exits_as_the_command(slurm: Slurm) -> None:
    ended = slurm("srun", "-c", "1", "sh", "-c", "echo $SLURM_PROCID; exit 4", code=4)
    assert ended.out.splitlines()[0] == "0"


def test_accounts_are_listed_as_workflow_programs_ask_for_them(slurm: Slurm) -> None:
    user = pwd.getpwuid(os.getuid()).pw_name
    listed = slurm("sacctmgr", "-n", "-s", "list", "user", user, "format=account%256").out
    assert listed == f"{'default':>256} \n"
    assert slurm("sacctmgr", "-P", "show", "assoc", "format=user,account").out == f"User|Account\n{user}|default\n"
    assert slurm("sacctmgr", "-n", "list", "users", "nobody-else").out == ""
    assert "cotenant tenants" in slurm("sacctmgr", "-i", "add", "user", "eve", code=1).err


def test_states_are_listed_as_workflow_programs_ask_for_them(slurm: Slurm) -> None:
    number = slurm.submit("-J", "run-17", "--comment", "rule_part", "-A", "default", "-p", "default", "--wrap", "true")
    slurm.ended(number)
    words = ("--parsable2", "--clusters", "all", "--noheader", "--format=JobIdRaw,State", "--endtime", "now")
    assert slurm("sacct", "-X", *words, "--name", "run-17").out == f"{number}|COMPLETED\n"
    assert slurm("sacct", "-X", "--noheader", "--format=jobid,state", "--job", number).out.split() == [
        number,
        "COMPLETED",
    ]
    assert slurm("sacct", "-j", f"{number}.0", "--format=Reason", "--noheader").out == ""
    assert slurm("sacct", "-n", "-P", "-j", f"{number}.batch", "-o", "JobID").out == f"{number}.batch\n"


def test_nextflows_executor_is_answered_as_it_expects(slurm: Slurm) -> None:
    """What `SlurmExecutor.groovy` of Nextflow (commit 06e3c4a, 2023) writes, calls and reads."""
    user = pwd.getpwuid(os.getuid()).pw_name
    task = slurm.folder / "work" / "3f" / "a1b2"
    task.mkdir(parents=True)
    header = (
        f"#!/bin/bash\n#SBATCH -J nf-align_(1)\n#SBATCH -o {task}/.command.log\n#SBATCH --no-requeue \n"
        "#SBATCH --signal B:USR2@30\n#SBATCH -t 01:00:00\n#SBATCH --mem 64M\n#SBATCH -p default\n"
    )
    (task / ".command.run").write_text(f"{header}trap 'exit 3' USR2\necho aligned; echo oops >&2\n")
    told = slurm("sbatch", ".command.run", cwd=task).out
    number = re.findall(r"Submitted batch job (\d+)", told)[0]
    held = slurm.submit("-H", "--wrap", "true")

    def states(*more: str) -> dict[str, str]:
        lines = slurm("squeue", "--noheader", "-o", "%i %t", "-t", "all", *more, "-u", user).out.splitlines()
        assert all(len(re.split(r"\s+", line)) == 2 for line in lines), "Nextflow reads two columns"
        return dict(line.split() for line in lines)

    until(lambda: states("-p", "default").get(number) == "CD", "the end of the task")
    assert states()[held] == "PD"
    assert (task / ".command.log").read_text() == "aligned\noops\n"
    slurm("scancel", held)
    until(lambda: states().get(held) == "CA", "the cancellation")


def test_nodes_are_listed(slurm: Slurm) -> None:
    lines = slurm("sinfo", "-h", "-N", "-o", "%N %D %P %G").out.splitlines()
    assert len(lines) == 2
    names = [line.split()[0] for line in lines]
    assert all(line.split()[1:] == ["1", "default*", "gpu:Fake:4"] for line in lines)
    [together] = slurm("sinfo", "-h", "-o", "%N").out.split()
    assert slurm("scontrol", "show", "hostnames", together).out.split() == names
    assert "CPUTot=" in slurm("scontrol", "show", "node", names[0]).out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["squeue", "-j", "99"], "slurm_load_jobs error: Invalid job id specified"),
        (["scancel", "99"], "scancel: error: Kill job error on job id 99: Invalid job id specified"),
        (["scontrol", "show", "job", "99"], "slurm_load_jobs error: Invalid job id specified"),
        (["sbatch", "nothing.sh"], "sbatch: error: Unable to open file nothing.sh"),
        (["sbatch", "plain.txt"], "sbatch: error: This does not look like a batch script.  The first"),
        (["sbatch", "-t", "soon", "--wrap", "true"], "sbatch: error: Invalid --time specification"),
        (
            ["sbatch", "-d", "afterok:99", "--wrap", "true"],
            "sbatch: error: Batch job submission failed: Job dependency",
        ),
        (["sbatch", "-A", "No!", "--wrap", "true"], "sbatch: error: Batch job submission failed: Invalid account"),
        (
            ["sbatch", "-C", "fast", "--strict", "--wrap", "true"],
            "sbatch: error: not followed by Cotenant: --constraint",
        ),
        (["sbatch", "--faster"], "sbatch: unrecognized option '--faster'"),
        (["squeue", "-o", "%!"], 'squeue: error: Format specification is invalid: "%!"'),
    ],
)
def test_errors_are_those_of_slurm(slurm: Slurm, words: list[str], message: str) -> None:
    slurm.script("plain.txt", "echo hello\n")
    assert slurm(*words, code=1).err.startswith(message)


def test_strictness_may_be_set_in_the_environment(slurm: Slurm) -> None:
    slurm("sbatch", "--test-only", "--exclusive", "--wrap", "true")
    refused = slurm("sbatch", "--test-only", "--exclusive", "--wrap", "true", code=1, COTENANT_SLURM_STRICT="1")
    assert refused.err.startswith("sbatch: error: not followed by Cotenant: --exclusive")


def test_commands_that_are_not_ours_are_kept(slurm: Slurm, mesh: Mesh, tmp_path: Path) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/sh\n")
    assert "other commands" in mesh.cli("slurm", "install", tmp_path, code=2).error
    mesh.cli("slurm", "install", "--force", tmp_path)
    mesh.cli("slurm", "install", tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(COMMANDS)


SUBMITIT = """
import submitit
def add(a, b):
    print("adding")
    return a + b
executor = submitit.AutoExecutor(folder="log", cluster="slurm")
executor.update_parameters(timeout_min=5, tasks_per_node=1, cpus_per_task=1, slurm_array_parallelism=2)
one, many = executor.submit(add, 3, 4), executor.map_array(add, [1, 2], [10, 20])
print(one.result(), [job.result() for job in many], "adding" in one.stdout())
"""


@pytest.mark.deep
def test_submitit_runs_functions(slurm: Slurm) -> None:
    pytest.importorskip("submitit", reason="submitit is not installed")
    ended = slurm(sys.executable, "-c", SUBMITIT, seconds=3 * SECONDS_MAX)
    assert ended.out == "7 [11, 22] True\n", ended.err
