"""Errors as HTTP answers: the status code for each gRPC code, and google.rpc.Status as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from types import MappingProxyType

from google.protobuf import json_format

from cotenant.codec import errors
from cotenant.codec.errors import Problem

# As google.rpc.Code has them.
HTTP_STATUS: Mapping[str, int] = MappingProxyType(
    {
        "CANCELLED": 499,
        "UNKNOWN": 500,
        "INVALID_ARGUMENT": 400,
        "DEADLINE_EXCEEDED": 504,
        "NOT_FOUND": 404,
        "ALREADY_EXISTS": 409,
        "PERMISSION_DENIED": 403,
        "UNAUTHENTICATED": 401,
        "RESOURCE_EXHAUSTED": 429,
        "FAILED_PRECONDITION": 400,
        "ABORTED": 409,
        "OUT_OF_RANGE": 400,
        "UNIMPLEMENTED": 501,
        "INTERNAL": 500,
        "UNAVAILABLE": 503,
        "DATA_LOSS": 500,
    }
)
CHALLENGE = 'Bearer realm="cotenant"'


class HttpError(Exception):
    """A refusal of the gateway itself; `status` is more exact than that of the problem's code, if it is not 0."""

    def __init__(self, problem: Problem, status: int = 0, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        super().__init__(problem.message)
        self.problem = problem
        self.status = status or HTTP_STATUS[problem.code.name]
        self.headers = headers


def problem_headers(problem: Problem) -> dict[str, str]:
    """Return the headers that say what the caller can do: authenticate, or try again later."""
    headers = {}
    if problem.code.name == "UNAUTHENTICATED":
        headers["www-authenticate"] = CHALLENGE
    if problem.retry_after_seconds is not None:
        headers["retry-after"] = str(max(1, math.ceil(problem.retry_after_seconds)))
    return headers


def problem_json(problem: Problem) -> str:
    """Return a problem as google.rpc.Status in JSON, with its details."""
    return json.dumps(json_format.MessageToDict(errors.to_status(problem)), ensure_ascii=False)
