"""What a caller of an unknown method is told: which packages this mesh speaks, and where the method may have gone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import metadata

import grpc

from cotenant.codec.errors import Problem
from cotenant.codec.method_table import METHOD_RULES
from cotenant.core.spelling import nearest

UNKNOWN_METHOD = "UNKNOWN_METHOD"
NOT_SERVED_HERE = "NOT_SERVED_HERE"
PATH_LENGTH_MAX = 200
HINTS_MAX = 3


def unknown_method(path: str) -> Problem:
    """Return the problem of a call to a method that this mesh does not have.

    >>> unknown_method("/cotenant.v1.AgentService/Connect").metadata["hint"]
    '/cotenant.agent.v1.AgentService/Connect'
    """
    shown = path if len(path) <= PATH_LENGTH_MAX else path[:PATH_LENGTH_MAX] + "…"
    message = f"there is no method {shown}; this is Cotenant {_version()}, which speaks {', '.join(packages())}"
    near = similar_methods(path[: 2 * PATH_LENGTH_MAX])
    details = {"version": _version(), "packages": ",".join(packages())}
    if near:
        message += f"; did you mean {' or '.join(near)}?"
        details["hint"] = ",".join(near)
    return Problem(grpc.StatusCode.UNIMPLEMENTED, UNKNOWN_METHOD, message, metadata=details)


def not_served_here(path: str, home: str) -> Problem:
    """Return the problem of a call to a private method that another service serves; such calls are not routed."""
    message = f"{path} is served by {home}; call that service itself, at its own address"
    return Problem(grpc.StatusCode.UNIMPLEMENTED, NOT_SERVED_HERE, message, metadata={"service": home})


@cache
def packages() -> Sequence[str]:
    """Return the packages of the API, the public one first."""
    found = {path[1:].split("/")[0].rpartition(".")[0] for path in METHOD_RULES}
    return sorted(found, key=lambda package: (package.count("."), package))


def similar_methods(path: str) -> list[str]:
    """Return methods that a caller may have meant: of the same name elsewhere, else of a similar name.

    >>> similar_methods("/cotenant.v1.JobService/GetJobs")[0]
    '/cotenant.v1.JobService/GetJob'
    >>> similar_methods("/cotenant.v2.JobService/GetJob")
    ['/cotenant.v1.JobService/GetJob']
    """
    service, _, name = path[1:].rpartition("/")
    service = service.rpartition(".")[2]
    same = [known for known in METHOD_RULES if known.endswith(f"/{name}")]
    same.sort(key=lambda known: not known.endswith(f".{service}/{name}"))
    if same:
        return same[:HINTS_MAX]
    in_service = {known.rpartition("/")[2]: known for known in METHOD_RULES if f".{service}/" in known}
    return [in_service[one] for one in nearest(name, in_service)][:HINTS_MAX]


@cache
def _version() -> str:
    return metadata.version("cotenant")
