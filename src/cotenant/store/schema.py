"""Records carry the version of their schema: what is newer than this version knows is refused, what is older is raised.

Within a schema version fields are only added, as protobuf allows: an older process that reads such a record loses what
it does not know only if it writes the record anew, which keeps unknown fields. A change that an older process would get
wrong raises the version; then it is refused there, and the raise has a step here that makes the old record a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from cotenant.store.port import Entry

VERSION = 1  # of all records, so far


class Versioned(Protocol):
    """A message of records.proto."""

    schema_version: int

    def ParseFromString(self, serialized: bytes) -> int:  # noqa: N802  # protobuf's name
        """Read bytes."""


M = TypeVar("M", bound=Versioned)

# By kind of record, the steps that each raise it by a version, the first one from 1 to 2.
STEPS: Mapping[type[Any], Sequence[Callable[[Any], None]]] = MappingProxyType({})


class NewerSchema(Exception):
    """A record was written by a version that came after this one; nothing was changed."""


def read(kind: type[M], entry: Entry, steps: Mapping[type[Any], Sequence[Callable[[Any], None]]] = STEPS) -> M:
    """Read a record, in the newest schema that this version knows; it is written so when it is written next.

    Raises:
        NewerSchema: it has a newer one.
    """
    record = kind()
    record.ParseFromString(entry.value)
    raises = steps.get(kind, ())
    newest = VERSION + len(raises)
    version = record.schema_version or VERSION
    if version > newest:
        raise NewerSchema(
            f"{entry.key} has schema {version}, and this version reads up to {newest}: a newer version wrote it; "
            "run that one, or restore a backup that was made before it"
        )
    for step in raises[version - VERSION :]:
        step(record)
    record.schema_version = newest
    return record
