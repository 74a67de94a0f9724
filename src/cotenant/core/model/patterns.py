r"""Regular expressions from users and operators, in RE2's syntax: linear time in the line, bounded memory to compile.

Theory of operation. Python's `re` backtracks: `(a+)+b` takes 2^n steps on a line of n letters, and a pattern of a
thousand characters can take seconds to compile. RE2 (Cox 2007, "Regular Expression Matching Can Be Simple And Fast")
simulates an automaton instead. Its program is bounded by `MEMORY_BYTES_MAX`: a pattern with too many repeats, once
expanded, is rejected within milliseconds, and a line of n bytes costs at most n times the size of the program. The
syntax excludes what an automaton cannot do: lookahead, lookbehind and backreferences.

RE2 is imported on first use, and `find_error` finds no error if it is not installed: a client without it leaves the
check to the queue, which cannot start without it.
"""

from __future__ import annotations

from typing import Any, Protocol

LENGTH_MAX = 1024
MEMORY_BYTES_MAX = 128 * 1024  # of a compiled program: about 1,300 instructions, compiled in less than 10 ms
ERROR_LENGTH_MAX = 120

HINT = "patterns have RE2's syntax, without lookahead, lookbehind and backreferences"


class BadPattern(ValueError):
    """A pattern that cannot be compiled; the message says why."""


class Pattern(Protocol):
    """A compiled pattern."""

    @property
    def pattern(self) -> str:
        """The pattern as it was written."""

    @property
    def groups(self) -> int:
        """The number of groups that it captures."""

    @property
    def groupindex(self) -> dict[str, int]:
        """The numbers of its named groups."""

    def search(self, text: str) -> Any:
        """Return the first match in a text; None if there is none."""


def compile_pattern(text: str, length_max: int = LENGTH_MAX) -> Pattern:
    r"""Compile a pattern.

    Raises:
        BadPattern: the pattern is too long or too large, or not in RE2's syntax.

    >>> compile_pattern(r"step (\d+)").search("at step 12")[1]
    '12'
    >>> compile_pattern("(a{1000}){1000}")
    Traceback (most recent call last):
    ...
    cotenant.core.model.patterns.BadPattern: repeats too often: '{1000}'; at most 1000 repeats in total are allowed
    """
    import re2

    if len(text) > length_max:
        raise BadPattern(f"must have at most {length_max} characters, not {len(text)}")
    options = re2.Options()
    options.max_mem, options.log_errors = MEMORY_BYTES_MAX, False
    try:
        compiled: Pattern = re2.compile(text, options)
    except re2.error as error:
        message = error.args[0] if error.args else ""
        raise BadPattern(
            _in_words(message.decode(errors="replace") if isinstance(message, bytes) else str(message))
        ) from None
    except UnicodeEncodeError:
        raise BadPattern("is not a regular expression: it contains characters that are not valid Unicode") from None
    return compiled


def find_error(text: str) -> str:
    r"""Return why a pattern for steps cannot be used; "" if it can.

    >>> find_error("step")
    'has no group for the step, such as step (\\d+)'
    """
    try:
        compiled = compile_pattern(text)
    except BadPattern as error:
        return str(error)
    except ImportError:
        return ""  # the queue checks it
    return "" if compiled.groups else r"has no group for the step, such as step (\d+)"


def _in_words(message: str) -> str:
    """Return RE2's error in our words, with what to write instead."""
    what, _, where = message.partition(": ")
    where = ascii(where[:ERROR_LENGTH_MAX])
    if "too large" in what:
        return "is too large once its repeats are expanded; use fewer or smaller repeats"
    if what == "invalid repetition size":
        return f"repeats too often: {where}; at most 1000 repeats in total are allowed"
    if what in ("invalid perl operator", "invalid escape sequence", "bad repetition operator", "invalid named capture"):
        return f"is not a regular expression: {where} is not supported; {HINT}"
    return f"is not a regular expression: {what}" + (f": {where}" if where != "''" else "")
