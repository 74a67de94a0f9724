"""What callers of unknown methods are told, over the wire."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any

import grpc
import pytest
from tests.unit.rpc.conftest import TOKEN, problem_of
from tests.unit.rpc.conftest import Mesh as Mesh
from tests.unit.rpc.conftest import mesh as mesh

from cotenant.codec.errors import Problem
from cotenant.codec.unknown_methods import packages, similar_methods
from cotenant.security.credentials import Credentials
from cotenant.security.permissions import ROLES
from cotenant.security.server_security import Security
from cotenant.security.subjects import Subject
from cotenant.security.tokens import TokenFile

OLD = "/cotenant.v1.AgentService/Connect"  # the agents' stream before it had a package of its own


async def called(mesh: Mesh, path: str, kind: str = "unary_unary", token: str = TOKEN) -> Problem:
    call: Any = getattr(mesh.channel()._inner, kind)(path)
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    made = call(iter([b""]) if kind.startswith("stream") else b"", metadata=metadata, timeout=60)
    return await problem_of(made if kind.endswith("unary") else made.read())


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream", "stream_unary", "stream_stream"])
async def test_an_old_clients_call_is_told_where_its_method_went(mesh: Mesh, kind: str) -> None:
    await mesh.serve()
    problem = await called(mesh, OLD, kind)
    assert (problem.code, problem.reason) == (grpc.StatusCode.UNIMPLEMENTED, "UNKNOWN_METHOD")
    assert problem.metadata["hint"] == "/cotenant.agent.v1.AgentService/Connect"
    assert "cotenant.v1, cotenant.agent.v1" in problem.message
    assert problem.metadata["version"] in problem.message


@pytest.mark.parametrize("path", ["/cotenant.v7.Nothing/Xyzzy", "/x", "/a/b/c", "/cotenant.v1.JobService/", "//"])
async def test_any_path_gets_an_answer(mesh: Mesh, path: str) -> None:
    await mesh.serve()
    problem = await called(mesh, path)
    assert (problem.code, problem.reason) == (grpc.StatusCode.UNIMPLEMENTED, "UNKNOWN_METHOD")
    assert "hint" not in problem.metadata


async def test_a_stranger_learns_nothing(mesh: Mesh) -> None:
    await mesh.serve()
    for path in (OLD, "/cotenant.v1.JobService/GetJob"):
        problem = await called(mesh, path, token="")
        assert problem.code is grpc.StatusCode.UNAUTHENTICATED
        assert "AgentService" not in problem.message


async def test_private_methods_keep_their_roles(mesh: Mesh, tmp_path: Any) -> None:
    file = TokenFile(tmp_path / "tokens.json")
    _, token = file.create(Subject.parse("user/eve?tenants=lab"))
    await mesh.serve(token=None, security=Security(Credentials("", file)))
    for path in ("/cotenant.internal.v1.PlacementService/PlanPlacement", "/cotenant.agent.v1.AgentService/Connect"):
        assert (await called(mesh, path, token=token)).reason == "ROLE_MAY_NOT"
    assert (await called(mesh, "/cotenant.v1.Nothing/Xyzzy", token=token)).reason == "UNKNOWN_METHOD"


@pytest.mark.deep
async def test_unknown_paths_are_not_kept(mesh: Mesh) -> None:
    """Callers choose them: 2,000 of 4 KiB each would stay as 8 MB."""
    await mesh.serve()
    channel, metadata = mesh.channel()._inner, (("authorization", f"Bearer {TOKEN}"),)

    async def call(path: str) -> None:
        assert (await problem_of(channel.unary_unary(path)(b"", metadata=metadata))).reason == "UNKNOWN_METHOD"

    await call("/warm.up/" + "x" * 4_000)
    tracemalloc.start()
    try:
        for index in range(2_000):
            await call(f"/p{index}.S/" + "x" * 4_000)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < 4_000_000
    finally:
        tracemalloc.stop()


def test_hints_name_existing_methods_in_packages_of_the_api() -> None:
    for path in ROLES:
        assert path in similar_methods(path.replace(".v1.", ".v0."))
        assert path[1:].split("/")[0].rpartition(".")[0] in packages()
