"""The queue's API for secrets: what is kept, who may read it, and what jobs without it wait for."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.unit.services.mesh import BACKFILL, Mesh, eventually, reason, running

from cotenant.security.secret_keys import KEYS_FILE, SecretKeys
from cotenant.services.queue.jobs.secret_gate import SECRETS
from cotenant.v1 import job_pb2, secret_service_pb2_grpc
from cotenant.v1 import secret_service_pb2 as pb
from cotenant.v1.job_service_pb2 import CancelJobRequest
from cotenant.v1.tenant_service_pb2 import CreateTenantRequest, DeleteTenantRequest, Tenant

VALUE = b"hf_s3cret-value"
USES = [job_pb2.SecretUse(name="HF_TOKEN", variable="HF_TOKEN")]


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with running(queue_config=replace(BACKFILL, secret_keys=tmp_path / KEYS_FILE)) as mesh:
        yield mesh


def secrets(mesh: Mesh) -> Any:
    return secret_service_pb2_grpc.SecretServiceStub(mesh.channel("queue"))


async def set_secret(mesh: Mesh, name: str = "HF_TOKEN", value: bytes = VALUE, tenant: str = "") -> pb.Secret:
    answer = await secrets(mesh).SetSecret(pb.SetSecretRequest(name=name, value=value, tenant=tenant))
    return answer.secret  # type: ignore[no-any-return]  # the stub is untyped


async def read(mesh: Mesh, job_id: str, node_id: str = "n1", number: int = 1) -> dict[str, bytes]:
    request = pb.ReadSecretsRequest(job_id=job_id, number=number, node_id=node_id)
    return {one.name: one.value for one in (await secrets(mesh).ReadSecrets(request)).secrets}


async def refusal_of(call: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return reason(refused.value)


async def test_a_value_is_stored_encrypted_and_goes_only_to_the_node_that_launches_the_job(mesh: Mesh) -> None:
    made = await set_secret(mesh)
    assert (made.name, made.tenant, made.size_bytes) == ("HF_TOKEN", "default", len(VALUE))
    await mesh.agent("n1", gpus=1)
    job_id = await mesh.submit(secrets=USES)
    await mesh.reach(job_id, "RUNNING")
    assert await read(mesh, job_id) == {"HF_TOKEN": VALUE}
    for other in ({"node_id": "n2"}, {"number": 2}):
        assert await refusal_of(read(mesh, job_id, **other)) == "NOT_PLACED_HERE"
    listed = (await secrets(mesh).ListSecrets(pb.ListSecretsRequest())).secrets
    assert [(one.name, one.size_bytes) for one in listed] == [("HF_TOKEN", len(VALUE))]
    [key] = await mesh.records_left(SECRETS)
    everything = (await mesh.store.list("")).entries
    assert not [entry.key for entry in everything if VALUE in entry.value]
    assert key == f"{SECRETS}default/HF_TOKEN"


async def test_a_job_with_an_unknown_secret_is_refused_with_the_command_that_sets_it(mesh: Mesh) -> None:
    await set_secret(mesh, tenant="other")  # another tenant's is as unknown
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await mesh.submit(secrets=USES)
    assert reason(refused.value) == "SECRET_UNKNOWN"
    assert "tenant default has no secret HF_TOKEN" in str(refused.value.details())


async def test_a_job_whose_secret_was_deleted_waits_until_it_is_set_again(mesh: Mesh) -> None:
    await set_secret(mesh)
    job_id = await mesh.submit(secrets=USES)
    await secrets(mesh).DeleteSecret(pb.DeleteSecretRequest(name="HF_TOKEN"))
    await mesh.agent("n1", gpus=1)
    other = await mesh.submit()
    await mesh.reach(other, "RUNNING")
    waiting = await mesh.refused(job_id, "SECRETS")
    assert waiting.refusal.remedy == "`cotenant secrets set HF_TOKEN --tenant default` sets it"
    await mesh.jobs.CancelJob(CancelJobRequest(id=other))
    await set_secret(mesh, value=b"new")
    await mesh.reach(job_id, "RUNNING")
    assert await read(mesh, job_id) == {"HF_TOKEN": b"new"}


async def test_secrets_survive_a_restart_and_a_rotation_of_keys(mesh: Mesh, tmp_path: Path) -> None:
    await set_secret(mesh)
    await mesh.agent("n1", gpus=1)
    fresh = SecretKeys(tmp_path / KEYS_FILE).rotate()

    async def resealed() -> bool:
        [entry] = (await mesh.store.list(SECRETS)).entries
        return fresh.encode() in entry.value

    await eventually(resealed)
    keys = json.loads((tmp_path / KEYS_FILE).read_text())["keys"]
    (tmp_path / KEYS_FILE).write_text(json.dumps({"keys": keys[:1]}))  # the old key is not needed
    await mesh.restart("queue")
    job_id = await mesh.submit(secrets=USES)
    await mesh.reach(job_id, "RUNNING")
    assert await read(mesh, job_id) == {"HF_TOKEN": VALUE}


async def test_without_the_file_of_keys_nothing_is_overwritten(mesh: Mesh, tmp_path: Path) -> None:
    await set_secret(mesh)
    (tmp_path / KEYS_FILE).unlink()
    assert await refusal_of(set_secret(mesh, "SECOND")) == "SECRET_KEYS_UNUSABLE"
    assert not (tmp_path / KEYS_FILE).exists()


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"name": "2nd"}, "name"),
        ({"name": "../x"}, "name"),
        ({"value": b""}, "value"),
        ({"value": b"x" * 65_537}, "value"),
    ],
)
async def test_invalid_names_and_values_are_refused(mesh: Mesh, fields: dict[str, Any], wrong: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await set_secret(mesh, **fields)
    assert f"{wrong}: " in str(refused.value.details())


async def test_a_tenant_with_secrets_is_not_deleted(mesh: Mesh) -> None:
    await mesh.tenants.CreateTenant(CreateTenantRequest(tenant=Tenant(id="lab")))
    await set_secret(mesh, tenant="lab")
    assert await refusal_of(mesh.tenants.DeleteTenant(DeleteTenantRequest(id="lab"))) == "TENANT_IN_USE"
    await secrets(mesh).DeleteSecret(pb.DeleteSecretRequest(name="HF_TOKEN", tenant="lab"))
    await mesh.tenants.DeleteTenant(DeleteTenantRequest(id="lab"))
