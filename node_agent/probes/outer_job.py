"""The job of another system that an agent runs in: what it was given, and until when.

Slurm and LSF describe a job in its environment; Kubernetes sets a variable in each container and names the control
group. A bound that is stated in several places is the smallest of them. Nothing is assumed to be given that is not
stated: an agent in a Slurm job without GPUs offers none, also where Slurm does not hide the devices.

The agent and its supervisors watch one process whose end is the end of the outer job on this node: Slurm's
`slurmstepd`, LSF's `res`, in a container its first process. Anywhere else that is the process that started the agent.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from cotenant.node_agent.supervisor.cgroups import parse_cpu_list, read_text
from cotenant.node_agent.supervisor.process_table import parent_of, start_ticks

if TYPE_CHECKING:  # settings are read without the modules of an agent
    from cotenant.node_agent.enforcement.cgroup_mounts import Mount

MEBIBYTE = 1 << 20
COUNT = re.compile(r"[0-9]{1,9}")
REPEATED = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,6})\))?")
DEVICE = re.compile(r"[0-9A-Za-z-]{1,100}")
REMAINING = re.compile(r"(?:([0-9]{1,5})-)?(?:([0-9]{1,5}):)?([0-9]{1,5}):([0-9]{1,2})")
CPU_IDS = re.compile(r"\bCPU_IDs=([0-9,-]{1,20000})")
GPU_INDICES = re.compile(r"\bgpu[^\s,()]{0,100}\(IDX:([0-9,-]{1,2000})\)")
STEP_PROCESSES = {"slurm": ("slurmstepd",), "lsf": ("res", "sbatchd")}
ANCESTORS_MAX = 64
QUERY_SECONDS_MAX = 10.0
KILL_WAIT = re.compile(r"^KillWait\s*=\s*([0-9]{1,6}) sec", re.MULTILINE)
KILL_WAIT_SECONDS_DEFAULT = 30.0  # of Slurm between SIGTERM and SIGKILL, and of Kubernetes
NO_DEVICES = frozenset({"", "NoDevFiles", "none", "void", "-1"})

Query = Callable[[Sequence[str]], str]
Gpu = TypeVar("Gpu")


@dataclass(frozen=True, slots=True)
class OuterJob:
    """A job of another system, as the agent's environment describes it.

    `id` is "SYSTEM/ID". None stands for a bound that is not stated. `cpus` are the CPUs that it was given if it is not
    confined to them; `gpus` are indices or UUIDs. `process` is the pid and the start time of the watched process.
    Between a SIGTERM and the kill of everything are `kill_wait_seconds`.
    """

    id: str
    evidence: str
    cpus_max: int | None = None
    cpus: tuple[int, ...] = ()
    gpus: tuple[str, ...] | None = None
    memory_bytes: int | None = None
    end_time: float | None = None
    process: tuple[int, int] | None = None
    kill_wait_seconds: float = KILL_WAIT_SECONDS_DEFAULT

    @property
    def name(self) -> str:
        """The job as users know it.

        >>> OuterJob("slurm/12", "").name, OuterJob("process/7", "").name
        ('Slurm job 12', 'process 7')
        """
        system, _, number = self.id.partition("/")
        return f"{ {'slurm': 'Slurm job', 'lsf': 'LSF job', 'kubernetes': 'pod'}.get(system, system) } {number}"

    def select_cpus(self, usable: Iterable[int]) -> tuple[int, ...]:
        """Return the usable CPUs that it was given: the named ones if there are that many, else the first.

        >>> OuterJob("slurm/1", "", cpus_max=2).select_cpus([4, 5, 6])
        (4, 5)
        >>> OuterJob("slurm/1", "", cpus_max=1, cpus=(1,)).select_cpus([4, 5, 6]), OuterJob("a/1", "").select_cpus([4])
        ((5,), (4,))
        """
        there = sorted(usable)
        if self.cpus_max is None or self.cpus_max >= len(there):
            return tuple(there)
        if len(self.cpus) == self.cpus_max and all(cpu < len(there) for cpu in self.cpus):
            return tuple(there[cpu] for cpu in self.cpus)  # Slurm numbers a node's CPUs from 0
        return tuple(there[: self.cpus_max])


@dataclass(frozen=True, slots=True)
class Nesting:
    """How an agent behaves in an outer job: it is drained at `drain_time` (None: never) and ends when it is done.

    It also ends when it had nothing to run for `idle_seconds`; 0: never.
    """

    job: OuterJob
    drain_time: float | None = None
    idle_seconds: float = 0.0

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Nesting:
        """Return what `asdict` took apart, perhaps by way of JSON.

        >>> from dataclasses import asdict
        >>> nesting = Nesting(OuterJob("slurm/1", "", gpus=("0",), process=(7, 8)), 9.0)
        >>> Nesting.from_fields(asdict(nesting)) == nesting
        True
        """
        job: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in fields["job"].items()
        }
        return cls(**{**fields, "job": OuterJob(**job)})


def select_gpus(found: Sequence[Gpu], uuids: Sequence[str], given: Collection[str] | None) -> list[Gpu]:
    """Return the GPUs that an outer job was given, by index or by the beginning of a UUID; all if it does not say.

    >>> select_gpus(["a", "b", "c"], ["GPU-1a", "GPU-2b", "GPU-3c"], ("0", "GPU-3"))
    ['a', 'c']
    """
    if given is None:
        return list(found)
    by_uuid = tuple(name for name in given if not name.isdigit())
    pairs = enumerate(zip(found, uuids, strict=True))
    return [gpu for index, (gpu, uuid) in pairs if str(index) in given or (by_uuid and uuid.startswith(by_uuid))]


def find_outer_job(environment: Mapping[str, str], mounts: Iterable[Mount] = (), pid: int = 0) -> OuterJob | None:
    """Return the outer job of a process, by default of this one; None if it runs in none.

    >>> job = find_outer_job({"SLURM_JOB_ID": "12", "SLURM_CPUS_ON_NODE": "4", "SLURM_JOB_GPUS": "2,3"})
    >>> job.id, job.cpus_max, job.gpus
    ('slurm/12', 4, ('2', '3'))
    """
    pid = pid or os.getpid()
    if COUNT.fullmatch(number := environment.get("SLURM_JOB_ID", "")):
        found = _slurm_job(number, environment)
    elif COUNT.fullmatch(number := environment.get("LSB_JOBID", "")):
        found = OuterJob(
            f"lsf/{number}", "LSB_JOBID is set", _smallest(_hosts_cpus(environment)), gpus=_gpus(environment) or ()
        )
    elif environment.get("KUBERNETES_SERVICE_HOST") and "kubepods" in read_text(f"/proc/{pid}/cgroup"):
        name = environment.get("HOSTNAME", "") or "unknown"
        why = "KUBERNETES_SERVICE_HOST is set, and the control group is a pod's"
        found = OuterJob(f"kubernetes/{name[:100]}", why, gpus=_gpus(environment))
    else:
        return None
    system = found.id.partition("/")[0]
    watched = _ancestor(pid, STEP_PROCESSES[system]) if system in STEP_PROCESSES else 1
    return replace(found, cpus_max=_smallest([found.cpus_max, *map(_quota, mounts)]), process=_identity(watched))


def given_by_process(environment: Mapping[str, str], mounts: Iterable[Mount] = ()) -> OuterJob:
    """Return the process that started this one as an outer job, for an agent that is nested because it was asked to."""
    parent = os.getppid()
    why = "asked for; no job of Slurm, LSF or Kubernetes was found, so the process that started the agent counts"
    return OuterJob(
        f"process/{parent}", why, _smallest(map(_quota, mounts)), gpus=_gpus(environment), process=_identity(parent)
    )


def ask_slurm(job: OuterJob, environment: Mapping[str, str], query: Query | None = None) -> OuterJob:
    """Return a Slurm job with what only Slurm's commands know, as far as they answer. Blocks.

    That is its end, and how long a SIGTERM is before the kill; on one node also its CPUs, and its GPUs if the
    environment names none.
    """
    query, number = query or _query, job.id.partition("/")[2]
    end, cpus, gpus = job.end_time, job.cpus, job.gpus
    if end is None:
        left = remaining_seconds(query(["squeue", "-h", "-j", number, "-o", "%L"]).strip())
        end = None if left is None else time.time() + left
    wait = KILL_WAIT.search(query(["scontrol", "show", "config"]))
    if environment.get("SLURM_JOB_NUM_NODES", "1") == "1":
        shown = query(["scontrol", "-d", "show", "job", number])
        named = CPU_IDS.findall(shown)
        cpus = tuple(sorted(parse_cpu_list(named[0]))) if len(named) == 1 else ()
        gpus = gpus or tuple(
            str(index) for part in GPU_INDICES.findall(shown) for index in sorted(parse_cpu_list(part))
        )
    kill_wait = float(wait[1]) if wait else job.kill_wait_seconds
    return replace(job, end_time=end, cpus=cpus, gpus=gpus, kill_wait_seconds=kill_wait)


def remaining_seconds(text: str) -> float | None:
    """Return a time that Slurm prints, in seconds; None if it is unlimited or unknown.

    >>> remaining_seconds("1-02:03:04"), remaining_seconds("3:04"), remaining_seconds("UNLIMITED")
    (93784.0, 184.0, None)
    """
    match = REMAINING.fullmatch(text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _query(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=QUERY_SECONDS_MAX, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode(errors="replace") if done.returncode == 0 else ""


def _slurm_job(number: str, environment: Mapping[str, str]) -> OuterJob:
    cpus = _smallest([_count(environment.get("SLURM_CPUS_ON_NODE")), _cpus_per_node(environment)])
    memory = _count(environment.get("SLURM_MEM_PER_NODE"))
    per_cpu = _count(environment.get("SLURM_MEM_PER_CPU"))
    if memory is None and per_cpu is not None and cpus is not None:
        memory = per_cpu * cpus
    end = _count(environment.get("SLURM_JOB_END_TIME"), 12)
    return OuterJob(
        id=f"slurm/{number}",
        evidence="SLURM_JOB_ID is set",
        cpus_max=cpus,
        gpus=_gpus(environment) or (),
        memory_bytes=memory * MEBIBYTE if memory else None,
        end_time=float(end) if end else None,
    )


def _cpus_per_node(environment: Mapping[str, str]) -> int | None:
    """Return this node's part of SLURM_JOB_CPUS_PER_NODE, such as "16(x2),8"."""
    matches = [REPEATED.fullmatch(part) for part in environment.get("SLURM_JOB_CPUS_PER_NODE", "").split(",")]
    node = _count(environment.get("SLURM_NODEID")) or 0
    for match in matches:
        if match is None:
            return None
        node -= int(match[2] or 1)
        if node < 0:
            return int(match[1])
    return None


