"""The audit log: who did what, on what, from where, and the answer. One line of JSON each, append-only.

Calls that change something are always logged, and so are calls that were refused because of their caller; reads are
optional. A line holds names and IDs, never a spec: commands and environments may contain secrets. Only of a session, in
which somebody acts inside a job, it holds the beginning of the command. The same lines are exported as OpenTelemetry
logs if those are enabled.

Whether the file is still in place is checked at most once a second, because the check costs more than the line itself.
Lines written since the last check went to the file as it was then: if that was moved away, they are in it. If it was
deleted, those lines are written again to the new file, so that none is lost.

A call that a process forwards to the leader, or routes to the service that answers, has a line at both. Both lines have
the same `call`, which is forwarded in the metadata; the line of the process that was asked names the other address in
`forwarded`, and the line of the process that answered is authoritative.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from cotenant import telemetry
from cotenant.codec.errors import Problem
from cotenant.core.model.limits import REQUEST_BYTES_MAX, REQUEST_SPECS_BYTES_MAX
from cotenant.security.identity import Identity, Metadata
from cotenant.security.limits import TOO_MANY_CALLS, TOO_MANY_CONCURRENT, TOO_MUCH_PROCESSING
from cotenant.security.permissions import Rule
from cotenant.telemetry.plain_structlog import structlog

log = structlog.get_logger()

AUDIT_FILE = "audit.jsonl"
FORWARDED = "cotenant-forwarded"  # metadata of a forwarded call: it is not forwarded again
ROUTED = "cotenant-routed"  # metadata of a call that was passed to the service that answers: it is not routed again
CALL = "cotenant-call"  # metadata of both: the ID of the lines of a call
CALL_ID = re.compile("[0-9a-f]{16}")
FILES = 10  # beside the current file
TEXT_LENGTH_MAX = 256
NOT_ANSWERED = "NOT_ANSWERED"
LOOK_SECONDS = 1.0
UNAUTHENTICATED_PER_SECOND, UNAUTHENTICATED_AT_ONCE = 10.0, 1_000  # lines
LOGGED_BY_SERVICER = frozenset({"/cotenant.v1.JobService/OpenSession"})  # streams with a target in their first message
TARGET_FIELDS = ("id", "job_id", "node_id", "gpu_uuid", "number")
CALLER_REJECTIONS = frozenset({grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED})

lines_lost = telemetry.counter("cotenant.audit.lost", "{line}", "Audit log lines that could not be written.")


class UnauthenticatedRate:
    """The rate of lines for unknown callers: without a limit they would rotate all other lines away.

    >>> clock = iter([0.0, 0.0, 0.0, 0.1]).__next__
    >>> unauthenticated_rate = UnauthenticatedRate(per_second=10.0, at_once=1, now=clock)
    >>> unauthenticated_rate.take(), unauthenticated_rate.take(), unauthenticated_rate.take()
    (0, None, 1)
    """

    def __init__(
        self,
        per_second: float = UNAUTHENTICATED_PER_SECOND,
        at_once: int = UNAUTHENTICATED_AT_ONCE,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._per_second, self._at_once, self._now = per_second, at_once, now
        self._left, self._since, self._left_out = float(at_once), now(), 0

    def take(self) -> int | None:
        """Return how many lines were left out before this one; None if this one is left out too."""
        now = self._now()
        self._left = min(float(self._at_once), self._left + (now - self._since) * self._per_second)
        self._since = now
        if self._left < 1:
            self._left_out += 1
            return None
        self._left -= 1
        told, self._left_out = self._left_out, 0
        return told


class Audit:
    """Appends to one file. Several processes may share it: each line is a single write to a file opened with O_APPEND.

    A file that has reached `bytes_max` is renamed to `….1`, the previous one to `….2` and so on, up to `files`; with 0
    it grows without limit. If it was renamed, by this process or another, a new file is created within `LOOK_SECONDS`.
    A line that cannot be written is logged, and the call proceeds. `clock` is monotonic.
    """

    def __init__(
        self,
        path: Path,
        service: str,
        *,
        reads: bool = False,
        fsync: bool = False,
        bytes_max: int = 0,
        files: int = FILES,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path, self._service, self._reads, self._fsync = path, service, reads, fsync
        self._now, self._clock = now, clock
        self._bytes_max, self._files = bytes_max, max(1, files)
        self.unauthenticated_rate = UnauthenticatedRate()
        self._descriptor = -1
        self._inode = (0, 0)
        self._size = 0  # as of the last check plus own writes; others may write too
        self._cut = False  # the last line is truncated
        self._looked = -LOOK_SECONDS
        self._since: list[bytes] = []  # lines since the last check

    def entry(self, method: str, rule: Rule, peer: str, metadata: Metadata = ()) -> AuditEntry:
        """Return a new entry, which becomes the entry of the current call."""
        entry = AuditEntry(self, method, peer, always=rule.changes, reads=self._reads)
        told = dict(metadata or ())
        if (FORWARDED in told or ROUTED in told) and CALL_ID.fullmatch(str(told.get(CALL))):
            entry.call = str(told[CALL])
        _serving.set(entry)
        return entry

    async def append(self, line: Mapping[str, Any]) -> None:
        """Write a line, and wait until it is on disk if `fsync` is set."""
        told = {"time": datetime.fromtimestamp(self._now(), UTC).isoformat(), "service": self._service, **line}
        telemetry.emit("audit", told)
        try:
            descriptor = self._open()
            text = json.dumps(told, ensure_ascii=True, separators=(",", ":"), default=str)
            self._write(descriptor, text.encode() + b"\n")
            if self._fsync:
                await asyncio.to_thread(os.fsync, descriptor)
        except OSError as error:
            lines_lost.add()
            log.error("audit_line_lost", path=str(self._path), error=error.strerror, **line)
            return
        if self._bytes_max and self._size >= self._bytes_max:
            self._rotate()

    def _write(self, descriptor: int, line: bytes) -> None:
        """Write a line in one system call; a line after a truncated one starts on a new line."""
        line = b"\n" * self._cut + line
        written = os.write(descriptor, line)
        self._cut = written < len(line)
        self._size += written
        if self._cut:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._since.append(line)

    def _rotate(self) -> None:
        """Rename the file, unless another process has done so; if that fails it keeps growing."""
        self._looked = self._clock() - LOOK_SECONDS  # the next line checks the file in any case
        try:
            lock = os.open(f"{self._path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                found = os.stat(self._path)
                if (found.st_dev, found.st_ino) == self._inode:
                    for path, older in pairwise(rotated(self._path, self._files)):
                        with suppress(FileNotFoundError):
                            os.replace(older, path)
            finally:
                os.close(lock)
        except FileNotFoundError:
            pass  # another process has renamed it
        except OSError as error:
            log.error("audit_log_rotation_failed", path=str(self._path), error=error.strerror)

    def _open(self) -> int:
        """Return the file's descriptor; now and then check that the file was not renamed or deleted."""
        now = self._clock()
        if self._descriptor >= 0 and now - self._looked < LOOK_SECONDS:
            return self._descriptor
        if self._descriptor >= 0:
            held = os.fstat(self._descriptor)
            self._size = held.st_size
            if held.st_nlink:
                self._since.clear()  # they still exist, perhaps under another name
            if self._is_there():
                self._looked = now
                return self._descriptor
        self.close()
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        made = os.fstat(self._descriptor)
        self._inode, self._size, self._looked = (made.st_dev, made.st_ino), made.st_size, now
        removed, self._since = self._since, []
        for line in removed:
            self._write(self._descriptor, line)
        return self._descriptor

    def _is_there(self) -> bool:
        """Return whether the open file still has its name."""
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            return False
        return (found.st_dev, found.st_ino) == self._inode

    def close(self) -> None:
        """Close the file; a later line opens it again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def rotated(path: Path, files: int) -> list[Path]:
    """Return the files of a log, the oldest first.

    >>> [str(one) for one in rotated(Path("a.jsonl"), 2)]
    ['a.jsonl.2', 'a.jsonl.1', 'a.jsonl']
    """
    return [*(path.with_name(f"{path.name}.{number}") for number in range(files, 0, -1)), path]


def record_forwarding(to: str) -> str:
    """Record the address to which the current call is forwarded, "" if it is not; return the call's ID."""
    entry = _serving.get()
    if entry is None:
        return secrets.token_hex(8)
    entry.forwarded = to
    return entry.call


