"""Errors of the API: one exception type, encoded as google.rpc.Status.

A servicer raises a `Problem`; the server sends it as a rich status; a client decodes it with `from_error`. The reason
is stable and in UPPER_SNAKE_CASE, so that programs decide by it and the message may be improved at any time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from google.protobuf.message import DecodeError

from cotenant.codec.handshake import handshake_failure
from cotenant.core.model.limits import VIOLATIONS_MAX
from cotenant.core.model.validation import Violation, shown
from cotenant.core.spelling import nearest
from cotenant.deferred import error_details_pb2, grpc, status_pb2

__all__ = [
    "Problem",
    "Violation",
    "already_exists",
    "conflict",
    "exhausted",
    "failed_precondition",
    "from_error",
    "internal",
    "invalid",
    "not_found",
    "to_status",
    "unauthenticated",
    "unavailable",
]

DOMAIN = "cotenant"
DETAILS_KEY = "grpc-status-details-bin"  # fixed by gRPC
MESSAGE_BYTES_MAX = 768  # clients reject trailers above 8 KiB, which hold the message percent-encoded
STATUS_BYTES_MAX = 3584  # and the status, with the message again, in base64
RETRY_AFTER_SECONDS_DEFAULT = 1.0
NO_LEADER = "NO_LEADER"  # the service has no leader now; nothing was done
NOT_LEADER = "NOT_LEADER"  # the called replica no longer leads; nothing was done


class Problem(Exception):
    """An error that the caller should know about, with what it can do."""

    def __init__(
        self,
        code: grpc.StatusCode,
        reason: str,
        message: str,
        *,
        metadata: Mapping[str, str] | None = None,
        violations: Sequence[Violation] = (),
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.metadata = dict(metadata or {})
        self.violations = tuple(violations)
        self.retry_after_seconds = retry_after_seconds

    def __repr__(self) -> str:
        return f"Problem({self.code.name}, {self.reason}, {self.message!r})"


def invalid(violations: Sequence[Violation]) -> Problem:
    """Return the problem of invalid input; the message names every bad field, or the first of very many.

    >>> invalid([Violation("spec.name", "is longer than 253 characters")]).message
    'spec.name: is longer than 253 characters'
    """
    message = "; ".join(f"{violation.field}: {violation.description}" for violation in violations[:VIOLATIONS_MAX])
    if len(violations) > VIOLATIONS_MAX:
        message += f"; and {len(violations) - VIOLATIONS_MAX} more"
    return Problem(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT", message or "bad input", violations=violations)


def not_found(kind: str, id: str, near: Iterable[str] = ()) -> Problem:
    """Return the problem of a missing object; the most similar of the existing IDs in `near` are suggested.

    >>> not_found("job", "resnet-1", near=["resnet-7", "bert"]).message
    "there is no job 'resnet-1'; did you mean 'resnet-7'?"
    """
    similar = nearest(id, near)
    hint = f"; did you mean {' or '.join(shown(name) for name in similar)}?" if similar else ""
    return Problem(
        grpc.StatusCode.NOT_FOUND,
        f"{kind.upper().replace(' ', '_')}_NOT_FOUND",
        f"there is no {kind} {shown(id)}{hint}",
        metadata={"kind": kind, "id": id},
    )


def already_exists(kind: str, id: str) -> Problem:
    """Return the problem that an object already exists."""
    return Problem(
        grpc.StatusCode.ALREADY_EXISTS,
        f"{kind.upper().replace(' ', '_')}_EXISTS",
        f"there already is a {kind} {shown(id)}",
        metadata={"kind": kind, "id": id},
    )


def conflict(kind: str, id: str, message: str = "") -> Problem:
    """Return the problem that an object has changed since the caller read it."""
    return Problem(
        grpc.StatusCode.ABORTED,
        "ETAG_MISMATCH",
        message or f"{kind} {shown(id)} has changed since its etag was read; read it again",
        metadata={"kind": kind, "id": id},
    )


def unavailable(
    message: str,
    retry_after_seconds: float = RETRY_AFTER_SECONDS_DEFAULT,
    reason: str = "UNAVAILABLE",
) -> Problem:
    """Return a temporary problem; the same call may succeed soon."""
    return Problem(grpc.StatusCode.UNAVAILABLE, reason, message, retry_after_seconds=retry_after_seconds)


def failed_precondition(reason: str, message: str, **metadata: str) -> Problem:
    """Return the problem that the system's state forbids a call until that state changes."""
    return Problem(grpc.StatusCode.FAILED_PRECONDITION, reason, message, metadata=metadata)


def exhausted(reason: str, message: str, retry_after_seconds: float | None = None, **metadata: str) -> Problem:
    """Return the problem that a limit is reached: a quota, a queue's length, a message's size."""
    return Problem(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        reason,
        message,
        metadata=metadata,
        retry_after_seconds=retry_after_seconds,
    )


def unauthenticated(reason: str, message: str) -> Problem:
    """Return the problem that the caller is not authenticated."""
    return Problem(grpc.StatusCode.UNAUTHENTICATED, reason, message)


