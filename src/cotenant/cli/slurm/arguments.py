"""Command lines of the façade's lists and changes: a small table of options for each command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cotenant.cli.slurm.options import UnknownOption

Options = Mapping[str, str]  # the long name of each option, by its letters and names; `=` behind those with a value


def read(command: str, words: Sequence[str], options: Options) -> tuple[dict[str, str], list[str]]:
    """Return the options of a command line by their long names, "" for a flag, and the other words.

    >>> read("squeue", ["-hj1", "--format=%i", "x", "--me"], {"h": "noheader", "j": "jobs=", "format": "format=",
    ...      "me": "me"})
    ({'noheader': '', 'jobs': '1', 'format': '%i', 'me': ''}, ['x'])

    Raises:
        UnknownOption: an option does not exist, or lacks its value.
    """
    given: dict[str, str] = {}
    others: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if word == "--":
            others += left
            break
        if word.startswith("--"):
            name, assigned, value = word[2:].partition("=")
            found = options.get(name) or _beginning(name, options)
            if found is None:
                raise UnknownOption(command, word)
            given[found.removesuffix("=")] = _value(command, word, found, value if assigned else None, left)
        elif word.startswith("-") and len(word) > 1:
            _read_letters(command, word[1:], options, given, left)
        else:
            others.append(word)
    return given, others


def _beginning(name: str, options: Options) -> str | None:
    found = {options[known] for known in options if len(name) > 1 and len(known) > 1 and known.startswith(name)}
    return found.pop() if len(found) == 1 else None


def _read_letters(command: str, letters: str, options: Options, given: dict[str, str], left: list[str]) -> None:
    while letters:
        letter, letters = letters[0], letters[1:]
        found = options.get(letter)
        if found is None:
            raise UnknownOption(command, letter, "invalid option --")
        name = found.removesuffix("=")
        if name == found:
            given[name] = ""
            continue
        given[name] = _value(command, letter, found, letters.removeprefix("=") or None, left)
        return


def _value(command: str, word: str, found: str, value: str | None, left: list[str]) -> str:
    if not found.endswith("="):
        if value is not None:
            raise UnknownOption(command, word, "option doesn't allow an argument")
        return ""
    if value is not None:
        return value
    if not left:
        raise UnknownOption(command, word, "option requires an argument --")
    return left.pop(0)
