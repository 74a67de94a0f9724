"""The secrets that tenants have, without their values, and which waiting jobs lack one. No IO."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from cotenant.core.model.job import JobSpec
from cotenant.core.model.lifecycle import Phase
from cotenant.core.model.refusal import Refusal, lacks_secrets
from cotenant.services.queue.jobs.transitions import Record
from cotenant.storage.v1 import records_pb2
from cotenant.store import schema
from cotenant.store.port import Entry

SECRETS = "queue/secrets/"
TAG_BYTES = 16  # of AES-GCM, behind the encrypted value


class SecretKey(NamedTuple):
    """A secret's tenant and name."""

    tenant: str
    name: str

    @property
    def store_key(self) -> str:
        """Its key in the store."""
        return f"{SECRETS}{self.tenant}/{self.name}"


class KnownSecret(NamedTuple):
    """A stored secret without its value, the length of the value, and the revision of the record."""

    stored: records_pb2.StoredSecret
    size_bytes: int
    revision: int


def load_secret(entry: Entry) -> records_pb2.StoredSecret:
    """Return the record of an entry.

    Raises:
        NewerSchema: a newer version wrote it.
        BadRecord: it is invalid.
    """
    stored = schema.read(records_pb2.StoredSecret, entry)
    with schema.reading(entry):
        if entry.key != SecretKey(stored.tenant, stored.name).store_key:
            raise ValueError(f"it is the secret {stored.name!r} of tenant {stored.tenant!r}")
    return stored


class SecretGate:
    """Which secrets there are, and which a job lacks."""

    def __init__(self) -> None:
        self._known: dict[SecretKey, KnownSecret] = {}

    def put(self, stored: records_pb2.StoredSecret, revision: int) -> None:
        """Add a secret or replace it; nothing of its value is kept."""
        size = max(0, len(stored.ciphertext) - TAG_BYTES)
        kept = records_pb2.StoredSecret()
        kept.CopyFrom(stored)
        kept.ClearField("ciphertext")
        kept.ClearField("nonce")
        self._known[SecretKey(stored.tenant, stored.name)] = KnownSecret(kept, size, revision)

    def remove(self, key: SecretKey) -> None:
        """Remove a secret, if it is known."""
        self._known.pop(key, None)

    @property
    def known(self) -> Mapping[SecretKey, KnownSecret]:
        """All secrets."""
        return self._known

    def names_of(self, tenant: str) -> list[str]:
        """Return the names of a tenant's secrets."""
        return [key.name for key in self._known if key.tenant == tenant]

    def missing(self, spec: JobSpec) -> list[str]:
        """Return the secrets that a job names and its tenant does not have, each once."""
        names = dict.fromkeys(use.name for use in spec.secrets)
        return [name for name in names if SecretKey(spec.tenant, name) not in self._known]

    def open(self, record: Record) -> bool:
        """Return whether a waiting job has its secrets."""
        return not (record.spec.secrets and self.missing(record.spec))

    def refusal(self, spec: JobSpec) -> Refusal | None:
        """Return why a job waits for its secrets; None if it does not."""
        missing = self.missing(spec) if spec.secrets else []
        return lacks_secrets(spec.tenant, missing) if missing else None

    @staticmethod
    def waiting_for(key: SecretKey, records: Iterator[Record]) -> Iterator[Record]:
        """Yield the queued jobs that name a secret."""
        for record in records:
            mine = record.phase is Phase.QUEUED and record.spec.tenant == key.tenant
            if mine and any(use.name == key.name for use in record.spec.secrets):
                yield record
