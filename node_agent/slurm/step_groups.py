"""The running steps of a Slurm node by their control groups (version 1), and how their processes are moved.

Slurm makes a cpuset for each job and below it one for each step, and writes the job's again whenever a step begins.
That write fails, and the step with it, while a group below has more cores than Slurm wants to give (tried: "Device or
resource busy"). So Slurm's own groups are never written. Processes of a step that is to have other cores are moved to a
group of ours, `cotenant-slurm/NODE/uid_0:job_17:step_0`, whose name says where they belong. To put everything back is
to move them back; this needs no record, so whoever comes next can do it. Slurm follows processes in other hierarchies
(freezer, cpuacct, memory), where nothing is moved; slurmstepd itself always stays.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cotenant.node_agent.supervisor.cgroups import Group, GroupError, parse_cpu_list, read_text, write_text

OURS = "cotenant-slurm"
SEPARATOR = ":"
STEPD = "slurmstepd"
ROUNDS_MAX = 50  # of moves, while a step forks
THREADS_MAX = 4096  # of a job, that are looked at
ENVIRONMENT_BYTES_MAX = 256 * 1024
STOPPED = "Tt"


@dataclass(frozen=True, slots=True)
class Step:
    """A control group of a step, by its path below Slurm's group of the node: `uid_0/job_17/step_0`."""

    path: str
    cores: tuple[int, ...]
    inode: int

    @property
    def job(self) -> str:
        """The number of its job."""
        return next(part.removeprefix("job_") for part in self.path.split("/") if part.startswith("job_"))


class StepGroups:
    """The steps of a node.

    Args:
        root: Where the cpuset hierarchy is mounted.
        node: The name of the node in slurm.conf.
    """

    def __init__(self, root: Path, node: str) -> None:
        several = root / f"slurm_{node}"  # if slurmd was built for several on one machine
        self._slurms = several if several.is_dir() else root / "slurm"
        self._freezer = root.parent / "freezer" / self._slurms.name
        self._parent = Group(1, {"cpuset": str(root)}, ("cpuset",)).child(OURS)
        self._ours = self._parent.child(node)

    @property
    def directory(self) -> Path:
        """Where Slurm's groups of the node are; it need not exist yet."""
        return self._slurms

    def create(self) -> Path:
        """Create our group of the node; return its directory. Raises `GroupError`."""
        self._parent.create()
        self._ours.create()
        return Path(self._ours.directories["cpuset"])

    def steps(self) -> list[Step]:
        """Return the groups of steps that Slurm has made, sorted."""
        found = []
        for directory in sorted(self._slurms.glob("uid_*/job_*/step_*")):
            for path in (directory, *sorted(directory.glob("task_*"))):
                with suppress(OSError):
                    cores = tuple(parse_cpu_list(read_text(str(path / "cpuset.cpus"))))
                    found.append(Step(str(path.relative_to(self._slurms)), cores, path.stat().st_ino))
        return [step for step in found if step.cores]

    def moved(self) -> list[str]:
        """Return the paths of the steps that have a group of ours."""
        place = Path(self._ours.directories["cpuset"])
        with suppress(OSError):
            return sorted(one.name.replace(SEPARATOR, "/") for one in place.iterdir() if one.is_dir())
        return []

    def cores_of(self, path: str) -> tuple[int, ...]:
        """Return the cores of our group of a step; none if it has none."""
        return tuple(self._group(path).cpus())

    def pids(self, path: str) -> list[int]:
        """Return the processes of a step, without slurmstepd."""
        pids = [*_pids(self._slurms / path), *_pids(self._directory(path))]
        return [pid for pid in pids if read_text(f"/proc/{pid}/comm") != STEPD]

    def suspended(self, path: str) -> bool:
        """Return whether Slurm has frozen a step, which it does two seconds after it stopped its processes."""
        return read_text(str(self._freezer / path / "freezer.state")) in ("FROZEN", "FREEZING")

    def give(self, step: Step, cores: Iterable[int]) -> None:
        """Move a step's processes to a group of ours with some cores, or change the cores of that group.

        Processes that began since the last call are moved too. Raises `GroupError`.
        """
        wanted, group = tuple(sorted(cores)), self._group(step.path)
        bound = () if set(wanted) <= set(step.cores) else wanted  # a cpuset alone does not widen Slurm's binding
        if not group.exists():
            self.create()
            group.create()
        if tuple(group.cpus()) != wanted:
            group.set_cpus(wanted)
            _bind(_pids(self._directory(step.path)), bound)
        _move(self._slurms / step.path, self._directory(step.path), bound)

    def put_back(self, path: str) -> bool:
        """Move a step's processes back to Slurm's group; return whether our group is gone.

        If Slurm's group is gone, the nearest one above takes what is left.
        """
        target = self._slurms / path
        while not (target / "cgroup.procs").exists() and target != self._slurms.parent:
            target = target.parent
        _move(self._directory(path), target, ())
        return self._group(path).remove(timeout_seconds=0.2)

    def put_all_back(self) -> list[str]:
        """Put every step back; return those that could not be."""
        left = []
        for path in self.moved():
            try:
                gone = self.put_back(path)
            except GroupError:
                gone = False
            if not gone:
                left.append(path)
        return left

    def remove(self) -> None:
        """Remove our groups of the node, if they are empty."""
        for group in (self._ours, self._parent):
            with suppress(OSError):
                os.rmdir(group.directories["cpuset"])

    def _group(self, path: str) -> Group:
        return self._ours.child(path.replace("/", SEPARATOR))

    def _directory(self, path: str) -> Path:
        return Path(self._group(path).directories["cpuset"])


