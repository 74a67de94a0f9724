"""Where an attempt's files lie: under `attempts/` until placement has acknowledged its end, then under `kept/`.

attempts/<job id>-<number>/   assignment   the Assignment as it came, and with other cores after each change of them
                              narrowed     while a profile or a throttle narrows its cores: to which CPUs
                              throttle     while it is held back: how
                              boot         in which boot of the machine it was made
                              spec         what the supervisor is to run
                              supervisor.log  what the supervisor says, which is nothing; there once it was started
                              lock         held by the supervisor for as long as it lives
                              state.json   what the supervisor knows
                              stop.json    the last stop order
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

from cotenant.core.model.throttle import FREE, Throttle
from cotenant.node_agent.runtime.attempt_status import AttemptKey, Status, parse_status
from cotenant.node_agent.supervisor.cgroups import Group
from cotenant.node_agent.supervisor.launch_faults import EXECUTING
from cotenant.node_agent.supervisor.lease import boot_id
from cotenant.node_agent.supervisor.state_file import StateFile, sync_directory
from cotenant.v1 import node_service_pb2

log = structlog.get_logger()

STOP_ORDER_BYTES = 64
SEAL = b"\x00crc32:"  # stands between a spec and its digest, of which the supervisor reads nothing
SUPERVISOR_LOG = "supervisor.log"
NUMBER_DIGITS_MAX = 18  # of an attempt, in a name


class AttemptDirectory:
    """One attempt's directory; making the object touches nothing."""

    def __init__(self, root: Path, key: AttemptKey) -> None:
        self.key = key
        self.path = root / f"{key.job_id}-{key.number}"

    def create(self, assignment: node_service_pb2.Assignment) -> None:
        """Make it anew for an assignment; what a launch that never began has left is removed."""
        if self.path.exists():
            shutil.rmtree(self.path)
        (self.path / "work").mkdir(parents=True, mode=0o700)
        self._write_privately("assignment", assignment.SerializeToString(), synced=False)
        (self.path / "boot").write_text(boot_id())
        self.write_stop_order(None)

    def open_to(self, uid: int, gid: int) -> None:
        """Give the working directory to a user, and let them reach it; all else is for the agent alone to read."""
        os.chown(self.path / "work", uid, gid)
        for directory in (self.path, self.path.parent, self.path.parent.parent):
            directory.chmod(0o711)

    def _write_privately(self, name: str, content: bytes, *, synced: bool = True) -> Path:
        """Write a file that holds the job's environment; `synced`: on the disk when this returns. Raises `OSError`."""
        path = self.path / name
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            if synced:
                os.fsync(file.fileno())
        return path

    def replace_assignment(self, assignment: node_service_pb2.Assignment) -> None:
        """Replace what is recorded, as a whole and on the disk when this returns. Raises `OSError`."""
        fresh = self._write_privately("assignment.new", assignment.SerializeToString())
        fresh.rename(self.path / "assignment")
        sync_directory(str(self.path))

    def mark_narrowed(self, cpus: Mapping[int, Iterable[int]] | None) -> None:
        """Note the CPUs by rank that tasks are narrowed to, for an agent after us; None: to none. Raises `OSError`."""
        path = self.path / "narrowed"
        if cpus is None:
            with contextlib.suppress(OSError):  # a mark that says what is so already does no harm
                path.unlink()
            return
        fresh = self.path / "narrowed.new"
        fresh.write_text(json.dumps({str(rank): sorted(some) for rank, some in cpus.items()}))
        fresh.rename(path)

    def narrowed(self) -> dict[int, list[int]]:
        """The CPUs by rank that an agent had narrowed tasks to when it was killed; none where it had not."""
        try:
            marked = json.loads((self.path / "narrowed").read_text())
            return {int(rank): [int(cpu) for cpu in cpus] for rank, cpus in marked.items()}
        except (OSError, ValueError, AttributeError, TypeError, OverflowError, RecursionError):
            return {}

    def mark_throttled(self, throttle: Throttle) -> None:
        """Note how it is held back, for an agent after us. Raises `OSError`."""
        path = self.path / "throttle"
        if throttle.free:
            path.unlink(missing_ok=True)
            return
        fresh = self.path / "throttle.new"
        fresh.write_text(json.dumps(asdict(throttle)))
        fresh.rename(path)

    def throttled(self) -> Throttle | None:
        """How an agent before us held it back, or was about to; None where it did not.

        What cannot be read tells nothing of how, so that whoever looks frees it in every way.
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
        """The first process of each task by rank, as the supervisor has recorded them."""
        try:
            tasks = json.loads((self.path / "state.json").read_bytes())["tasks"]
            return {int(task["rank"]): int(task["pid"]) for task in tasks if task["pid"] and task["status"] is None}
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return {}

    def write_spec(self, spec: dict[str, object]) -> None:
        """Write what the supervisor is to run; it holds the job's environment, so nobody else may read it."""
        descriptor = os.open(self.path / "spec", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        written = marshal.dumps(spec)
        with open(descriptor, "wb") as file:
            file.write(written + SEAL + zlib.crc32(written).to_bytes(4, "big"))

    def recorded_group(self) -> Group | None:
        """The control group that the supervisor was told of; None where there is none, or nothing is recorded."""
        try:
            written, seal, digest = (self.path / "spec").read_bytes().rpartition(SEAL)
            if not seal or digest != zlib.crc32(written).to_bytes(4, "big"):
                return None  # a single damaged byte of a length can have marshal fill all memory
            group = marshal.loads(written)["group"]
            return Group.from_json(group) if group else None
        except (OSError, ValueError, EOFError, TypeError, KeyError, AssertionError):
            return None

    def write_stop_order(self, grace_seconds: float | None) -> None:
        """Write what the supervisor reads when SIGTERM comes; None is no order.

        It is written over what is there and has always the same length: that works on a full disk too.
        """
        order = json.dumps({"grace_seconds": grace_seconds}).ljust(STOP_ORDER_BYTES)
        descriptor = os.open(self.path / "stop.json", os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.pwrite(descriptor, order.encode(), 0)
        finally:
            os.close(descriptor)

    def write_end(self, status: Status) -> None:
        """Record an end in place of a supervisor that cannot."""
        file = StateFile(str(self.path / "state.json"), 4096)
        file.write(status.to_json(), last=True)

    def lock(self) -> int | None:
        """Take the lock and return its descriptor; None where a supervisor holds it."""
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return descriptor

    def supervised(self) -> bool:
        """Whether a supervisor lives."""
        descriptor = self.lock()
        if descriptor is not None:
            os.close(descriptor)
        return descriptor is None

    def of_earlier_boot(self) -> bool:
        """Whether the machine was booted since it was made."""
        try:
            made = (self.path / "boot").read_text(errors="replace").strip()
        except OSError:
            return False
        return bool(made) and made != boot_id()

    def was_begun(self) -> bool:
        """Whether a supervisor was ever started here."""
        return (self.path / SUPERVISOR_LOG).exists()

    def was_executed(self) -> bool:
        """Whether the program may have been executed: a supervisor marks that, and records a state soon after."""
        return any((self.path / name).exists() for name in (EXECUTING, "state.json"))

    def status(self) -> Status | None:
        """What the supervisor has recorded; None where there is nothing, or nothing legible."""
        try:
            return parse_status((self.path / "state.json").read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            log.warning("state_unreadable", attempt=str(self.key), error=str(error))
            return None

    def assignment(self) -> node_service_pb2.Assignment | None:
        """The assignment; None where it is not there or not legible."""
        try:
            return node_service_pb2.Assignment.FromString((self.path / "assignment").read_bytes())
        except (OSError, DecodeError) as error:
            log.warning("assignment_unreadable", attempt=str(self.key), error=str(error))
            return None

    def last_words(self) -> str:
        """The last line that the supervisor itself wrote, which is where its own failure would stand."""
        try:
            lines = (self.path / SUPERVISOR_LOG).read_text(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return lines[-1] if lines else ""

    def remove(self) -> None:
        """Remove it with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)

    def keep(self, root: Path) -> None:
        """Move it to the kept ones and leave only what a user may want to read; a call that failed may be repeated."""
        target = root / self.path.name
        if self.path != target:
            shutil.rmtree(target, ignore_errors=True)
            self.path.rename(target)
            self.path = target
        for path in sorted(target.iterdir()):
            if path.name != "work" and not path.name.startswith("output-"):
                path.unlink(missing_ok=True)
        work = target / "work"
        if work.is_dir() and not any(work.iterdir()):
            work.rmdir()


def find_directories(root: Path) -> Iterator[AttemptDirectory]:
    """All attempt directories under `root`, by name; anything else that lies there is passed over."""
    for path in sorted(root.iterdir()):
        if (key := key_of(path)) and path.is_dir():
            yield AttemptDirectory(root, key)


def key_of(path: Path) -> AttemptKey | None:
    """Whose directory, or control group, bears this name; None where it is no attempt's."""
    job_id, dash, number = path.name.rpartition("-")
    is_number = number.isdecimal() and len(number) <= NUMBER_DIGITS_MAX
    return AttemptKey(job_id, int(number)) if job_id and dash and is_number else None


def prune(root: Path, *, keep_max: int, younger_than: float) -> int:
    """Remove the oldest kept directories beyond `keep_max`, and those last changed before `younger_than`.

    Returns how many were removed. The time is in seconds since 1970.
    """
    by_age = sorted(((path.stat().st_mtime, path) for path in root.iterdir()), reverse=True)
    surplus = [path for place, (time, path) in enumerate(by_age) if place >= keep_max or time < younger_than]
    for path in surplus:
        shutil.rmtree(path, ignore_errors=True)
    return len(surplus)
