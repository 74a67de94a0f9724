"""The servicer of secrets: values go in, and come out only for the node that launches a job."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog
from google.protobuf.timestamp_pb2 import Timestamp

from cotenant.codec import errors
from cotenant.core.model.job import JobSpec
from cotenant.core.model.secrets import secret_name_error, value_error
from cotenant.core.model.validation import Violation
from cotenant.rpc.paging import PageRequest, page_of_messages
from cotenant.security.identity import caller, check_node, resolve_tenant
from cotenant.security.secret_keys import BadKeys, Sealed, SecretKeys
from cotenant.services.queue.jobs.job_store import JobStore
from cotenant.services.queue.jobs.secret_gate import KnownSecret, SecretKey, load_secret
from cotenant.services.queue.jobs.transitions import SCHEMA_VERSION
from cotenant.services.queue.jobs.visibility import View
from cotenant.storage.v1 import records_pb2
from cotenant.store.port import Compare, Conflict, Delete, Put
from cotenant.v1 import secret_service_pb2 as pb
from cotenant.v1 import secret_service_pb2_grpc

log = structlog.get_logger()

SECRETS_OF_TENANT_MAX = 200
RESEAL_SECONDS = 5.0  # between looks for another key
SYNCED_AT_ONCE = 200


class SecretServicer(secret_service_pb2_grpc.SecretServiceServicer):
    """Keeps secrets for tenants, and hands them to the nodes that launch their jobs. Without a file of keys, none."""

    def __init__(self, job_store: JobStore, keys_file: Path | None) -> None:
        self._job_store, self._state = job_store, job_store.state
        self._keys = SecretKeys(keys_file) if keys_file else None
        self._writing = asyncio.Lock()

    async def SetSecret(self, request: pb.SetSecretRequest, context: Any) -> pb.SetSecretResponse:
        """Encrypt a value and store it."""
        key = self._key(request.tenant, request.name)
        if wrong := value_error(request.value):
            raise errors.invalid([Violation("value", wrong)])
        async with self._writing:
            before = self._state.secrets.known.get(key)
            if before is None and (count := len(self._state.secrets.names_of(key.tenant))) >= SECRETS_OF_TENANT_MAX:
                raise errors.failed_precondition(
                    "TOO_MANY_SECRETS", f"tenant {key.tenant} has {count} secrets already; delete some first"
                )
            sealed = await asyncio.to_thread(self._seal, key, request.value)
            now = Timestamp()
            now.GetCurrentTime()
            stored = records_pb2.StoredSecret(
                schema_version=SCHEMA_VERSION,
                tenant=key.tenant,
                name=key.name,
                create_time=before.stored.create_time if before else now,
                update_time=now,
                updater=caller().name,
            )
            await self._put(key, _with(stored, sealed), before)
        log.info("secret_set", tenant=key.tenant, secret=key.name)
        await self._sync_waiting(key)
        return pb.SetSecretResponse(secret=_message(key, self._state.secrets.known))

    async def ListSecrets(self, request: pb.ListSecretsRequest, context: Any) -> pb.ListSecretsResponse:
        """Return secrets without their values."""
        view, known = View(self._state), self._state.secrets.known
        if request.tenant:
            view.check_tenant(request.tenant)
        asked = PageRequest.read(request.page_size, request.page_token, "secrets")
        wanted = {
            f"{key.tenant}/{key.name}": key
            for key in known
            if view.sees_tenant(key.tenant) and request.tenant in ("", key.tenant)
        }
        page = await page_of_messages(sorted(wanted), lambda one: _message(wanted[one], known), asked)
        return pb.ListSecretsResponse(secrets=page.items, next_page_token=page.next_token)

    async def DeleteSecret(self, request: pb.DeleteSecretRequest, context: Any) -> pb.DeleteSecretResponse:
        """Delete a secret; jobs that name it and have not started wait."""
        key = self._key(request.tenant, request.name)
        async with self._writing:
            known = self._state.secrets.known.get(key)
            if known is None:
                raise errors.not_found("secret", key.name, near=self._state.secrets.names_of(key.tenant))
            deleted = await self._job_store.store.transact(
                [Compare(key.store_key, known.revision)], [Delete(key.store_key)]
            )
            await self._check_committed(key, deleted)
            self._state.secrets.remove(key)
        log.info("secret_deleted", tenant=key.tenant, secret=key.name)
        await self._sync_waiting(key)
        return pb.DeleteSecretResponse()

    async def ReadSecrets(self, request: pb.ReadSecretsRequest, context: Any) -> pb.ReadSecretsResponse:
        """Return the values of a job's secrets to a node that launches it."""
        check_node(request.node_id)
        record = self._state.records.get(request.job_id)
        attempt = record.job.attempt if record else None
        placed = {one.node_id for one in attempt.allocations} if attempt else set()
        if record is None or attempt is None or attempt.number != request.number or request.node_id not in placed:
            raise errors.unavailable(
                f"the queue does not know yet that {request.job_id}/{request.number} is placed on {request.node_id}",
                reason="NOT_PLACED_HERE",
            )
        if record.phase.ended or not record.phase.holds_resources:
            raise errors.failed_precondition("NOT_RUNNING", f"{request.job_id}/{request.number} has ended")
        self.check(record.spec)
        names = dict.fromkeys(use.name for use in record.spec.secrets)
        values = [await self._open(SecretKey(record.spec.tenant, name)) for name in names]
        return pb.ReadSecretsResponse(secrets=values)

    def check(self, spec: JobSpec) -> None:
        """Check that a job's tenant has the secrets that it names.

        Raises:
            Problem: it lacks some.
        """
        if refusal := self._state.secrets.refusal(spec):
            raise errors.failed_precondition("SECRET_UNKNOWN", refusal.detail, remedy=refusal.remedy)

    async def run(self) -> None:
        """Encrypt secrets with the key that seals now, whenever it has changed."""
        while self._keys is not None:
            try:
                await self.reseal()
            except BadKeys as error:
                log.error("secret_keys_unusable", error=str(error))
            await asyncio.sleep(RESEAL_SECONDS)

    async def reseal(self) -> None:
        """Encrypt again what another key than the present one has sealed.

        Raises:
            BadKeys: the keys cannot be used.
        """
        known = self._state.secrets.known
        if self._keys is None or not known or not (current := await asyncio.to_thread(self._keys.current)):
            return
        for key in [key for key, one in known.items() if one.stored.key_id != current]:
            async with self._writing:
                if (before := known.get(key)) is None:
                    continue
                entry = await self._job_store.store.get(key.store_key)
                if entry is None or entry.mod_revision != before.revision:
                    continue
                stored = load_secret(entry)
                value = await asyncio.to_thread(self._keys.open, *key, _sealed(stored))
                await self._put(key, _with(stored, await asyncio.to_thread(self._keys.seal, *key, value)), before)
                log.info("secret_resealed", tenant=key.tenant, secret=key.name)

    def _seal(self, key: SecretKey, value: bytes) -> Sealed:
        if self._keys is None:
            raise errors.failed_precondition("NO_SECRETS", "this mesh keeps no secrets: its queue has no file of keys")
        try:
            if not self._keys.current():
                if self._state.secrets.known:  # another replica has the keys
                    raise BadKeys(f"this queue does not have {self._keys.path}; copy it from the other replicas")
                self._keys.create()
            return self._keys.seal(*key, value)
        except BadKeys as error:
            raise errors.failed_precondition("SECRET_KEYS_UNUSABLE", str(error)) from None

    async def _open(self, key: SecretKey) -> pb.SecretValue:
        entry = await self._job_store.store.get(key.store_key)
        if entry is None or self._keys is None:
            raise errors.failed_precondition("SECRET_UNKNOWN", f"tenant {key.tenant} has no secret {key.name}")
        try:
            value = await asyncio.to_thread(self._keys.open, *key, _sealed(load_secret(entry)))
        except BadKeys as error:
            log.error("secret_unreadable", tenant=key.tenant, secret=key.name, error=str(error))
            raise errors.failed_precondition("SECRET_KEYS_UNUSABLE", str(error)) from None
        return pb.SecretValue(name=key.name, value=value)

    async def _put(self, key: SecretKey, stored: records_pb2.StoredSecret, before: KnownSecret | None) -> None:
        put = Put(key.store_key, stored.SerializeToString())
        result = await self._job_store.store.transact([Compare(key.store_key, before.revision if before else 0)], [put])
        self._state.secrets.put(stored, await self._check_committed(key, result))

    async def _check_committed(self, key: SecretKey, result: Any) -> int:
        """Return the revision of a commit; after a conflict, which follows an unknown outcome, read the secret again.

        Raises:
            Problem: it was a conflict.
        """
        if not isinstance(result, Conflict):
            return int(result.revision)
        entry = await self._job_store.store.get(key.store_key)
        if entry is None:
            self._state.secrets.remove(key)
        else:
            self._state.secrets.put(load_secret(entry), entry.mod_revision)
        raise errors.unavailable("the secret was changed concurrently; retry the call", 0.1, "CONFLICT")

    async def _sync_waiting(self, key: SecretKey) -> None:
        """Reconsider the waiting jobs that name a secret."""
        found = list(self._state.secrets.waiting_for(key, iter(self._state.records.values())))
        for place, record in enumerate(found):
            self._state.sync_known(record.id)
            if not (place + 1) % SYNCED_AT_ONCE:
                await asyncio.sleep(0)

    def _key(self, tenant: str, name: str) -> SecretKey:
        tenant = resolve_tenant(tenant)
        View(self._state).check_tenant(tenant)
        if wrong := secret_name_error(name):
            raise errors.invalid([Violation("name", wrong)])
        return SecretKey(tenant, name)


def _message(key: SecretKey, known: Mapping[SecretKey, KnownSecret]) -> pb.Secret | None:
    if (found := known.get(key)) is None:
        return None
    stored = found.stored
    return pb.Secret(
        tenant=key.tenant,
        name=key.name,
        size_bytes=found.size_bytes,
        create_time=stored.create_time,
        update_time=stored.update_time,
        updater=stored.updater,
    )


def _with(stored: records_pb2.StoredSecret, sealed: Sealed) -> records_pb2.StoredSecret:
    stored.key_id, stored.nonce, stored.ciphertext = sealed
    return stored


def _sealed(stored: records_pb2.StoredSecret) -> Sealed:
    return Sealed(stored.key_id, stored.nonce, stored.ciphertext)
