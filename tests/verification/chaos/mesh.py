"""The parts of a mesh: three members of etcd, two processes of each service and five agents, each on a machine."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.end_to_end.commands import COTENANT, Serving, environment_of
from tests.support.etcd_server import EtcdServer
from tests.support.paths import ROOT
from tests.verification.chaos.certificates import CERTS, CLOCK, TENANTS, Certificates
from tests.verification.chaos.machines import Machine, Machines
from tests.verification.chaos.name_server import DOMAIN, NameServer
from tests.verification.chaos.plan import CLIENT, GUEST, MEMBERS, NODES, OPERATOR, REPLICAS, SERVICES

from cotenant import fail_points
from cotenant.history import recording

PORTS = {"queue": 7070, "placement": 7071, "predictor": 7072, "contention": 7073}
TOKEN = "chaos"
GPUS = 2
LOST_AFTER_SECONDS, HEARTBEAT_SECONDS = 8.0, 0.5
ENDED_KEPT = 80  # jobs, so that a run of a hundred steps removes some, but none that was just queried
HISTORY_SECONDS = 30.0  # no fault affects the recorder, but it may need some time until it has found a member
SETTINGS = f"""\
heartbeat_seconds = {HEARTBEAT_SECONDS}
lost_after_seconds = {LOST_AFTER_SECONDS}
retry_seconds = 0.2
infrastructure_retries = 1000000
allocator = "restless"
ended_jobs = {ENDED_KEPT}
history_seconds = {HISTORY_SECONDS}
[users]
ann = "root"
bob = "root"
"""
NON_PARTS = (CLIENT, GUEST, OPERATOR)  # their timestamps are compared with each other, so their clocks are never set
STORE_BYTES_MAX = 32 << 20  # etcd's quota, small enough to reach it in a moment
ETCD_FLAGS = ("--max-txn-ops=4096", f"--quota-backend-bytes={STORE_BYTES_MAX}")
RESOLVER = "/etc/resolv.conf"
PLUGINS = "plugins"
ENTRY_POINTS = """\
[cotenant.cpu_allocators]
restless = tests.verification.chaos.restless:Restless
"""
NO_STORE = "error: cannot start without the store"  # a part started now ends, for its manager to restart it
READ_ONLY = "cannot be written: Read-only file system"  # likewise an agent started on a disk that refuses launches
EXPIRED = "CERTIFICATE_EXPIRED"  # likewise a part started with an expired certificate
SOURCE = Path(__file__).with_name("wall_clock.c")
LIBRARY, OFFSET, HISTORY, POINTS = "wall_clock.so", "clock", "edges", "points"


def service_of(part: str) -> str:
    """Return the service of a part."""
    return part.partition("-")[0]


def install_allocator(directory: Path) -> str:
    """Install the resizing allocator as a package; return the prefix for the module path of processes."""
    info = directory / PLUGINS / "chaos-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: chaos\nVersion: 1\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return os.pathsep.join([str(directory / PLUGINS), str(ROOT)])


def build_clock(directory: Path) -> Path | None:
    """Compile the library that sets clocks; return None without a compiler."""
    compiler, library = shutil.which("cc"), directory / LIBRARY
    if compiler is None:
        return None
    command = [compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(SOURCE), "-ldl"]
    return library if subprocess.run(command, capture_output=True, check=False).returncode == 0 else None


@dataclass
class Part:
    """A process that should run, and the faults that prevent it."""

    name: str
    machine: Machine
    command: Sequence[str] = ()
    member: EtcdServer | None = None
    down: int = 0  # number of faults
    paused: int = 0
    full: bool = False
    was_full: bool = False  # since its last start
    process: Serving | None = None
    ended_with: list[str] = field(default_factory=list)


class Mesh:
    """All parts, optionally of a deliberately broken build."""

    def __init__(
        self, directory: Path, machines: Machines, broken: str = "", *, tls: bool = False, names: bool = False
    ) -> None:
        self.directory, self.machines = directory, machines
        self.program = [sys.executable, "-m", "tests.verification.chaos.broken", broken] if broken else [COTENANT]
        self.clock, self._modules = build_clock(directory), install_allocator(directory)
        self.starts: Counter[str] = Counter()
        self.points = directory / POINTS  # armed fail points, and which processes took them
        self.node_ids = {node: f"{directory.name}-{node}" for node in NODES}
        (self.points / fail_points.PASSED).mkdir(parents=True)
        self._logs = directory / "logs"
        self._logs.mkdir()
        (directory / "settings.toml").write_text(SETTINGS)
        for name in (*MEMBERS, *REPLICAS, *NODES, CLIENT, GUEST, OPERATOR):
            machines.add(name)
        self.names = self._start_name_server() if names else None
        self.parts = {name: Part(name, machines.all[name]) for name in (*MEMBERS, *REPLICAS, *NODES)}
        self.certificates = self._issue() if tls else None
        for name in MEMBERS:
            machine, own = machines.all[name], self.certificates
            self.parts[name].member = EtcdServer(
                machine.disk,
                name=name,
                arguments=(
                    "--max-txn-ops=4096",
                    f"--quota-backend-bytes={STORE_BYTES_MAX}",
                    *(own.flags(name) if own else ()),
                ),
                scheme="https" if own else "http",
                host=machine.address,
                prefix=machine.prefix,
                log=self._logs / f"{name}.log",
                context=own.context(name) if own else None,
            )
        members = [part.member for part in self.parts.values() if part.member]
        for member in members:
            member.peers = members
        self.store = [member.endpoint for member in members]
        for name in (*REPLICAS, *NODES):
            self.parts[name].command = self._command(name)

    def _issue(self) -> Certificates:
        bearers = {name: f"service/{name}" for name in (*MEMBERS, *REPLICAS)}
        bearers |= {name: f"agent/{node_id}" for name, node_id in self.node_ids.items()} | {CLIENT: "operator/chaos"}
        made = Certificates(self.directory / CERTS, bearers | TENANTS)
        addresses = {name: address for name, address in self.addresses.items() if name not in (GUEST, OPERATOR)}
        made.issue(addresses | dict.fromkeys(TENANTS, addresses[CLIENT]), self.clock)
        return made

    def _start_name_server(self) -> NameServer:
        """Make each machine resolve names at its router."""
        served = NameServer()
        served.start({name: machine.router for name, machine in self.machines.all.items()}, self.addresses)
        for name, machine in self.machines.all.items():
            file = self.directory / f"{name}.resolv"
            file.write_text(f"nameserver {machine.router}\noptions timeout:1 attempts:2\n")
            machine.call("mount", "--bind", str(file), RESOLVER)
        return served

    @property
    def addresses(self) -> dict[str, str]:
        """Return the addresses of all machines."""
        return {name: machine.address for name, machine in self.machines.all.items()}

    def service_address(self, service: str) -> str:
        """Return the addresses of all replicas of a service."""
        replicas = [f"{service}-{number}" for number in (1, 2)]
        if self.names:
            return "|".join(f"{part}.{DOMAIN}:{PORTS[service]}" for part in replicas)
        return "|".join(map(self.address, replicas))

    def address(self, part: str) -> str:
        """Return where a part serves; for a member of etcd, its client endpoint."""
        if member := self.parts[part].member if part in MEMBERS else None:
            return member.endpoint
        return f"{self.machines.all[part].address}:{PORTS[service_of(part)]}"

    def _command(self, part: str) -> list[str]:
        machine = self.machines.all[part]
        words = [*machine.prefix, *self.program, "--state-dir", str(machine.disk / "state"), "serve", service_of(part)]
        words += ["--endpoints", ",".join(f"{service}={self.service_address(service)}" for service in SERVICES)]
        words += ["--config", str(self.directory / "settings.toml")]
        if part in NODES:
            return [*words, "--node", self.node_ids[part], "--gpus", f"fake:{GPUS}", "--address", machine.address]
        words += ["--listen", self.address(part)]
        if self.certificates:
            return [*words, "--store", f"etcds://{','.join(self.store)}"]
        return [*words, "--store", f"etcd://{','.join(self.store)}", "--insecure"]

    def environment(self, part: str) -> dict[str, str]:
        """Return the environment of a part's process."""
        more = {"COTENANT_TOKEN": TOKEN, "PYTHONPATH": self._modules}
        more |= {recording.VARIABLE: str(self.directory / HISTORY), fail_points.VARIABLE: str(self.points)}
        if self.clock and part not in NON_PARTS:
            offset = self.machines.all[part].disk.parent / f"{part}.{OFFSET}"
            if not offset.exists():
                offset.write_bytes(struct.pack("=q", 0))
            more |= {"LD_PRELOAD": str(self.clock), CLOCK: str(offset)}
        if self.certificates:
            more |= self.certificates.variables(CLIENT if part in NON_PARTS else part)
        return environment_of(self.directory, **more)

    # Life ----------------------------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        """Start a part without waiting until it serves."""
        part = self.parts[name]
        part.was_full = part.full
        self.starts[name] += 1
        if part.member:
            part.member.start(wait=False)
        else:
            part.process = Serving(part.command, self.environment(name), self.log(name))
        if part.paused:
            self._signal(part, frozen=True)

    def log(self, name: str) -> Path:
        """Return the path of a part's log."""
        return self._logs / f"{name}.log"

    def log_size(self, name: str) -> int:
        """Return the size of a part's log in bytes."""
        return self.log(name).stat().st_size if self.log(name).exists() else 0

    def log_since(self, name: str, begin: int) -> str:
        """Return what a part has logged after an offset in bytes."""
        with self.log(name).open("rb") as file:
            file.seek(begin)
            return file.read().decode(errors="replace")

    def pid(self, name: str) -> int | None:
        """Return a part's process ID, or None."""
        if not self.is_there(name):
            return None
        part = self.parts[name]
        return part.member.pid if part.member else part.process.pid if part.process else None

    def kill(self, *names: str) -> None:
        """Kill parts, as a power failure would."""
        for part in (self.parts[name] for name in names):
            part.down += 1
            if part.member:
                part.member.kill()
            elif part.process:
                part.process.kill()
                part.process = None

    def bring_back(self, *names: str) -> None:
        """Start parts again, once no fault keeps them down."""
        for name in names:
            self.parts[name].down -= 1
            if not self.parts[name].down:
                self.start(name)

    def replace(self, name: str, term: int) -> Serving:
        """Replace a placement replica with one that believes it leads, under an old term."""
        return self.stand_in(name, "tests.verification.chaos.impostor", str(term))

    def stand_in(self, name: str, module: str, *words: str) -> Serving:
        """Kill a part and run one of our modules at its address, until `bring_back`."""
        self.kill(name)
        return self.run_on(name, module, self.address(name), *words)

    def run_on(self, name: str, module: str, *words: str) -> Serving:
        """Run one of our modules on a machine."""
        command = [*self.machines.all[name].prefix, sys.executable, "-m", module, *words]
        return Serving(command, self.environment(name), self.log(name))

    def restart(self, name: str) -> str:
        """Stop a running part as an operator does, and start it again; return what was wrong with its exit."""
        part = self.parts[name]
        wrong = ""
        if part.process:
            served = self.serving(name)
            process, part.process = part.process, None
            try:
                code = process.terminate()
                wrong = f"{name} exited with {code} when stopped" if code and served else ""
            except subprocess.TimeoutExpired:
                wrong = f"{name} did not exit when stopped"
                process.kill()
            if self._is_at_a_point(process.pid):  # while it was shutting down
                wrong = ""
        elif part.member:
            part.member.kill()
        self.start(name)
        return wrong

    def is_running(self, name: str) -> bool:
        """Return whether a part's process exists and is not stopped."""
        return self.is_there(name) and not self.parts[name].paused and not self._has_halted(self.parts[name])

    def is_there(self, name: str) -> bool:
        """Return whether a part's process exists."""
        part = self.parts[name]
        return not part.down and not self._has_ended(part)

    @staticmethod
    def _has_halted(part: Part) -> bool:
        """Return whether a part has stopped itself at a fail point."""
        if part.process is None:
            return False
        with contextlib.suppress(FileNotFoundError):
            return Path(f"/proc/{part.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        return False

    def part_at(self, address: str) -> str:
        """Return the part that serves at an address, or ""."""
        return next((name for name in REPLICAS if self.address(name) == address), "")

    def arm(self, point: str, action: str) -> None:
        """Arm a fail point for the first process that reaches it."""
        fresh = self.points / f"{point}~"
        fresh.write_text(action)
        fresh.rename(self.points / point)

    def disarm(self, point: str) -> None:
        """Disarm a fail point."""
        (self.points / point).unlink(missing_ok=True)

    def take_reached(self, point: str) -> tuple[str, int, float] | None:
        """Return the part and process that reached a fail point, and how many seconds ago; each only once."""
        for file in self.points.glob(f"{point}.*"):
            pid = int(file.suffix[1:])
            seconds = time.time() - file.stat().st_ctime
            file.unlink()
            names = (name for name, part in self.parts.items() if part.process and part.process.pid == pid)
            return next(names, ""), pid, seconds
        return None

    def pass_count(self, point: str) -> int:
        """Return how often processes reached a fail point, armed or not."""
        file = self.points / fail_points.PASSED / point
        return file.stat().st_size if file.exists() else 0

    def _is_at_a_point(self, pid: int) -> bool:
        return any(self.points.glob(f"*.{pid}"))

    def thaw(self, name: str, pid: int) -> None:
        """Resume a part stopped at a fail point, unless its process was replaced or it is to stay paused."""
        part = self.parts[name]
        if part.process and part.process.pid == pid and not part.paused:
            self._signal(part, frozen=False)

    def pause(self, name: str) -> None:
        """Stop a part's process."""
        part = self.parts[name]
        part.paused += 1
        if part.paused == 1:
            self._signal(part, frozen=True)

    def resume(self, name: str) -> None:
        """Resume a part, once no fault pauses it."""
        part = self.parts[name]
        part.paused -= 1
        if not part.paused:
            self._signal(part, frozen=False)

    def _signal(self, part: Part, *, frozen: bool) -> None:
        process = part.member if part.member and not part.member.ended() else part.process
        if process:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                process.freeze() if frozen else process.thaw()

    def restart_ended_parts(self) -> list[str]:
        """Restart parts that have exited, as a system manager does; return unexpected exits."""
        wrong = []
        for name, part in self.parts.items():
            if part.down or not self._has_ended(part) or (part.process and self._is_at_a_point(part.process.pid)):
                continue
            output = part.process.said[-500:] if part.process else self.log(name).read_text(errors="replace")[-500:]
            part.ended_with.append(output)
            if not part.was_full and not any(reason in output for reason in (NO_STORE, EXPIRED, READ_ONLY)):
                wrong.append(f"{name} exited by itself: {output}")
            if part.member:
                part.member.kill()
            self.start(name)
        return wrong

    @staticmethod
    def _has_ended(part: Part) -> bool:
        if part.member:
            return part.member.ended()
        return part.process is not None and part.process.ended()

    def fill_disk(self, name: str) -> None:
        """Fill a part's disk."""
        part = self.parts[name]
        part.full = part.was_full = True
        self.machines.fill_disk(name)

    def free_disk(self, name: str) -> None:
        """Restore the free space of its disk."""
        self.machines.free_disk(name)
        self.parts[name].full = False

    def set_clock(self, name: str, by_seconds: float) -> None:
        """Set a part's wall clock forward or back."""
        with (self.directory / f"{name}.{OFFSET}").open("r+b") as file, mmap.mmap(file.fileno(), 8) as page:
            (before,) = struct.unpack("=q", page[:8])
            page[:8] = struct.pack("=q", before + round(by_seconds * 1e9))

    def clock_offset(self, name: str) -> float:
        """Return how far a part's wall clock is ahead of the machine's, in seconds."""
        if self.clock is None:
            return 0.0
        (nanoseconds,) = struct.unpack("=q", (self.directory / f"{name}.{OFFSET}").read_bytes()[:8])
        return float(nanoseconds / 1e9)

    def pids(self) -> set[int]:
        """Return the process IDs of all parts."""
        members = {part.member.pid for part in self.parts.values() if part.member and not part.member.ended()}
        return members | {part.process.pid for part in self.parts.values() if part.process}

    def serving(self, name: str) -> bool:
        """Return whether a part has reported, since its last start, that it serves."""
        part = self.parts[name]
        if part.member:
            return not part.member.ended()
        said = "placement_connected" if name in NODES else f"{service_of(name)} serves at"
        return part.process is not None and said in part.process.said

    def close(self) -> None:
        """Kill all parts."""
        self.kill(*self.parts)
        if self.names:
            self.names.close()
