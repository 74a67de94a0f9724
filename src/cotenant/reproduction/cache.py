"""Figures of cases, kept in a directory from one run to the next.

A full run takes a while, and whoever stops one should not have to begin again. Each paper has a file of lines there,
one for each case that was done. What a case gives depends on its work, on the code that does it, on what is bundled
with that, on the libraries beneath and on the data: a line is taken only where the digest of all these is the same.
Lines of other code stay where they are, for whoever goes back to it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import cotenant
from cotenant.reproduction.model import BUNDLED, Case, Data, Figures
from cotenant.simulator.recording.event_file import versions

ROOMS = ("core", "policies", "simulator", "reproduction")  # of the package: what figures depend on
ENDINGS = (".py", ".csv", ".json", ".toml")  # of what is code there, or bundled
LIBRARIES = ("lightgbm", "scikit-learn", "scipy")  # beside those that recordings name


class BadDirectory(Exception):
    """A directory in which nothing can be kept, and why, in one sentence."""


@dataclass(frozen=True, slots=True)
class Ran:
    """What came of a case, and what it cost."""

    figures: Figures
    processor_seconds: float


class Kept:
    """What was kept of a paper's cases. Without a directory nothing was, and nothing is."""

    def __init__(self, directory: Path | None = None, paper: str = "", data: Data = BUNDLED) -> None:
        """Read what is there.

        Raises:
            BadDirectory: it cannot be made, read or written.
        """
        self._path = directory / f"{paper}.jsonl" if directory else None
        self._found: dict[str, Ran] = {}
        if self._path is None:
            return
        self._under = _digest_of_code() + _digest_of(data)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a+", encoding="utf-8", errors="replace") as file:
                file.seek(0)
                lines = file.readlines()
                file.write("\n" * (bool(lines) and not lines[-1].endswith("\n")))  # of a run that was killed
        except OSError as error:
            raise BadDirectory(f"figures cannot be kept in {directory}: {error.strerror or error}") from error
        self._found = dict(_read(lines))

    def of(self, case: Case) -> Ran | None:
        """Give what is known of a case; of one that would not be the same another time, nothing."""
        return self._found.get(self._key(case)) if self._path and case.repeatable else None

    def keep(self, case: Case, ran: Ran) -> None:
        """Write a case down.

        Raises:
            BadDirectory: there is no room, or no right, to.
        """
        if self._path is None or not case.repeatable:
            return
        line = {
            "key": self._key(case),
            "case": str(case),
            "processor_seconds": round(ran.processor_seconds, 6),
            "values": dict(ran.figures.values),
            "series": {name: list(those) for name, those in ran.figures.series.items()},
        }
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
        except OSError as error:
            raise BadDirectory(f"{self._path} cannot be written: {error.strerror or error}") from error

    def _key(self, case: Case) -> str:
        return hashlib.sha256(f"{self._under}{case!r}".encode()).hexdigest()


def _read(lines: Sequence[str]) -> Iterator[tuple[str, Ran]]:
    """Read lines; one that is torn, as the last may be, is none."""
    for line in lines:
        try:
            told = json.loads(line)
            series = {name: tuple(map(float, those)) for name, those in told["series"].items()}
            values = {name: float(value) for name, value in told["values"].items()}
            yield str(told["key"]), Ran(Figures(values, series), float(told["processor_seconds"]))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            continue


def _digest_of_code() -> str:
    """Sum up the code that simulates, what is bundled with it, and the libraries that figures depend on."""
    beneath = versions() | {name: _version(name) for name in LIBRARIES}
    digest = hashlib.sha256(json.dumps(beneath, sort_keys=True).encode())
    package = Path(cotenant.__file__).parent
    for room in ROOMS:
        for path in sorted(_files(package / room)):
            digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _version(library: str) -> str:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(library)
    return ""


def _files(directory: Path) -> Iterator[Path]:
    for folder, _, names in os.walk(directory):
        yield from (Path(folder) / name for name in names if name.endswith(ENDINGS))


def _digest_of(data: Data) -> str:
    """Sum up which files the data has, how long each is and when it was written."""
    digest = hashlib.sha256()
    if data.directory:
        for path in sorted(data.directory.glob("*/*")):
            told = path.stat()
            digest.update(f"{path.relative_to(data.directory)}\0{told.st_size}\0{told.st_mtime_ns}\0".encode())
    return digest.hexdigest()
