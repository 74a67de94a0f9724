"""Attributes processes that NVML finds on GPUs to the attempts that were allocated those GPUs, or to none."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from cotenant.core.model.health import GpuProcess
from cotenant.node_agent.control.attempt import Attempt, Attempts
from cotenant.node_agent.runtime.attempt_status import AttemptKey
from cotenant.node_agent.supervisor.process_table import parent_of

FIRST_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO: the machine's initial namespace
DRIVER_PROCESSES = frozenset({"nvidia-cuda-mps-server", "nvidia-cuda-mps-control", "nvidia-persistenced"})
ANCESTORS_MAX = 64


def sees_all_processes(proc: Path = Path("/proc")) -> bool:
    """Return whether NVML's pids are valid here: the agent does not run in a pid namespace of its own."""
    try:
        return os.readlink(proc / "self/ns/pid") == FIRST_PID_NAMESPACE
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class GpuOwners:
    """Attributes processes to attempts by what the attempts were allocated."""

    attempts: Attempts

    def describe(
        self, gpu_uuid: str, processes: Iterable[tuple[int, int]], without: AttemptKey | None = None
    ) -> tuple[GpuProcess, ...]:
        """Return the processes on a GPU with their owners, given their pids and the GPU memory that they use in bytes.

        An attempt that has ended, or is given as `without`, owns no processes: they count as foreign.
        """
        live = {key: attempt for key, attempt in self.attempts.items() if not attempt.status.ended and key != without}
        described = (self._describe(gpu_uuid, pid, memory_bytes, live) for pid, memory_bytes in processes)
        return tuple(process for process in described if process.name not in DRIVER_PROCESSES)

    def _describe(self, gpu_uuid: str, pid: int, memory_bytes: int, live: Mapping[AttemptKey, Attempt]) -> GpuProcess:
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
        return GpuProcess(pid, memory_bytes, f"{name} in {owner}, which was not allocated it,", user)


def gpus_of(attempt: Attempt) -> frozenset[str]:
    """Return the UUIDs of the GPUs that an attempt was allocated on this node."""
    return frozenset(share.uuid for task in attempt.assignment.allocation.tasks for share in task.gpus)


def owner_of(pid: int, live: Mapping[AttemptKey, Attempt]) -> AttemptKey | None:
    """Return the attempt that owns a process: its supervisor is an ancestor, or its id is in the environment."""
    supervisors = {attempt.status.pid: key for key, attempt in live.items() if attempt.status.pid}
    ancestor = pid
    for _ in range(ANCESTORS_MAX):
        if ancestor in supervisors:
            return supervisors[ancestor]
        if ancestor <= 1:
            break
        ancestor = parent_of(ancestor)
    try:  # it may have been reparented
        environment = dict(
            line.partition(b"=")[::2] for line in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if line
        )
        key = AttemptKey(environment[b"COTENANT_JOB_ID"].decode(), int(environment[b"COTENANT_ATTEMPT"]))
    except (OSError, KeyError, ValueError):
        return None
    return key if key in live else None
