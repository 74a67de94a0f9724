"""The output of a job as lines for a page: bounded, decoded, and harmless."""

from __future__ import annotations

import codecs
import re
from collections import deque
from typing import Any

from cotenant.cli.control_characters import inert

LINES_MAX = 2_000  # that wait to be sent; older ones are dropped, and counted
LINE_CHARACTERS_MAX = 2_000
_COLOURS = re.compile("\x1b\\[[0-9;:]{0,32}m")


class LogTail:
    """Lines that wait to be sent, and the line that each rank has begun."""

    def __init__(self) -> None:
        self._decoders: dict[int, Any] = {}
        self._begun: dict[int, str] = {}
        self._lines: deque[tuple[int, str]] = deque()
        self._dropped = 0
        self._fed = False

    def feed(self, rank: int, data: bytes) -> None:
        """Add a piece of a rank's output."""
        self._fed = True
        decoder = self._decoders.setdefault(rank, codecs.getincrementaldecoder("utf-8")("replace"))
        *lines, begun = (self._begun.get(rank, "") + decoder.decode(data)).split("\n")
        for line in lines:
            self._add(rank, line)
        if len(begun) > 4 * LINE_CHARACTERS_MAX:  # keep its end: progress bars rewrite one line without ever ending it
            rewritten = begun.rpartition("\r")[2]
            begun = rewritten if len(rewritten) <= 4 * LINE_CHARACTERS_MAX else begun[: 4 * LINE_CHARACTERS_MAX]
        self._begun[rank] = begun

    def take(self) -> dict[str, Any] | None:
        """Return the lines since the last call, how many were dropped, and the begun lines by rank; None if nothing."""
        if not self._fed:
            return None
        self._fed = False
        batch = {
            "lines": list(self._lines),
            "dropped": self._dropped,
            "begun": [(rank, shown(line)) for rank, line in sorted(self._begun.items()) if line],
        }
        self._lines.clear()
        self._dropped = 0
        return batch

    def _add(self, rank: int, line: str) -> None:
        self._lines.append((rank, shown(line)))
        if len(self._lines) > LINES_MAX:
            self._lines.popleft()
            self._dropped += 1


def shown(line: str) -> str:
    r"""Return a line as a page shows it: what a terminal would show in the end, without colours, cut if it is long.

    >>> shown("10 %\r20 %\r"), shown("\x1b[31mred\x1b[0m \x1b]0;title\x07"), shown("x" * 3000)[-24:]
    ('20 %', 'red ^[]0;title^G', 'x … 1000 more characters')
    """
    last = line.rstrip("\r").rpartition("\r")[2]
    plain = inert(_COLOURS.sub("", last).replace("\t", "    "))
    if len(plain) <= LINE_CHARACTERS_MAX:
        return plain
    return f"{plain[:LINE_CHARACTERS_MAX]} … {len(plain) - LINE_CHARACTERS_MAX} more characters"
