"""Names the largest fields of an encoded message without decoding it.

The encoding of a message is a sequence of fields, each with its number and its length, so a scan skips a large field at
once. The scan is bounded by the number of fields that it passes: of a message with more of them it reports what it has
seen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, cast

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError

from cotenant.codec.wire_format import read_field

if TYPE_CHECKING:
    from google._upb._message import Descriptor as FastDescriptor

AnyDescriptor: TypeAlias = "Descriptor | FastDescriptor"  # as messages declare theirs
FIELDS_MAX = 10_000  # scanned in all: about 20 ms
FIELDS_NAMED_MAX = 3
SHARE_MIN = 0.1  # of the message: smaller fields are not named
DEPTH_MAX = 4


@dataclass(frozen=True, slots=True)
class FieldSize:
    """A field's path and the bytes that it takes, with all of its items; `complete` if all were counted."""

    path: str
    size: int
    complete: bool = True


def largest_fields(descriptor: AnyDescriptor, data: bytes) -> Sequence[FieldSize]:
    """Return the largest fields of an encoded message, the largest first; none if it cannot be decoded.

    >>> from cotenant.v1.job_service_pb2 import CreateJobRequest
    >>> request = CreateJobRequest()
    >>> request.spec.environment["PATH"] = "x" * 1000
    >>> [(one.path, one.size) for one in largest_fields(request.DESCRIPTOR, request.SerializeToString())]
    [('spec.environment', 1012)]
    """
    scan = _Scan()
    try:
        found = scan.fields(cast("Descriptor", descriptor), data, "", 0)
    except DecodeError:
        return ()
    found = [FieldSize(one.path, one.size, scan.left > 0) for one in found if one.size >= SHARE_MIN * len(data)]
    return sorted(found, key=lambda one: -one.size)[:FIELDS_NAMED_MAX]


class _Scan:
    """One scan, with the number of fields that it may still pass."""

    def __init__(self) -> None:
        self.left = FIELDS_MAX

    def fields(self, descriptor: Descriptor, data: bytes, prefix: str, depth: int) -> list[FieldSize]:
        """Return the sizes of the fields of a message; a large message in a field stands for its own fields."""
        sizes: dict[int, int] = defaultdict(int)
        contents: dict[int, tuple[int, int]] = {}
        at = 0
        while at < len(data) and self.left:
            self.left -= 1
            number, start, end = read_field(data, at)
            sizes[number] += end - at
            contents[number] = start, end
            at = end
        found: list[FieldSize] = []
        for number, size in sizes.items():
            field = descriptor.fields_by_number.get(number)
            path = f"{prefix}{field.name if field else f'field {number}'}"
            inner: list[FieldSize] = []
            kind = field.message_type if field and not field.is_repeated else None
            if kind and depth < DEPTH_MAX and 2 * size > len(data):
                start, end = contents[number]
                inner = self.fields(kind, data[start:end], f"{path}.", depth + 1)
            found += inner or [FieldSize(path, size)]
        return found
