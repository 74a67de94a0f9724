"""Everything that reads what others wrote, each with good inputs to begin from and the errors that it may raise.

A target takes bytes. It returns, or raises one of its errors in words; whatever else it does is a finding.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path

Run = Callable[[bytes], None]
Made = Callable[[Path], "Prepared"]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A target that may be run: seeds to change, words to put in, and how changed bytes become the input."""

    run: Run
    seeds: Sequence[bytes]
    words: Sequence[bytes] = ()
    pack: Callable[[bytes], bytes] = bytes


@dataclass(frozen=True, slots=True)
class Target:
    """What is fuzzed. `seconds_max` is what one input may take before it hangs.

    What services or agents do within an event loop is `in_loop`: one input may take no more CPU time than one callback.
    """

    name: str
    prepare: Made
    errors: tuple[type[Exception], ...] = ()
    seconds_max: float = 10.0
    in_loop: bool = False


def file_target(name: str, read: Callable[[Path], object], seeds: Sequence[bytes], words: Sequence[bytes] = ()) -> Made:
    """Make a target of what reads a file."""

    def prepare(directory: Path) -> Prepared:
        path = directory / name

        def run(data: bytes) -> None:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                os.write(descriptor, data)
            finally:
                os.close(descriptor)
            read(path)

        return Prepared(run, seeds, words)

    return prepare


def all_targets() -> Iterator[Target]:
    """Give every target that needs no server."""
    from tests.verification.fuzz import (
        agent_files,
        learnt,
        mesh_files,
        observing,
        operator_files,
        outside,
        records,
        specs,
        store_files,
        trace_files,
        witness_files,
    )

    for module in (
        *(operator_files, trace_files, agent_files, records, store_files, learnt, outside, observing, specs),
        witness_files,
        mesh_files,
    ):
        yield from module.targets()


def within(directory: Path, run: Run) -> Run:
    """Run a target from a directory, for what reads a file by its bare name."""

    def inside(data: bytes) -> None:
        with chdir(directory):
            run(data)

    return inside
