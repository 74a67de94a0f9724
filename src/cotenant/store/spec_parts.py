"""Stores large parts of jobs' specs separately from the records that change: once, under their digest.

A job's record is rewritten each time its phase changes, and an attempt's as well; etcd keeps every version until its
history is compacted. With a command or an environment of 60 KB in it a single run would write half a megabyte. So if a
record is large, the store that services use puts those parts under a key of their own, named by their digest, and the
record refers to the digest. Tasks of an array, resubmissions and attempts of one job share the parts. Readers see whole
records, as if they had never been divided; records that were stored whole stay readable, and so do those below the
limits.

Theory of operation. Parts may be deleted when no record refers to them, and must not be while one does. A transaction
that refers to parts either writes them too, or compares their revision (they exist) and touches a small key beside
them. The collector first reads the revisions of both keys, then scans all records, and then deletes under a comparison
of both: if a record had come to refer to the parts in between, one of them would have changed. A record that referred
to the parts before and is rewritten under a comparison of its own revision needs none of this.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from types import MappingProxyType
from typing import Any, cast

from google.protobuf.message import DecodeError

from cotenant.codec.wire_format import tag_of
from cotenant.storage.v1 import records_pb2
from cotenant.store.port import (
    Change,
    Changes,
    Committed,
    Compare,
    Conflict,
    Delete,
    Entry,
    Listing,
    Operation,
    Put,
    Relisted,
)
from cotenant.store.revision_offset import OffsetStore
from cotenant.store.schema import PARTED_VERSION, VERSION, BadRecord
from cotenant.telemetry.plain_structlog import structlog
from cotenant.v1 import job_pb2

log = structlog.get_logger()

PREFIX = "specs/"
DATA, USED = f"{PREFIX}data/", f"{PREFIX}used/"
VALUE_BYTES_MIN = 8 * 1024  # of a record: smaller records are stored whole
PARTS_BYTES_MIN = 4 * 1024
DIGEST_BYTES = 16
DAMAGED = b""  # stands for parts whose digest differs from their key
CACHED_MAX, CACHED_BYTES_MAX = 1_024, 32 * 1024**2
READ_ALONE_MAX = 16  # digests: for more than these all parts are listed
READS_MAX = 3  # of records whose parts were collected during the read
KINDS: Mapping[str, type[Any]] = MappingProxyType(
    {"queue/jobs/": records_pb2.StoredJob, "placement/attempts/": records_pb2.StoredAttempt}
)


# the tag and the length of the field `spec_parts`, which ends a record that has it
MARKS = {
    kind: tag_of(kind.DESCRIPTOR.fields_by_name["spec_parts"].number) + bytes([DIGEST_BYTES]) for kind in KINDS.values()
}


def kind_of(key: str) -> type[Any] | None:
    """Return the kind of record of a key, if such records may be divided."""
    return next((kind for prefix, kind in KINDS.items() if key.startswith(prefix)), None)


def spec_of(record: Any) -> job_pb2.JobSpec:
    """Return the spec in a job's record or an attempt's."""
    spec: job_pb2.JobSpec = record.job.spec if isinstance(record, records_pb2.StoredJob) else record.spec
    return spec


def divide(key: str, value: bytes) -> tuple[bytes, str, bytes] | None:
    """Return a record without its spec's large parts, their digest and the parts; None if it is stored whole."""
    kind = kind_of(key) if len(value) >= VALUE_BYTES_MIN else None
    if kind is None:
        return None
    try:
        record = kind.FromString(value)
    except DecodeError:  # its reader reports it
        return None
    spec = spec_of(record)
    parts = records_pb2.StoredSpecParts(schema_version=VERSION, command=spec.command, environment=spec.environment)
    if any(role.command for role in spec.roles):
        parts.roles.extend(records_pb2.StoredCommand(arguments=role.command) for role in spec.roles)
    written = parts.SerializeToString(deterministic=True)
    if len(written) < PARTS_BYTES_MIN:
        return None
    for name in ("command", "environment"):
        spec.ClearField(name)
    for role in spec.roles:
        role.ClearField("command")
    digest = _digest_of(written)
    record.schema_version, record.spec_parts = PARTED_VERSION, digest
    return record.SerializeToString(), digest.hex(), written


