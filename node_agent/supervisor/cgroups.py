"""One small interface to both versions of control groups.

A `Group` is a directory in each hierarchy that we use: version 2 has one hierarchy, version 1 one per controller. The
supervisor loads this file by its bare name without the package, so it imports next to nothing. Values are read back
after writing, and a value that the kernel did not accept is an error. `cpu_time` decides which jobs may be
limited.
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
    import _signal as signal  # the public module builds enumerations: see loop.py
if TYPE_CHECKING or __package__:
    from cotenant.node_agent.supervisor.kernel_files import (
        GroupError,
        format_cpu_list,
        number_in,
        online_cpus,
        parse_cpu_list,
        put,
        raise_shortage,
        read_if_present,
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
        raise_shortage,
        read_if_present,
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
UNLIMITED_BYTES = 1 << 60  # version 1 has the largest page-aligned number for "no limit"
WEIGHT_MIN, WEIGHT_DEFAULT, WEIGHT_MAX = 1, 100, 10_000  # on the scale of version 2
SHARES_DEFAULT = 1024  # version 1's default weight
PERIOD_MICROSECONDS = 100_000
FREEZE_SECONDS_MAX = 2.0
LINKS_OF_LEAF = 2  # hard links of a directory that has no directories in it: its name and its "."
FREEZE_WORDS = {1: ("THAWED", "FROZEN"), 2: ("0", "1")}


class Group:
    """A control group: its directories by controller, or the one directory of version 2 under `UNIFIED`.

    Unavailable controllers are absent, and their limits are not enforced; the creator of the node's group reports that
    once.
    """

    __slots__ = ("directories", "enforces", "version")

    def __init__(self, version: int, directories: dict[str, str], enforces: Iterable[str]) -> None:
        self.version = version
        self.directories = directories
        self.enforces = tuple(enforces)

    @classmethod
    def from_json(cls, written: dict[str, object]) -> Group:
        """Return the group that `to_json` described."""
        version, directories, enforces = written["version"], written["directories"], written["enforces"]
        assert isinstance(version, int)
        assert isinstance(directories, dict)
        assert isinstance(enforces, list)
        return cls(version, directories, enforces)

    def to_json(self) -> dict[str, object]:
        """Return a description of the group for the supervisor."""
        return {"version": self.version, "directories": self.directories, "enforces": list(self.enforces)}

    def child(self, name: str) -> Group:
        """Return a group below this one, which is not created yet."""
        below = {key: os.path.join(path, name) for key, path in self.directories.items()}
        return Group(self.version, below, self.enforces)

    def paths(self) -> list[str]:
        """Return all directories once each: version 1 may mount two controllers together."""
        return sorted(set(self.directories.values()))

    def _file(self, controller: str, name: str) -> str:
        directory = self.directories.get(UNIFIED) or self.directories.get(controller, "")
        return os.path.join(directory, name) if directory else ""

    def create(self) -> None:
        """Create the directories; copy the parent's CPUs and memory nodes if the kernel does not."""
        for path in self.paths():
            try:
                os.mkdir(path)
            except FileExistsError:
                pass
            except OSError as error:
                raise GroupError(f"cannot create the control group {path}: {error.strerror}") from error
        if self.version == 1 and "cpuset" in self.directories:
            above = os.path.dirname(self.directories["cpuset"])
            for name in ("cpuset.cpus", "cpuset.mems"):
                wanted, path = read_text(os.path.join(above, name)), self._file("cpuset", name)
                if read_text(path) != wanted:  # the kernel rebuilds its scheduling domains at each write
                    write_text(path, wanted)

    def let_children_inherit_cpus(self) -> None:
        """Let the kernel copy CPUs and memory nodes to groups created below; version 2 always does."""
        path = self._file("cpuset", "cgroup.clone_children")
        if self.version == 1 and os.path.exists(path):
            write_text(path, "1")

    def delegate_controllers(self) -> None:
        """Enable the controllers for children, or those that the kernel accepts; in version 1 they always are.

        Version 2 rejects several controllers because of one, such as `cpu` while a real-time process runs.
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
        """Bind to CPUs and, unless empty, memory nodes; read back the kernel's result.

        Its processes always have the memory nearest to their CPUs: nodes are added before the CPUs change and removed
        after. Pages on removed nodes are migrated. Offline CPUs are left out, unless all are offline.
        """
        if "cpuset" not in self.enforces:
            return
        wanted = set(memory_nodes)
        if wanted:
            self._bind("cpuset.mems", wanted | set(self.memory_nodes()))
        requested = set(cpus)
        self._bind("cpuset.cpus", requested & set(online_cpus()) or requested)
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
        given = set(self._bound(name))  # without offline CPUs, which version 2 adds when they are back
        if given != wanted and not (name == "cpuset.cpus" and given == wanted & set(online_cpus())):
            requested, effective = format_cpu_list(wanted), format_cpu_list(given)
            raise GroupError(f"requested {requested} in {path}, the kernel gives {effective!r}")

    def cpus(self, *, asked_for: bool = False) -> list[int]:
        """Return the effective CPUs, or with `asked_for` those last requested; none without cpusets."""
        return self._bound("cpuset.cpus", asked_for)

    def memory_nodes(self) -> list[int]:
        """Return the effective memory nodes; none without cpusets."""
        return self._bound("cpuset.mems")

    def _bound(self, name: str, asked_for: bool = False) -> list[int]:
        if "cpuset" not in self.enforces:
            return []
        path = self._file("cpuset", name)
        return parse_cpu_list(read_text(f"{path}.effective" if self.version == 2 and not asked_for else path))

    def limit_memory(self, limit_bytes: int) -> None:
        """Limit memory and allow no swap beyond it; 0 means no limit."""
        if "memory" not in self.enforces or limit_bytes <= 0:
            return
        path = self._file("memory", "memory.max" if self.version == 2 else "memory.limit_in_bytes")
        write_text(path, str(limit_bytes))
        page_bytes = os.sysconf("SC_PAGE_SIZE")
        taken = read_text(path)
        if not taken.isdigit() or abs(int(taken) - limit_bytes) >= page_bytes:
            raise GroupError(f"requested {limit_bytes} bytes in {path}, the kernel gives {taken!r}")
        swap, value = ("memory.swap.max", "0") if self.version == 2 else ("memory.memsw.limit_in_bytes", taken)
        if os.path.exists(self._file("memory", swap)):
            write_text(self._file("memory", swap), value)
        if self.version == 2 and os.path.exists(self._file("memory", "memory.oom.group")):
            write_text(self._file("memory", "memory.oom.group"), "1")

    def limit_processes(self, count: int) -> None:
        """Limit the number of processes and threads; 0 means no limit."""
        if "pids" in self.enforces:
            put(self._file("pids", "pids.max"), str(count) if count > 0 else "max")

    # CPU time among groups that compete for the same CPUs. The settings are independent; see `cpu_time`.

    def set_weight(self, weight: int) -> None:
        """Set the weight among siblings, 1 to 10,000 on the scale of version 2, whose default is 100.

        An idle group has no weight, so nothing is written.
        """
        if "cpu" not in self.enforces or self.is_idle():
            return
        weight = min(max(weight, WEIGHT_MIN), WEIGHT_MAX)
        if self.version == 2:
            put(self._file("cpu", "cpu.weight"), str(weight))
        else:
            put(self._file("cpu", "cpu.shares"), str(max(2, weight * SHARES_DEFAULT // WEIGHT_DEFAULT)))

    def set_idle(self, idle: bool) -> None:
        """Give it only CPU time that no sibling wants, or end that; its weight is then the default.

        Raises:
            GroupError: the kernel refuses it or does not support it (before 5.15).
        """
        path = self._file("cpu", "cpu.idle") if "cpu" in self.enforces else ""
        if not path or not os.path.exists(path):
            if idle:
                raise GroupError("the kernel cannot limit it to idle CPU time: there is no writable cpu.idle")
            return
        put(path, str(int(idle)))

    def is_idle(self) -> bool:
        """Return whether it gets only CPU time that no sibling wants."""
        return "cpu" in self.enforces and read_text(self._file("cpu", "cpu.idle")) == "1"

    def limit_cpu(self, cores: float) -> None:
        """Limit its CPU time to that of a number of cores; 0 means no limit. Raises `GroupError`."""
        if "cpu" not in self.enforces:
            if cores > 0:
                raise GroupError("its CPU time cannot be limited: no writable cpu control group")
            return
        quota = max(1000, round(cores * PERIOD_MICROSECONDS)) if cores > 0 else 0
        if self.version == 2:
            put(self._file("cpu", "cpu.max"), f"{quota or 'max'} {PERIOD_MICROSECONDS}")
            return
        put(self._file("cpu", "cpu.cfs_period_us"), str(PERIOD_MICROSECONDS))
        put(self._file("cpu", "cpu.cfs_quota_us"), str(quota or -1))

    def cpu_limit(self) -> float:
        """Return the limit of CPU time in cores; 0 if there is none."""
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
        """Return whether its processes can be frozen."""
        return os.path.exists(self._freezer())

    def freeze(self, frozen: bool, timeout_seconds: float = FREEZE_SECONDS_MAX) -> None:
        """Freeze or thaw all its processes. Blocks until they are.

        Raises:
            GroupError: there is no freezer, or a process does not freeze in time; then all are thawed.
        """
        path = self._freezer()
        if not path or not os.path.exists(path):
            if frozen:
                raise GroupError("its processes cannot be suspended: no writable freezer control group")
            return
        words = FREEZE_WORDS[self.version]
        write_text(path, words[frozen])
        deadline = time.monotonic() + timeout_seconds
        while self.is_frozen() is not frozen:
            if time.monotonic() >= deadline:
                write_text(path, words[False])
                raise GroupError(
                    f"requested {words[frozen]} in {path}, but it did not happen within {timeout_seconds} s"
                )
            time.sleep(0.001)

    def is_frozen(self) -> bool:
        """Return whether all its processes are frozen."""
        if self.version == 2:
            return number_in(read_text(self._file(UNIFIED, "cgroup.events")), "frozen") == 1
        return "freezer" in self.enforces and read_text(self._file("freezer", "freezer.state")) == "FROZEN"

    def attach(self, pid: int = 0) -> None:
        """Move a process into the group; 0 is the caller, which must have a single thread.

        In version 1 the caller moves itself as a thread: to move a process, the kernel first waits until no process is
        being forked on any CPU, which takes milliseconds [Linux 5.4, 9a3284fad42f].
        """
        for path in self.paths():
            threads = os.path.join(path, "tasks")
            write_text(
                threads if pid == 0 and os.path.exists(threads) else os.path.join(path, "cgroup.procs"), str(pid)
            )

    def _walk(self, directory: str) -> Iterator[str]:
        """Yield all directories, deepest first, up to `directory`: a job may have created its own below.

        Raises:
            GroupError: this process lacks what it needs to list them.
        """
        below: list[str] = []
        try:
            if os.stat(directory).st_nlink != LINKS_OF_LEAF:
                with os.scandir(directory) as entries:
                    below = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError as error:
            raise_shortage(error, directory)
            return  # it is gone
        for path in below:
            yield from self._walk(path)
        yield directory

    def pids(self) -> set[int]:
        """Return all processes in the group and below it, in any hierarchy.

        Raises:
            GroupError: this process lacks what it needs to read them.
        """
        return {
            int(line)
            for directory in self.paths()
            for path in self._walk(directory)
            for line in read_if_present(os.path.join(path, "cgroup.procs")).split()
            if line.isdigit() and line != "0"  # 0 is a process outside of our pid namespace
        }

    def kill(self) -> None:
        """Send SIGKILL to everything in it. Nothing can fork afterwards, so that repeated calls terminate.

        In version 1 the freezer stops the processes while they are signaled: none can fork in the meantime, and
        processes that were frozen before die too.
        """
        killer = self._file(UNIFIED, "cgroup.kill") if self.version == 2 else ""
        if killer and os.path.exists(killer):
            _write_unless_gone(killer, "1")
            return
        self._order_freeze(True)
        for pid in self.pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._order_freeze(False)
        if "pids" in self.enforces and os.path.exists(self._file("pids", "pids.max")):
            # only after the first round: a failed fork could look like the job's end
            _write_unless_gone(self._file("pids", "pids.max"), "0")

    def _order_freeze(self, frozen: bool) -> None:
        """Request it if there is a freezer, without waiting. Thawing includes children that were frozen separately."""
        directory, name = os.path.split(self._freezer())
        for path in [directory] if frozen else self._walk(directory):
            try:
                if name and os.path.exists(os.path.join(path, name)):
                    write_text(os.path.join(path, name), FREEZE_WORDS[self.version][frozen])
            except GroupError:
                continue

    def exists(self) -> bool:
        """Return whether any of its directories exists."""
        return any(os.path.isdir(path) for path in self.paths())

    def cpu_seconds(self) -> float:
        """Return the CPU time used in it and below it since it was created."""
        if self.version == 2:
            return number_in(read_text(self._file(UNIFIED, "cpu.stat")), "usage_usec") / 1e6
        text = read_text(self._file("cpuacct", "cpuacct.usage"))
        return int(text) / 1e9 if text.isdigit() else 0.0

    def system_seconds(self) -> float:
        """Return the part of its CPU time that the kernel spent for its processes."""
        if self.version == 2:
            return number_in(read_text(self._file(UNIFIED, "cpu.stat")), "system_usec") / 1e6
        return number_in(read_text(self._file("cpuacct", "cpuacct.stat")), "system") / os.sysconf("SC_CLK_TCK")

    def memory_bytes(self) -> int:
        """Return the resident memory of its processes, without the page cache."""
        stat = read_text(self._file("memory", "memory.stat"))
        return number_in(stat, "anon" if self.version == 2 else "total_rss")

    def memory_peak_bytes(self) -> int:
        """Return the highest memory ever charged to it; 0 if unknown."""
        name = "memory.peak" if self.version == 2 else "memory.max_usage_in_bytes"
        text = read_text(self._file("memory", name))
        return int(text) if text.isdigit() else 0

    def oom_kills(self) -> int:
        """Return how many of its processes the kernel killed for lack of memory."""
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        return number_in(read_text(self._file("memory", name)), "oom_kill")

    def remove(self, timeout_seconds: float = 1.0) -> bool:
        """Remove it and all below; return False if something is still in it after the timeout.

        The kernel reports a group as busy for a moment after its last process has died.
        """
        deadline = time.monotonic() + timeout_seconds
        while True:
            if self._remove_once():
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.002)

    def _remove_once(self) -> bool:
        gone = True
        for directory in self.paths():
            try:
                for path in self._walk(directory):
                    gone = _remove_directory(path) and gone
            except GroupError:
                gone = False
        return gone


def _remove_directory(path: str) -> bool:
    """Remove a group's directory; return whether it is gone."""
    try:
        os.rmdir(path)
    except OSError as error:
        return error.errno == errno.ENOENT
    return True


def _write_unless_gone(path: str, text: str) -> None:
    """Write a file of a group that its supervisor may remove at the same time."""
    try:
        write_text(path, text)
    except GroupError:
        if os.path.exists(path):
            raise
