"""Exceptions of the Python API, from the errors of services."""

from __future__ import annotations

from collections.abc import Callable

import grpc
import grpc.aio
import pytest

import cotenant
from cotenant.cli.name_lookup import NoMatch
from cotenant.cli.outcome import CommandError
from cotenant.client.errors import as_api_errors, from_problem
from cotenant.codec import errors
from cotenant.codec.errors import Problem, Violation
from cotenant.rpc.access import AccessError


@pytest.mark.parametrize(
    ("problem", "kind"),
    [
        (errors.not_found("job", "j1"), cotenant.NotFound),
        (errors.already_exists("tenant", "t1"), cotenant.AlreadyExists),
        (errors.conflict("job", "j1"), cotenant.Conflict),
        (errors.unavailable("no leader"), cotenant.Unavailable),
        (errors.failed_precondition("ARCHIVED_ELSEWHERE", "elsewhere"), cotenant.FailedPrecondition),
        (errors.exhausted("QUOTA", "full", 3.0), cotenant.LimitExceeded),
        (errors.unauthenticated("BAD_TOKEN", "no"), cotenant.Unauthenticated),
        (Problem(grpc.StatusCode.PERMISSION_DENIED, "DENIED", "no"), cotenant.PermissionDenied),
        (errors.internal("i1"), cotenant.InternalError),
        (Problem(grpc.StatusCode.DATA_LOSS, "DATA_LOSS", "?"), cotenant.InternalError),
    ],
    ids=lambda one: one.reason if isinstance(one, Problem) else "",
)
def test_each_status_has_its_exception(problem: Problem, kind: type[cotenant.CotenantError]) -> None:
    error = from_problem(problem)
    assert type(error) is kind
    assert error.reason == problem.reason
    assert problem.message in str(error)


def test_an_unavailable_service_says_when_to_retry() -> None:
    error = from_problem(errors.unavailable("no leader", 7.0))
    assert isinstance(error, cotenant.Unavailable)
    assert error.retry_after_seconds == 7.0


def test_bad_input_names_each_field_as_the_caller_wrote_it() -> None:
    error = from_problem(errors.invalid([Violation("spec.name", "is too long"), Violation("request_id", "is odd")]))
    assert isinstance(error, cotenant.InvalidArgument)
    assert [*error.fields] == [("name", "is too long"), ("request_id", "is odd")]
    assert str(error) == "name: is too long; request_id: is odd"
    assert isinstance(error, ValueError)


def test_a_rich_status_is_read_from_the_call() -> None:
    status = errors.to_status(errors.not_found("job", "j1"))
    trailers = grpc.aio.Metadata((errors.DETAILS_KEY, status.SerializeToString()))
    failed = grpc.aio.AioRpcError(grpc.StatusCode.NOT_FOUND, grpc.aio.Metadata(), trailers, status.message)
    with pytest.raises(cotenant.NotFound, match="there is no job 'j1'"), as_api_errors():
        raise failed


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: AccessError("no services are running"), cotenant.NotConfigured),
        (lambda: NoMatch("job 'x' not found", hint="list them"), cotenant.NotFound),
        (lambda: CommandError("the queue no longer reports j1"), cotenant.CotenantError),
    ],
)
def test_errors_of_the_shared_code_are_those_of_the_api(
    make: Callable[[], Exception], kind: type[cotenant.CotenantError]
) -> None:
    with pytest.raises(kind) as caught, as_api_errors():
        raise make()
    assert type(caught.value) is kind


def test_without_a_mesh_the_error_says_what_to_do(tmp_path: object) -> None:
    with pytest.raises(cotenant.NotConfigured, match="start them with `cotenant up`"):
        cotenant.Client(state_dir=str(tmp_path))


def test_a_failed_job_shows_the_end_of_its_output() -> None:
    error = cotenant.JobFailed("j1", "failed: rank 0 exited with code 3", exit_code=3, log_tail="boom")
    assert str(error) == "j1 failed: rank 0 exited with code 3\nlast output:\nboom"
    assert error.exit_code == 3
