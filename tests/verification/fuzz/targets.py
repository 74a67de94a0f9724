"""All readers of outside input, each with valid inputs to start from and the errors that it may raise.

A target takes bytes. It returns, or raises one of its errors with a message; anything else is a finding.
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
    """A target ready to run: seeds to mutate, words to insert, and how mutated bytes become the input (`pack`)."""

    run: Run
    seeds: Sequence[bytes]
    words: Sequence[bytes] = ()
    pack: Callable[[bytes], bytes] = bytes


@dataclass(frozen=True, slots=True)
class Target:
    """A fuzz target. An input that takes more CPU time than `seconds_max` hangs.

    `in_loop` marks code that services or agents run in an event loop: one input may take no more CPU time than one
    callback.
    """

    name: str
    prepare: Made
    errors: tuple[type[Exception], ...] = ()
    seconds_max: float = 10.0
    in_loop: bool = False


def file_target(name: str, read: Callable[[Path], object], seeds: Sequence[bytes], words: Sequence[bytes] = ()) -> Made:
    """Return a target of a function that reads a file."""

    def prepare(directory: Path) -> Prepared:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)

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
    """Yield every target that needs no server."""
    from tests.verification.fuzz import (
        agent_files,
        environment_files,
        external_inputs,
        folder_files,
        image_files,
        learned_records,
        mesh_files,
        operator_files,
        predictor_calls,
        records,
        server_answers,
        slurm_answers,
        specs,
        store_files,
        trace_files,
        witness_files,
    )

    for module in (
        *(
            operator_files,
            trace_files,
            agent_files,
            records,
            store_files,
            learned_records,
            external_inputs,
            folder_files,
            image_files,
            predictor_calls,
            specs,
            environment_files,
        ),
        witness_files,
        mesh_files,
        server_answers,
        slurm_answers,
    ):
        yield from module.targets()


def within(directory: Path, run: Run) -> Run:
    """Run a target in a directory, for code that reads a file by its bare name."""

    def inside(data: bytes) -> None:
        with chdir(directory):
            run(data)

    return inside
