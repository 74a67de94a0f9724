"""One small interface over the two kinds of control groups.

A `Group` is a directory in each hierarchy that we use: in version 2 there is one hierarchy, in version 1 one per
controller. The supervisor loads this file beside it without the package around it, so it imports next to nothing.

No CPU quota is ever set: processes that have their cores to themselves must not be throttled on them.
"""

from __future__ import annotations

import errno
import os
import signal
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

UNIFIED = "unified"
CONTROLLERS = ("cpuset", "memory", "cpuacct", "pids")
UNLIMITED_BYTES = 1 << 60  # version 1 writes "no limit" as the largest page-aligned number; nothing real is as large


class GroupError(Exception):
    """The kernel did not take what was written; the text says what and why."""


def read_text(path: str) -> str:
    """Read a small kernel file, stripped; empty where it is absent or refuses."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def write_text(path: str, text: str) -> None:
    """Write one value in a single call, as the kernel wants it. Raises `GroupError`."""
    try:
        descriptor = os.open(path, os.O_WRONLY)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        raise GroupError(f"cannot write {text!r} to {path}: {error.strerror}") from error


def parse_cpu_list(text: str) -> list[int]:
    """Read the kernel's list format, leaving out what is not a number.

    >>> parse_cpu_list("0-2,5,8-9")
    [0, 1, 2, 5, 8, 9]
    >>> parse_cpu_list("")
    []
    """
    numbers: set[int] = set()
    for part in text.replace("\n", "").split(","):
        first, dash, last = part.strip().partition("-")
        if first.isdigit() and (not dash or last.isdigit()):
            numbers.update(range(int(first), int(last if dash else first) + 1))
    return sorted(numbers)


def format_cpu_list(cpus: Iterable[int]) -> str:
    """Write the kernel's list format, one number at a time.

    >>> format_cpu_list([5, 1, 0])
    '0,1,5'
    """
    return ",".join(str(cpu) for cpu in sorted(set(cpus)))


def number_in(text: str, key: str) -> int:
    """Find `key` in a file of "key number" lines; 0 where it is not.

    >>> number_in("low 0\\noom_kill 3", "oom_kill")
    3
    """
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == key and value.strip().isdigit():
            return int(value)
    return 0


class Group:
    """A control group: its directories by controller, or the one directory of version 2 under `UNIFIED`.

    Controllers that could not be had are simply absent, and what they would enforce is not enforced; whoever makes
    the first group says so once.
    """

    __slots__ = ("directories", "enforces", "version")

    def __init__(self, version: int, directories: dict[str, str], enforces: Iterable[str]) -> None:
        self.version = version
        self.directories = directories
        self.enforces = tuple(enforces)

    @classmethod
    def from_json(cls, written: dict[str, object]) -> Group:
        """Read what `to_json` wrote."""
        version, directories, enforces = written["version"], written["directories"], written["enforces"]
        assert isinstance(version, int)
        assert isinstance(directories, dict)
        assert isinstance(enforces, list)
        return cls(version, directories, enforces)

    def to_json(self) -> dict[str, object]:
        """Write the group so that the supervisor can be told of it."""
        return {"version": self.version, "directories": self.directories, "enforces": list(self.enforces)}

    def child(self, name: str) -> Group:
        """Name a group below this one; it is not made yet."""
        below = {key: os.path.join(path, name) for key, path in self.directories.items()}
        return Group(self.version, below, self.enforces)

    def paths(self) -> list[str]:
        """All directories, each once: version 1 may mount two controllers together."""
        return sorted(set(self.directories.values()))

    def _file(self, controller: str, name: str) -> str:
        directory = self.directories.get(UNIFIED) or self.directories.get(controller, "")
        return os.path.join(directory, name) if directory else ""

    def create(self) -> None:
        """Make the directories, and pass the parent's CPUs and memory nodes on where the kernel does not."""
        for path in self.paths():
            try:
                os.mkdir(path)
            except FileExistsError:
                pass
            except OSError as error:
                raise GroupError(f"cannot make the control group {path}: {error.strerror}") from error
        if self.version == 1 and "cpuset" in self.directories:
            above = os.path.dirname(self.directories["cpuset"])
            for name in ("cpuset.cpus", "cpuset.mems"):
                write_text(self._file("cpuset", name), read_text(os.path.join(above, name)))

    def open_to_children(self) -> None:
        """Let children have the controllers; in version 1 they always do."""
        if self.version == 2:
            wanted = " ".join(f"+{controller}" for controller in self.enforces)
            write_text(self._file(UNIFIED, "cgroup.subtree_control"), wanted)

    def set_cpus(self, cpus: Iterable[int], memory_nodes: Iterable[int] = ()) -> None:
        """Bind to CPUs and, unless empty, memory nodes; read back what the kernel made of it.

        What runs in it always has the memory nearest to its CPUs: nodes are gained before the CPUs change, and lost
        after. Pages on nodes that are lost move along.
        """
        if "cpuset" not in self.enforces:
            return
        wanted = set(memory_nodes)
        if wanted:
            self._bind("cpuset.mems", wanted | set(self.memory_nodes()))
        self._bind("cpuset.cpus", set(cpus))
        if wanted:
            self._bind("cpuset.mems", wanted)

    def _bind(self, name: str, wanted: set[int]) -> None:
        path = self._file("cpuset", name)
        if not wanted or (parse_cpu_list(read_text(path)) == self._bound(name) == sorted(wanted)):
            return
        migrate = self._file("cpuset", "cpuset.memory_migrate")
        if name == "cpuset.mems" and os.path.exists(migrate):  # version 2 always moves pages
            write_text(migrate, "1")
        write_text(path, format_cpu_list(wanted))
        if self._bound(name) != sorted(wanted):
            given = format_cpu_list(self._bound(name))
            raise GroupError(f"asked for {format_cpu_list(wanted)} in {path}, the kernel gives {given!r}")

    def cpus(self) -> list[int]:
        """The CPUs that the kernel gives it; none where cpusets are not enforced."""
        return self._bound("cpuset.cpus")

    def memory_nodes(self) -> list[int]:
        """The memory nodes that the kernel gives it; none where cpusets are not enforced."""
        return self._bound("cpuset.mems")

    def _bound(self, name: str) -> list[int]:
        if "cpuset" not in self.enforces:
            return []
        path = self._file("cpuset", name)
        return parse_cpu_list(read_text(f"{path}.effective" if self.version == 2 else path))

    def limit_memory(self, limit_bytes: int) -> None:
        """Limit memory and leave no swap beyond it; 0 means no limit."""
        if "memory" not in self.enforces or limit_bytes <= 0:
            return
        path = self._file("memory", "memory.max" if self.version == 2 else "memory.limit_in_bytes")
        write_text(path, str(limit_bytes))
        page_bytes = os.sysconf("SC_PAGE_SIZE")
        taken = read_text(path)
        if not taken.isdigit() or abs(int(taken) - limit_bytes) >= page_bytes:
            raise GroupError(f"asked for {limit_bytes} bytes in {path}, the kernel gives {taken!r}")
        swap, value = ("memory.swap.max", "0") if self.version == 2 else ("memory.memsw.limit_in_bytes", taken)
        if os.path.exists(self._file("memory", swap)):
            write_text(self._file("memory", swap), value)
        if self.version == 2 and os.path.exists(self._file("memory", "memory.oom.group")):
            write_text(self._file("memory", "memory.oom.group"), "1")

    def limit_processes(self, count: int) -> None:
        """Limit how many processes and threads there may be at once."""
        if "pids" in self.enforces:
            write_text(self._file("pids", "pids.max"), str(count))

    def attach(self, pid: int = 0) -> None:
        """Move a process in; 0 is the caller."""
        for path in self.paths():
            write_text(os.path.join(path, "cgroup.procs"), str(pid))

    def _walk(self, directory: str) -> Iterator[str]:
        """All directories from the deepest up to `directory`: a job may have made its own below."""
        for path, _, _ in os.walk(directory, topdown=False):
            yield path

    def pids(self) -> set[int]:
        """All processes in the group and below it, in any hierarchy."""
        return {
            int(line)
            for directory in self.paths()
            for path in self._walk(directory)
            for line in read_text(os.path.join(path, "cgroup.procs")).split()
            if line.isdigit() and line != "0"  # 0 stands for a process outside of our pid namespace
        }

    def kill(self) -> None:
        """Send SIGKILL to everything in it. Nothing can fork afterwards, so that repeating this comes to an end."""
        killer = self._file(UNIFIED, "cgroup.kill") if self.version == 2 else ""
        if killer and os.path.exists(killer):
            write_text(killer, "1")
            return
        for pid in self.pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if "pids" in self.enforces and os.path.exists(self._file("pids", "pids.max")):
            write_text(
                self._file("pids", "pids.max"), "0"
            )  # after the first round, lest a failed fork look like the end

    def exists(self) -> bool:
        """Whether any of its directories is there."""
        return any(os.path.isdir(path) for path in self.paths())

    def cpu_seconds(self) -> float:
        """CPU time used in it and below it since it was made."""
        if self.version == 2:
            return number_in(read_text(self._file(UNIFIED, "cpu.stat")), "usage_usec") / 1e6
        text = read_text(self._file("cpuacct", "cpuacct.usage"))
        return int(text) / 1e9 if text.isdigit() else 0.0

    def memory_bytes(self) -> int:
        """Memory that its processes have resident, without the page cache."""
        stat = read_text(self._file("memory", "memory.stat"))
        return number_in(stat, "anon" if self.version == 2 else "total_rss")

    def memory_peak_bytes(self) -> int:
        """The most memory that was ever charged to it; 0 where the kernel does not tell."""
        name = "memory.peak" if self.version == 2 else "memory.max_usage_in_bytes"
        text = read_text(self._file("memory", name))
        return int(text) if text.isdigit() else 0

    def oom_kills(self) -> int:
        """How many of its processes the kernel killed for memory."""
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        return number_in(read_text(self._file("memory", name)), "oom_kill")

    def remove(self, patience_seconds: float = 1.0) -> bool:
        """Remove it and all below; False where something is still in it when patience is over.

        The kernel calls a group busy for a moment after its last process has died.
        """
        deadline = time.monotonic() + patience_seconds
        while True:
            if self._remove_once():
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.002)

    def _remove_once(self) -> bool:
        gone = True
        for directory in self.paths():
            for path in self._walk(directory):
                try:
                    os.rmdir(path)
                except OSError as error:
                    gone = gone and error.errno == errno.ENOENT
        return gone
