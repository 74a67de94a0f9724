"""The exceptions of the Python API, made from the structured errors of the services.

All derive from `CotenantError`. `reason` is stable and in UPPER_SNAKE_CASE, for programs; `hint` says what to do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from cotenant.cli.connection import command_error
from cotenant.cli.jobs.job_file import BadJobs
from cotenant.cli.name_lookup import NoMatch
from cotenant.cli.outcome import CommandError, ExitCode
from cotenant.codec import errors
from cotenant.deferred import Deferred, grpc
from cotenant.rpc.access import AccessError

if TYPE_CHECKING:
    from cotenant.codec.errors import Problem
    from cotenant.security import grpc_tls
else:
    grpc_tls = Deferred("cotenant.security.grpc_tls")

INVALID = "INVALID_ARGUMENT"


class BadField(NamedTuple):
    """A field of a request that is invalid, and why."""

    field: str
    description: str

    def __str__(self) -> str:
        """Return both on one line."""
        return f"{self.field}: {self.description}" if self.field else self.description


class CotenantError(Exception):
    """An error of Cotenant: what is wrong, its stable reason, and a hint what to do."""

    def __init__(self, message: str, *, reason: str = "", hint: str = "") -> None:
        super().__init__(f"{message}\nhint: {hint}" if hint else message)
        self.message = message
        self.reason = reason
        self.hint = hint


class NotConfigured(CotenantError):
    """No setting names the services, or the settings or credentials cannot be used."""


class NotFound(CotenantError):
    """There is no such job, array, node or tenant."""


class InvalidArgument(CotenantError, ValueError):
    """A request is invalid; `fields` names every bad field."""

    def __init__(
        self, message: str, *, reason: str = INVALID, hint: str = "", fields: tuple[BadField, ...] = ()
    ) -> None:
        super().__init__(message, reason=reason, hint=hint)
        self.fields = fields


class Unavailable(CotenantError):
    """A service cannot be reached, or has no leader now; the same call may succeed later."""

    retry_after_seconds: float | None = None


class Unauthenticated(CotenantError):
    """The token or certificate is missing or was refused."""


class PermissionDenied(CotenantError):
    """The caller may not do this."""


class AlreadyExists(CotenantError):
    """There already is an object with this id."""


class Conflict(CotenantError):
    """The object was changed concurrently; read it again and retry."""


class FailedPrecondition(CotenantError):
    """The state of the object or of the mesh forbids the call."""


class LimitExceeded(CotenantError):
    """A quota, the length of a queue or the size of a message is at its limit."""

    retry_after_seconds: float | None = None


class InternalError(CotenantError):
    """A service failed; the message names the incident in its log."""


class WaitTimeout(CotenantError, TimeoutError):
    """The job has not ended within the time-out; it keeps running."""


class JobFailed(CotenantError):
    """A job has failed: the reason, its exit code if a process decided it, and the last lines of its output."""

    def __init__(self, job_id: str, outcome: str, *, exit_code: int | None, log_tail: str = "") -> None:
        shown = f"\nlast output:\n{log_tail}" if log_tail else ""
        super().__init__(f"{job_id} {outcome}{shown}", reason=outcome)
        self.job_id = job_id
        self.exit_code = exit_code
        self.log_tail = log_tail


class JobCancelled(JobFailed):
    """A job was cancelled."""


_BY_CODE: Mapping[str, type[CotenantError]] = {
    "NOT_FOUND": NotFound,
    "INVALID_ARGUMENT": InvalidArgument,
    "OUT_OF_RANGE": InvalidArgument,
    "UNAVAILABLE": Unavailable,
    "DEADLINE_EXCEEDED": Unavailable,
    "UNAUTHENTICATED": Unauthenticated,
    "PERMISSION_DENIED": PermissionDenied,
    "ALREADY_EXISTS": AlreadyExists,
    "ABORTED": Conflict,
    "FAILED_PRECONDITION": FailedPrecondition,
    "RESOURCE_EXHAUSTED": LimitExceeded,
}


def from_problem(problem: Problem) -> CotenantError:
    """Return a service's error as the exception of its status."""
    kind = _BY_CODE.get(problem.code.name, InternalError)
    plain = command_error(problem)
    if kind is InvalidArgument:
        fields = tuple(BadField(one.field.removeprefix("spec."), one.description) for one in problem.violations)
        return InvalidArgument(
            _of_fields(fields) or plain.message, reason=problem.reason, hint=plain.hint, fields=fields
        )
    error = kind(plain.message, reason=problem.reason, hint=plain.hint)
    if isinstance(error, Unavailable | LimitExceeded):
        error.retry_after_seconds = problem.retry_after_seconds
    return error


def from_command_error(error: CommandError) -> CotenantError:
    """Return an error of the code that commands share as an exception of the API."""
    if isinstance(error, BadJobs):
        fields = tuple(BadField(one.label or one.place.source, one.message) for one in error.mistakes)
        return InvalidArgument(_of_fields(fields), fields=fields)
    message = "; ".join((error.message, *error.details))
    if isinstance(error, NoMatch):
        return NotFound(message, reason="NOT_FOUND", hint=error.hint)
    if error.code is ExitCode.USAGE:
        return InvalidArgument(message, hint=error.hint)
    return CotenantError(message, hint=error.hint)


def _of_fields(fields: tuple[BadField, ...]) -> str:
    return "; ".join(map(str, fields))


@contextmanager
def as_api_errors() -> Iterator[None]:
    """Raise the errors of calls, lookups and settings as exceptions of the API."""
    try:
        yield
    except CommandError as error:
        raise from_command_error(error) from None
    except (AccessError, grpc_tls.BadTls) as error:
        raise NotConfigured(str(error), reason="NOT_CONFIGURED") from None
    except grpc.aio.AioRpcError as error:
        raise from_problem(errors.from_error(error)) from None
