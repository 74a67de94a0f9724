"""The papers, a module each: `PAPER` in it is what is reproduced."""

from __future__ import annotations

from importlib import import_module

from cotenant.reproduction.model import Paper

NAMES: tuple[str, ...] = ("aiturbo", "coda", "genie", "philly", "xiao", "twins")


def paper(name: str) -> Paper:
    """Load a paper by its name, one of `NAMES`."""
    found: Paper = import_module(f"{__name__}.{name}").PAPER
    return found
