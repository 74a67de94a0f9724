"""Messages of any type: random ones by their descriptors, or valid ones with a few changed fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

DEPTH_MAX = 5
TEXTS = (
    "",
    "x",
    "a/b",
    "../../etc",
    "a\nb",
    "\x00",
    "é" * 40,
    "x" * 5000,
    "\U0001f4a5",
    "-1",
    "nan",
    "%s",
    " ",
    "A" * 64,
)
INTEGERS = (0, 1, 2, 3, 8, 1000, 4096, -1, 2**31 - 1, -(2**31), 2**32 - 1, 2**53, 2**63 - 1, -(2**63), 2**64 - 1)
NUMBERS = (0.0, -0.0, 0.5, 1.0, 99.0, -1.0, 1e-320, 1e308, -1e308, float("inf"), -float("inf"), float("nan"))
LEAST_AND_MOST = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


class Drawer:
    """Draws messages. `known` has meaningful texts by parts of field names; it may be extended."""

    def __init__(self, rng: Random, known: Mapping[str, Sequence[str]]) -> None:
        self._rng, self._known = rng, known

    def fill(self, message: Message, depth: int = 0, share: float = 0.5) -> Message:
        """Set a share of a message's fields at random."""
        for field in message.DESCRIPTOR.fields:
            if self._rng.random() < share:
                self._set(message, field, depth)
        return message

    def change(self, message: Message) -> Message:
        """Change a few fields of a message, or of nested messages."""
        for _ in range(self._rng.randint(1, 3)):
            inner = message
            while True:
                present = [
                    value
                    for field, value in inner.ListFields()
                    if field.message_type and not field.message_type.GetOptions().map_entry
                    for value in (value if field.is_repeated else [value])
                ]
                if not present or self._rng.random() < 0.35:
                    break
                inner = self._rng.choice(present)
            if inner.DESCRIPTOR.fields:
                self._set(inner, self._rng.choice(inner.DESCRIPTOR.fields), 1)
        return message

    def _set(self, message: Message, field: Any, depth: int) -> None:
        message.ClearField(field.name)
        entry = field.message_type
        if entry is not None and entry.GetOptions().map_entry:
            self._set_map(getattr(message, field.name), entry, depth)
        elif field.is_repeated:
            for _ in range(self._rng.choice((0, 1, 1, 2, 3, 40 if depth < 2 else 1))):
                if entry is None:
                    getattr(message, field.name).append(self._value(field))
                elif depth < DEPTH_MAX:
                    self.fill(getattr(message, field.name).add(), depth + 1)
        elif entry is None:
            setattr(message, field.name, self._value(field))
        elif depth < DEPTH_MAX:
            inner = getattr(message, field.name)
            inner.SetInParent()
            self.fill(inner, depth + 1)

    def _set_map(self, entries: Any, entry: Any, depth: int) -> None:
        key, value = entry.fields_by_name["key"], entry.fields_by_name["value"]
        for _ in range(self._rng.choice((0, 1, 3))):
            if value.message_type is None:
                entries[self._value(key)] = self._value(value)
            elif depth < DEPTH_MAX:
                self.fill(entries[self._value(key)], depth + 1)

    def _value(self, field: Any) -> Any:
        rng = self._rng
        match field.cpp_type:
            case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
                return rng.randbytes(rng.choice((0, 1, 20, 3000)))
            case FieldDescriptor.CPPTYPE_STRING:
                return self._text(field)
            case FieldDescriptor.CPPTYPE_BOOL:
                return rng.random() < 0.5
            case FieldDescriptor.CPPTYPE_ENUM:
                numbers = [value.number for value in field.enum_type.values]
                return rng.choice([*numbers, *numbers, 999, -1])
            case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
                return rng.choice((*NUMBERS, rng.random() * 100))
        least, most = LEAST_AND_MOST[field.cpp_type]
        return min(most, max(least, rng.choice((*INTEGERS, rng.randint(0, 10), rng.randint(0, 10)))))

    def texts(self, field: Any) -> list[str]:
        """Return the meaningful texts for a field."""
        return [text for part, texts in self._known.items() if part in field.full_name for text in texts]

    def _text(self, field: Any) -> str:
        near = self.texts(field)
        if near and self._rng.random() < 0.7:
            return self._rng.choice(near)
        return self._rng.choice(TEXTS)
