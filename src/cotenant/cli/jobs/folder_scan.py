"""Finds what is to be uploaded of a folder, and refuses what cannot be, before anything is sent.

Left out are `.git`, what `.gitignore` and `.cotenantignore` name (in the folder itself or in one below it, with git's
rules; a later line wins, and `!.git` takes `.git` along), and sockets, pipes and devices. Links are kept as links; one
that leads out of the folder is an error, because the job could not follow it. Links are never followed, so loops do no
harm.
"""

from __future__ import annotations

import os
import re
import stat
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pathspec import GitIgnoreSpec

from cotenant.cli import units
from cotenant.cli.outcome import CommandError, sanitize, usage_error
from cotenant.folders.content import (
    DEPTH_MAX,
    DIRECTORY,
    ENTRIES_MAX,
    FILE,
    FOLDER_BYTES_MAX,
    LINK,
    MODE_MAX,
    link_stays,
    path_error,
)

IGNORE_FILES = (b".gitignore", b".cotenantignore")
ALWAYS_IGNORED = ".git"
IGNORE_FILE_BYTES_MAX = 2**20
STARS = re.compile(r"\*{2,}")
STARS_MAX = 8  # between two slashes; matching tries all ways to divide a name among them
SHOWN_MAX = 10
HINT_IGNORE = "leave out what the job does not need with lines in .cotenantignore, which is written like .gitignore"


@dataclass(frozen=True, slots=True)
class FoundEntry:
    """An entry to upload."""

    path: bytes  # within the folder
    kind: int
    mode: int
    status: os.stat_result
    link_target: bytes = b""

    @property
    def size_bytes(self) -> int:
        """The bytes of a file; 0 for others."""
        return self.status.st_size if self.kind == FILE else 0


@dataclass(slots=True)
class FoundFolder:
    """What is to be uploaded of a folder, and what is left out besides what is ignored."""

    root: bytes
    entries: list[FoundEntry] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)  # sockets, pipes and devices

    @property
    def size_bytes(self) -> int:
        """The bytes of its files."""
        return sum(entry.size_bytes for entry in self.entries)


def scan(folder: str) -> FoundFolder:
    """Return what is to be uploaded of a folder, sorted by path.

    Raises:
        CommandError: it is not a folder, is too large, or has something that cannot be uploaded.
    """
    root = os.fsencode(os.path.abspath(folder))
    if not os.path.isdir(root):
        what = "is not a folder" if os.path.exists(root) else "does not exist"
        raise usage_error(f"--upload: {shown(os.fsencode(folder))} {what}")
    scanner = _Scanner(root)
    scanner.walk(b"", ())
    if scanner.unreadable:
        raise _refusal("cannot be read", scanner.unreadable, HINT_IGNORE)
    if scanner.leading_out:
        raise _refusal("lead out of the folder", scanner.leading_out, f"copy what they lead to, or {HINT_IGNORE}")
    found = scanner.found
    found.entries.sort(key=lambda entry: entry.path.split(b"/"))
    _check_size(found)
    return found


def _refusal(what: str, found: Sequence[str], hint: str) -> CommandError:
    more = [f"and {len(found) - SHOWN_MAX} more"] if len(found) > SHOWN_MAX else []
    return usage_error(f"--upload: {len(found)} of its entries {what}", details=[*found[:SHOWN_MAX], *more], hint=hint)


def _check_size(found: FoundFolder) -> None:
    """Refuse a folder that is too large, with what is largest in it."""
    size, count = found.size_bytes, len(found.entries)
    if size > FOLDER_BYTES_MAX:
        why = f"has {units.short_bytes(size)}; at most {units.short_bytes(FOLDER_BYTES_MAX)} can be uploaded"
    elif count > ENTRIES_MAX:
        why = f"has {count:,} entries; at most {ENTRIES_MAX:,} can be uploaded"
    else:
        return
    largest = largest_entries(found, by_count=size <= FOLDER_BYTES_MAX)
    raise usage_error(
        f"--upload: {shown(found.root)} {why}",
        details=["the largest of its entries:", *largest],
        hint=f"{HINT_IGNORE}; data sets belong on a shared file system",
    )


def largest_entries(found: FoundFolder, *, by_count: bool = False) -> list[str]:
    """Return the ten largest entries of the folder itself, each with its size or the number of entries in it."""
    sums: dict[bytes, int] = {}
    for entry in found.entries:
        top = entry.path.partition(b"/")[0]
        sums[top] = sums.get(top, 0) + (1 if by_count else entry.size_bytes)
    order = sorted(sums, key=lambda top: (-sums[top], top))[:SHOWN_MAX]
    return [f"{f'{sums[top]:,}' if by_count else units.short_bytes(sums[top])}  {shown(top)}" for top in order]


def shown(path: bytes) -> str:
    """Return a path made safe for a terminal."""
    return sanitize(path.decode(errors="replace"))