def _hosts_cpus(environment: Mapping[str, str]) -> list[int | None]:
    """Return this host's slots in LSB_MCPU_HOSTS, such as "hosta 4 hostb 2", as the only element."""
    words, here = environment.get("LSB_MCPU_HOSTS", "").split(), os.uname().nodename.partition(".")[0]
    pairs = zip(words[::2], words[1::2], strict=False)
    return [_count(count) for host, count in pairs if host.partition(".")[0] == here]


def _gpus(environment: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the GPUs that the environment names; None if it says nothing about them."""
    for variable in ("CUDA_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS"):
        if (text := environment.get(variable)) is not None:
            names = [name.strip() for name in text.split(",")]
            return tuple(name for name in names if name not in NO_DEVICES and DEVICE.fullmatch(name))
    return None


def _count(text: str | None, digits: int = 9) -> int | None:
    return int(text) if text and text.isascii() and text.isdigit() and len(text) <= digits else None


def _smallest(bounds: Iterable[int | None]) -> int | None:
    return min((bound for bound in bounds if bound is not None), default=None)


def _quota(mount: Mount) -> int | None:
    """Return the whole cores of the smallest CPU-time quota of the agent's group and those above it."""
    if mount.version == 1 and "cpu" not in mount.controllers:
        return None
    found = []
    for path in chain([Path(mount.own)], Path(mount.own).parents):
        if mount.version == 2:
            quota, _, period = read_text(str(path / "cpu.max")).partition(" ")
        else:
            quota, period = (read_text(str(path / f"cpu.cfs_{what}_us")) for what in ("quota", "period"))
        if quota.isdigit() and period.isdigit() and int(period):
            found.append(max(1, int(quota) // int(period)))
        if str(path) == mount.root:
            break
    return _smallest(found)


def _ancestor(pid: int, names: Sequence[str]) -> int:
    """Return the nearest ancestor with one of some names; 0 if there is none."""
    for _ in range(ANCESTORS_MAX):
        pid = parent_of(pid)
        if pid <= 1:
            break
        if read_text(f"/proc/{pid}/comm") in names:
            return pid
    return 0


def _identity(pid: int) -> tuple[int, int] | None:
    try:
        return (pid, start_ticks(pid)) if pid > 0 else None
    except (OSError, ValueError):
        return None
