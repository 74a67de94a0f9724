"""Options that several commands share, declared once: in the signature of what makes something of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, get_type_hints

Command = Callable[..., None]


def takes(
    maker: Callable[..., Any],
    within: Callable[[], AbstractContextManager[Any]] = nullcontext,
    unimported: Sequence[str] = (),
) -> Callable[[Command], Command]:
    """Give a command the options of `maker` before its own; what it makes is the command's first argument.

    `within` is entered around both, to put their errors into a user's words. `unimported` are names of types that only
    the type checker imports.
    """
    strangers = dict.fromkeys(unimported, object)

    def with_options(command: Command) -> Command:
        shared, own = inspect.signature(maker).parameters, inspect.signature(command).parameters
        hints = {
            **get_type_hints(maker, localns=strangers, include_extras=True),
            **get_type_hints(command, localns=strangers, include_extras=True),
        }
        parameters = [
            each.replace(annotation=hints[each.name], kind=inspect.Parameter.KEYWORD_ONLY)
            for each in (*shared.values(), *list(own.values())[1:])
        ]

        def filled(**given: Any) -> None:
            with within():
                made = maker(**{name: given.pop(name) for name in shared})
                command(made, **given)

        filled.__doc__ = command.__doc__
        filled.__annotations__ = {each.name: each.annotation for each in parameters}
        filled.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # functions have one, says inspect
        return filled

    return with_options
