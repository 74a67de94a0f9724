"""Runs the commands that are typed all day without the option parser, whose import takes longer than the command.

Theory of operation. `quick_table` is generated from the declarations that typer reads: for each quick command its
function, its options and the values of those that are not given. A command line is taken here only if it is plain:
known options with values of the simple kinds, in forms that typer reads the same way. For everything else, such as an
option that does not exist, a value that might be wrong, `--help` or shell completion, `quick_command` returns None, and
typer parses the line: so there is one set of help texts and errors, and a test compares both parsers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any, cast

from cotenant.cli.aliases import command_of
from cotenant.cli.flags import GLOBAL_OPTIONS, TAIL
from cotenant.cli.quick_table import COMMANDS

COMPLETING = "_COTENANT_COMPLETE"  # set by shells that ask for completions

FLAG, TEXT, TEXTS, INTEGER = "flag", "text", "texts", "integer"
Found = dict[str, Any]


class NotPlain(Exception):
    """The arguments are for typer."""


class QuickContext:
    """What commands read of typer's context."""

    def __init__(self, params: Found, tail: list[str] | None) -> None:
        self.params, self.meta = params, {} if tail is None else {TAIL: tail}

    def find_root(self) -> QuickContext:
        """Return the context with the global options."""
        return self


def quick_command(arguments: Sequence[str], environment: Mapping[str, str]) -> Callable[[], None] | None:
    """Return the call of a quick command, or None for typer."""
    if COMPLETING in environment:
        return None
    try:
        return _call(list(arguments))
    except NotPlain:
        return None


def _call(waiting: list[str]) -> Callable[[], None]:
    flags: Found = {}
    while waiting and waiting[0].startswith("-"):
        name, *assigned = waiting.pop(0).split("=", 1)
        if name not in GLOBAL_OPTIONS:
            raise NotPlain
        flags[GLOBAL_OPTIONS[name]] = _value(assigned, waiting)
    if not waiting or (name := command_of(waiting.pop(0))) not in COMMANDS:
        raise NotPlain
    row = COMMANDS[name]
    tail = None
    if "--" in waiting:
        if not row["tail"]:
            raise NotPlain
        at = waiting.index("--")
        waiting, tail = waiting[:at], waiting[at + 1 :]
    given = {name: list(value) if isinstance(value, list) else value for name, value in row["defaults"].items()}
    words = _read_options(row["options"], waiting, given, flags)
    _read_arguments(row["argument"], words, given)
    context = QuickContext(flags, tail)
    return partial(_run, row, context, given)


def _run(row: Mapping[str, Any], context: QuickContext, given: Found) -> None:
    """Call the command's function as typer would."""
    if row["document"]:
        from cotenant.cli.jobs.quick_submit import submitted

        if submitted(context, given, context.meta.get(TAIL)):
            return
        from cotenant.cli.jobs.job_options import document

        prefix = "job_"
        values = {name: given.pop(name) for name in list(given) if name.startswith(prefix)}
        given["job"] = document(cast("Any", context), values)
    getattr(import_module(row["module"]), row["function"])(context=context, **given)


def _read_options(options: Mapping[str, Any], waiting: list[str], given: Found, flags: Found) -> list[str]:
    """Read options into `given` and global ones into `flags`, and return the other words."""
    words: list[str] = []
    seen: set[str] = set()
    while waiting:
        word = waiting.pop(0)
        if not word.startswith("-") or word == "-":
            words.append(word)
            continue
        name, *assigned = word.split("=", 1)
        if name in GLOBAL_OPTIONS and name not in options:
            flags[GLOBAL_OPTIONS[name]] = _value(assigned, waiting)
            continue
        if name not in options or (assigned and not name.startswith("--")):
            raise NotPlain
        parameter, kind, *bounds = options[name]
        if kind == FLAG:
            if assigned:
                raise NotPlain
            given[parameter] = True
        elif kind == TEXTS:
            given[parameter] = [*(given[parameter] or ()), _value(assigned, waiting)]
        elif name in seen:
            raise NotPlain
        else:
            text = _value(assigned, waiting)
            given[parameter] = _integer(text, *bounds) if kind == INTEGER else text
        seen.add(name)
    return words


def _value(assigned: list[str], waiting: list[str]) -> str:
    """Return an option's value; one that begins with a dash may be the next option."""
    if assigned:
        return assigned[0]
    if not waiting or waiting[0].startswith("-"):
        raise NotPlain
    return waiting.pop(0)


def _integer(text: str, least: int | None, most: int | None) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise NotPlain
    number = int(text)
    if (least is not None and number < least) or (most is not None and number > most):
        raise NotPlain
    return number


def _read_arguments(argument: Sequence[Any] | None, words: list[str], given: Found) -> None:
    """Assign the words to the command's argument: (parameter, fewest words, whether it takes several)."""
    if argument is None:
        if words:
            raise NotPlain
        return
    parameter, fewest, several = argument
    if len(words) < fewest or (len(words) > 1 and not several) or "" in words:
        raise NotPlain
    if words:
        given[parameter] = words if several else words[0]
