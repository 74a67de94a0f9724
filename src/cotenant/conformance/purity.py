"""Watches what a policy does besides deciding: clocks that it reads, and chance that it draws.

Functions of the standard library and of numpy are replaced while a policy runs, in their own modules and wherever a
module of the policy's package has imported them by name. A use is recorded and raises, so that a policy that catches
every error is found out too.
"""

from __future__ import annotations

import datetime
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import FrameType, ModuleType
from typing import Any, NoReturn

import numpy as np

from cotenant import plugins

CLOCKS = (
    *("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time"),
    *("process_time_ns", "thread_time", "thread_time_ns", "clock_gettime", "clock_gettime_ns"),
    *("localtime", "gmtime", "ctime", "sleep"),
)
DATES = {datetime.datetime: ("now", "utcnow", "today"), datetime.date: ("today",)}
SEEDED = ("Random", "SystemRandom", "Generator", "RandomState", "SeedSequence", "BitGenerator")
OWN_PACKAGES = ("cotenant.policies", "cotenant.core")


class Impure(AssertionError):
    """A policy read a clock or drew chance."""


@dataclass(slots=True)
class Watch:
    """Which functions a policy must not call, and those that it called."""

    used: list[str] = field(default_factory=list)
    is_on: bool = False

    def tripped(self, name: str) -> NoReturn:
        """Record a call.

        Raises:
            Impure: always.
        """
        self.used.append(f"{name}()")
        raise Impure(f"the policy called {name}()")


Replacements = list[tuple[Any, Any]]  # an original, and what stands in for it


@contextmanager
def watched(policy: type, replacements: Replacements, watch: Watch) -> Iterator[None]:
    """Replace functions wherever a policy finds them; the watch has those that it called."""
    changed: list[tuple[dict[str, Any], str, Any]] = []
    try:
        watch.is_on = True
        for space, name, original, stand_in in _places(policy, tuple(replacements)):
            space[name] = stand_in
            changed.append((space, name, original))
        yield
    finally:
        watch.is_on = False
        for space, name, original in reversed(changed):
            space[name] = original


def clocks(watch: Watch) -> Replacements:
    """Return what stands in for the functions that read a clock or wait."""
    named = [(f"time.{name}", getattr(time, name)) for name in CLOCKS if hasattr(time, name)]
    found: Replacements = [(original, _trap(name, original, watch)) for name, original in named]
    return [*found, *((kind, _trapped_class(kind, names, watch)) for kind, names in DATES.items())]


def chance(watch: Watch) -> Replacements:
    """Return what stands in for the functions that draw from a generator of the whole process, or from the system."""
    named = [(f"random.{name}", getattr(random, name)) for name in random.__all__ if name not in SEEDED]
    drawn = [name for name in np.random.__all__ if name[0].islower() and name != "default_rng"]
    named += [(f"numpy.random.{name}", getattr(np.random, name)) for name in drawn]
    named += [("os.urandom", os.urandom)]
    found: Replacements = [(original, _trap(name, original, watch)) for name, original in named]
    return [*found, (np.random.default_rng, _trap_unseeded(watch))]


def _trap(name: str, original: Callable[..., Any], watch: Watch) -> Callable[..., Any]:
    def trap(*arguments: Any, **others: Any) -> Any:
        if not watch.is_on or _is_ours(sys._getframe(1).f_globals) or _is_import(sys._getframe(1)):
            return original(*arguments, **others)
        return watch.tripped(name)

    return trap


def _trap_unseeded(watch: Watch) -> Callable[..., Any]:
    original = np.random.default_rng

    def default_rng(seed: Any = None) -> Any:
        if seed is None and watch.is_on and not _is_import(sys._getframe(1)):
            watch.tripped("numpy.random.default_rng")
        return original(seed)

    return default_rng


def _is_import(frame: FrameType | None) -> bool:
    """Return whether a call comes from a module that is being imported: a policy may import what it needs late."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _trapped_class(kind: type, names: tuple[str, ...], watch: Watch) -> type:
    """Return a subclass whose constructors from a clock trap; instances of the original count as its own."""

    class Same(type(kind)):  # type: ignore[misc]  # `type` itself, for every class that is trapped
        def __instancecheck__(cls, one: object) -> bool:
            return isinstance(one, kind)

    def trapped(name: str) -> classmethod[Any, Any, Any]:
        def trap(cls: type, *arguments: Any, **others: Any) -> Any:
            if not watch.is_on or _is_ours(sys._getframe(1).f_globals) or _is_import(sys._getframe(1)):
                return getattr(kind, name)(*arguments, **others)
            return watch.tripped(f"datetime.{kind.__name__}.{name}")

        return classmethod(trap)

    return Same(kind.__name__, (kind,), {name: trapped(name) for name in names})


def _is_ours(space: Mapping[str, Any]) -> bool:
    """Return whether a caller is the machinery of the test, such as a callback of the garbage collector."""
    top = str(space.get("__name__", "")).partition(".")[0]
    return top in ("hypothesis", "_pytest", "pytest_timeout", "xdist", "execnet", "threading")


def _places(policy: type, replacements: tuple[tuple[Any, Any], ...]) -> list[tuple[dict[str, Any], str, Any, Any]]:
    stand_ins = {id(original): (original, stand_in) for original, stand_in in replacements}
    return [
        (space, name, *stand_ins[id(value)])
        for space in _spaces(policy)
        for name, value in list(space.items())
        if id(value) in stand_ins
    ]


@cache
def _spaces(policy: type) -> list[dict[str, Any]]:
    """Return the modules in which a policy may find a function: those of the functions, and of its package."""
    top = policy.__module__.partition(".")[0]
    packages = OWN_PACKAGES if top == plugins.OURS else (top,)
    modules: list[ModuleType] = [time, datetime, random, np.random, os]
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and f"{name}.".startswith(tuple(f"{one}." for one in packages)):
            modules.append(module)
    return [vars(module) for module in modules]
