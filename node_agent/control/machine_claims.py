"""Keeps two agents of one user from offering the same CPUs or memory of a machine, or from using one node id there.

Each agent holds a locked file that says what it offers, in a directory that only its user can write: nobody else can
keep an agent from starting. Agents of different users do not see each other here; placement compares the nodes of one
machine (see `cotenant.services.placement.registry.node_claims`). A lock ends with its process, so nothing has to be
cleaned up.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import structlog

from cotenant.core.model.refusal import plural
from cotenant.node_agent.control.state_directory import AnotherAgent
from cotenant.node_agent.probes.inventory import machine_memory_bytes
from cotenant.node_agent.supervisor.lease import boot_id
from cotenant.v1 import resources_pb2

log = structlog.get_logger()

LOCK = "lock"
CLAIM_BYTES_MAX = 1 << 20
REASON_CHARACTERS_MAX = 200
NUMBERS = range(1 << 63)  # that a claim may hold
NOT_FILES = frozenset({errno.ELOOP, errno.ENXIO})  # a symbolic link, a socket
ANYWAY = (
    "end that agent, give each a part of the machine (serve agent --cpus --memory, up --nodes N), or accept that with "
    "--share-machine"
)
GIBIBYTE = 1 << 30


class MachineTaken(AnotherAgent):
    """Another agent of this user offers parts of this machine that this one would offer too."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What an agent offers of a machine. Memory in bytes; `machine_memory_bytes` is all that the machine has."""

    node_id: str
    state_dir: str
    pid: int
    cpus: tuple[int, ...]
    memory_bytes: int
    machine_memory_bytes: int

    def check(self) -> None:
        """Check the types and ranges of all fields. Raises `ValueError`."""
        for text in (self.node_id, self.state_dir):
            if not isinstance(text, str):
                raise ValueError(f"{text!r} is not text")
            text.encode()
        for number in (self.pid, self.memory_bytes, self.machine_memory_bytes, *self.cpus):
            if type(number) is not int or number not in NUMBERS:
                raise ValueError(f"{number!r} is not a number that a claim may hold")

    def conflict(self, others: list[Claim]) -> str:
        """Return what this claim has in common with others that are held, in words; "" where they fit together.

        >>> here = Claim("a", "/s", 1, (0, 1), 4, 8)
        >>> here.conflict([Claim("b", "/t", 7, (2, 3), 4, 8)])
        ''
        >>> here.conflict([Claim("b", "/t", 7, (1, 2), 4, 8)])
        "it would offer 1 CPU that node 'b' offers (process 7, state in /t)"
        """
        for other in others:
            where = f"(process {other.pid}, state in {other.state_dir})"
            if other.node_id == self.node_id:
                return f"this machine runs node {self.node_id!r} already {where}"
            if shared := set(self.cpus) & set(other.cpus):
                return f"it would offer {plural(len(shared), 'CPU')} that node {other.node_id!r} offers {where}"
        offered = self.memory_bytes + sum(other.memory_bytes for other in others)
        if others and offered > self.machine_memory_bytes:
            names = ", ".join(sorted(repr(other.node_id) for other in others))
            have = f"{self.machine_memory_bytes / GIBIBYTE:.1f} GiB"
            return f"with node {names} it would offer {offered / GIBIBYTE:.1f} GiB of memory, of {have}"
        return ""


def take_machine(node_id: str, state_dir: Path, inventory: resources_pb2.Inventory) -> list[int]:
    """Claim what an agent offers; returns the descriptors that hold the claim, none where it cannot be kept. Blocks.

    Raises:
        MachineTaken: another agent of this user offers some of it.
    """
    claim = Claim(
        node_id=node_id,
        state_dir=str(state_dir),
        pid=os.getpid(),
        cpus=tuple(sorted(cpu for core in inventory.cores for cpu in core.cpus)),
        memory_bytes=inventory.memory_bytes,
        machine_memory_bytes=machine_memory_bytes(),
    )
    directory = claims_directory(os.environ, boot_id())
    try:
        return [take(directory, claim)] if directory else []
    except OSError as error:
        log.warning("machine_not_claimed", error=str(error))
        return []


def claims_directory(environment: Mapping[str, str], boot: str) -> Path | None:
    """Make and return the directory of this user's claims in this boot of the machine; None where there can be none."""
    uid = os.geteuid()
    runtime = environment.get("XDG_RUNTIME_DIR") or f"/run/user/{uid}"
    cache = environment.get("XDG_CACHE_HOME") or str(Path(environment.get("HOME") or "/") / ".cache")
    for place in ("/run",) if uid == 0 else (runtime, cache):
        directory = Path(place) / "cotenant" / f"agents-{hashlib.sha256(boot.encode()).hexdigest()[:12]}"
        try:
            if not Path(place).is_dir():
                continue
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            log.info("claims_directory_refused", directory=str(directory), error=str(error))
            continue
        if all(_is_our_own(path, uid) for path in (directory, directory.parent)):
            return directory
        log.warning("claims_directory_refused", directory=str(directory), error="others may write it")
    return None


def _is_our_own(path: Path, uid: int) -> bool:
    found = path.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == uid and not found.st_mode & 0o022


def take(directory: Path, wanted: Claim) -> int:
    """Acquire a claim and return the descriptor that holds it. Blocks for a moment.

    Raises:
        MachineTaken: it does not fit together with those that are held.
        OSError: it cannot be written.
    """
    with _locked(directory / LOCK):
        if why := wanted.conflict(list(_held(directory))):
            raise MachineTaken(f"the agent of node {wanted.node_id!r} cannot start: {why}; {ANYWAY}")
        path = directory / f"{hashlib.sha256(wanted.node_id.encode()).hexdigest()[:24]}.json"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, 0)  # not before it is locked: another agent may hold it
            os.write(descriptor, json.dumps(asdict(wanted)).encode())
        except OSError:
            os.close(descriptor)
            raise
        return descriptor


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # held for a few file operations
        yield
    finally:
        os.close(descriptor)


def _held(directory: Path) -> Iterator[Claim]:
    """The claims of agents that live; what the others have left is removed. What is not a file is skipped."""
    for path in sorted(directory.glob("*.json")):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno not in NOT_FILES:
                raise
            log.warning("claim_unreadable", path=str(path), error=str(error))
            continue
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # a job of the same user may have made a FIFO here
            os.close(descriptor)
            log.warning("claim_unreadable", path=str(path), error="it is not a file")
            continue
        with open(descriptor, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if (claim := _read(file.read(CLAIM_BYTES_MAX))) is not None:
                    yield claim
            else:
                path.unlink(missing_ok=True)


def _read(text: bytes) -> Claim | None:
    try:
        fields = json.loads(text)
        claim = Claim(**{**fields, "cpus": tuple(fields["cpus"])})
        claim.check()
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        log.warning("claim_unreadable", error=str(error)[:REASON_CHARACTERS_MAX])
        return None
    return claim
