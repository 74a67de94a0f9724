"""The table of roles: whole, and enforced for each role and each method, over gRPC with real TLS."""

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
from tests.unit.rpc.test_channel import contract
from tools import roles

from cotenant.codec.errors import Problem
from cotenant.rpc.auth_interceptor import scope_of
from cotenant.rpc.channel import Channel, connect
from cotenant.rpc.server import Server
from cotenant.security import identity
from cotenant.security.certificates import Authority
from cotenant.security.credentials import Credentials
from cotenant.security.grpc_tls import TlsFiles, Watched
from cotenant.security.identity import Identity
from cotenant.security.permissions import ROLES, Role, Scope
from cotenant.security.server_security import Security
from cotenant.security.subjects import Bearer

METHODS = dict(contract())
OF_ONE = "?tenants=lab"
STUBS = {"AgentService": "node_service"}  # others have a file of their own name
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
CALLERS = {name: Bearer.parse(text).identity for name, text in BEARERS.items()}
# Written by hand, so that the table is held to something: whom each kind of method is for.
READS = ("Get", "List", "Watch", "Explain", "Summarize", "Simulate", "ReadLogs", "Estimate", "PlanProfile")
OF_AGENTS = {"Connect", "UploadOutput", "StreamSamples"}
OF_SERVICES = {
    "PlanPlacement",
    "StopAttempts",
    "ForgetAttempts",
    "AdviseAttempts",
    "WatchAttempts",
    "ForecastStarts",
    "ReadAttemptLogs",
    "Observe",
}


class Served:
    """All services of the contract on one server, none of them implemented: who gets that far was let in."""

    def __init__(self, channels: dict[str, Channel]) -> None:
        self.channels = channels

    async def call(self, path: str, caller: str, **metadata: str) -> Problem:
        descriptor = METHODS[path]
        streams = (descriptor.client_streaming, descriptor.server_streaming)
        asks, answers = ("stream" if one else "unary" for one in streams)
        call: Any = getattr(self.channels[caller]._inner, f"{asks}_{answers}")(path)
        made = call(iter([b""]) if asks == "stream" else b"", metadata=tuple(metadata.items()), timeout=20)
        return await problem_of(_drained(made) if answers == "stream" else made)


async def _drained(stream: Any) -> None:
    async for _ in stream:
        pass


@pytest_asyncio.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    """The server, and a channel for each caller with a certificate of its own."""
    authority = Authority(tmp_path)
    authority.create()
    certified = authority.issue(Bearer.parse("service/placement"), ["127.0.0.1"])
    files = TlsFiles(authority.cert_path, certified.path, certified.key_path)
    async with AsyncExitStack() as stack:
        server = Server(security=Security(authenticator=Credentials(), tls=Watched(files)))
        for service in {path.split("/")[1] for path in METHODS}:
            name = service.rpartition(".")[2]
            file = STUBS.get(name) or re.sub("(?<!^)([A-Z])", r"_\1", name).lower()
            module = import_module(f"cotenant.v1.{file}_pb2_grpc")
            server.add(getattr(module, f"add_{name}Servicer_to_server"), getattr(module, f"{name}Servicer")(), service)
        port = await server.start()
        stack.push_async_callback(server.stop, 0)
        channels: dict[str, Channel] = {}
        for name, text in BEARERS.items():
            own = authority.issue(Bearer.parse(text))
            mine = TlsFiles(authority.cert_path, own.path, own.key_path)
            channels[name] = await stack.enter_async_context(connect(f"127.0.0.1:{port}", tls=mine))
        yield Served(channels)


def test_every_method_of_the_contract_is_in_the_table_and_no_other() -> None:
    assert set(ROLES) == set(METHODS)
    for path, rule in ROLES.items():
        assert rule.scopes, path


def test_what_carries_a_request_id_changes_something_and_reads_do_not() -> None:
    planning = "/cotenant.v1.PlacementService/PlanPlacement"  # told by the history of the store
    for path, method in METHODS.items():
        if "request_id" in method.input_type.fields_by_name and path != planning:
            assert ROLES[path].changes, path
        if method.name.startswith(READS):
            assert not ROLES[path].changes, path


def test_the_table_says_what_is_written_by_hand() -> None:
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
    """Every caller calls every method; all that are let in meet services that know nothing."""
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
                )
                assert caller.name in problem.message


def test_what_tells_of_all_tenants_together_is_for_callers_of_all_of_them() -> None:
    path = "/cotenant.v1.ContentionService/ListIncidents"
    assert scope_of(CALLERS["viewer-of-all"], path, ROLES[path]) is Scope.ALL_TENANTS
    with pytest.raises(Problem, match="of some tenants only"):
        scope_of(CALLERS["viewer-of-lab"], path, ROLES[path])


# Speaking for others -----------------------------------------------------------------------------------------------

GET, DRAIN = "/cotenant.v1.JobService/GetJob", "/cotenant.v1.NodeService/DrainNode"


async def test_only_a_service_may_say_whose_call_it_passes_on(served: Served) -> None:
    key, value = identity.speaking_for(CALLERS["operator-1"])
    for name, caller in CALLERS.items():
        problem = await served.call(DRAIN, name, **{key: value})
        if Role.SERVICE in caller.roles:
            assert problem.code is grpc.StatusCode.UNIMPLEMENTED
        else:
            assert problem.reason == "SPEAKS_FOR_OTHERS", name
            assert problem.code is grpc.StatusCode.PERMISSION_DENIED


async def test_a_call_that_is_passed_on_is_judged_as_its_callers(served: Served) -> None:
    for name in ("viewer-of-lab", "user-of-all", "agent-n1"):
        key, value = identity.speaking_for(CALLERS[name])
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
async def test_a_service_that_speaks_unreadably_is_refused(served: Served, told: str) -> None:
    problem = await served.call(GET, "service-queue", **{identity.CALLER: told})
    assert (problem.code, problem.reason) == (grpc.StatusCode.PERMISSION_DENIED, "CALLER_UNREADABLE")


@pytest.mark.parametrize("name", sorted(CALLERS))
def test_an_identity_survives_being_passed_on(name: str) -> None:
    told = identity.speaking_for(CALLERS[name])
    read = identity.spoken_for(Identity("queue-2", frozenset({Role.SERVICE}), None), (told,))
    assert read == CALLERS[name]
    assert read.via == "queue-2"


def test_two_words_of_who_calls_are_one_too_many() -> None:
    told = identity.speaking_for(CALLERS["user-of-lab"])
    with pytest.raises(Problem, match="cannot be read"):
        identity.spoken_for(CALLERS["service-queue"], (told, told))


def test_the_page_shows_the_table_as_it_is() -> None:
    text = roles.PAGE.read_text()
    assert roles.page(text) == text, "`make docs` draws it anew"
