"""Answers of the API as JSON, by protobuf's JSON mapping: lowerCamelCase names, no fields with default values."""

from __future__ import annotations

import json
from typing import Any

from google.protobuf import json_format

INLINE_BYTES_MAX = 8 * 1024  # of an encoded message, and of a body: converting it takes a few milliseconds
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def to_json(message: Any) -> bytes:
    """Return a message as JSON.

    A large one is encoded in steps: the encoder in C would hold all other threads for as long as it takes.
    """
    value = json_format.MessageToDict(message)
    if message.ByteSize() <= INLINE_BYTES_MAX:
        return _ENCODER.encode(value).encode()
    return "".join(_ENCODER.iterencode(value)).encode()


def answer_json(kind: Any, data: bytes) -> bytes:
    """Return an encoded message of a class as JSON.

    Raises:
        DecodeError: it is not such a message.
    """
    return to_json(kind.FromString(data))
