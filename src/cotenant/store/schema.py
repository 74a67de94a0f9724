"""Records carry the version of their schema: what is newer than this version knows is refused, what is older is raised.

Within a schema version fields are only added, as protobuf allows: an older process that reads such a record loses what
it does not know only if it writes the record anew, which keeps unknown fields. A change that an older process would get
wrong raises the version; then it is refused there, and the raise has a step here that makes the old record a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from google.protobuf.message import DecodeError

from cotenant.store.port import Entry

VERSION = 1  # of all records, so far
PARTED_VERSION = 2  # of a record as it is kept without parts of its spec, which `spec_parts` joins before it is read
TOLD_LENGTH_MAX = 200  # of what is wrong with one


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


class BadRecord(Exception):
    """A record is damaged; the message names its key. Nothing was changed."""


@contextmanager
def reading(entry: Entry) -> Iterator[None]:
    """Read what a record holds; whatever cannot be read of it is told with its key.

    Raises:
        BadRecord: it cannot be read.
    """
    try:
        yield
    except (DecodeError, ValueError, LookupError, TypeError, ArithmeticError, AssertionError) as error:
        told = f"{type(error).__name__}: {error}"[:TOLD_LENGTH_MAX]
        raise BadRecord(
            f"{entry.key} is damaged, and nothing is done before it can be read ({told}); restore a backup, or delete "
            "the key if what it holds may be lost"
        ) from error


def read(kind: type[M], entry: Entry, steps: Mapping[type[Any], Sequence[Callable[[Any], None]]] = STEPS) -> M:
    """Read a record, in the newest schema that this version knows; it is written so when it is written next.

    Raises:
        NewerSchema: it has a newer one.
        BadRecord: it is none.
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
            "run that one, or restore a backup that was made before it"
        )
    for step in raises[version - VERSION :]:
        step(record)
    record.schema_version = newest
    return record
