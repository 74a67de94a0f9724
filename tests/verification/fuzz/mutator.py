"""Mutates valid inputs: bytes, words, lines and JSON values are changed, by one seeded generator."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from itertools import islice
from random import Random
from typing import Any

BYTES_MAX = 1 << 16
STEPS = (1, 1, 1, 2, 3, 4)  # most inputs have one fault, so that code behind the first check is reached
DEEP = 3000  # more levels than Python's stack allows
DEEP_SHARE = 0.003  # share of inserted words: they take as long as a thousand others
WORD_BYTES = 8  # a random position is likelier within a word than at its start
WORDS_LOOKED_AT = 40
WORD = re.compile(rb"[A-Za-z_][\w-]*|-?\d[\w.+-]*|[ \t]+|.", re.DOTALL)

NUMBERS = (
    *(b"0", b"-0", b"-1", b"1", b"0.5", b"1e-320", b"1e308", b"1e309", b"-1e309", b"nan", b"NaN", b"inf", b"Infinity"),
    *(b"-Infinity", b"2147483648", b"9223372036854775807", b"9223372036854775808", b"18446744073709551616"),
    *(b"9" * 400, b"9" * 5000, b"1_000", b"0x10", b"1e", b"1.", b"\xd9\xa1\xd9\xa2", b"\xc2\xb2", b"2024-13-01"),
)
WORDS = (
    *(b"", b"null", b"true", b"false", b"[]", b"{}", b'""', b"'", b'"', b"\\", b"\x00", b"\r", b"\n\n", b"\t", b"%s%n"),
    *(b"\xff\xfe", b"\xef\xbb\xbf", b"\xed\xa0\x80", b'"\\ud800"', b"\\ud800", b"\xe2\x80\xa8", b"\x85", b"\x1c"),
    *(b"../../x", b"*a", b"&a [*a]", b"!!python/none", b"<<: *a", b"---", b"...", b"# ", b"=", b",", b":", b"|", b"@"),
    *(b"x" * 5000, b"\xf0\x9f\x92\xa5"),
)
DEEP_WORDS = (b"[" * DEEP, b"{a: " * DEEP, b'{"a":' * DEEP, b"- " * DEEP)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**400, 0.5, 1e308, float("nan"), float("inf"), -float("inf")),
    *("", "0", "x", "nan", "\ud800", "\x00", "é" * 300, "9" * 5000, [], {}, [[]], [None], {"a": 1}, ["x"], [1, 2, 3]),
)

Step = Callable[[bytes], bytes]


class Mutator:
    """Draws inputs from a target's seeds; the same generator and seeds give the same inputs."""

    def __init__(self, rng: Random, seeds: Sequence[bytes], words: Sequence[bytes] = ()) -> None:
        self._rng, self._seeds = rng, seeds
        taken = {word for seed in seeds for word in WORD.findall(seed[:20_000]) if len(word) > 1}
        self._words = sorted(taken | set(words))
        self._fields = (*NUMBERS, *WORDS, *self._words)
        self._steps: tuple[Step, ...] = (
            *(self._flip, self._cut, self._double, self._break_off, self._insert, self._splice),
            *(self._other_number, self._other_number, self._other_word, self._other_word, self._drop_word),
            *(self._double_line, self._drop_line, self._swap_lines, self._field, self._field),
        )

    def draw(self) -> bytes:
        """Return the next input."""
        data = self._rng.choice(self._seeds)
        if data[:1] in b"{[" and self._rng.random() < 0.5:
            data = self._other_json(data)
            if self._rng.random() < 0.8:
                return data[:BYTES_MAX]
        for _ in range(self._rng.choice(STEPS)):
            data = self._rng.choice(self._steps)(data)
        return data[:BYTES_MAX]

    def _span(self, data: bytes) -> tuple[int, int]:
        begin = self._rng.randint(0, len(data))
        return begin, min(len(data), begin + int(self._rng.expovariate(1 / 12)) + 1)

    def _flip(self, data: bytes) -> bytes:
        if not data:
            return b"\x00"
        at = self._rng.randrange(len(data))
        changed = self._rng.choice((data[at] ^ (1 << self._rng.randrange(8)), self._rng.randrange(256)))
        return data[:at] + bytes([changed]) + data[at + 1 :]

    def _cut(self, data: bytes) -> bytes:
        begin, end = self._span(data)
        return data[:begin] + data[end:]

    def _double(self, data: bytes) -> bytes:
        begin, end = self._span(data)
        return data[:end] + data[begin:end] * self._rng.choice((1, 2, 50)) + data[end:]

    def _break_off(self, data: bytes) -> bytes:
        return data[: self._rng.randint(0, len(data))]

    def _insert(self, data: bytes) -> bytes:
        at = self._rng.randint(0, len(data))
        return data[:at] + (self._rng.randbytes(4) if self._rng.random() < 0.03 else self._word()) + data[at:]

    def _word(self) -> bytes:
        """Choose a word that few formats expect."""
        return self._rng.choice(DEEP_WORDS if self._rng.random() < DEEP_SHARE else WORDS)

    def _splice(self, data: bytes) -> bytes:
        other = self._rng.choice(self._seeds)
        return data[: self._rng.randint(0, len(data))] + other[self._rng.randint(0, len(other)) :]

    def _replaced(self, data: bytes, wanted: Callable[[bytes], bool], by: bytes) -> bytes:
        """Replace a word near a random position."""
        begin = self._rng.randrange(len(data)) if data else 0
        for match in islice(WORD.finditer(data, max(0, begin - WORD_BYTES)), WORDS_LOOKED_AT):
            if wanted(match.group()):
                return data[: match.start()] + by + data[match.end() :]
        return data

    def _other_number(self, data: bytes) -> bytes:
        return self._replaced(data, lambda word: word.lstrip(b"-")[:1].isdigit(), self._rng.choice(NUMBERS))

    def _other_word(self, data: bytes) -> bytes:
        by = self._rng.choice((self._rng.choice(self._words or [b""]), self._word()))
        return self._replaced(data, lambda word: word[:1].isalpha(), by)

    def _drop_word(self, data: bytes) -> bytes:
        return self._replaced(data, lambda word: not word.isspace(), b"")

    def _field(self, data: bytes) -> bytes:
        """Change one field of a row separated by commas or tabs."""
        lines = data.split(b"\n")
        row = self._rng.randrange(len(lines))
        mark = b"\t" if b"\t" in lines[row] else b","
        fields = lines[row].split(mark)
        fields[self._rng.randrange(len(fields))] = self._rng.choice(self._fields)
        lines[row] = mark.join(fields)
        return b"\n".join(lines)

    def _double_line(self, data: bytes) -> bytes:
        lines = data.split(b"\n")
        at = self._rng.randrange(len(lines))
        return b"\n".join([*lines[: at + 1], *lines[at:]])

    def _drop_line(self, data: bytes) -> bytes:
        lines = data.split(b"\n")
        del lines[self._rng.randrange(len(lines))]
        return b"\n".join(lines)

    def _swap_lines(self, data: bytes) -> bytes:
        lines = data.split(b"\n")
        one, other = self._rng.randrange(len(lines)), self._rng.randrange(len(lines))
        lines[one], lines[other] = lines[other], lines[one]
        return b"\n".join(lines)

    # JSON ------------------------------------------------------------------------------------------------------

    def _other_json(self, data: bytes) -> bytes:
        """Change values of JSON, or of one of many lines, keeping it valid JSON."""
        lines = data.split(b"\n")
        whole = len(lines) < 2 or not lines[0].rstrip().endswith((b"}", b"]"))
        at = 0 if whole else self._rng.randrange(len(lines))
        try:
            value = json.loads(data if whole else lines[at])
        except ValueError:
            return data
        for _ in range(self._rng.randint(1, 2)):
            value = self._other_value(value)
        written = json.dumps(value).encode()
        if whole:
            return written
        return b"\n".join([*lines[:at], written, *lines[at + 1 :]])

    def _other_value(self, value: Any) -> Any:
        """Change one nested value; copies what encloses it."""
        if isinstance(value, dict) and value and self._rng.random() < 0.85:
            key = self._rng.choice(list(value))
            kept = dict(value)
            match self._rng.randrange(8):
                case 0:
                    del kept[key]
                case 1:
                    kept[self._rng.choice(("", "x", key + "s", "\ud800"))] = kept.pop(key)
                case _:
                    kept[key] = self._other_value(value[key])
            return kept
        if isinstance(value, list) and value and self._rng.random() < 0.85:
            at = self._rng.randrange(len(value))
            match self._rng.randrange(8):
                case 0:
                    return [*value[:at], *value[at + 1 :]]
                case 1:
                    return [*value, value[at]]
                case _:
                    return [*value[:at], self._other_value(value[at]), *value[at + 1 :]]
        return self._rng.choice(VALUES)