def note_target(on: Mapping[str, Any]) -> None:
    """Note what the current stream is about, which only its servicer knows."""
    if entry := _serving.get():
        entry.on = {name: _short(value) for name, value in on.items()}


async def log_stream(*, by_servicer: bool = False) -> None:
    """Log the current stream, now that it is known which replica serves it.

    Where it is not forwarded, the servicer itself logs a stream whose target is in its first message.
    """
    entry = _serving.get()
    if entry is None or (entry.method in LOGGED_BY_SERVICER and not entry.forwarded and not by_servicer):
        return
    if entry.stream is not None:
        request, entry.stream = entry.stream, None
        await entry.answered(request, None)


class AuditEntry:
    """The audit line of a call, while it is being served."""

    __slots__ = (
        "_always", "_audit", "_begun", "_peer", "_reads", "call", "forwarded", "identity", "method", "on", "stream"
    )  # fmt: skip  # one per line would fill a screen

    def __init__(self, audit: Audit, method: str, peer: str, *, always: bool, reads: bool) -> None:
        self._audit, self.method, self._peer, self._always, self._reads = audit, method, peer, always, reads
        self._begun = time.monotonic()
        self.identity: Identity | None = None
        self.call = secrets.token_hex(8)
        self.forwarded = ""  # the address it was forwarded to
        self.stream: Any = None  # the request of a stream that is not logged yet
        self.on: Mapping[str, Any] = {}  # what a stream is about, if its servicer has noted it

    async def answered(self, request: Any, response: Any) -> None:
        """Log a call that was served."""
        if not (self._reads or self._always):
            return
        asked = self._read(request, "input_type")
        if self._reads or not getattr(asked, "validate_only", False):
            await self._append({**target(self._read(response, "output_type")), **target(asked)}, "OK")

    async def refused(self, request: Any, problem: Problem) -> None:
        """Log a refused call. Callers over their limits get no line per call, and unknown callers only some."""
        told = self._always or self._reads or problem.code in CALLER_REJECTIONS
        if not told or problem.reason in (TOO_MANY_CALLS, TOO_MUCH_PROCESSING, TOO_MANY_CONCURRENT):
            return
        left_out = self._audit.unauthenticated_rate.take() if self.identity is None else 0
        if left_out is not None:
            on = target(self._read(request, "input_type"))
            await self._append(on, problem.code.name, problem.reason, **({"left_out": left_out} if left_out else {}))

    async def left(self, request: Any) -> None:
        """Log a call without an answer: its caller or this server went away. Its changes may have been made."""
        asked = self._read(request, "input_type")
        if self.identity is not None and (self._reads or (self._always and not getattr(asked, "validate_only", False))):
            await self._append(target(asked), grpc.StatusCode.CANCELLED.name, NOT_ANSWERED)

    def _read(self, message: Any, kind: str) -> Any:
        """Decode a message that is still bytes; return None if it cannot be decoded."""
        if not isinstance(message, bytes):
            return message
        if len(message) > (REQUEST_BYTES_MAX if self.identity is None else REQUEST_SPECS_BYTES_MAX):
            return None  # do not decode what the server would reject
        try:
            return _class_of(self.method, kind).FromString(message)
        except (KeyError, DecodeError):
            return None

    async def _append(self, on: Mapping[str, Any], answer: str, reason: str = "", **more: Any) -> None:
        who = self.identity
        line = {
            "who": who.name if who else "",
            "roles": sorted(who.roles) if who else [],
            "what": self.method.rpartition("/")[2],
            "on": {**on, **self.on},
            "from": self._peer,
            "answer": answer,
            "ms": round((time.monotonic() - self._begun) * 1000, 1),
            "call": self.call,
        }
        if self.forwarded:
            line["forwarded"] = self.forwarded
        if who and who.via:
            line["via"] = who.via
        if reason:
            line["reason"] = reason
        await self._audit.append(line | more)


