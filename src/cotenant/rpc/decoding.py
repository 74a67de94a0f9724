"""Decodes large messages in pieces, so that other calls are not delayed.

The cost of decoding does not follow from a message's size alone: 4 MiB of empty messages take several hundred
milliseconds. The encoding of a message is the encoding of its fields, one after the other, and messages merge by
concatenation; so a large message is cut between its fields, and the pieces are merged one at a time. A field that is
too large to be decoded in one piece is rejected, as is a message with too many fields.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from cotenant.codec import errors
from cotenant.codec.wire_format import read_field
from cotenant.core.model.validation import Violation

PIECE_BYTES = 128 * 1024  # decoded before the loop yields: 12 ms at worst
FIELD_BYTES_MAX = 2**20  # of one field: 90 ms at worst
FIELDS_MAX = 200_000  # of the message itself
FIELDS_AT_ONCE = 20_000  # scanned before the loop yields


async def decode(kind: Any, data: bytes) -> Any:
    """Decode a message of the given class.

    Raises:
        DecodeError: the data cannot be decoded.
        Problem: INVALID_ARGUMENT: a field is too large, or there are too many fields.
    """
    if len(data) <= PIECE_BYTES:
        return kind.FromString(data)
    message = kind()
    begin = 0
    for end in _ends(data):
        if end > begin:
            message.MergeFromString(data[begin:end])
            begin = end
        await asyncio.sleep(0)
    return message


def _ends(data: bytes) -> Iterator[int]:
    """Yield the ends of pieces; the same position is repeated where the loop should yield."""
    size, at, begin, fields = len(data), 0, 0, 0
    while at < size:
        start = at
        number, _, at = read_field(data, at)
        fields += 1
        if fields > FIELDS_MAX:
            raise errors.invalid([Violation("request", f"has more than {FIELDS_MAX} items")])
        if at - start > FIELD_BYTES_MAX:
            what = f"field {number} has {at - start} bytes; {FIELD_BYTES_MAX} are allowed at most"
            raise errors.invalid([Violation("request", what)])
        if at - begin > PIECE_BYTES:
            if start > begin:
                yield start
            begin = start
            if at - begin > PIECE_BYTES:
                yield at
                begin = at
        elif fields % FIELDS_AT_ONCE == 0:
            yield begin
    yield size
