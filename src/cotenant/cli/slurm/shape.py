"""The nodes, tasks and resources of a job, from Slurm's options.

A job has one replica on each of its nodes, with everything that its tasks there need. So a batch script runs once, and
`srun` starts the tasks within the replicas. Tasks without `--nodes` are on one node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

from cotenant.cli.slurm import sizes

T = TypeVar("T")


class Shape(NamedTuple):
    """What a job asks for. `cores` and `memory_bytes` are of each node; None leaves the cores to Cotenant."""

    nodes: int
    tasks: int
    tasks_per_node: int
    cores: int | None
    memory_bytes: int
    gpus: sizes.Gpus
    cpus_per_task: int | None = None
    gpus_per_task: int = 0


class Values:
    """Reads the values of options; `wrong` collects an error for each that is invalid."""

    def __init__(self, given: Mapping[str, str], wrong: list[str]) -> None:
        self.given, self.wrong = given, wrong

    def __contains__(self, name: str) -> bool:
        return name in self.given

    def read(self, name: str, reader: Callable[[str], T], absent: T, message: str = "") -> T:
        """Return the value of an option, or `absent` if it is not given or invalid."""
        if name not in self.given:
            return absent
        try:
            return reader(self.given[name])
        except ValueError:
            self.wrong.append((message or "Invalid --{name} specification").format(name=name, value=self.given[name]))
            return absent

    def count(self, name: str, absent: int = 0) -> int:
        """Return a number above zero."""
        return self.read(name, sizes.read_count, absent, 'Invalid numeric value "{value}" for --{name}.')

    def size(self, name: str) -> int:
        """Return an amount of memory."""
        return self.read(name, sizes.read_bytes, 0)


def shape_of(values: Values, warn: Callable[[str], None]) -> Shape:
    """Return the shape of a job."""
    nodes, tasks, per_node = _tasks(values, warn)
    cpus_per_task = values.count("cpus-per-task") or None
    gpus = _gpus(values, nodes, per_node, warn)
    if gpus.number and not tasks and (per_gpu := values.count("ntasks-per-gpu")):
        per_node = gpus.number * per_gpu
    tasks = tasks or nodes * per_node
    cores: int | None = per_node * (cpus_per_task or 1)
    if cpus_per_task is None and gpus.number:
        cores = gpus.number * values.count("cpus-per-gpu") or None
    memory = (
        values.size("mem")
        or values.size("mem-per-cpu") * (cores or per_node)
        or values.size("mem-per-gpu") * gpus.number
    )
    return Shape(nodes, tasks, per_node, cores, memory, gpus, cpus_per_task, values.count("gpus-per-task"))


def _tasks(values: Values, warn: Callable[[str], None]) -> tuple[int, int, int]:
    """Return the nodes, the tasks or 0 if they are not given, and the most tasks on a node."""
    nodes = values.read("nodes", lambda text: sizes.read_count(text.partition("-")[0]), 0)
    tasks, per_node = values.count("ntasks"), values.count("ntasks-per-node")
    if not nodes:
        nodes = -(-tasks // per_node) if tasks and per_node else 1
    if tasks and tasks < nodes:
        warn(f"can't run {tasks} processes on {nodes} nodes, setting nnodes to {tasks}")
        nodes = tasks
    if tasks and per_node * nodes < tasks:
        if per_node:
            warn(f"{tasks} tasks do not fit {nodes} nodes with {per_node} each; --ntasks-per-node is ignored")
        per_node = -(-tasks // nodes)
    return nodes, tasks, per_node or 1


def _gpus(values: Values, nodes: int, tasks_per_node: int, warn: Callable[[str], None]) -> sizes.Gpus:
    """Return the GPUs of each node."""
    none = sizes.Gpus(0)
    of_node = values.read("gpus-per-node", sizes.read_gpus, none)
    no_gres: tuple[sizes.Gpus, list[str]] = (none, [])
    of_gres, others = values.read("gres", sizes.read_gres, no_gres)
    if others:
        warn(f"--gres={','.join(others)}: only GPUs are known here; ignored")
    per_task = values.read("gpus-per-task", sizes.read_gpus, none)
    total = values.read("gpus", sizes.read_gpus, none)
    if of_node.number or of_gres.number:
        return of_node if of_node.number else of_gres
    if per_task.number:
        return sizes.Gpus(per_task.number * tasks_per_node, per_task.gpu_type)
    if total.number % nodes:
        values.wrong.append(f"--gpus={values.given['gpus']}: {total.number} GPUs cannot be divided among {nodes} nodes")
    return sizes.Gpus(total.number // nodes, total.gpu_type)
