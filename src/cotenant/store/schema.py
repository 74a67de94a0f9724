"""Schema versions of records: newer records than this version knows are rejected, older ones are upgraded.

Within a schema version fields are only added, as protobuf allows: an older process that reads such a record and writes
it again keeps the unknown fields. A change that an older process would get wrong raises the version; then that process
rejects the record, and the change has a step here that upgrades old records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from google.protobuf.message import DecodeError

from cotenant.store.port import Entry

VERSION = 1  # of all records, so far
PARTED_VERSION = 2  # of a record without its spec's large parts, which `spec_parts` joins
QUOTED_LENGTH_MAX = 200  # of a quoted error


class Versioned(Protocol):
    """A message of records.proto."""

    schema_version: int

    def ParseFromString(self, serialized: bytes) -> int:  # noqa: N802  # protobuf's name
        """Decode bytes."""


M = TypeVar("M", bound=Versioned)

# By kind of record, the steps that each upgrade it by one version, the first one from 1 to 2.
STEPS: Mapping[type[Any], Sequence[Callable[[Any], None]]] = MappingProxyType({})


class NewerSchema(Exception):
    """A record was written by a newer version; nothing was changed."""


class BadRecord(Exception):
    """A record is damaged; the message names its key. Nothing was changed."""


class reading:  # noqa: N801  # a context manager that reads like a function; a generator would take twice the time
    """Raise errors of decoding a record as `BadRecord`, with the record's key.

    Raises:
        BadRecord: the record cannot be read.
    """

    __slots__ = ("_entry",)

    def __init__(self, entry: Entry) -> None:
        self._entry = entry

    def __enter__(self) -> None:
        """Begin to decode."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Translate an error of decoding."""
        if isinstance(error, (DecodeError, ValueError, LookupError, TypeError, ArithmeticError, AssertionError)):
            told = f"{type(error).__name__}: {error}"[:QUOTED_LENGTH_MAX]
            raise BadRecord(
                f"{self._entry.key} is damaged, and nothing is done before it can be read ({told}); restore a backup, "
                "or delete the key if its content may be lost"
            ) from error


def read(kind: type[M], entry: Entry, steps: Mapping[type[Any], Sequence[Callable[[Any], None]]] = STEPS) -> M:
    """Decode a record and upgrade it to the newest schema of this version.

    Raises:
        NewerSchema: the record's schema is newer.
        BadRecord: the record is damaged.
    """
    record = kind()
    with reading(entry):
        record.ParseFromString(entry.value)
        if record.schema_version < 0:
            raise ValueError(f"schema {record.schema_version}")
    raises = steps.get(kind, ())
    newest = VERSION + len(raises)
    version = record.schema_version or VERSION
    if version > newest:
        raise NewerSchema(
            f"{entry.key} has schema {version}, and this version reads up to {newest}: a newer version wrote it; "
            "run that version, or restore an older backup"
        )
    for step in raises[version - VERSION :]:
        step(record)
    record.schema_version = newest
    return record