def _pids(directory: Path) -> list[int]:
    return [int(line) for line in read_text(str(directory / "cgroup.procs")).split() if line != "0"]


def _move(source: Path, target: Path, cores: tuple[int, ...]) -> None:
    """Move all processes but slurmstepd, again while they fork; bind their threads to cores if any are named."""
    for _ in range(ROUNDS_MAX):
        pids = [pid for pid in _pids(source) if read_text(f"/proc/{pid}/comm") != STEPD]
        if not pids:
            return
        for pid in pids:
            with suppress(GroupError):  # it has ended
                write_text(str(target / "cgroup.procs"), str(pid))
        _bind(pids, cores)


def _bind(pids: Iterable[int], cores: tuple[int, ...]) -> None:
    """Allow all threads of processes these cores; Slurm's task/affinity has bound them to fewer."""
    for pid in pids if cores else ():
        for thread in _threads(pid):
            with suppress(OSError):
                os.sched_setaffinity(thread, cores)


def _threads(pid: int) -> Iterator[int]:
    with suppress(OSError):
        yield from map(int, os.listdir(f"/proc/{pid}/task"))


# What processes do ---------------------------------------------------------------------------------------------


def why_fixed(pids: Iterable[int], *expected: tuple[int, ...]) -> str:
    """Return why processes must keep their cores, or "": they are stopped, or have bound their threads to some.

    `expected` are the cores of the groups that they may be in.
    """
    seen, running = 0, False
    for pid in pids:
        state = read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()[:1]
        running |= bool(state) and state[0] not in STOPPED
        for thread in _threads(pid):
            seen += 1
            if seen > THREADS_MAX:
                return f"it has more than {THREADS_MAX:,} threads"
            with suppress(OSError):
                if tuple(sorted(os.sched_getaffinity(thread))) not in expected:
                    return "it binds its threads to cores of its own"
    return "" if running else "it is suspended" if seen else "it has no processes yet"


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the CPU time of processes and of their children that have ended."""
    ticks = 0
    for pid in pids:
        words = read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
        ticks += sum(map(int, words[11:15])) if len(words) > 15 else 0
    return ticks / os.sysconf("SC_CLK_TCK")


def environment(pid: int) -> dict[str, str]:
    """Return the environment with which a process began; empty if it has ended."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return variables_of(file.read(ENVIRONMENT_BYTES_MAX))
    except OSError:
        return {}


def variables_of(data: bytes) -> dict[str, str]:
    """Return the variables in a process's environment, which its user may have filled with anything.

    >>> variables_of(bytes("A=1|B|C=x=y".replace("|", chr(0)), "ascii"))
    {'A': '1', 'C': 'x=y'}
    """
    pairs = (pair.partition("=") for pair in data.decode(errors="replace").split("\0"))
    return {name: value for name, separator, value in pairs if separator}
