from __future__ import annotations

import operator

import grpc
import pytest
from google.rpc import error_details_pb2
from hypothesis import given
from hypothesis import strategies as st

from cotenant.codec import errors
from cotenant.codec.errors import Problem, Violation

TRAILERS_BYTES_MAX = 8192  # what a gRPC client takes by default, all keys together


class FailedCall(Exception):
    """A failed call as a client sees it, without a network."""

    def __init__(self, code: grpc.StatusCode, details: str, trailers: tuple[tuple[str, bytes], ...] = ()) -> None:
        super().__init__(details)
        self._code, self._details, self._trailers = code, details, trailers

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        return self._trailers


def sent(problem: Problem) -> FailedCall:
    status = errors.to_status(problem)
    return FailedCall(problem.code, status.message, ((errors.DETAILS_KEY, status.SerializeToString()),))


short = st.text(max_size=20)
problems = st.builds(
    Problem,
    st.sampled_from([code for code in grpc.StatusCode if code is not grpc.StatusCode.OK]),
    st.from_regex(r"[A-Z_]{1,20}", fullmatch=True),
    short,
    metadata=st.dictionaries(short, short, max_size=3),
    violations=st.lists(st.builds(Violation, short, short), max_size=4),
    retry_after_seconds=st.none() | st.integers(0, 10**6).map(lambda milliseconds: milliseconds / 1000),
)


@given(problems)
def test_a_problem_arrives_as_it_was_sent(problem: Problem) -> None:
    arrived = errors.from_error(sent(problem))
    assert vars(arrived) == vars(problem)


def test_details_are_readable_by_other_clients() -> None:
    problem = errors.unavailable("busy", retry_after_seconds=2.5)
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    first, second = errors.to_status(problem).details
    assert first.Unpack(info)
    assert second.Unpack(retry)
    assert (info.domain, info.reason) == ("cotenant", "UNAVAILABLE")
    assert (retry.retry_delay.seconds, retry.retry_delay.nanos) == (2, 500_000_000)


long = st.builds(operator.mul, st.sampled_from(["x", "π", "𝄞"]), st.integers(0, 3000))


@given(st.integers(0, 2000), long, st.dictionaries(st.text(max_size=300), long, max_size=20))
def test_every_problem_fits_into_the_trailers(count: int, text: str, metadata: dict[str, str]) -> None:
    violations = [Violation(f"spec.roles[{index}].replicas", text) for index in range(count)]
    problem = Problem(grpc.StatusCode.INVALID_ARGUMENT, "X", text * 3, metadata=metadata, violations=violations)
    status = errors.to_status(problem)
    in_base_64 = len(status.SerializeToString()) * 4 / 3
    in_percent_code = 3 * len(status.message.encode())
    assert in_base_64 + in_percent_code < TRAILERS_BYTES_MAX - 500


def test_violations_that_do_not_fit_are_counted() -> None:
    problem = errors.invalid([Violation(f"spec.roles[{index}].replicas", "must be positive") for index in range(500)])
    arrived = errors.from_error(sent(problem))
    kept = len(arrived.violations) - 1
    assert 10 < kept < 500
    assert arrived.violations[-1].description == f"and {500 - kept} more"
    assert arrived.violations[0] == problem.violations[0]


def test_a_missing_object_is_named_with_a_suggestion() -> None:
    problem = errors.not_found("tenant", "vison", near=["vision", "speech"])
    assert problem.reason == "TENANT_NOT_FOUND"
    assert problem.message == "there is no tenant 'vison'; did you mean 'vision'?"
    assert problem.metadata == {"kind": "tenant", "id": "vison"}


def test_a_conflict_says_what_to_do() -> None:
    problem = errors.conflict("job", "a")
    assert (problem.code, problem.reason) == (grpc.StatusCode.ABORTED, "ETAG_MISMATCH")
    assert "read it again" in problem.message


@pytest.mark.parametrize(
    ("code", "details", "message"),
    [
        (grpc.StatusCode.UNAVAILABLE, "connection refused", "the service cannot be reached: connection refused"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "", "no answer within the call's deadline"),
        (grpc.StatusCode.UNAUTHENTICATED, "", "the caller is not authenticated"),
        (grpc.StatusCode.OUT_OF_RANGE, "", "OUT_OF_RANGE"),
        (grpc.StatusCode.UNKNOWN, "odd", "odd"),
    ],
)
def test_a_plain_status_is_explained(code: grpc.StatusCode, details: str, message: str) -> None:
    problem = errors.from_error(FailedCall(code, details))
    assert (problem.code, problem.reason, problem.message) == (code, code.name, message)


def test_contradicting_or_undecodable_details_are_ignored() -> None:
    rich = errors.to_status(errors.not_found("job", "a")).SerializeToString()
    contradicting = FailedCall(grpc.StatusCode.INTERNAL, "odd", ((errors.DETAILS_KEY, rich),))
    garbled = FailedCall(grpc.StatusCode.INTERNAL, "odd", ((errors.DETAILS_KEY, b"\xff\xff\xff"),))
    for error in (contradicting, garbled):
        assert vars(errors.from_error(error)) == vars(Problem(grpc.StatusCode.INTERNAL, "INTERNAL", "odd"))


def test_a_status_of_another_system_keeps_its_message() -> None:
    status = errors.to_status(errors.unavailable("busy"))
    del status.details[:]
    error = FailedCall(grpc.StatusCode.UNAVAILABLE, "busy", ((errors.DETAILS_KEY, status.SerializeToString()),))
    problem = errors.from_error(error)
    assert (problem.reason, problem.message, problem.retry_after_seconds) == ("UNAVAILABLE", "busy", None)
