r"""Files of environment variables (dotenv): `KEY=VALUE` lines, as `--env-file` and `env_file` read them.

A line may begin with `export`. A value in single quotes is taken as it is, one in double quotes with `\n`, `\r`, `\t`,
`\"`, `\\` and `\$`; both may span lines. Without quotes it ends before ` #` or at the end of its line. Nothing is
expanded: `$HOME` stays as it is written. Of two lines with the same name the last one counts. No error shows a value.

>>> pairs, mistakes = parse_dotenv("# data\nexport DATA=/data  # shared\nKEY='a b'\n7\n")
>>> [(pair.name, pair.value, pair.line) for pair in pairs], mistakes
([('DATA', '/data', 2), ('KEY', 'a b', 3)], [(4, 'no `=`: write KEY=VALUE')])
"""

from __future__ import annotations

import re
from typing import NamedTuple

BYTES_MAX = 2**20
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_EXPORT = re.compile(r"export[ \t]+")
_COMMENT = re.compile(r"[ \t]#")
_CLOSED = {"'": re.compile(r"'([^']*)'"), '"': re.compile(r'"([^"\\]*(?:\\.[^"\\]*)*)"', re.DOTALL)}
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "$": "$"}


class Variable(NamedTuple):
    """A variable of a file, and the line where it begins."""

    name: str
    value: str
    line: int


class BadFile(Exception):
    """A file that is no text of a reasonable size; `line` is 0 if no line is to blame."""

    def __init__(self, message: str, line: int = 0) -> None:
        super().__init__(message)
        self.line = line


def read_env_file(path: str) -> tuple[list[Variable], list[tuple[int, str]]]:
    """Return the variables of a file, and its mistakes by line.

    Raises:
        BadFile: it cannot be read, is too large or is no text.
    """
    try:
        with open(path, "rb") as file:
            raw = file.read(BYTES_MAX + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise BadFile(f"cannot be read: {why.lower()}") from None
    if len(raw) > BYTES_MAX:
        raise BadFile("is larger than 1 MiB")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadFile("not UTF-8 text", raw.count(b"\n", 0, error.start) + 1) from None
    return parse_dotenv(text)


def parse_dotenv(text: str) -> tuple[list[Variable], list[tuple[int, str]]]:
    """Return the variables of a text, each name once, and its mistakes by line."""
    text = text.replace("\r\n", "\n")
    found: dict[str, Variable] = {}
    mistakes: list[tuple[int, str]] = []
    at, number = 0, 1
    while at < len(text):
        end = _line_end(text, at)
        try:
            if pair := _pair(text, at, end):
                name, value, end = pair
                found.pop(name, None)
                found[name] = Variable(name, value, number)
        except ValueError as error:
            mistakes.append((number, str(error)))
        number += 1 + text.count("\n", at, end)
        at = end + 1
    return list(found.values()), mistakes


def _line_end(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end


def _pair(text: str, at: int, end: int) -> tuple[str, str, int] | None:
    """Return the name and the value of the line from `at` to `end`, and where the value's last line ends.

    None for an empty line or a comment.

    Raises:
        ValueError: the line is neither.
    """
    line = text[at:end]
    if not line.strip() or line.lstrip().startswith("#"):
        return None
    left, equals, right = line.partition("=")
    name = _EXPORT.sub("", left.strip(), count=1)
    if not equals:
        raise ValueError("no `=`: write KEY=VALUE")
    if not _NAME.fullmatch(name):
        raise ValueError("a name has letters, digits and underscores, and begins with no digit")
    quote = right.lstrip()[:1]
    if quote not in _CLOSED:
        return name, _COMMENT.split(f" {right}", maxsplit=1)[0].strip(), end
    closed = _CLOSED[quote].match(text, end - len(right.lstrip()))
    if closed is None:
        raise ValueError(f"{name}: the quote {quote} is not closed")
    end = _line_end(text, closed.end())
    after = text[closed.end() : end].strip()
    if after and not after.startswith("#"):
        raise ValueError(f"{name}: text after the closing quote {quote}")
    return name, closed[1] if quote == "'" else _unescaped(closed[1]), end


def _unescaped(text: str) -> str:
    """Return a text with its escapes replaced; other backslashes stay."""
    return _ESCAPED.sub(lambda match: _ESCAPES.get(match[1], match[0]), text)
