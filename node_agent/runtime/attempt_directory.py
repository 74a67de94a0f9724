"""An attempt's files: under `attempts/` until placement has acknowledged its end, then under `kept/`.

attempts/<job id>-<number>/   assignment   the Assignment as received, updated after each change of cores
                              narrowed     while a profile or a throttle narrows its cores: the CPUs
                              throttle     while it is throttled: the throttle
                              boot         the boot id of the machine when the directory was created
                              spec         what the supervisor runs
                              supervisor.log  the supervisor's own output, normally empty; exists once it was started
                              lock         held by the supervisor while it lives
                              state.json   the supervisor's state
                              stop.json    the last stop order
                              time_limit.json  the time limit that replaced the spec's
                              output-<rank>.log, output-<rank>.log.1
                              work/        the working directory of a job that names none
kept/<job id>-<number>/       output and work/, until enough newer ones are kept
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import marshal
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import structlog
from google.protobuf.message import DecodeError

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.core.model.throttle import FREE, Throttle
from cotenant.node_agent.runtime.attempt_status import AttemptKey, Status, parse_status
from cotenant.node_agent.supervisor.cgroups import Group
from cotenant.node_agent.supervisor.launch_faults import EXECUTING, LIMIT_ERRORS, SUPERVISOR_LOG
from cotenant.node_agent.supervisor.lease import boot_id
from cotenant.node_agent.supervisor.state_file import StateFile, sync_directory
from cotenant.node_agent.supervisor.time_limit import FILE as TIME_LIMIT

log = structlog.get_logger()

STOP_ORDER_BYTES = 96
SEAL = b"\x00crc32:"  # between a spec and its checksum, which the supervisor ignores
NUMBER_DIGITS_MAX = 18  # of an attempt's number in a name


class AttemptDirectory:
    """One attempt's directory; creating the object does not touch the disk."""

    def __init__(self, root: Path, key: AttemptKey) -> None:
        self.key = key
        self.path = root / f"{key.job_id}-{key.number}"

    def create(self, assignment: agent_pb2.Assignment) -> None:
        """Create the directory for an assignment; remove what a launch that never started has left."""
        if self.path.exists():
            shutil.rmtree(self.path)
        (self.path / "work").mkdir(parents=True, mode=0o700)
        self._write_privately("assignment", assignment.SerializeToString(), synced=False)
        (self.path / "boot").write_text(boot_id())
        self.write_stop_order(None)

    def grant_to(self, uid: int, gid: int) -> None:
        """Give the working directory to a user and make it reachable; everything else stays private to the agent."""
        os.chown(self.path / "work", uid, gid)
        for directory in (self.path, self.path.parent, self.path.parent.parent):
            directory.chmod(0o711)

    def _write_privately(self, name: str, content: bytes, *, synced: bool = True) -> Path:
        """Write a file that contains the job's environment; with `synced`, flush it to disk. Raises `OSError`."""
        path = self.path / name
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            if synced:
                os.fsync(file.fileno())
        return path

    def replace_assignment(self, assignment: agent_pb2.Assignment) -> None:
        """Replace the recorded assignment atomically and durably. Raises `OSError`."""
        fresh = self._write_privately("assignment.new", assignment.SerializeToString())
        fresh.rename(self.path / "assignment")
        sync_directory(str(self.path))

    def mark_narrowed(self, cpus: Mapping[int, Iterable[int]] | None) -> None:
        """Mark the CPUs by rank that tasks are narrowed to, for the next agent; None: not narrowed.

        Raises:
            OSError: the disk refuses.
        """
        path = self.path / "narrowed"
        if cpus is None:
            with contextlib.suppress(OSError):  # a stale mark is harmless
                path.unlink()
            return
        fresh = self.path / "narrowed.new"
        fresh.write_text(json.dumps({str(rank): sorted(some) for rank, some in cpus.items()}))
        fresh.rename(path)

    def narrowed(self) -> dict[int, list[int]]:
        """Return the CPUs by rank that an earlier agent had narrowed tasks to when it was killed; empty if none."""
        try:
            marked = json.loads((self.path / "narrowed").read_text())
            return {int(rank): [int(cpu) for cpu in cpus] for rank, cpus in marked.items()}
        except (OSError, ValueError, AttributeError, TypeError, OverflowError, RecursionError):
            return {}

    def mark_throttled(self, throttle: Throttle) -> None:
        """Mark the attempt's throttle for the next agent. Raises `OSError`."""
        path = self.path / "throttle"
        if throttle.free:
            path.unlink(missing_ok=True)
            return
        fresh = self.path / "throttle.new"
        fresh.write_text(json.dumps(asdict(throttle)))
        fresh.rename(path)

    def throttled(self) -> Throttle | None:
        """Return the throttle that an earlier agent applied or was about to apply; None if there is none.

        An unreadable mark gives `FREE`, so that the caller releases every kind of throttle.
        """
        try:
            marked = json.loads((self.path / "throttle").read_text())
            return Throttle(
                int(marked["bandwidth_percent"]), int(marked["cores"]), bool(marked["idle"]), bool(marked["suspended"])
            )
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            log.warning("throttle_unreadable", attempt=str(self.key), error=str(error))
            return FREE

    def task_pids(self) -> dict[int, int]:
        """Return the first process of each task by rank, as recorded by the supervisor."""
        try:
            tasks = json.loads((self.path / "state.json").read_bytes())["tasks"]
            return {int(task["rank"]): int(task["pid"]) for task in tasks if task["pid"] and task["status"] is None}
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return {}

    def write_spec(self, spec: dict[str, object]) -> None:
        """Write what the supervisor is to run. It contains the job's environment, so only the agent may read it."""
        descriptor = os.open(self.path / "spec", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        written = marshal.dumps(spec)
        with open(descriptor, "wb") as file:
            file.write(written + SEAL + zlib.crc32(written).to_bytes(4, "big"))

    def recorded_group(self) -> Group | None:
        """Return the control group in the spec; None if there is none or the spec is missing or damaged."""
        try:
            written, seal, digest = (self.path / "spec").read_bytes().rpartition(SEAL)
            if not seal or digest != zlib.crc32(written).to_bytes(4, "big"):
                return None  # one damaged length byte can make marshal fill all memory
            group = marshal.loads(written)["group"]
            return Group.from_json(group) if group else None
        except (OSError, ValueError, EOFError, TypeError, KeyError, AssertionError):
            return None

    def write_stop_order(self, grace_seconds: float | None, reason: str = "") -> None:
        """Write the order that the supervisor reads on SIGTERM; without a grace period there is no order.

        It always has the same length and overwrites the old order in place, which works on a full disk too.
        """
        order = json.dumps({"grace_seconds": grace_seconds, "reason": reason}).ljust(STOP_ORDER_BYTES)
        descriptor = os.open(self.path / "stop.json", os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.pwrite(descriptor, order.encode(), 0)
        finally:
            os.close(descriptor)

    def write_time_limit(self, limit_seconds: float | None) -> None:
        """Write the time limit that the supervisor reads on SIGUSR1; None: no limit. Raises `OSError`."""
        path = self.path / TIME_LIMIT
        new = path.with_suffix(".new")
        new.write_text(json.dumps({"limit_seconds": limit_seconds}))
        new.replace(path)

    def write_end(self, status: Status) -> None:
        """Record the end in place of a dead supervisor."""
        file = StateFile(str(self.path / "state.json"), 4096)
        file.write(status.to_json(), last=True)

    def lock(self) -> int | None:
        """Acquire the lock and return its descriptor; None if a supervisor holds it.

        Raises:
            OSError: the disk refuses.
        """
        return _locked(self.path / "lock", os.O_RDWR | os.O_CREAT)

    def supervised(self) -> bool:
        """Return whether a supervisor is alive; works on a read-only disk too."""
        try:
            descriptor = _locked(self.path / "lock", os.O_RDONLY)
        except FileNotFoundError:
            return False
        if descriptor is not None:
            os.close(descriptor)
        return descriptor is None

    def from_earlier_boot(self) -> bool:
        """Return whether the machine was rebooted since the directory was created."""
        try:
            made = (self.path / "boot").read_text(errors="replace").strip()
        except OSError:
            return False
        return bool(made) and made != boot_id()

    def was_started(self) -> bool:
        """Return whether a supervisor was ever started."""
        return (self.path / SUPERVISOR_LOG).exists()

    def was_executed(self) -> bool:
        """Return whether the program may have been executed: a supervisor marks it, and records a state soon after."""
        return any((self.path / name).exists() for name in (EXECUTING, "state.json"))

    def status(self) -> Status | None:
        """Return the status that the supervisor recorded; None if there is none or it is unreadable.

        Raises:
            OSError: this process lacks what it needs to read it.
        """
        try:
            return parse_status((self.path / "state.json").read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno in LIMIT_ERRORS:
                raise
            log.warning("state_unreadable", attempt=str(self.key), error=str(error))
            return None

    def assignment(self) -> agent_pb2.Assignment | None:
        """Return the assignment; None if it is missing or unreadable."""
        try:
            return agent_pb2.Assignment.FromString((self.path / "assignment").read_bytes())
        except (OSError, DecodeError) as error:
            log.warning("assignment_unreadable", attempt=str(self.key), error=str(error))
            return None

    def last_log_line(self) -> str:
        """Return the last line of the supervisor's own log, which would be its own failure.

        Raises:
            OSError: this process lacks what it needs to read it.
        """
        try:
            lines = (self.path / SUPERVISOR_LOG).read_text(errors="replace").strip().splitlines()
        except OSError as error:
            if error.errno in LIMIT_ERRORS:
                raise
            return ""
        return lines[-1] if lines else ""

    def remove(self) -> None:
        """Remove the directory and everything in it."""
        shutil.rmtree(self.path, ignore_errors=True)

    def keep(self, root: Path) -> None:
        """Move the directory to the kept ones and leave only files for users; a failed call may be repeated."""
        target = root / self.path.name
        if self.path != target:
            shutil.rmtree(target, ignore_errors=True)
            self.path.rename(target)
            self.path = target
        for path in sorted(target.iterdir()):
            if path.name == "containers":
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != "work" and not path.name.startswith("output-"):
                path.unlink(missing_ok=True)
        work = target / "work"
        if work.is_dir() and not any(work.iterdir()):
            work.rmdir()


def _locked(path: Path, flags: int) -> int | None:
    """Open and lock a file; return its descriptor, or None if another process holds the lock."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def find_directories(root: Path) -> Iterator[AttemptDirectory]:
    """Yield all attempt directories under `root` by name; other entries are skipped."""
    for path in sorted(root.iterdir()):
        if (key := key_of(path)) and path.is_dir():
            yield AttemptDirectory(root, key)


def key_of(path: Path) -> AttemptKey | None:
    """Return the attempt whose directory or control group has this name; None if it is not an attempt's."""
    job_id, dash, number = path.name.rpartition("-")
    is_number = number.isdecimal() and len(number) <= NUMBER_DIGITS_MAX
    return AttemptKey(job_id, int(number)) if job_id and dash and is_number else None


def prune(root: Path, *, keep_max: int, younger_than: float) -> int:
    """Remove the oldest kept directories beyond `keep_max`, and those last changed before `younger_than`.

    Returns how many were removed. `younger_than` is in seconds since 1970.
    """
    with os.scandir(root) as entries:
        by_age = sorted(((entry.stat().st_mtime, entry.path) for entry in entries), reverse=True)
    surplus = [path for place, (time, path) in enumerate(by_age) if place >= keep_max or time < younger_than]
    for path in surplus:
        shutil.rmtree(path, ignore_errors=True)
    return len(surplus)
