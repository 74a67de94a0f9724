"""Functions and arguments as pickles; an error names the variable that cannot be pickled."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from cotenant import extras
from cotenant.client.errors import CotenantError


class CannotPickle(CotenantError, TypeError):
    """A function, one of its variables, or an argument cannot be pickled."""


def _dumps(value: object) -> bytes:
    try:
        import cloudpickle
    except ImportError:
        raise CotenantError(
            "functions need cloudpickle to run as jobs", reason="MISSING_EXTRA", hint=extras.how_to_install("python")
        ) from None
    dumped: bytes = cloudpickle.dumps(value)
    return dumped


def pickled_function(function: Callable[..., object]) -> bytes:
    """Return a function with the variables that it uses.

    Raises:
        CannotPickle: names the variable that cannot be pickled.
    """
    try:
        return _dumps(function)
    except CotenantError:
        raise
    except Exception as error:
        name = getattr(function, "__qualname__", repr(function))
        culprits = [
            f"{variable} ({type(value).__name__}: {why})"
            for variable, value in _variables(function).items()
            if (why := _why_not(value))
        ]
        if not culprits:
            raise CannotPickle(f"{name} cannot be pickled: {error}", reason="CANNOT_PICKLE") from error
        raise CannotPickle(
            f"{name} uses what cannot be pickled: {', '.join(culprits)}",
            reason="CANNOT_PICKLE",
            hint="create it inside the function",
        ) from error


def pickled_call(number: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
    """Return the arguments of a call.

    Raises:
        CannotPickle: names the argument that cannot be pickled.
    """
    try:
        return _dumps((args, dict(kwargs)))
    except CotenantError:
        raise
    except Exception as error:
        named = {str(place): value for place, value in enumerate(args)} | dict(kwargs)
        culprits = [
            f"argument {name} ({type(value).__name__}: {why})"
            for name, value in named.items()
            if (why := _why_not(value))
        ]
        raise CannotPickle(
            f"item {number}: {', '.join(culprits) or error} cannot be pickled", reason="CANNOT_PICKLE"
        ) from error


def _variables(function: Callable[..., object]) -> dict[str, object]:
    """Return the variables of other scopes that a function uses, and its defaults."""
    try:
        used = inspect.getclosurevars(function)
        defaults = {
            name: parameter.default
            for name, parameter in inspect.signature(function).parameters.items()
            if parameter.default is not inspect.Parameter.empty
        }
    except (TypeError, ValueError):
        return {}
    return {**used.globals, **used.nonlocals, **defaults}


def _why_not(value: object) -> str:
    """Return why a value cannot be pickled; "" if it can."""
    try:
        _dumps(value)
    except Exception as error:
        return str(error)
    return ""
