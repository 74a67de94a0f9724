"""Input of node agents and supervisors: datagrams of jobs, and files that carry state over a restart."""

from __future__ import annotations

import fcntl
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.verification.fuzz.targets import Prepared, Target, file_target, within

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.node_agent.control.epoch_fence import EpochFence, read_store_memory
from cotenant.node_agent.control.health_file import HealthFile
from cotenant.node_agent.control.machine_claims import Claim, MachineClaimConflict, acquire_claim
from cotenant.node_agent.control.pattern_process import search
from cotenant.node_agent.control.placement_outbox import PlacementOutbox
from cotenant.node_agent.control.progress import ProgressTracker, newest_lines, parse_line
from cotenant.node_agent.control.progress_reports import ProgressReports
from cotenant.node_agent.control.state_directory import NodeMismatch, open_state_directory
from cotenant.node_agent.control.throttles import Throttles
from cotenant.node_agent.probes.hot_plug import HotPlug
from cotenant.node_agent.probes.inventory import ProbeOptions
from cotenant.node_agent.probes.pressure import parse_pressure
from cotenant.node_agent.runtime import secret_files
from cotenant.node_agent.runtime.attempt_directory import AttemptDirectory, key_of
from cotenant.node_agent.runtime.attempt_status import AttemptKey, Exit, Status, parse_status, report
from cotenant.node_agent.runtime.output_reader import OutputReader, ranks_in
from cotenant.node_agent.runtime.output_tail import TAIL_BYTES_MAX, tail_of
from cotenant.node_agent.runtime.secret_files import open_secret_files
from cotenant.node_agent.runtime.socket_paths import LOCATION_FILE, _directory_in_use
from cotenant.node_agent.runtime.supervisor_start import SUPERVISOR
from cotenant.node_agent.supervisor.kernel_files import number_in, parse_cpu_list
from cotenant.node_agent.supervisor.lease import DisconnectLimit, Lease, boot_seconds, read_lease
from cotenant.store.witness import REVISION_MAX
from cotenant.v1 import resources_pb2

KEY = AttemptKey("job", 1)
STATUS = Status(
    KEY, 3, "FAILED", 1e9, "told", Exit(0, 1), 1e9, 1e9 + 5, 2.5, 4096, 77, 123456, "DISCONNECTED"
).to_json()
STATE = json.dumps({**STATUS, "tasks": [{"rank": 0, "pid": 7, "status": None}]}).encode()
PROGRESS = (
    b"step=12 loss=0.5 phase=validation\nstep=13",
    b'{"step": 12, "loss": 0.25, "phase": "train"}\n{"batch": 8, "batch_seconds": 0.02}',
    b"batch=8, batch_seconds=0.02, step=4",
)
FINDING = {"rule": "xid-79", "detail": "x", "gpu_uuid": "GPU-0", "mark": "m", "since": 5.0, "lasted_seconds": 1.0}
HEALTH = json.dumps(
    {
        "table_version": 1,
        "boot": "b",
        "driver": "d",
        "gpus": [{"uuid": "GPU-0", "index": 0}],
        "findings": [{**FINDING, "calm_seconds": 0.0, "boot": "b", "driver": "d"}],
    }
).encode()
ASSIGNMENT = agent_pb2.Assignment(
    job_id="job", number=1, epoch=4, allocation=resources_pb2.NodeAllocation(node_id="n")
).SerializeToString()
SPEC = {"group": {"path": "/x", "controllers": ["cpu"]}, "command": ["true"], "grace_seconds": 5.0}


