"""The audit log: who did what, on what, from where, and what was answered. One line of JSON each, only ever appended.

What changes something is always told, and so is every call that was refused for who made it; reads where that is
wanted. A line holds names and ids, never a spec: commands and environments may hold secrets. The same lines go out as
OpenTelemetry logs where those are on.

Whether the file is still where it was is looked at once a second at most, for it costs more than the line itself. What
has been written since the last look went to the file that it was then: where that was moved away, it is there. Where it
was removed meanwhile, those lines are written once more, to the new one, so that none is lost.

A call that a replica passes on to its leader has a line at both. They have one `call`, which goes along in the
metadata; that of the replica says to whom it was `forwarded`, and the leader's is the one that counts.
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
import structlog
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from cotenant import telemetry
from cotenant.codec.errors import Problem
from cotenant.core.model.limits import REQUEST_BYTES_MAX, REQUEST_SPECS_BYTES_MAX
from cotenant.security.identity import Identity, Metadata
from cotenant.security.limits import TOO_MANY_AT_ONCE, TOO_MANY_CALLS, TOO_MUCH_PROCESSING
from cotenant.security.permissions import Rule

log = structlog.get_logger()

AUDIT_FILE = "audit.jsonl"
FORWARDED = "cotenant-forwarded"  # metadata of a call that was passed on: it is not passed on again
CALL = "cotenant-call"  # the same: what both of its lines are known by
CALL_ID = re.compile("[0-9a-f]{16}")
FILES = 10  # beside the one that is appended to
TEXT_LENGTH_MAX = 256
NOT_ANSWERED = "NOT_ANSWERED"
LOOK_SECONDS = 1.0
STRANGERS_PER_SECOND, STRANGERS_AT_ONCE = 10.0, 1_000  # lines
FIELDS_TOLD = ("id", "job_id", "node_id", "gpu_uuid", "number")
REFUSED_FOR_WHO = frozenset({grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED})

lines_lost = telemetry.counter("cotenant.audit.lost", "{line}", "Lines of the audit log that could not be written.")


class Strangers:
    """How many lines are written of callers that nobody knows: without a bound they would turn all others out.

    >>> clock = iter([0.0, 0.0, 0.0, 0.1]).__next__
    >>> strangers = Strangers(per_second=10.0, at_once=1, now=clock)
    >>> strangers.take(), strangers.take(), strangers.take()
    (0, None, 1)
    """

    def __init__(
        self,
        per_second: float = STRANGERS_PER_SECOND,
        at_once: int = STRANGERS_AT_ONCE,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._per_second, self._at_once, self._now = per_second, at_once, now
        self._left, self._since, self._left_out = float(at_once), now(), 0

    def take(self) -> int | None:
        """Tell how many were left out before this line; None where it is left out too."""
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
    """Appends to one file. Several processes may share it: each line is one write to a file opened with O_APPEND.

    A file that has come to `bytes_max` is moved to `….1`, the one before it to `….2` and so on, `files` of them; 0 lets
    it grow. Where it was moved away, also by somebody else, a new one is begun within `LOOK_SECONDS`. A line that
    cannot be written is told in the log, and the call goes on. `clock` is monotonic.
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
        self.strangers = Strangers()
        self._descriptor = -1
        self._inode = (0, 0)
        self._size = 0  # as of the last look, and with what was written since; others may have written too
        self._cut = False  # the last line is not whole
        self._looked = -LOOK_SECONDS
        self._since: list[bytes] = []  # lines since the last look

    def entry(self, method: str, rule: Rule, peer: str, metadata: Metadata = ()) -> Entry:
        """Begin a line; the call that is being served has it from now on."""
        entry = Entry(self, method, peer, always=rule.changes, reads=self._reads)
        told = dict(metadata or ())
        if FORWARDED in told and CALL_ID.fullmatch(str(told.get(CALL))):
            entry.call = str(told[CALL])
        _serving.set(entry)
        return entry

    async def append(self, line: Mapping[str, Any]) -> None:
        """Write a line, and wait until it is on disk where that is wanted."""
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
            self._turn()

    def _write(self, descriptor: int, line: bytes) -> None:
        """Write a line at one stroke; what follows one that was cut off begins a line of its own."""
        line = b"\n" * self._cut + line
        written = os.write(descriptor, line)
        self._cut = written < len(line)
        self._size += written
        if self._cut:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._since.append(line)

    def _turn(self) -> None:
        """Move the file away, unless another process has done so meanwhile; where that fails it goes on growing."""
        self._looked = self._clock() - LOOK_SECONDS  # whatever comes of it, the next line looks
        try:
            lock = os.open(f"{self._path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                found = os.stat(self._path)
                if (found.st_dev, found.st_ino) == self._inode:
                    for path, older in pairwise(turned(self._path, self._files)):
                        with suppress(FileNotFoundError):
                            os.replace(older, path)
            finally:
                os.close(lock)
        except FileNotFoundError:
            pass  # somebody else has moved it
        except OSError as error:
            log.error("audit_log_not_turned", path=str(self._path), error=error.strerror)

    def _open(self) -> int:
        """Return the file's descriptor; the file is looked for by name now and then, since it may have been moved."""
        now = self._clock()
        if self._descriptor >= 0 and now - self._looked < LOOK_SECONDS:
            return self._descriptor
        if self._descriptor >= 0:
            held = os.fstat(self._descriptor)
            self._size = held.st_size
            if held.st_nlink:
                self._since.clear()  # they are there, perhaps under another name
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
        """Whether the open file is still found by its name."""
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


def turned(path: Path, files: int) -> list[Path]:
    """Name a log's files, the oldest first.

    >>> [str(one) for one in turned(Path("a.jsonl"), 2)]
    ['a.jsonl.2', 'a.jsonl.1', 'a.jsonl']
    """
    return [*(path.with_name(f"{path.name}.{number}") for number in range(files, 0, -1)), path]


def passed_on(to: str) -> str:
    """Note to which address the call that is served is passed on, "" where to none; returns what it is known by."""
    entry = _serving.get()
    if entry is None:
        return secrets.token_hex(8)
    entry.forwarded = to
    return entry.call


async def begun() -> None:
    """Tell of the stream that is being served, now that it is known who serves it."""
    entry = _serving.get()
    if entry is not None and entry.stream is not None:
        request, entry.stream = entry.stream, None
        await entry.answered(request, None)


class Entry:
    """One call's line, while it is being served."""

    __slots__ = (
        "_always", "_audit", "_begun", "_method", "_peer", "_reads", "call", "forwarded", "identity", "stream"
    )  # fmt: skip  # one to a line would be a screen

    def __init__(self, audit: Audit, method: str, peer: str, *, always: bool, reads: bool) -> None:
        self._audit, self._method, self._peer, self._always, self._reads = audit, method, peer, always, reads
        self._begun = time.monotonic()
        self.identity: Identity | None = None
        self.call = secrets.token_hex(8)
        self.forwarded = ""  # to which address, if it was
        self.stream: Any = None  # the request of one of which is still to be told

    async def answered(self, request: Any, response: Any) -> None:
        """The call was served."""
        if not (self._reads or self._always):
            return
        asked = self._read(request, "input_type")
        if self._reads or not getattr(asked, "validate_only", False):
            await self._append({**target(self._read(response, "output_type")), **target(asked)}, "OK")

    async def refused(self, request: Any, problem: Problem) -> None:
        """The call was not. Who calls too often has no line for each of these calls, nor has who is not known."""
        told = self._always or self._reads or problem.code in REFUSED_FOR_WHO
        if not told or problem.reason in (TOO_MANY_CALLS, TOO_MUCH_PROCESSING, TOO_MANY_AT_ONCE):
            return
        left_out = self._audit.strangers.take() if self.identity is None else 0
        if left_out is not None:
            on = target(self._read(request, "input_type"))
            await self._append(on, problem.code.name, problem.reason, **({"left_out": left_out} if left_out else {}))

    async def left(self, request: Any) -> None:
        """The call was not answered: its caller went, or this server. What it was to change may be changed."""
        asked = self._read(request, "input_type")
        if self.identity is not None and (self._reads or (self._always and not getattr(asked, "validate_only", False))):
            await self._append(target(asked), grpc.StatusCode.CANCELLED.name, NOT_ANSWERED)

    def _read(self, message: Any, kind: str) -> Any:
        """Read a message that is passed on as it came; what cannot be read tells nothing."""
        if not isinstance(message, bytes):
            return message
        if len(message) > (REQUEST_BYTES_MAX if self.identity is None else REQUEST_SPECS_BYTES_MAX):
            return None  # nobody is to have this process decode what it refuses
        try:
            return _class_of(self._method, kind).FromString(message)
        except (KeyError, DecodeError):
            return None

    async def _append(self, on: Mapping[str, Any], answer: str, reason: str = "", **more: Any) -> None:
        who = self.identity
        line = {
            "who": who.name if who else "",
            "roles": sorted(who.roles) if who else [],
            "what": self._method.rpartition("/")[2],
            "on": dict(on),
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


_serving: ContextVar[Entry | None] = ContextVar("serving", default=None)


@cache
def _class_of(method: str, kind: str) -> Any:
    """Find the class of a method's requests or answers.

    Raises:
        KeyError: there is no such method.
    """
    described = descriptor_pool.Default().FindMethodByName(method[1:].replace("/", "."))
    return message_factory.GetMessageClass(getattr(described, kind))


def target(message: Any) -> Mapping[str, Any]:
    """Say by ids and names what a request or an answer is about.

    >>> from cotenant.v1.job_service_pb2 import CancelJobRequest
    >>> target(CancelJobRequest(id="0abc"))
    {'id': '0abc'}
    """
    fields = getattr(getattr(message, "DESCRIPTOR", None), "fields_by_name", None)
    if fields is None:
        return {}  # a stream
    told: dict[str, Any] = {
        name: _short(value) for name in FIELDS_TOLD if name in fields and (value := getattr(message, name))
    }
    for inner in ("job", "tenant", "node"):
        if inner in fields and fields[inner].message_type is not None and (value := getattr(message, inner).id):
            told["id"] = _short(value)
    if "spec" in fields:
        told |= {"name": _short(message.spec.name), "tenant": _short(message.spec.tenant)}
    if "attempts" in fields:
        told["attempts"] = [f"{_short(one.job_id)}/{one.number}" for one in message.attempts[:20]]
    return told


def _short(value: Any) -> Any:
    return value[:TEXT_LENGTH_MAX] if isinstance(value, str) else value
