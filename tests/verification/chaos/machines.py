"""A machine for each part: with its own address, name, boot time and disk, connected by one router.

Machines are made of kernel namespaces: nothing is visible outside, and everything goes when the creating process ends.
This process must run inside `run_inside`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tests.verification.chaos.link import Emulator, Impairment

TOOLS = ("unshare", "nsenter", "setpriv", "ip", "iptables-restore", "iptables-save", "mount")
NAMESPACES = ("--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
INSIDE = "COTENANT_CHAOS_INSIDE"
NETWORK = "10.91"
DISK_BYTES = 1 << 30  # a full node accepts work again once 512 MiB are free
UPTIME_SECONDS_MAX = 30 * 86_400
PAGE_BYTES = 4096
FILLS_MAX = 20
HELD_SECONDS_MAX, POLL_SECONDS = 10.0, 0.005
DROPPED = re.compile(r"\[(?P<packets>\d+):\d+\] -A FORWARD -s (?P<source>[\d.]+)/32 -d (?P<target>[\d.]+)/32 .*-j DROP")

Pair = tuple[str, str]  # packets from one machine to another


def missing_tools() -> str:
    """Return why machines cannot be created here; "" if they can."""
    if os.geteuid() != 0:
        return "separate machines for all parts need root"
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    if absent:
        return f"separate machines for all parts need {', '.join(absent)} (Debian: iproute2, iptables, util-linux)"
    tried = _call(["unshare", *NAMESPACES, "--time", "--uts", "--", "iptables-restore", "/dev/null"], check=False)
    return "" if tried.returncode == 0 else f"cannot create namespaces: {tried.stderr.strip()}"


def own_directory() -> Path | None:
    """Return the run's directory inside the namespaces; None outside."""
    return Path(os.environ[INSIDE]) if INSIDE in os.environ else None


def run_inside(command: Sequence[str], directory: Path) -> int:
    """Run a command in new network, mount and process namespaces; return its exit status.

    It gets a directory for its files. All of it ends with this process, however that ends.
    """
    inside = ["setpriv", "--pdeathsig=KILL", "unshare", *NAMESPACES, "--", *command]
    return subprocess.run(inside, env=os.environ | {INSIDE: str(directory)}, check=False).returncode


def be_init(command: Sequence[str]) -> int:
    """Run a command and, as the first process of its namespace, reap orphans; return its exit status."""
    _call(["mount", "-t", "tmpfs", "none", "/run"])  # hides a system manager's sockets: it does not know our processes
    child = os.posix_spawnp(command[0], list(command), os.environ)
    while True:
        pid, status = os.wait()
        if pid == child:
            return abs(os.waitstatus_to_exitcode(status))