def targets() -> Iterator[Target]:
    """Yield the targets."""
    yield Target("progress datagram", lambda directory: Prepared(_progress, PROGRESS), in_loop=True)
    yield Target("supervisor datagram", lambda directory: Prepared(_status, (STATE,)), (ValueError,), in_loop=True)
    yield Target("state.json", _of("state.json", _state, STATE))
    yield Target("narrowed", _of("narrowed", lambda there: there.narrowed(), b'{"0": [1, 2], "1": [3]}'))
    throttle = b'{"bandwidth_percent": 50, "cores": 2, "idle": false, "suspended": true}'
    yield Target("throttle", _of("throttle", lambda there: there.throttled(), throttle))
    yield Target("assignment", _of("assignment", lambda there: there.assignment(), ASSIGNMENT))
    yield Target("spec", _spec)
    yield Target("boot", _of("boot", lambda there: there.from_earlier_boot(), b"1f0c-77\n"))
    yield Target("supervisor.log", _of("supervisor.log", lambda there: there.last_log_line(), b"a\nOSError: b\n"))
    yield Target("attempt directory name", lambda directory: Prepared(_name, (b"job-1", b"j-0-22", b"a-b-3")))
    yield Target("health.json", file_target("health.json", lambda path: HealthFile(path.parent).read(), (HEALTH,)))
    yield Target("stop.json", _stop_order)
    yield Target("time_limit.json", _time_limit)
    fence = b'{"term": 7}\n\n{"job": "a", "epoch": 40}\n{"job": "b", "epoch": 41}\n'
    yield Target("fence", file_target("fence", _fence, (fence,)))
    store = (
        b'{"store": {"id": "a", "generation": 1, "revision": 9, "era": "e", "era_revision": 8, "signature": "00ff"}}\n'
    )
    yield Target("store state in a fence", file_target("fence.jsonl", _remembered, (fence + store,)))
    yield Target("cores.json", file_target("cores.json", _cores, (b'{"0": 0, "1": 0, "2": 1, "3": 1}',)))
    yield Target("node name", file_target("node", _claimed, (b"node-1\n",)), (NodeMismatch,))
    yield Target("lease", file_target("lease", _lease, (b"12.500 12.500".ljust(48),)))
    yield Target("sockets.path", _sockets)
    yield Target("secrets.path", _secrets)
    yield Target("machine claim", _claims, (MachineClaimConflict,))
    yield Target("output", _output)
    yield Target("kernel files", lambda directory: Prepared(_kernel, KERNEL))


def _fence(path: Path) -> None:
    """An accepted fence is obeyed, can be rewritten, and can be raised like any other."""
    fence = EpochFence(path)
    fence_again = EpochFence(path)
    if (fence_again.term, fence_again.epoch_of("a")) != (fence.term, fence.epoch_of("a")):
        raise AssertionError("another fence after it was rewritten")
    agent_pb2.Welcome(term=fence.term)
    if not (fence.raise_term(1 << 62) and fence.raise_epoch("a", 1 << 62)):
        raise AssertionError("this node refuses every term")


def _remembered(path: Path) -> None:
    """The remembered store state is one that a store could have."""
    memory = read_store_memory(path)
    if memory and not (memory.id and 0 <= memory.revision <= REVISION_MAX):
        raise AssertionError(f"remembers {memory}")


def _cores(path: Path) -> None:
    """The offered cores can be listed, with distinct IDs."""
    inventory = resources_pb2.Inventory()
    plug = HotPlug(
        inventory, ProbeOptions("n"), path.parent, report=lambda inventory: None, heal=None, interval_seconds=1.0,
        sysfs=path.parent / "none", allowed=lambda: range(4),
    )  # fmt: skip
    plug.refresh()
    ids = [core.id for core in inventory.cores]
    if len(set(ids)) != 4:
        raise AssertionError(f"cores {ids} are offered")


def _claimed(path: Path) -> None:
    attempt = path.parent / "attempts" / "job-1"
    attempt.mkdir(parents=True, exist_ok=True)
    os.close(open_state_directory(path.parent, "node-1"))


def _lease(path: Path) -> None:
    heard = boot_seconds() - 100
    sensible = 100 < read_lease(str(path)) < heard + 100
    if not sensible and not DisconnectLimit(str(path), 5.0, heard).expired():
        raise AssertionError("a lease without end")
    lease = Lease(str(path))
    lease.renew(5.0)
    lease.close()


def _sockets(directory: Path) -> Prepared:
    """The note with the sockets' directory; whatever it contains, the mode of a foreign directory must not change."""
    made, deep = directory / "cotenant-abcd_123", directory / ("d" * 100)
    made.mkdir(mode=0o700)
    deep.mkdir()

    def read(path: Path) -> None:
        if (found := _directory_in_use(path.parent)) not in (None, made):
            raise AssertionError(f"the sockets' directory would be {found}")

    return file_target(LOCATION_FILE, read, (str(made).encode(),))(deep)


def _secrets(directory: Path) -> Prepared:
    """The note with the directory of secrets; whatever it contains, they are only ever in directories of our own."""
    made = directory / "cotenant-secrets-abcd_123"
    made.mkdir(mode=0o700)

    def read(path: Path) -> None:
        found = open_secret_files(path.parent).root
        if found != made:
            found.rmdir()  # it is new
        if not found.name.startswith("cotenant-secrets-") and found != path.with_name("secrets"):
            raise AssertionError(f"secrets would be in {found}")

    return file_target(secret_files.LOCATION_FILE, read, (str(made).encode(),))(directory)


def _claims(directory: Path) -> Prepared:
    """The claim of a live agent, as another agent finds it at its start."""
    wanted = Claim("a", "/a", 7, (0, 1), 1 << 30, 1 << 34)
    kept = directory / "held.json"
    kept.touch()
    held = os.open(kept, os.O_RDONLY)  # as long as this process lives
    fcntl.flock(held, fcntl.LOCK_EX)

    def read(path: Path) -> None:
        try:
            os.close(acquire_claim(directory, wanted))
        except MachineClaimConflict as error:
            str(error).encode()
            raise

    seeds = [json.dumps(asdict(Claim("b", "/b", 8, cpus, 1 << 30, 1 << 34))).encode() for cpus in ((2, 3), (1, 2))]
    return file_target("held.json", read, seeds)(directory)


