"""Keeps two agents of one user from offering the same CPUs or memory of a machine, or from using the same node id.

Each agent holds a locked file that describes what it offers, in a directory that only its user can write: other users
cannot block an agent. Agents of different users do not see each other's claims; placement compares the nodes of one
machine (see `cotenant.services.placement.registry.node_claims`). A lock ends with its process, so stale claims need no
cleanup.
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
from cotenant.node_agent.control.state_directory import AgentAlreadyRunning
from cotenant.node_agent.probes.inventory import machine_memory_bytes
from cotenant.node_agent.supervisor.lease import boot_id
from cotenant.v1 import resources_pb2

log = structlog.get_logger()

LOCK = "lock"
CLAIM_BYTES_MAX = 1 << 20
REASON_CHARACTERS_MAX = 200
NUMBERS = range(1 << 63)  # valid in a claim
NOT_FILES = frozenset({errno.ELOOP, errno.ENXIO})  # a symbolic link, a socket
HINT = (
    "stop that agent, give each agent a part of the machine (serve agent --cpus --memory, up --nodes N), or allow "
    "sharing with --share-machine"
)
GIBIBYTE = 1 << 30


class MachineClaimConflict(AgentAlreadyRunning):
    """Another agent of this user already offers parts of this machine that this agent would offer."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What an agent offers of a machine. Memory is in bytes; `machine_memory_bytes` is the machine's total."""

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
                raise ValueError(f"{number!r} is not a valid number in a claim")

    def conflict(self, others: list[Claim]) -> str:
        """Return how this claim conflicts with others that are held; "" if it does not.

        >>> here = Claim("a", "/s", 1, (0, 1), 4, 8)
        >>> here.conflict([Claim("b", "/t", 7, (2, 3), 4, 8)])
        ''
        >>> here.conflict([Claim("b", "/t", 7, (1, 2), 4, 8)])
        "it would offer 1 CPU that node 'b' already offers (process 7, state in /t)"
        """
        for other in others:
            where = f"(process {other.pid}, state in {other.state_dir})"
            if other.node_id == self.node_id:
                return f"this machine already runs node {self.node_id!r} {where}"
            if shared := set(self.cpus) & set(other.cpus):
                return f"it would offer {plural(len(shared), 'CPU')} that node {other.node_id!r} already offers {where}"
        offered = self.memory_bytes + sum(other.memory_bytes for other in others)
        if others and offered > self.machine_memory_bytes:
            names = ", ".join(sorted(repr(other.node_id) for other in others))
            have = f"{self.machine_memory_bytes / GIBIBYTE:.1f} GiB"
            return f"with node {names} it would offer {offered / GIBIBYTE:.1f} GiB of memory, of {have}"
        return ""


def claim_machine(node_id: str, state_dir: Path, inventory: resources_pb2.Inventory) -> list[int]:
    """Claim what an agent offers; return the descriptors that hold the claim, empty if it cannot be stored. Blocks.

    Raises:
        MachineClaimConflict: another agent of this user offers some of it.
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
        return [acquire_claim(directory, claim)] if directory else []
    except OSError as error:
        log.warning("machine_claim_failed", error=str(error))
        return []


def claims_directory(environment: Mapping[str, str], boot: str) -> Path | None:
    """Return this user's directory of claims for this boot, created if needed; None if no safe directory exists."""
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
        log.warning("claims_directory_refused", directory=str(directory), error="other users can write to it")
    return None


def _is_our_own(path: Path, uid: int) -> bool:
    found = path.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == uid and not found.st_mode & 0o022


def acquire_claim(directory: Path, wanted: Claim) -> int:
    """Acquire a claim and return the descriptor that holds it. Blocks for a moment.

    Raises:
        MachineClaimConflict: it conflicts with claims that are held.
        OSError: it cannot be written.
    """
    with _locked(directory / LOCK):
        if why := wanted.conflict(list(_live_claims(directory))):
            raise MachineClaimConflict(f"the agent of node {wanted.node_id!r} cannot start: {why}; {HINT}")
        path = directory / f"{hashlib.sha256(wanted.node_id.encode()).hexdigest()[:24]}.json"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, 0)  # only once locked: another agent may hold it
            os.write(descriptor, json.dumps(asdict(wanted)).encode())
        except OSError:
            os.close(descriptor)
            raise
        return descriptor


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # held only for a few file operations
        yield
    finally:
        os.close(descriptor)


def _live_claims(directory: Path) -> Iterator[Claim]:
    """Yield the claims of live agents and remove those of dead ones. Anything but a regular file is skipped."""
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
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # a job of the same user may have created a FIFO here
            os.close(descriptor)
            log.warning("claim_unreadable", path=str(path), error="not a regular file")
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