_serving: ContextVar[AuditEntry | None] = ContextVar("serving", default=None)


@cache
def _class_of(method: str, kind: str) -> Any:
    """Return the class of a method's requests or responses.

    Raises:
        KeyError: there is no such method.
    """
    described = descriptor_pool.Default().FindMethodByName(method[1:].replace("/", "."))
    return message_factory.GetMessageClass(getattr(described, kind))


def target(message: Any) -> Mapping[str, Any]:
    """Return the IDs and names that a request or a response is about.

    >>> from cotenant.v1.job_service_pb2 import CancelJobRequest
    >>> target(CancelJobRequest(id="0abc"))
    {'id': '0abc'}
    """
    fields = getattr(getattr(message, "DESCRIPTOR", None), "fields_by_name", None)
    if fields is None:
        return {}  # a stream
    told: dict[str, Any] = {
        name: _short(value) for name in TARGET_FIELDS if name in fields and (value := getattr(message, name))
    }
    for inner in ("job", "array", "tenant", "node"):
        if inner in fields and fields[inner].message_type is not None and (value := getattr(message, inner).id):
            told["id"] = _short(value)
    if "spec" in fields:
        told |= {"name": _short(message.spec.name), "tenant": _short(message.spec.tenant)}
    if "attempts" in fields:
        told["attempts"] = [f"{_short(one.job_id)}/{one.number}" for one in message.attempts[:20]]
    return told


def _short(value: Any) -> Any:
    return value[:TEXT_LENGTH_MAX] if isinstance(value, str) else value