def _digest_of(written: bytes) -> bytes:
    return hashlib.blake2b(written, digest_size=DIGEST_BYTES).digest()


def digest_in(key: str, value: bytes) -> str:
    """Return the digest of the parts that a record refers to; "" if it is whole."""
    kind = kind_of(key)
    if kind is None or not value[:-DIGEST_BYTES].endswith(MARKS[kind]):
        return ""
    try:
        return str(kind.FromString(value).spec_parts.hex())
    except DecodeError:  # the reader of the record reports it
        return ""


def join(key: str, value: bytes, written: bytes | None) -> bytes:
    """Return a record with its parts; without them if they are gone, as of a record that is itself deleted."""
    kind = kind_of(key)
    assert kind is not None
    record = kind.FromString(value)
    record.schema_version = VERSION
    record.ClearField("spec_parts")
    if written is not None:
        spec, parts = spec_of(record), records_pb2.StoredSpecParts.FromString(written)
        spec.command.extend(parts.command)
        spec.environment.update(parts.environment)
        for role, command in zip(spec.roles, parts.roles, strict=False):
            role.command.extend(command.arguments)
    return bytes(record.SerializeToString())


class SpecStore(OffsetStore):
    """A store whose users see whole records, wherever the parts are stored."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self._cache: OrderedDict[str, tuple[bytes, int]] = OrderedDict()  # parts and their revision, by digest
        self._cached_bytes = 0
        self._named: dict[str, tuple[str, int]] = {}  # by a record's key: its digest, and at which revision

    # Reading -------------------------------------------------------------------------------------------------

    async def get(self, key: str) -> Entry | None:
        """Read one key."""
        for _ in range(READS_MAX):
            entry = await super().get(key)
            if entry is None or not (digest := digest_in(key, entry.value)):
                return entry
            if parts := await self._read([digest]):
                return cast("Entry", self._joined(entry, digest, parts[digest]))
        raise _missing(key)

    async def list(self, prefix: str) -> Listing:
        """Read all keys under a prefix."""
        for _ in range(READS_MAX):
            listing = await super().list(prefix)
            named = {one.key: digest for one in listing.entries if (digest := digest_in(one.key, one.value))}
            if not named:
                return listing
            parts = await self._read(set(named.values()))
            lost = next((key for key, digest in named.items() if digest not in parts), "")
            if not lost:
                entries = (
                    self._joined(one, named[one.key], parts[named[one.key]]) if one.key in named else one
                    for one in listing.entries
                )
                return Listing(tuple(entries), listing.revision)
        raise _missing(lost)

    async def watch(self, prefix: str, *, after_revision: int) -> AsyncGenerator[Changes | Relisted, None]:
        """Yield what is committed after a revision."""
        async with aclosing(super().watch(prefix, after_revision=after_revision)) as updates:
            async for update in updates:
                if isinstance(update, Relisted):
                    yield replace(update, entries=await self._all_joined(update.entries))
                else:
                    yield replace(update, changes=await self._all_joined(update.changes))

    async def _all_joined(self, read: Sequence[Any]) -> tuple[Any, ...]:
        """Join the updates of a watch. Missing parts belonged to records deleted since, which the watch will report."""
        for one in read:
            if one.value is None:
                self._named.pop(one.key, None)
        named = {one.key: digest for one in read if one.value is not None and (digest := digest_in(one.key, one.value))}
        if not named:
            return tuple(read)
        parts = await self._read(set(named.values()))
        return tuple(self._joined(one, named[one.key], parts.get(named[one.key])) if one.key in named else one
                     for one in read)  # fmt: skip

    def _joined(self, one: Any, digest: str, written: bytes | None) -> Any:
        """Return an entry or a change with its parts."""
        assert isinstance(one, Entry | Change)
        assert one.value is not None
        if written == DAMAGED:
            raise BadRecord(
                f"{one.key} refers to damaged parts of its spec ({DATA}{digest}); restore a backup, or delete the key"
            )
        self._named[one.key] = digest, one.mod_revision
        return replace(one, value=join(one.key, one.value, written))

    async def _read(self, digests: Iterable[str]) -> dict[str, bytes]:
        """Return parts by their digest, `DAMAGED` if they do not match it; missing parts are left out."""
        found = {digest: self._cache[digest][0] for digest in digests if digest in self._cache}
        wanted = [digest for digest in digests if digest not in found]
        if len(wanted) > READ_ALONE_MAX:
            entries: Sequence[Entry] = (await super().list(DATA)).entries
        else:
            entries = [entry for digest in wanted if (entry := await OffsetStore.get(self, DATA + digest))]
        for entry in entries:
            digest = entry.key.removeprefix(DATA)
            if _digest_of(entry.value).hex() != digest:
                found[digest] = DAMAGED
                continue
            self._remember(digest, entry.value, entry.mod_revision)
            found[digest] = entry.value
        return found

    def _remember(self, digest: str, written: bytes, revision: int) -> None:
        self._forget(digest)
        self._cache[digest] = written, revision
        self._cached_bytes += len(written)
        while len(self._cache) > CACHED_MAX or self._cached_bytes > CACHED_BYTES_MAX:
            self._forget(next(iter(self._cache)))

    def _forget(self, digest: str) -> None:
        if known := self._cache.pop(digest, None):
            self._cached_bytes -= len(known[0])

    # Writing -------------------------------------------------------------------------------------------------

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Committed | Conflict:
        """Apply all operations if all comparisons hold, else none."""
        divided: dict[str, tuple[bytes, str, bytes]] = {}
        for one in operations:
            if isinstance(one, Put) and (parts := divide(one.key, one.value)):
                divided[one.key] = parts
            else:
                self._named.pop(one.key, None)
        if not divided:
            return await super().transact(compares, operations)
        compared = {one.key: one.mod_revision for one in compares}
        slim = [
            replace(one, value=divided[one.key][0]) if isinstance(one, Put) and one.key in divided else one
            for one in operations
        ]
        new = {
            digest: written
            for key, (_, digest, written) in divided.items()
            if self._named.get(key) != (digest, compared.get(key, -1))
        }
        await self._read(new)  # another process may have written them
        while True:
            there = {digest: self._cache[digest][1] for digest in new if digest in self._cache}
            result = await self._transact(compares, slim, new, there)
            if isinstance(result, Committed) or not await self._are_gone(there):
                break
        if isinstance(result, Committed):
            self._named |= {key: (digest, result.revision) for key, (_, digest, _) in divided.items()}
        return result

    async def _transact(
        self,
        compares: Sequence[Compare],
        operations: Sequence[Operation],
        new: Mapping[str, bytes],
        there: Mapping[str, int],
    ) -> Committed | Conflict:
        """Apply operations whose records refer to `new` parts; parts that are not known to exist are written too."""
        result = await super().transact(
            [*compares, *(Compare(DATA + digest, revision) for digest, revision in there.items())],
            [
                *operations,
                *(Put(USED + digest, b"") for digest in there),
                *(Put(DATA + digest, written) for digest, written in new.items() if digest not in there),
            ],
        )
        if isinstance(result, Committed):
            for digest, written in new.items():
                self._remember(digest, written, there.get(digest, result.revision))
        return result

    async def _are_gone(self, there: Mapping[str, int]) -> bool:
        """Return whether parts that were assumed to exist are gone or changed; these are dropped from the cache."""
        gone = False
        for digest, revision in there.items():
            entry = await super().get(DATA + digest)
            if entry is None or entry.mod_revision != revision:
                if self._cache.get(digest, (b"", 0))[1] == revision:
                    self._forget(digest)
                gone = True
        return gone

    # Collecting ----------------------------------------------------------------------------------------------

    async def collect_parts(self) -> int:
        """Delete unreferenced parts; return how many there were."""
        there = {one.key: one.mod_revision for one in (await super().list(PREFIX)).entries}
        digests = {key.removeprefix(DATA) for key in there if key.startswith(DATA)}
        for prefix in KINDS if digests else ():
            listing = await super().list(prefix)
            digests -= {digest_in(one.key, one.value) for one in listing.entries}
        done = 0
        for digest in sorted(digests):
            keys = (DATA + digest, USED + digest)
            self._forget(digest)
            result = await super().transact([Compare(key, there.get(key, 0)) for key in keys], [*map(Delete, keys)])
            done += isinstance(result, Committed)
        if done:
            log.info("spec_parts_collected", count=done)
        return done


def _missing(key: str) -> BadRecord:
    return BadRecord(f"{key} refers to missing parts of its spec; restore a backup, or delete the key")
