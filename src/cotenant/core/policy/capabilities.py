"""What a policy can do beyond what all of its group can: the further protocols that it follows.

A cycle asks for several of them, and `isinstance` lists a protocol's members anew each time, which took a tenth of a
small cycle's time. Here they are listed once for each protocol.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeVar

T = TypeVar("T")


def able(policy: object, protocol: Callable[..., T]) -> T | None:
    """Give a policy as one that follows a protocol; None where it does not. It does where `isinstance` says so.

    >>> from typing import Protocol
    >>> class Sings(Protocol):
    ...     def sing(self) -> str: ...
    >>> class Bird:
    ...     def sing(self) -> str:
    ...         return "tweet"
    >>> able(Bird(), Sings).sing(), able(object(), Sings)
    ('tweet', None)
    """
    methods, others = _members(protocol)
    follows = all(getattr(policy, name, None) is not None for name in methods)
    follows = follows and all(hasattr(policy, name) for name in others)
    return policy if follows else None  # type: ignore[return-value]  # it was just seen to follow it


@cache
def _members(protocol: type) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """List the methods of a protocol, and its other members."""
    bases = [base for base in protocol.__mro__ if getattr(base, "_is_protocol", False)]
    names = sorted({name for base in bases for name in (*vars(base), *vars(base).get("__annotations__", ()))})
    public = [name for name in names if not name.startswith("_")]
    methods = tuple(name for name in public if callable(getattr(protocol, name, None)))
    return methods, tuple(name for name in public if name not in methods)
