"""The role table is complete, and enforced for each role and each method, over gRPC with real TLS."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from tests.unit.rpc.conftest import problem_of
from tools import methods, roles

from cotenant.codec.errors import Problem
from cotenant.rpc.auth_interceptor import scope_of
from cotenant.rpc.channel import Channel, connect
from cotenant.rpc.server import Server
from cotenant.security import identity
from cotenant.security.certificates import Authority
from cotenant.security.credentials import Credentials
from cotenant.security.grpc_tls import TlsFiles, WatchedTlsFiles
from cotenant.security.identity import Identity
from cotenant.security.permissions import ROLES, Role, Scope
from cotenant.security.server_security import Security
from cotenant.security.subjects import Subject

METHODS = dict(methods.methods())
OF_ONE = "?tenants=lab"
BEARERS = {
    "viewer-of-all": "viewer/viewer-of-all?tenants=*",
    "user-of-all": "user/user-of-all?tenants=*",
    "admin-of-all": "tenant-admin/admin-of-all?tenants=*",
    "viewer-of-lab": f"viewer/viewer-of-lab{OF_ONE}",
    "user-of-lab": f"user/user-of-lab{OF_ONE}",
    "admin-of-lab": f"tenant-admin/admin-of-lab{OF_ONE}",
    "operator-1": "operator/operator-1",
    "agent-n1": "agent/n1",
    "service-queue": "service/queue",
}
CALLERS = {name: Subject.parse(text).identity for name, text in BEARERS.items()}
# Written by hand, as a check of the table: which roles each kind of method is for.
READS = ("Get", "List", "Watch", "Explain", "Summarize", "Simulate", "ReadLogs", "Estimate", "PlanProfile")
OF_AGENTS = {"Connect", "UploadOutput", "ServeSession", "StreamSamples", "ReadChunks", "ReadSecrets"}
OF_SERVICES = {
    "OpenAttemptSession",
    "PlanPlacement",
    "StopAttempts",
    "ForgetAttempts",
    "AdviseAttempts",
    "ResizeReplicas",
    "WatchAttempts",
    "ForecastStarts",
    "ReadAttemptLogs",
    "Observe",
}


# gRPC's client loses the answer to a stream that the server has refused before the request was written.
LOST_ANSWER, TRIES_MAX = "Internal error from Core", 20


class Served:
    """All services of the API on one server, none of them implemented: UNIMPLEMENTED means that a call was admitted."""

    def __init__(self, channels: dict[str, Channel]) -> None:
        self.channels = channels

    async def call(self, path: str, caller: str, **metadata: str) -> Problem:
        descriptor = METHODS[path]
        streams = (descriptor.client_streaming, descriptor.server_streaming)
        asks, answers = ("stream" if one else "unary" for one in streams)
        call: Any = getattr(self.channels[caller]._inner, f"{asks}_{answers}")(path)
        for _ in range(TRIES_MAX):
            made = call(iter([b""]) if asks == "stream" else b"", metadata=tuple(metadata.items()), timeout=60)
            problem = await problem_of(_drained(made) if answers == "stream" else made)
            if problem.message != LOST_ANSWER:
                break
        return problem


async def _drained(stream: Any) -> None:
    async for _ in stream:
        pass


@pytest_asyncio.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    """Yield the server, and a channel for each caller with its own certificate."""
    authority = Authority(tmp_path)
    authority.create()
    certified = authority.issue(Subject.parse("service/placement"), ["127.0.0.1"])
    files = TlsFiles(authority.cert_path, certified.path, certified.key_path)
    async with AsyncExitStack() as stack:
        server = Server(security=Security(authenticator=Credentials(), tls=WatchedTlsFiles(files)))
        for service in {path.split("/")[1] for path in METHODS}:
            package, _, name = service.rpartition(".")
            file = re.sub("(?<!^)([A-Z])", r"_\1", name).lower()
            module = import_module(f"{package}.{file}_pb2_grpc")
            server.add(getattr(module, f"add_{name}Servicer_to_server"), getattr(module, f"{name}Servicer")(), service)
        port = await server.start()
        stack.push_async_callback(server.stop, 0)
        channels: dict[str, Channel] = {}
        for name, text in BEARERS.items():
            own = authority.issue(Subject.parse(text))
            mine = TlsFiles(authority.cert_path, own.path, own.key_path)
            channels[name] = await stack.enter_async_context(connect(f"127.0.0.1:{port}", tls=mine))
        yield Served(channels)


def test_the_role_table_has_exactly_the_methods_of_the_api() -> None:
    assert set(ROLES) == set(METHODS)
    for path, rule in ROLES.items():
        assert rule.scopes, path


def test_methods_with_a_request_id_are_changes_and_others_are_reads() -> None:
    planning = "/cotenant.internal.v1.PlacementService/PlanPlacement"  # the store's history has it
    for path, method in METHODS.items():
        if "request_id" in method.input_type.fields_by_name and path != planning:
            assert ROLES[path].changes, path
        if method.name.startswith(READS):
            assert not ROLES[path].changes, path


def test_the_table_matches_the_list_in_this_test() -> None:
    for path, rule in ROLES.items():
        name = path.rpartition("/")[2]
        assert (Role.AGENT in rule.scopes) == (name in OF_AGENTS), path
        assert (set(rule.scopes) == {Role.SERVICE}) == (name in OF_SERVICES), path
        if name in OF_AGENTS:
            assert dict(rule.scopes) == {Role.AGENT: Scope.OWN_NODE}
        if rule.changes:
            assert Role.VIEWER not in rule.scopes, path
        if "Tenant" in name and not name.startswith(READS):
            assert Role.TENANT_ADMIN not in rule.scopes, path
        widest = [rule.scopes.get(role, 0) for role in (Role.VIEWER, Role.USER, Role.TENANT_ADMIN, Role.OPERATOR)]
        if name not in OF_SERVICES | OF_AGENTS:
            assert widest == sorted(widest), f"{path}: a higher role may do less"


async def test_each_role_gets_as_far_with_each_method_as_the_table_says(served: Served) -> None:
    """Every caller calls every method; admitted calls reach services that implement nothing."""
    for path, rule in ROLES.items():
        for name, caller in CALLERS.items():
            allowed = caller.scope(rule) is not None
            problem = await served.call(path, name)
            if allowed:
                assert problem.code is grpc.StatusCode.UNIMPLEMENTED, (path, name, problem)
            else:
                assert (problem.code, problem.reason) == (grpc.StatusCode.PERMISSION_DENIED, "ROLE_MAY_NOT"), (
                    path,
                    name,
                    problem,
                )
                assert caller.name in problem.message


def test_methods_over_all_tenants_are_for_callers_of_all_tenants() -> None:
    path = "/cotenant.v1.ContentionService/ListIncidents"
    assert scope_of(CALLERS["viewer-of-all"], path, ROLES[path]) is Scope.ALL_TENANTS
    with pytest.raises(Problem, match="limited to some tenants"):
        scope_of(CALLERS["viewer-of-lab"], path, ROLES[path])


# Acting on behalf of others ------------------------------------------------------------------------------------------

GET, DRAIN = "/cotenant.v1.JobService/GetJob", "/cotenant.v1.NodeService/DrainNode"


async def test_only_a_service_may_act_on_behalf_of_others(served: Served) -> None:
    key, value = identity.on_behalf_header(CALLERS["operator-1"])
    for name, caller in CALLERS.items():
        problem = await served.call(DRAIN, name, **{key: value})
        if Role.SERVICE in caller.roles:
            assert problem.code is grpc.StatusCode.UNIMPLEMENTED
        else:
            assert problem.reason == "SPEAKS_FOR_OTHERS", name
            assert problem.code is grpc.StatusCode.PERMISSION_DENIED


async def test_a_forwarded_call_is_authorized_as_its_callers(served: Served) -> None:
    for name in ("viewer-of-lab", "user-of-all", "agent-n1"):
        key, value = identity.on_behalf_header(CALLERS[name])
        problem = await served.call(DRAIN, "service-queue", **{key: value})
        assert problem.reason == "ROLE_MAY_NOT"
        assert CALLERS[name].name in problem.message


@pytest.mark.parametrize(
    "told",
    [
        "",
        "{",
        "null",
        "[]",
        '"operator"',
        "{}",
        "[" * 4000,
        json.dumps({"name": "eve", "roles": ["god"], "tenants": None, "node": ""}),
        json.dumps({"name": "eve", "roles": "operator", "tenants": None, "node": ""}),
        json.dumps({"name": "eve", "roles": ["operator"], "tenants": "lab", "node": ""}),
        json.dumps({"name": "eve", "roles": ["operator"], "tenants": [1], "node": ""}),
        json.dumps({"name": "", "roles": ["operator"], "tenants": None, "node": ""}),
        json.dumps({"name": "eve\nroot", "roles": ["operator"], "tenants": None, "node": ""}),
        json.dumps({"name": "eve", "roles": [["operator"]], "tenants": None, "node": ""}),
        json.dumps({"name": "eve", "roles": ["operator"], "tenants": ["x" * 5000], "node": ""}),
    ],
)
async def test_a_service_with_invalid_caller_metadata_is_rejected(served: Served, told: str) -> None:
    problem = await served.call(GET, "service-queue", **{identity.CALLER: told})
    assert (problem.code, problem.reason) == (grpc.StatusCode.PERMISSION_DENIED, "CALLER_UNREADABLE")


@pytest.mark.parametrize("name", sorted(CALLERS))
def test_an_identity_survives_forwarding(name: str) -> None:
    told = identity.on_behalf_header(CALLERS[name])
    read = identity.acting_identity(Identity("queue-2", frozenset({Role.SERVICE}), None), (told,))
    assert read == CALLERS[name]
    assert read.via == "queue-2"


def test_two_caller_headers_are_rejected() -> None:
    told = identity.on_behalf_header(CALLERS["user-of-lab"])
    with pytest.raises(Problem, match="invalid caller metadata"):
        identity.acting_identity(CALLERS["service-queue"], (told, told))


def test_the_page_shows_the_current_role_table() -> None:
    text = roles.PAGE.read_text()
    assert roles.page(text) == text, "`make docs` redraws it"
