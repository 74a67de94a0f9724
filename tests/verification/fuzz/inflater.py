"""Inflates requests: one field of a valid one is repeated, lengthened or replaced by a value that is slow to read.

A message has a limit in bytes, but bytes differ in cost: a million empty messages, an array of overlapping ranges,
short patterns that are large once their repeats are expanded.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from tests.verification.fuzz.messages import Drawer

BYTES_MAX = 4_000_000  # slightly more than a server accepts
COUNTS = (40, 100, 1_000, 10_000, 100_000)
LENGTHS = (100, 4_096, 60_000, 250_000, 1_000_000)
TEXTS = ("x", "0", "a-", "é", "0t6czcnzd6ed ", "(a{1,1000})", "0-9999,", "=", "/", "\n")
PATTERNS = (
    "(" + "(?:a{1,1000})" * 78 + ")",
    "((a{1,30}){1,30})" * 60,
    "(" + r"(?:\C*){100}" * 80 + ")",
    "(" + "|".join([r"\pL+"] * 170) + ")",
    "(a+)+$",
    "(?i)(" + r"[\x00-\U0010fffe]" * 55 + ")",  # takes Python's engine seconds to compile
    r"(\d+)(?=x)",
)


class Inflater:
    """Draws large messages from valid ones."""

    def __init__(self, rng: Random, drawer: Drawer) -> None:
        self._rng, self._drawer = rng, drawer

    def inflate(self, message: Message) -> Message:
        """Inflate one to three fields of a message, or of nested messages."""
        for _ in range(self._rng.choice((1, 1, 2, 3))):
            inner = self._inner(message)
            fields = [field for field in inner.DESCRIPTOR.fields if _grows(field)]
            if fields:
                self._grow(inner, self._rng.choice(fields), BYTES_MAX - message.ByteSize())
        return message

    def _inner(self, message: Message) -> Message:
        """Choose the message itself, or a nested one."""
        while self._rng.random() < 0.6:
            within = list(_within(message))
            if not within:
                break
            message = self._rng.choice(within)
        return message

    def _grow(self, message: Message, field: Any, room_bytes: int) -> None:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            self._fill_map(getattr(message, field.name), field.message_type, room_bytes)
        elif field.is_repeated:
            self._repeat(getattr(message, field.name), field, room_bytes)
        else:
            setattr(message, field.name, self._text(field, room_bytes))

    def _repeat(self, values: Any, field: Any, room_bytes: int) -> None:
        if field.message_type is not None:
            kept = self._rng.choice(values) if len(values) and self._rng.random() < 0.6 else None
            made = values.add()
            if kept is not None:
                made.CopyFrom(kept)
            elif self._rng.random() < 0.4:
                self._drawer.fill(made, 3, share=0.3)
            count = min(self._rng.choice(COUNTS), max(0, room_bytes) // (made.ByteSize() + 3))
            values.extend([made] * count)
        elif field.cpp_type == FieldDescriptor.CPPTYPE_STRING and field.type == FieldDescriptor.TYPE_STRING:
            text = self._rng.choice((*TEXTS, *self._drawer.texts(field)))
            count = min(self._rng.choice(COUNTS), max(0, room_bytes) // (len(text.encode()) + 10))
            values.extend(text if self._rng.random() < 0.3 else f"{text}{number}" for number in range(count))
        elif field.type != FieldDescriptor.TYPE_BYTES:
            values.extend([1] * min(self._rng.choice(COUNTS), max(0, room_bytes) // 10))

    def _fill_map(self, entries: Any, entry: Any, room_bytes: int) -> None:
        key, value = entry.fields_by_name["key"], entry.fields_by_name["value"]
        count = min(self._rng.choice(COUNTS), max(0, room_bytes) // 30)
        if key.type == FieldDescriptor.TYPE_STRING and value.type == FieldDescriptor.TYPE_STRING:
            for number in range(count):
                entries[f"K{number}"] = "v"

    def _text(self, field: Any, room_bytes: int) -> Any:
        if field.name == "regex":
            return self._rng.choice(PATTERNS)
        length = min(self._rng.choice(LENGTHS), max(0, room_bytes) // 4)
        if field.type == FieldDescriptor.TYPE_BYTES:
            return b"\x00" * length
        text = self._rng.choice(TEXTS)
        return (text * (length // len(text) + 1))[:length]


def _grows(field: Any) -> bool:
    return bool(field.is_repeated or field.cpp_type == FieldDescriptor.CPPTYPE_STRING)


def _within(message: Message) -> Iterator[Message]:
    for field, value in message.ListFields():
        if field.message_type and not field.message_type.GetOptions().map_entry:
            yield from value[:3] if field.is_repeated else [value]