def internal(incident: str) -> Problem:
    """Return the problem of a server error; the server's log has the details under this ID, the caller gets no more."""
    return Problem(
        grpc.StatusCode.INTERNAL,
        "INTERNAL",
        f"internal error; see incident {incident} in the server's log",
        metadata={"incident": incident},
    )


def to_status(problem: Problem) -> Any:
    """Encode a problem as google.rpc.Status, small enough for the trailers."""
    status = status_pb2.Status(code=problem.code.value[0], message=_clipped(problem.message))
    status.details.add().Pack(
        error_details_pb2.ErrorInfo(reason=problem.reason, domain=DOMAIN, metadata=_fitting(problem.metadata))
    )
    if problem.retry_after_seconds is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(round(problem.retry_after_seconds * 1e9))
        status.details.add().Pack(retry)
    if problem.violations:
        room = STATUS_BYTES_MAX - status.ByteSize()
        status.details.add().Pack(_bad_request(problem.violations, room))
    return status


def from_error(error: Exception) -> Problem:
    """Return the problem of a failed call: its rich status if there is one, else its plain status."""
    call = cast("Any", error)  # every error of a call is also a grpc.Call
    code: grpc.StatusCode = call.code()
    for key, value in call.trailing_metadata() or ():
        if key == DETAILS_KEY and (problem := _from_rich(code, value)):
            return problem
    return _from_plain(code, call.details() or "")


def _bad_request(violations: Sequence[Violation], room_bytes: int) -> Any:
    """Return as many violations as fit, and the number of the others."""
    bad = error_details_pb2.BadRequest()
    for index, violation in enumerate(violations):
        bad.field_violations.add(field=violation.field, description=_clipped(violation.description))
        if bad.ByteSize() > room_bytes - 150:  # leave room for the line below
            del bad.field_violations[-1]
            bad.field_violations.add(field="", description=f"and {len(violations) - index} more")
            break
    return bad


def _fitting(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the first entries that fit, each clipped."""
    kept, room_bytes = {}, MESSAGE_BYTES_MAX
    for key, value in metadata.items():
        short = _clipped(value, MESSAGE_BYTES_MAX // 4)
        room_bytes -= len(key.encode()) + len(short.encode())
        if room_bytes < 0:
            break
        kept[key] = short
    return kept


def _clipped(text: str, bytes_max: int = MESSAGE_BYTES_MAX) -> str:
    """Cut a text so that it stays valid UTF-8, and mark the cut."""
    encoded = text.encode()
    if len(encoded) <= bytes_max:
        return text
    return encoded[: bytes_max - 3].decode(errors="ignore") + "…"


def _from_rich(code: grpc.StatusCode, encoded: bytes) -> Problem | None:
    """Decode a rich status; return None if it is damaged or its code differs from the call's."""
    info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    told_retry = False
    try:
        status = status_pb2.Status.FromString(encoded)
        for detail in status.details:
            if not detail.Unpack(info):
                told_retry |= detail.Unpack(retry)
                detail.Unpack(bad)
    except DecodeError:
        return None
    if status.code != code.value[0]:
        return None
    return Problem(
        code,
        info.reason or code.name,
        status.message,
        metadata=dict(info.metadata),
        violations=[Violation(one.field, one.description) for one in bad.field_violations],
        retry_after_seconds=retry.retry_delay.ToNanoseconds() / 1e9 if told_retry else None,
    )


PLAIN_MESSAGES = {
    "UNAVAILABLE": "the service cannot be reached",
    "DEADLINE_EXCEEDED": "no answer within the call's deadline",
    "UNAUTHENTICATED": "the caller is not authenticated",
    "PERMISSION_DENIED": "the caller may not do this",
    "UNIMPLEMENTED": "the service at this address does not implement this call",
    "CANCELLED": "the call was cancelled",
    "RESOURCE_EXHAUSTED": "a limit was reached",
}


_CLOSED_AT_ONCE = re.compile(r"(failed to connect|connections to all).*: Socket closed$")
_TOO_LARGE = re.compile(r"(CLIENT|SERVER)?:? ?Received message larger than max \((\d+) vs\. (\d+)\)")


def _too_large(reader: str, size: int, most: int) -> str:
    """Return what to do about a message that its reader refused unread, by gRPC's name for the reader."""
    if reader == "CLIENT":
        return f"the answer has {size:,} bytes; this client reads at most {most:,} bytes: ask for smaller pages"
    return (
        f"the request has {size:,} bytes; the server reads at most {most:,} bytes: send less at once, "
        "or let an operator raise `message_bytes` in the server's [limits]"
    )


def _from_plain(code: grpc.StatusCode, details: str) -> Problem:
    if size := _TOO_LARGE.search(details):
        return exhausted("MESSAGE_TOO_LARGE", _too_large(size[1], int(size[2]), int(size[3])))
    if code is grpc.StatusCode.UNAVAILABLE and (handshake := handshake_failure(details)):
        return Problem(code, *handshake)
    if code is grpc.StatusCode.UNAVAILABLE and _CLOSED_AT_ONCE.search(details):
        message = "the server closes each connection at once: it may require TLS or a certificate, or be full"
        return Problem(code, code.name, message)
    words = PLAIN_MESSAGES.get(code.name)
    message = f"{words}: {details}" if words and details else words or details or code.name
    return Problem(code, code.name, message)
