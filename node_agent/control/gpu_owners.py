"""Whose the processes are that NVML finds on GPUs: an attempt's that was given the GPU, or a stranger's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from cotenant.core.model.health import GpuProcess
from cotenant.node_agent.control.attempt_manager import Attempt
from cotenant.node_agent.runtime.attempt_status import AttemptKey
from cotenant.node_agent.supervisor.process_table import parent_of

FIRST_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO: that of the machine itself
GUESTS = frozenset({"nvidia-cuda-mps-server", "nvidia-cuda-mps-control", "nvidia-persistenced"})
ANCESTORS_MAX = 64


def sees_all_processes(proc: Path = Path("/proc")) -> bool:
    """Whether the pids that NVML tells mean the same here: the agent is not in a container of its own."""
    try:
        return os.readlink(proc / "self/ns/pid") == FIRST_PID_NAMESPACE
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class GpuOwners:
    """Knows which attempts are here and what they were given."""

    attempts: Callable[[], Mapping[AttemptKey, Attempt]]

    def tell(
        self, gpu_uuid: str, processes: Iterable[tuple[int, int]], without: AttemptKey | None = None
    ) -> tuple[GpuProcess, ...]:
        """Say whose the processes on a GPU are, given as pids and the GPU memory that they hold, in bytes.

        An attempt that has ended, or is given as `without`, has no processes any more: they are strangers.
        """
        live = {key: attempt for key, attempt in self.attempts().items() if not attempt.status.ended and key != without}
        told = (self._tell(gpu_uuid, pid, memory_bytes, live) for pid, memory_bytes in processes)
        return tuple(process for process in told if process.name not in GUESTS)

    def _tell(self, gpu_uuid: str, pid: int, memory_bytes: int, live: Mapping[AttemptKey, Attempt]) -> GpuProcess:
        try:
            process = psutil.Process(pid)
            name = process.name()
        except psutil.Error:
            return GpuProcess(pid, memory_bytes)
        try:
            user = process.username()
        except (psutil.Error, KeyError):
            user = ""
        owner = owner_of(pid, live)
        if owner is None:
            return GpuProcess(pid, memory_bytes, name, user)
        if gpu_uuid in gpus_of(live[owner]):
            return GpuProcess(pid, memory_bytes, name, user, ours=True)
        return GpuProcess(pid, memory_bytes, f"{name} in {owner}, which was not given it,", user)


def gpus_of(attempt: Attempt) -> frozenset[str]:
    """UUIDs of the GPUs that an attempt was given here."""
    return frozenset(share.uuid for task in attempt.assignment.allocation.tasks for share in task.gpus)


def owner_of(pid: int, live: Mapping[AttemptKey, Attempt]) -> AttemptKey | None:
    """The attempt whose process this is: it descends from its supervisor, or has its id in the environment."""
    supervisors = {attempt.status.pid: key for key, attempt in live.items() if attempt.status.pid}
    ancestor = pid
    for _ in range(ANCESTORS_MAX):
        if ancestor in supervisors:
            return supervisors[ancestor]
        if ancestor <= 1:
            break
        ancestor = parent_of(ancestor)
    try:  # it may have lost its parents
        environment = dict(
            line.partition(b"=")[::2] for line in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if line
        )
        key = AttemptKey(environment[b"COTENANT_JOB_ID"].decode(), int(environment[b"COTENANT_ATTEMPT"]))
    except (OSError, KeyError, ValueError):
        return None
    return key if key in live else None
