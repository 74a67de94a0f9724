"""The papers, one module each; its `PAPER` is the reproduction."""

from __future__ import annotations

from importlib import import_module

from cotenant.reproduction.model import Paper

NAMES: tuple[str, ...] = ("aiturbo", "coda", "genie", "philly", "xiao", "twins")


def paper(name: str) -> Paper:
    """Return a paper by its name, one of `NAMES`."""
    found: Paper = import_module(f"{__name__}.{name}").PAPER
    return found
