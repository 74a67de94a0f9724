"""One small interface over the two kinds of control groups.

A `Group` is a directory in each hierarchy that we use: in version 2 there is one hierarchy, in version 1 one per
controller. The supervisor loads this file beside it without the package around it, so it imports next to nothing. What
is set is read back, and what the kernel did not take is an error. Who may be limited is for `holding` to say.
"""

from __future__ import annotations

import errno
import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Iterable, Iterator
else:
    import _signal as signal  # the module around it makes enumerations: see loop.py
if TYPE_CHECKING or __package__:
    from cotenant.node_agent.supervisor.kernel_files import (
        GroupError,
        format_cpu_list,
        number_in,
        online_cpus,
        parse_cpu_list,
        put,
        read_text,
        write_text,
    )
else:
    from kernel_files import (  # fmt: skip
        GroupError,
        format_cpu_list,
        number_in,
        online_cpus,
        parse_cpu_list,
        put,
        read_text,
        write_text,
    )

__all__ = [
    "CONTROLLERS",
    "UNIFIED",
    "UNLIMITED_BYTES",
    "Group",
    "GroupError",
    "format_cpu_list",
    "number_in",
    "parse_cpu_list",
    "put",
    "read_text",
    "write_text",
]

UNIFIED = "unified"
CONTROLLERS = ("cpuset", "cpu", "memory", "cpuacct", "pids", "freezer", "devices")
UNLIMITED_BYTES = 1 << 60  # version 1 writes "no limit" as the largest page-aligned number; nothing real is as large
WEIGHT_MIN, WEIGHT_DEFAULT, WEIGHT_MAX = 1, 100, 10_000  # as version 2 counts
SHARES_DEFAULT = 1024  # what version 1 has for the default weight
PERIOD_MICROSECONDS = 100_000
FREEZE_SECONDS_MAX = 2.0
FREEZE_WORDS = {1: ("THAWED", "FROZEN"), 2: ("0", "1")}


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
        """Let children have the controllers, or those of them that the kernel takes; in version 1 they always do.

        Version 2 refuses all of several for the sake of one, such as `cpu` while a real-time process runs.
        """
        if self.version != 2:
            return
        path = self._file(UNIFIED, "cgroup.subtree_control")
        try:
            write_text(path, " ".join(f"+{controller}" for controller in self.enforces))
        except GroupError:
            taken = []
            for controller in self.enforces:
                try:
                    write_text(path, f"+{controller}")
                    taken.append(controller)
                except GroupError:
                    continue
            if not taken:
                raise
            self.enforces = tuple(taken)

    def set_cpus(self, cpus: Iterable[int], memory_nodes: Iterable[int] = ()) -> None:
        """Bind to CPUs and, unless empty, memory nodes; read back what the kernel made of it.

        What runs in it always has the memory nearest to its CPUs: nodes are gained before the CPUs change, and lost
        after. Pages on nodes that are lost move along. CPUs that are off line are left out, unless all are.
        """
        if "cpuset" not in self.enforces:
            return
        wanted = set(memory_nodes)
        if wanted:
            self._bind("cpuset.mems", wanted | set(self.memory_nodes()))
        asked = set(cpus)
        self._bind("cpuset.cpus", asked & set(online_cpus()) or asked)
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
        given = set(self._bound(name))  # without CPUs that are off line: version 2 gives those when they come back
        if given != wanted and not (name == "cpuset.cpus" and given == wanted & set(online_cpus())):
            asked, told = format_cpu_list(wanted), format_cpu_list(given)
            raise GroupError(f"asked for {asked} in {path}, the kernel gives {told!r}")

    def cpus(self, *, asked_for: bool = False) -> list[int]:
        """The CPUs that the kernel gives it, or was last asked for; none where cpusets are not enforced."""
        return self._bound("cpuset.cpus", asked_for)

    def memory_nodes(self) -> list[int]:
        """The memory nodes that the kernel gives it; none where cpusets are not enforced."""
        return self._bound("cpuset.mems")

    def _bound(self, name: str, asked_for: bool = False) -> list[int]:
        if "cpuset" not in self.enforces:
            return []
        path = self._file("cpuset", name)
        return parse_cpu_list(read_text(f"{path}.effective" if self.version == 2 and not asked_for else path))

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
        """Limit how many processes and threads there may be at once; 0 means no limit."""
        if "pids" in self.enforces:
            put(self._file("pids", "pids.max"), str(count) if count > 0 else "max")

    # CPU time among those that want the same CPUs. Each stands for itself; see `holding` for who may be held back.

    def set_weight(self, weight: int) -> None:
        """Give it a weight from 1 to 10,000 among its siblings, as version 2 counts: 100 is that of a lone group.

        A group that is idle has none, so that nothing is written.
        """
        if "cpu" not in self.enforces or self.is_idle():
            return
        weight = min(max(weight, WEIGHT_MIN), WEIGHT_MAX)
        if self.version == 2:
            put(self._file("cpu", "cpu.weight"), str(weight))
        else:
            put(self._file("cpu", "cpu.shares"), str(max(2, weight * SHARES_DEFAULT // WEIGHT_DEFAULT)))

    def set_idle(self, idle: bool) -> None:
        """Let it have only CPU time that no sibling wants, or no longer; its weight is then the default one.

        Raises:
            GroupError: the kernel does not take it, or has no such thing (before 5.15).
        """
        path = self._file("cpu", "cpu.idle") if "cpu" in self.enforces else ""
        if not path or not os.path.exists(path):
            if idle:
                raise GroupError(
                    "the kernel cannot give it idle CPU time only: there is no cpu.idle that can be written"
                )
            return
        put(path, str(int(idle)))

    def is_idle(self) -> bool:
        """Whether it has only CPU time that no sibling wants."""
        return "cpu" in self.enforces and read_text(self._file("cpu", "cpu.idle")) == "1"

    def limit_cpu(self, cores: float) -> None:
        """Limit its CPU time to that of so many cores; 0 means no limit. Raises `GroupError`."""
        if "cpu" not in self.enforces:
            if cores > 0:
                raise GroupError("its CPU time cannot be limited: no cpu control group can be written")
            return
        quota = max(1000, round(cores * PERIOD_MICROSECONDS)) if cores > 0 else 0
        if self.version == 2:
            put(self._file("cpu", "cpu.max"), f"{quota or 'max'} {PERIOD_MICROSECONDS}")
            return
        put(self._file("cpu", "cpu.cfs_period_us"), str(PERIOD_MICROSECONDS))
        put(self._file("cpu", "cpu.cfs_quota_us"), str(quota or -1))

    def cpu_limit(self) -> float:
        """The cores whose CPU time is its limit; 0 where there is none."""
        if "cpu" not in self.enforces:
            return 0.0
        if self.version == 2:
            words = read_text(self._file("cpu", "cpu.max")).split()
        else:
            words = [read_text(self._file("cpu", f"cpu.cfs_{name}_us")) for name in ("quota", "period")]
        return int(words[0]) / int(words[1]) if len(words) == 2 and words[0].isdigit() else 0.0

    def _freezer(self) -> str:
        if self.version == 2:
            return self._file(UNIFIED, "cgroup.freeze")
        return self._file("freezer", "freezer.state") if "freezer" in self.enforces else ""

    def can_freeze(self) -> bool:
        """Whether its processes can be made to stand still."""
        return os.path.exists(self._freezer())

    def freeze(self, frozen: bool, patience_seconds: float = FREEZE_SECONDS_MAX) -> None:
        """Let all its processes stand still, or go on. Blocks until they do.

        Raises:
            GroupError: there is no freezer, or some process does not stand still in time; then all go on.
        """
        path = self._freezer()
        if not path or not os.path.exists(path):
            if frozen:
                raise GroupError("its processes cannot be suspended: no freezer control group can be written")
            return
        words = FREEZE_WORDS[self.version]
        write_text(path, words[frozen])
        deadline = time.monotonic() + patience_seconds
        while self.is_frozen() is not frozen:
            if time.monotonic() >= deadline:
                write_text(path, words[False])
                raise GroupError(
                    f"asked for {words[frozen]} in {path}, and it did not come about in {patience_seconds} s"
                )
            time.sleep(0.001)

    def is_frozen(self) -> bool:
        """Whether all its processes stand still."""
        if self.version == 2:
            return number_in(read_text(self._file(UNIFIED, "cgroup.events")), "frozen") == 1
        return "freezer" in self.enforces and read_text(self._file("freezer", "freezer.state")) == "FROZEN"

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
        """Send SIGKILL to everything in it. Nothing can fork afterwards, so that repeating this comes to an end.

        In version 1 the freezer holds what is there while it is signalled: none of it can fork meanwhile, and what
        was frozen before dies too.
        """
        killer = self._file(UNIFIED, "cgroup.kill") if self.version == 2 else ""
        if killer and os.path.exists(killer):
            write_text(killer, "1")
            return
        self._order_freeze(True)
        for pid in self.pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._order_freeze(False)
        if "pids" in self.enforces and os.path.exists(self._file("pids", "pids.max")):
            # after the first round, lest a failed fork look like the end
            write_text(self._file("pids", "pids.max"), "0")

    def _order_freeze(self, frozen: bool) -> None:
        """Ask for it if it can be had; wait for nothing. What is below goes on too, though frozen by itself."""
        directory, name = os.path.split(self._freezer())
        for path in [directory] if frozen else self._walk(directory):
            try:
                if name and os.path.exists(os.path.join(path, name)):
                    write_text(os.path.join(path, name), FREEZE_WORDS[self.version][frozen])
            except GroupError:
                continue

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
