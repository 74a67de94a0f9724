"""Options shared by several commands, declared once in the signature of the function that consumes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, get_type_hints

Command = Callable[..., None]


def with_options_of(
    factory: Callable[..., Any],
    within: Callable[[], AbstractContextManager[Any]] = nullcontext,
    unimported: Sequence[str] = (),
) -> Callable[[Command], Command]:
    """Return a decorator that adds the options of `factory` to a command and passes its result as first argument.

    `within` is entered around both to translate their errors for users. `unimported` names types that only the type
    checker imports.
    """
    placeholders = dict.fromkeys(unimported, object)

    def with_options(command: Command) -> Command:
        shared, own = inspect.signature(factory).parameters, inspect.signature(command).parameters
        hints = {
            **get_type_hints(factory, localns=placeholders, include_extras=True),
            **get_type_hints(command, localns=placeholders, include_extras=True),
        }
        parameters = [
            each.replace(annotation=hints[each.name], kind=inspect.Parameter.KEYWORD_ONLY)
            for each in (*shared.values(), *list(own.values())[1:])
        ]

        def filled(**given: Any) -> None:
            with within():
                made = factory(**{name: given.pop(name) for name in shared})
                command(made, **given)

        filled.__doc__ = command.__doc__
        filled.__annotations__ = {each.name: each.annotation for each in parameters}
        filled.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # inspect reads it from functions
        return filled

    return with_options
