"""The machine that the checks run on: its cores, what torch sees, and the driver's own list of GPUs."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LOOK_SECONDS_MAX = 90.0  # the first import of torch from a cold disk
ONE_THREAD = ("OMP_NUM_THREADS=1", "OPENBLAS_NUM_THREADS=1")  # of a process: a worker of a pipeline uses one core
TORCH = """
import json, torch
seen = torch.cuda.is_available()
print(json.dumps([torch.__version__, torch.cuda.get_device_name(0) if seen else ""]))
"""
QUERY = ("--query-gpu=uuid,name,memory.total,pci.bus_id,driver_version", "--format=csv,noheader,nounits")


@dataclass(frozen=True, slots=True)
class DriverGpu:
    """A GPU as nvidia-smi lists it."""

    uuid: str
    name: str
    memory_mib: int
    pci_bus_id: str
    driver: str


@dataclass(frozen=True, slots=True)
class Machine:
    """What the checks can use. `torch` is its version, empty if it is missing; `torch_gpu` the GPU that it sees.

    In a rehearsal, GPUs are those of a stand-in for NVML, and programs compute on the processor.
    """

    cores: int
    torch: str = ""
    torch_gpu: str = ""
    gpus: tuple[DriverGpu, ...] = ()
    rehearsal: bool = False

    @property
    def device(self) -> str:
        """The device of training programs: `cuda`, in a rehearsal `cpu`, or `none` without torch."""
        if not self.rehearsal:
            return "cuda"
        return "cpu" if self.torch else "none"

    def program(self, module: str, *arguments: object) -> list[str]:
        """Return the command that runs one of `benchmarks.gpu.programs`; it has to start in the checkout."""
        return ["env", *ONE_THREAD, sys.executable, "-m", f"benchmarks.gpu.programs.{module}", *map(str, arguments)]

    def train(self, model: str, log: Path, *arguments: object) -> list[str]:
        """Return the command that trains a model on this machine and logs its steps."""
        small = ["--small"] if self.rehearsal else []
        return self.program("train", model, "--device", self.device, "--log", log, *small, *arguments)


def look(*, rehearsal: bool) -> Machine:
    """Return what this machine has; torch is imported in a process of its own."""
    version, gpu = _torch()
    return Machine(len(os.sched_getaffinity(0)), version, gpu, () if rehearsal else driver_gpus(), rehearsal)


def missing_gpu(machine: Machine) -> str:
    """Return why training on a GPU is impossible here; empty if it is possible, or rehearsed."""
    if machine.rehearsal or machine.torch_gpu:
        return ""
    return "torch sees no GPU" if machine.torch else "torch is not installed"


def conditions() -> dict[str, str | int | float]:
    """Return what the results depend on beside the GPU."""
    return {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "cpus": os.cpu_count() or 0,
        "load": os.getloadavg()[0],
        "cgroup_controllers": _read(Path("/sys/fs/cgroup/cgroup.controllers")),
        "cgroup_directories": " ".join(sorted(path.name for path in Path("/sys/fs/cgroup").glob("*"))[:40]),
        "resctrl": _read(Path("/sys/fs/resctrl/schemata")),
    }


def driver_gpus() -> tuple[DriverGpu, ...]:
    """Return the GPUs that nvidia-smi lists; none if it is missing or fails."""
    if (command := shutil.which("nvidia-smi")) is None:
        return ()
    return parse_gpus(_output([command, *QUERY]))


def parse_gpus(text: str) -> tuple[DriverGpu, ...]:
    """Return the GPUs of nvidia-smi's table.

    >>> parse_gpus("GPU-1, NVIDIA H100, 81559, 00000000:04:00.0, 580.1\\n")[0].memory_mib
    81559
    """
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.count(",") == 4]
    return tuple(DriverGpu(row[0], row[1], int(row[2]), row[3], row[4]) for row in rows if row[2].isdigit())


def _torch() -> tuple[str, str]:
    try:
        version, gpu = json.loads(_output([sys.executable, "-c", TORCH]))
    except ValueError:
        return "", ""
    return version, gpu


def _output(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LOOK_SECONDS_MAX, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
