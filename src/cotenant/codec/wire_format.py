"""Reads the encoding of messages field by field: numbers and lengths, not values."""

from __future__ import annotations

from google.protobuf.message import DecodeError

BYTES = 2  # the wire type of texts, bytes and messages


def tag_of(number: int) -> bytes:
    """Return what precedes the length of a text, bytes or message field of this number in an encoded message."""
    key, tag = number << 3 | BYTES, bytearray()
    while key >= 0x80:
        tag.append(key & 0x7F | 0x80)
        key >>= 7
    return bytes([*tag, key])


def read_field(data: bytes, at: int) -> tuple[int, int, int]:
    """Return the number of the field at a position, and where its content begins and ends.

    >>> read_field(b"\\x0a\\x03abc", 0)
    (1, 2, 5)

    Raises:
        DecodeError: the data is not the encoding of a message.
    """
    key, start = read_varint(data, at)
    match key & 7:
        case 0:  # VARINT
            end = read_varint(data, start)[1]
        case 1:  # FIXED64
            end = start + 8
        case 5:  # FIXED32
            end = start + 4
        case 2:
            length, start = read_varint(data, start)
            end = start + length
        case other:
            raise DecodeError(f"unknown wire type {other}")
    if end > len(data):
        raise DecodeError("truncated message")
    return key >> 3, start, end


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a varint and the position after it.

    Raises:
        DecodeError: the data ends within it, or it is too long.
    """
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise DecodeError("truncated message")
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
