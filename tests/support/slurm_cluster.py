"""A real Slurm for tests: slurmctld, slurmd with declared GPUs, and munge, all in a folder, on free loopback ports.

Each part is a process of its own that can be killed and started again. Needs root and Debian's packages slurmctld,
slurmd, slurm-client and munge; without them a test skips with what `missing_for_slurm` says.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.etcd_server import free_ports

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol")
START_SECONDS_MAX = 60.0
POLL_SECONDS = 0.05
CGROUP_V1 = Path("/sys/fs/cgroup/cpuset/cgroup.procs")
CONTROLLER, MUNGE = "slurmctld", "munged"

CONFIG = """\
ClusterName=cotenant
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={run}/run/munge.socket
StateSaveLocation={run}/state
SlurmdSpoolDir={run}/spool/%n
SlurmctldPidFile={run}/run/slurmctld.pid
SlurmdPidFile={run}/run/slurmd-%n.pid
SlurmctldLogFile={run}/log/slurmctld.log
SlurmdLogFile={run}/log/slurmd-%n.log
ProctrackType=proctrack/{proctrack}
TaskPlugin={task}
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=5
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_min_interval=0,bf_interval=5,batch_sched_delay=0
PriorityType=priority/multifactor
PriorityWeightAge=1
PriorityFlags=NO_FAIR_TREE
GresTypes=gpu
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SlurmctldDebug=info
SlurmdDebug=info
MinJobAge=300
MaxArraySize=10001
NodeName=n[1-{nodes}] NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports} {node} Gres=gpu:a100:{gpus} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
{more}
"""
DECLARED_NODE = "CPUs=16 Sockets=2 CoresPerSocket=8 ThreadsPerCore=1 RealMemory=65536"
CGROUP_CONFIG = """\
CgroupPlugin=cgroup/v1
CgroupMountpoint=/sys/fs/cgroup
ConstrainCores=yes
ConstrainRAMSpace=no
ConstrainDevices=no
"""


def missing_for_slurm() -> str:
    """Return why a real Slurm cannot be started here, or nothing if it can."""
    if os.geteuid() != 0:
        return "Slurm's daemons need root"
    missing = [program for program in PROGRAMS if not shutil.which(program)]
    return f"Slurm is not installed ({', '.join(missing)}): make test-slurm installs it" if missing else ""


class SlurmCluster:
    """A Slurm of a test's own.

    Args:
        directory: An empty folder. Munge wants a path of less than 100 characters, without parts that others may write.
        nodes: Number of nodes n1, n2, …, each a slurmd on this machine.
        gpus: Declared GPUs of type a100 on each node: files that are no devices.
        cgroups: Whether steps are confined by control groups (v1) to real cores; else nodes declare 16 cores, and
            processes are tracked by parentage.
        more: Lines for slurm.conf.
        lua: The script job_submit.lua, with @RUN@ for the folder.
    """

    def __init__(
        self,
        directory: Path,
        nodes: int = 2,
        *,
        gpus: int = 4,
        cgroups: bool = False,
        more: Sequence[str] = (),
        lua: str = "",
    ) -> None:
        self.directory = directory
        self.nodes = [f"n{number}" for number in range(1, nodes + 1)]
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        controller_port, *ports = free_ports(1 + nodes)
        for folder in ("run", "state", "spool", "log", "dev"):
            (directory / folder).mkdir(parents=True)
        directory.chmod(0o755)
        for number in range(gpus):
            (directory / "dev" / f"nvidia{number}").touch()
        key = directory / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        cores = os.sched_getaffinity(0)
        config = CONFIG.format(
            controller_port=controller_port,
            run=directory,
            proctrack="cgroup" if cgroups else "linuxproc",
            task="task/cgroup,task/affinity" if cgroups else "task/none",
            nodes=nodes,
            ports=",".join(map(str, ports)),
            node=f"CPUs={len(cores)} CoresPerSocket={len(cores)} RealMemory=8000" if cgroups else DECLARED_NODE,
            gpus=gpus,
            more="\n".join((*more, *(("JobSubmitPlugins=lua",) if lua else ()))),
        )
        (directory / "slurm.conf").write_text(config)
        (directory / "cgroup.conf").write_text(CGROUP_CONFIG)
        if lua:
            (directory / "job_submit.lua").write_text(lua.replace("@RUN@", str(directory)))
        files = f"File={directory}/dev/nvidia[0-{gpus - 1}]"
        (directory / "gres.conf").write_text(
            f"AutoDetect=off\nNodeName=n[1-{nodes}] Name=gpu Type=a100 {files}\n" if gpus else ""
        )

    @property
    def environment(self) -> dict[str, str]:
        """Return an environment in which Slurm's commands talk to this cluster."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
        return kept | {"SLURM_CONF": str(self.directory / "slurm.conf")}

    def start(self) -> None:
        """Start all parts; return when every node takes jobs. Raises `RuntimeError` with the logs if they do not."""
        self.start_part(MUNGE)
        self._wait(lambda: self.directory.joinpath("run", "munge.socket").exists(), "munge has no socket")
        for part in (CONTROLLER, *self.nodes):
            self.start_part(part)
        self.wait_for_nodes()

    def start_part(self, part: str) -> None:
        """Start `slurmctld`, `munged` or a node's slurmd, which does not run."""
        run = self.directory
        command = {
            MUNGE: [
                *("munged", "-F", "--force", f"--key-file={run}/munge.key", f"--socket={run}/run/munge.socket"),
                *(f"--pid-file={run}/run/munged.pid", f"--seed-file={run}/run/munged.seed"),
                f"--log-file={run}/log/munged.log",
            ],
            CONTROLLER: ["slurmctld", "-D"],
        }.get(part, ["slurmd", "-D", "-N", part])
        with open(run / "log" / f"{part}.out", "ab") as output:
            self._processes[part] = subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    def kill(self, part: str, signal_number: int = signal.SIGKILL) -> None:
        """Kill a part and wait for its end; what it started lives on."""
        process = self._processes.pop(part)
        process.send_signal(signal_number)
        process.wait()

    def call(self, *command: str, check: bool = True, text: str | None = None) -> str:
        """Return the output of one of Slurm's commands. Raises `CalledProcessError` if it fails, unless told not to."""
        done = subprocess.run(
            command, env=self.environment, cwd=self.directory, input=text, capture_output=True, text=True, check=False
        )
        if check and done.returncode:
            raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
        return done.stdout

    def submit(self, script: str, *options: str) -> str:
        """Submit a batch script, without its first line; return the job's id."""
        text = f"#!/bin/bash\n{script}\n"
        return self.call("sbatch", "--parsable", *options, text=text).strip().partition(";")[0]

    def wait_for_nodes(self) -> None:
        """Wait until every node takes jobs."""

        def ready() -> bool:
            return self.call("sinfo", "-h", "-N", "-o", "%T", check=False).split() == ["idle"] * len(self.nodes)

        self._wait(ready, "not all nodes are idle")

    def wait_for_state(self, job: str, *states: str) -> str:
        """Wait until a job has one of some states (`RUNNING`); return it."""
        found = ""

        def reached() -> bool:
            nonlocal found
            found = self.call("squeue", "-h", "-t", "all", "-j", job, "-o", "%T", check=False).strip()
            return found in states

        self._wait(reached, f"job {job} is not {' or '.join(states)}")
        return found

    def stop(self) -> None:
        """Cancel all jobs, and end all parts and what is left of them."""
        if CONTROLLER in self._processes:
            self.call("scancel", "--full", "--signal=KILL", "--user=root", check=False)
            self.call("scancel", "--user=root", check=False)
            with suppress(RuntimeError):
                self._wait(lambda: not self.call("squeue", "-h", check=False).strip(), "jobs are left", 10)
        for part in (*self.nodes, CONTROLLER, MUNGE):
            if part in self._processes:
                self.kill(part, signal.SIGTERM if part == MUNGE else signal.SIGKILL)

    def _wait(self, condition: Callable[[], bool], what: str, seconds: float = START_SECONDS_MAX) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{what} after {seconds:.0f} s\n{self._logs()}")
            time.sleep(POLL_SECONDS)

    def _logs(self) -> str:
        logs = sorted((self.directory / "log").iterdir())
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-2000:]}" for path in logs)


@contextmanager
def slurm_cluster(
    nodes: int = 2, *, gpus: int = 4, cgroups: bool = False, more: Sequence[str] = (), lua: str = ""
) -> Iterator[SlurmCluster]:
    """Start a Slurm in a new folder with a short path, and end it."""
    with _alone(cgroups), tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as folder:
        cluster = SlurmCluster(Path(folder), nodes, gpus=gpus, cgroups=cgroups, more=more, lua=lua)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


@contextmanager
def _alone(cgroups: bool) -> Iterator[None]:
    """Hold a lock while a cluster uses control groups: two clusters with the same node names would share theirs."""
    if not cgroups:
        yield
        return
    with open(Path(tempfile.gettempdir()) / "cotenant-test-slurm.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        for root in Path("/sys/fs/cgroup").glob("*/slurm_n*"):
            for group, _, _ in os.walk(root, topdown=False):
                with suppress(OSError):
                    os.rmdir(group)