def _call(command: Sequence[str], text: str = "", *, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done


@dataclass
class Machine:
    """A part's machine. A command with `prefix` in front runs there, in the same process."""

    name: str
    number: int
    disk: Path
    prefix: tuple[str, ...] = ()

    @property
    def address(self) -> str:
        """Return its address for other machines."""
        return f"{NETWORK}.{self.number}.2"

    @property
    def router(self) -> str:
        """Return the router's address for it; the router is the driver's machine."""
        return f"{NETWORK}.{self.number}.1"

    def call(self, *command: str) -> None:
        """Run a short command there, such as one that changes its mounts. Raises OSError."""
        _call([*self.prefix, *command])


@dataclass
class Machines:
    """All machines and the links between them."""

    directory: Path
    rng: Random
    all: dict[str, Machine] = field(default_factory=dict)
    _drops: dict[Pair, list[float]] = field(default_factory=dict)  # source and target: shares, 1.0 if cut
    _impairments: dict[Pair, list[Impairment]] = field(default_factory=dict)
    _queues: dict[Pair, int] = field(default_factory=dict)
    _namespace_holders: list[subprocess.Popen[bytes]] = field(default_factory=list)  # one per machine
    _dropped: Counter[Pair] = field(default_factory=Counter)  # packets, before the current rules

    def __post_init__(self) -> None:
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1\n")
        _call(["ip", "link", "set", "lo", "up"])
        self.emulator = Emulator(self.rng)

    def add(self, name: str) -> Machine:
        """Create a machine with an empty disk, its own mounts and a random uptime."""
        machine = Machine(name, len(self.all) + 1, self.directory / name)
        machine.disk.mkdir()
        _call(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(machine.disk)])
        spaces = self.directory / "spaces" / name
        spaces.mkdir(parents=True)
        files = {kind: spaces / kind for kind in ("net", "uts", "time")}
        for file in files.values():
            file.touch()
        options = [f"--{kind}={file}" for kind, file in files.items()]
        uptime = str(self.rng.randrange(UPTIME_SECONDS_MAX))
        _call(["unshare", *options, "--monotonic", uptime, "--boottime", uptime, "hostname", name])
        self._wire_up(machine, str(files["net"]))
        machine.prefix = ("nsenter", *options, f"--mount=/proc/{self._hold_mounts()}/ns/mnt", "--")
        self.all[name] = machine
        return machine

    def _hold_mounts(self) -> int:
        """Start a process that holds a mount namespace; newer kernels do not always allow to bind one to a file."""
        own = os.stat("/proc/self/ns/mnt").st_ino
        holder = subprocess.Popen(["unshare", "--mount", "sleep", "infinity"])
        self._namespace_holders.append(holder)
        deadline = time.monotonic() + HELD_SECONDS_MAX
        while os.stat(f"/proc/{holder.pid}/ns/mnt").st_ino == own:
            if time.monotonic() > deadline:
                raise OSError("no mount namespace was created")
            time.sleep(POLL_SECONDS)
        return holder.pid

    def _wire_up(self, machine: Machine, network: str) -> None:
        here, router = f"m{machine.number}", f"{NETWORK}.{machine.number}.1"
        _call(["ip", "link", "add", here, "type", "veth", "peer", "name", "eth0", "netns", network])
        _call(["ip", "-batch", "-"], f"addr add {router}/24 dev {here}\nlink set {here} up\n")
        up = f"link set lo up\naddr add {machine.address}/24 dev eth0\nlink set eth0 up\n"
        _call(["nsenter", f"--net={network}", "ip", "-batch", "-"], f"{up}route add default via {router}\n")

    # What is between them ------------------------------------------------------------------------------------

    def drop(self, pairs: Iterable[Pair], share: float = 1.0) -> None:
        """Drop packets between pairs, all of them or a share."""
        for pair in pairs:
            self._drops.setdefault(pair, []).append(share)
        self._set_rules()

    def stop_dropping(self, pairs: Iterable[Pair], share: float = 1.0) -> None:
        """End one such fault."""
        for pair in pairs:
            self._drops[pair].remove(share)
        self._set_rules()

    def impair(self, pairs: Iterable[Pair], impairment: Impairment) -> None:
        """Delay or garble packets between pairs."""
        for pair in pairs:
            self._impairments.setdefault(pair, []).append(impairment)
            self._update_emulator(pair)
        self._set_rules()

    def stop_impairing(self, pairs: Iterable[Pair], impairment: Impairment) -> None:
        """End one such fault."""
        for pair in pairs:
            self._impairments[pair].remove(impairment)
            self._update_emulator(pair)
        self._set_rules()

    def affected_packets(self, pairs: Iterable[Pair]) -> int:
        """Return how many packets between pairs were dropped, delayed or garbled so far."""
        dropped, emulator = self._dropped + self._dropped_by_current_rules(), self.emulator
        queues = [self._queues[pair] for pair in pairs if pair in self._queues]
        held = sum(emulator.garbled[queue] + emulator.delayed[queue] for queue in queues)
        return sum(dropped[pair] for pair in pairs) + held

    def _dropped_by_current_rules(self) -> Counter[Pair]:
        """Return the packets that the current rules have dropped."""
        names = {machine.address: name for name, machine in self.all.items()}
        found: Counter[Pair] = Counter()
        for line in _call(["iptables-save", "-c", "-t", "filter"]).stdout.splitlines():
            if rule := DROPPED.match(line):
                found[names[rule["source"]], names[rule["target"]]] += int(rule["packets"])
        return found

    def _update_emulator(self, pair: Pair) -> None:
        impairments, queue = self._impairments[pair], self._queues.setdefault(pair, len(self._queues))
        delay_seconds = max((impairment.delay_seconds_max for impairment in impairments), default=0.0)
        least_seconds = max((impairment.delay_seconds_min for impairment in impairments), default=0.0)
        garbled, anywhere = (
            max((impairment.garbled for impairment in impairments), default=0.0),
            any(impairment.anywhere for impairment in impairments),
        )
        self.emulator.put(queue, Impairment(delay_seconds, least_seconds, garbled, anywhere))

    def _set_rules(self) -> None:
        self._dropped += self._dropped_by_current_rules()  # counters of new rules start at zero
        rules = [
            f"-A FORWARD {self._between(*pair)} -j DROP"
            if max(shares) == 1.0
            else f"-A FORWARD {self._between(*pair)} -m statistic --mode random --probability {max(shares)} -j DROP"
            for pair, shares in self._drops.items()
            if shares
        ]
        rules += [
            f"-A FORWARD {self._between(*pair)} -j NFQUEUE --queue-num {self._queues[pair]} --queue-bypass"
            for pair, impairments in self._impairments.items()
            if impairments
        ]
        _call(["iptables-restore"], "\n".join(["*filter", ":FORWARD ACCEPT [0:0]", *rules, "COMMIT", ""]))

    def _between(self, source: str, target: str) -> str:
        return f"-s {self.all[source].address} -d {self.all[target].address}"

    # Disks ---------------------------------------------------------------------------------------------------

    def fill_disk(self, name: str) -> None:
        """Fill a machine's disk."""
        for left in reversed(range(FILLS_MAX)):
            disk = os.statvfs(self.all[name].disk)
            used_bytes = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
            try:
                self._resize(name, max(PAGE_BYTES, used_bytes))
            except OSError:  # data was written in between
                if not left:
                    raise
            else:
                return

    def free_disk(self, name: str) -> None:
        """Restore the free space of a disk."""
        self._resize(name, DISK_BYTES)

    def _resize(self, name: str, size_bytes: int) -> None:
        _call(["mount", "-o", f"remount,size={size_bytes}", str(self.all[name].disk)])
