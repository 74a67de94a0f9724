"""Which method a request calls: the google.api.http rules of the public API, with their path variables.

A path such as `/v1/jobs/{id}:cancel` has segments, of which some are variables, and may end with an action. Each
variable is one segment. The rules leave no request to two methods; a test of the protos checks that.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import grpc
from google.protobuf import descriptor_pool, message_factory

from cotenant.codec import errors
from cotenant.codec.errors import Problem, Violation
from cotenant.core.spelling import nearest
from cotenant.transcoding.api_model import Api, ApiMethod
from cotenant.transcoding.http_errors import HttpError

VARIABLE = re.compile(r"\{([^}]*)\}")
SHOWN_LENGTH_MAX = 200
VARIABLE_LENGTH_MAX = 4_096


@dataclass(frozen=True, slots=True)
class Route:
    """A method of the API as HTTP calls it."""

    verb: str
    template: str
    segments: tuple[str, ...]  # a variable is in braces
    action: str  # after the colon, "" without one
    body: str  # "*", the name of a field, or ""
    service: str  # the full name of the gRPC service
    method: ApiMethod
    request: Any  # classes of messages
    response: Any

    @property
    def grpc_path(self) -> str:
        """The path by which gRPC calls the method."""
        return f"/{self.service}/{self.method.name}"

    @property
    def variables(self) -> list[str]:
        """The fields of the request that are in the path."""
        return VARIABLE.findall(self.template)

    def match(self, segments: list[str], action: str) -> dict[str, str] | None:
        """Return the variables of a path; None if it is another method's."""
        if action != self.action or len(segments) != len(self.segments):
            return None
        found = {}
        for wanted, given in zip(self.segments, segments, strict=True):
            if wanted.startswith("{"):
                if not given:
                    return None
                found[wanted[1:-1]] = given
            elif wanted != given:
                return None
        return found


class Routes:
    """All routes of an API."""

    def __init__(self, api: Api) -> None:
        import_messages(api)
        self.all = [
            route(service.full_name, method) for service in api.services for method in service.methods if method.http
        ]

    def find(self, verb: str, raw_path: str) -> tuple[Route, Mapping[str, str]]:
        """Return the method that a request calls, and the variables in its path, decoded.

        Raises:
            HttpError: 404 or 405, or 400 if the path is not UTF-8.
        """
        matches = self._matches(raw_path)
        for found, variables in matches:
            if found.verb == verb:
                return found, {name: _decoded(name, value) for name, value in variables.items()}
        if matches:
            allowed = sorted({found.verb for found, _ in matches})
            message = f"{_shown(raw_path)} is called with {' or '.join(allowed)}, not with {_shown(verb)}"
            problem = Problem(grpc.StatusCode.UNIMPLEMENTED, "METHOD_NOT_ALLOWED", message)
            raise HttpError(problem, 405, {"allow": ", ".join(allowed)})
        raise HttpError(self._unknown(raw_path))

    def _matches(self, raw_path: str) -> list[tuple[Route, dict[str, str]]]:
        """Return the routes of a path. What follows a colon is an action if a method has it, else part of a segment."""
        segments = raw_path.removeprefix("/").split("/")
        last, colon, action = segments[-1].rpartition(":")
        acting = [*segments[:-1], last] if colon else []
        found = [(one, one.match(acting, action)) for one in self.all if one.action]
        if all(variables is None for _, variables in found):
            found = [(one, one.match(segments, "")) for one in self.all if not one.action]
        return [(one, variables) for one, variables in found if variables is not None]

    def _unknown(self, raw_path: str) -> Problem:
        near = nearest(raw_path, dict.fromkeys(one.template for one in self.all))
        hint = f"did you mean {' or '.join(near)}?" if near else "GET /openapi.json describes all methods"
        return Problem(grpc.StatusCode.NOT_FOUND, "UNKNOWN_PATH", f"there is no method at {_shown(raw_path)}; {hint}")


def route(service: str, method: ApiMethod) -> Route:
    """Return the route of a method that has an HTTP rule."""
    assert method.http
    plain, _, action = VARIABLE.sub("{}", method.http.path).partition(":")
    names = iter(VARIABLE.findall(method.http.path))
    segments = tuple("{" + next(names) + "}" if part == "{}" else part for part in plain.split("/")[1:])
    return Route(
        method.http.verb,
        method.http.path,
        segments,
        action,
        method.http.body,
        service,
        method,
        message_class(method.request),
        message_class(method.response),
    )


def message_class(name: str) -> Any:
    """Return the class of a message of the public API."""
    return message_factory.GetMessageClass(descriptor_pool.Default().FindMessageTypeByName(name))


def import_messages(api: Api) -> None:
    """Import the modules of the API's services, by which its messages become known."""
    for file in {service.file for service in api.services}:
        importlib.import_module(file.removesuffix(".proto").replace("/", ".") + "_pb2")


def _decoded(name: str, value: str) -> str:
    try:
        found = unquote(value, errors="strict")
    except UnicodeDecodeError:
        raise HttpError(
            errors.invalid([Violation(name, "is not UTF-8 when its percent encoding is decoded")])
        ) from None
    if len(found) > VARIABLE_LENGTH_MAX:
        raise HttpError(errors.invalid([Violation(name, f"is longer than {VARIABLE_LENGTH_MAX} characters")]))
    return found


def _shown(text: str) -> str:
    return text if len(text) <= SHOWN_LENGTH_MAX else text[:SHOWN_LENGTH_MAX] + "…"