class _Scanner:
    """Walks through a folder."""

    def __init__(self, root: bytes) -> None:
        self.found = FoundFolder(root)
        self.unreadable: list[str] = []
        self.leading_out: list[str] = []
        self._default = _Rules("", [GitIgnoreSpec.from_lines([ALWAYS_IGNORED]).patterns])

    def walk(self, inner: bytes, outer: Sequence[_Rules]) -> None:
        """Add everything below a directory of the folder that is not ignored."""
        place = os.path.join(self.found.root, inner) if inner else self.found.root
        try:
            with os.scandir(place) as entries:
                names = sorted(entry.name for entry in entries)
            rules = [*(outer or (self._default,)), *self._rules(place, inner, names)]
        except OSError as error:
            self.unreadable.append(f"{shown(inner or b'.')}: {(error.strerror or str(error)).lower()}")
            return
        for name in names:
            path = b"/".join((inner, name)) if inner else name
            try:
                status = os.lstat(os.path.join(place, name))
            except OSError as error:
                if not isinstance(error, FileNotFoundError):  # it was removed meanwhile
                    self.unreadable.append(f"{shown(path)}: {(error.strerror or str(error)).lower()}")
                continue
            is_directory = stat.S_ISDIR(status.st_mode)
            if not _ignored(rules, os.fsdecode(path), is_directory):
                self._add(path, status)
                if is_directory and path.count(b"/") < DEPTH_MAX:
                    self.walk(path, rules)

    def _rules(self, place: bytes, inner: bytes, names: Sequence[bytes]) -> Iterator[_Rules]:
        """Yield the rules of the ignore files of a directory. Raises `OSError`."""
        found = []
        for name in IGNORE_FILES:
            path = os.path.join(place, name)
            if name in names and stat.S_ISREG(os.stat(path).st_mode):
                with open(path, "rb") as file:
                    text = os.fsdecode(file.read(IGNORE_FILE_BYTES_MAX))
                found.append(_patterns(text, shown(os.path.join(inner, name))))
        if found:
            yield _Rules(os.fsdecode(inner) + "/" if inner else "", found)

    def _add(self, path: bytes, status: os.stat_result) -> None:
        mode, entries = status.st_mode & MODE_MAX, self.found.entries
        full = os.path.join(self.found.root, path)
        if why := path_error(path):
            self.unreadable.append(f"{shown(path[:200])}: {why}")
        elif stat.S_ISDIR(status.st_mode):
            entries.append(FoundEntry(path, DIRECTORY, mode, status))
        elif stat.S_ISLNK(status.st_mode):
            target = os.readlink(full)
            if link_stays(path, target):
                entries.append(FoundEntry(path, LINK, 0, status, target))
            else:
                self.leading_out.append(f"{shown(path)} -> {shown(target)}")
        elif not stat.S_ISREG(status.st_mode):
            self.found.skipped.append(shown(path))
        elif os.access(full, os.R_OK):
            entries.append(FoundEntry(path, FILE, mode, status))
        else:
            self.unreadable.append(f"{shown(path)}: permission denied")


class _Rules:
    """The patterns of one directory's ignore files, which are relative to it; the last that matches decides."""

    def __init__(self, prefix: str, patterns: Sequence[Sequence[object]]) -> None:
        self.prefix = prefix
        self._patterns = [one for some in patterns for one in some if getattr(one, "include", None) is not None][::-1]

    def decision(self, path: str) -> bool | None:
        """Return whether a path is ignored; None if no pattern matches it."""
        for pattern in self._patterns:
            if pattern.match_file(path[len(self.prefix) :]):  # type: ignore[attr-defined]  # a pattern of the library
                return bool(pattern.include)  # type: ignore[attr-defined]  # as above
        return None


def _patterns(text: str, name: str) -> Sequence[object]:
    """Return the patterns of an ignore file.

    Raises:
        CommandError: names the file and the line of a pattern that cannot be used.
    """
    found: list[object] = []
    for number, line in enumerate(text.splitlines(), 1):
        if "\0" in line:
            continue
        try:
            found += _patterns_of(line)
        except (ValueError, re.error) as error:
            raise usage_error(f"{name}:{number}: {sanitize(line)}: {error}") from None
    return found


def _patterns_of(line: str) -> Sequence[object]:
    """Return the pattern of a line, if it has one.

    Raises:
        ValueError, re.error: it is not a pattern, or its cost is exponential in the length of a name.
    """
    line = STARS.sub(lambda stars: "*" if len(stars[0]) > len("**") else stars[0], line)
    if not line.startswith("#") and any(part.count("*") > STARS_MAX for part in line.split("/")):
        raise ValueError(f"has more than {STARS_MAX} asterisks between two slashes")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of `re`, about sets within sets, which Git does not have
        found: Sequence[object] = GitIgnoreSpec.from_lines([line]).patterns
    return found


def _ignored(rules: Sequence[_Rules], path: str, is_directory: bool) -> bool:
    for one in reversed(rules):
        decided = one.decision(f"{path}/" if is_directory else path)
        if decided is not None:
            return decided
    return False