def _output(directory: Path) -> Prepared:
    """A task's output: its tail, its chunks, and the progress parsed from it, also during a rotation."""
    path = directory / "output-0.log"
    (directory / "output-\u00b2.log").write_bytes(b"x")

    def run(data: bytes) -> None:
        path.write_bytes(data)
        path.with_name("output-0.log.1").write_bytes(data[::-1])
        for most in (1, 7, TAIL_BYTES_MAX):
            tail = tail_of(directory, 0, most)
            if len(tail.encode()) > most:
                raise AssertionError(f"{len(tail.encode())} bytes, at most {most} allowed")
        agent_pb2.AttemptReport(output_tail=tail)
        for rank in ranks_in(directory):
            reader = OutputReader(directory, rank, tail_bytes=5)
            while reader.read().data:
                pass
            reader.close()
        search(r"step (\d+)(?: loss (?P<loss>\S+))?", data.decode(errors="replace").splitlines())
        search(data[:200].decode(errors="replace").replace("*", "").replace("+", ""), ["step 5", "x" * 40])

    return Prepared(run, (b"step 5 loss 0.5\nstep 6\r\n", b"\xff\xfe step 7", b"(\\d)[a-z]{2}(?P<loss>x)"))


KERNEL = (
    b"some avg10=0.00 avg60=1.50 avg300=0.00 total=123\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=7\n",
    b"0-3,8,10-11\n",
    b"usage_usec 123\nuser_usec 5\n",
)


def _kernel(data: bytes) -> None:
    """Kernel files may contain unknown values."""
    text = data.decode("ascii", errors="replace")
    parse_pressure(text)
    parse_cpu_list(text)
    number_in(text, "usage_usec")


def _of(name: str, read: Callable[[AttemptDirectory], object], *seeds: bytes) -> Callable[[Path], Prepared]:
    def prepare(directory: Path) -> Prepared:
        there = AttemptDirectory(directory, KEY)
        there.path.mkdir(exist_ok=True)
        return file_target(name, lambda path: read(there), seeds)(there.path)

    return prepare


def _spec(directory: Path) -> Prepared:
    there = AttemptDirectory(directory, KEY)
    there.path.mkdir(exist_ok=True)
    there.write_spec(SPEC)
    written = (there.path / "spec").read_bytes()
    return file_target("spec", lambda path: there.recorded_group(), (written,))(there.path)


def _progress(data: bytes) -> None:
    track, now = ProgressTracker(), 5.0
    for line in newest_lines(data):
        if parsed := parse_line(line):
            now += 0.5
            track.update(parsed, now)
    rate = track.rate_per_second(now)
    if not (math.isfinite(rate) and rate >= 0):
        raise AssertionError(f"a rate of {rate}")
    outbox = PlacementOutbox()
    without_throttling: Any = None
    ProgressReports(outbox, Throttles(without_throttling)).report(KEY, track, rate, 1e9)
    outbox.take().SerializeToString()


def _status(data: bytes) -> None:
    report(parse_status(data), "node").SerializeToString()


def _state(there: AttemptDirectory) -> None:
    if status := there.status():
        report(status, "node").SerializeToString()
    there.task_pids()


def _name(data: bytes) -> None:
    key_of(Path(data.replace(b"\0", b"").decode(errors="surrogateescape")))


def _stop_order(directory: Path) -> Prepared:
    seeds = b'{"grace_seconds": 30.0, "reason": "DRAINED"}'.ljust(96), b'{"grace_seconds": null}'
    return _by_supervisor("stop_order", "read_stop_order", "stop.json", seeds)(directory)


def _time_limit(directory: Path) -> Prepared:
    seeds = b'{"limit_seconds": 7200.0}', b'{"limit_seconds": null}'
    return _by_supervisor("time_limit", "read_changed", "time_limit.json", seeds)(directory)


def _by_supervisor(module: str, function: str, name: str, seeds: Sequence[bytes]) -> Callable[[Path], Prepared]:
    """A supervisor loads its modules without the enclosing package."""
    sys.path.append(str(SUPERVISOR.parent))
    try:
        reader = getattr(import_module(module), function)
    finally:
        sys.path.pop()

    def prepare(directory: Path) -> Prepared:
        def read(path: Path) -> None:
            reader()  # it reads the file from the working directory

        prepared = file_target(name, read, seeds)(directory)
        return Prepared(within(directory, prepared.run), prepared.seeds)

    return prepare
