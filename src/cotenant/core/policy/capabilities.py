"""Optional capabilities of a policy: the further protocols that it implements.

A cycle checks several of them, and `isinstance` lists a protocol's members again each time, which took a tenth of a
small cycle's time. Here they are listed once per protocol.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeVar

T = TypeVar("T")


def capability_of(policy: object, protocol: Callable[..., T]) -> T | None:
    """Return a policy as an implementation of a protocol; None if `isinstance` would say that it is not one.

    >>> from typing import Protocol
    >>> class Sings(Protocol):
    ...     def sing(self) -> str: ...
    >>> class Bird:
    ...     def sing(self) -> str:
    ...         return "tweet"
    >>> capability_of(Bird(), Sings).sing(), capability_of(object(), Sings)
    ('tweet', None)
    """
    methods, others = _members(protocol)
    follows = all(getattr(policy, name, None) is not None for name in methods)
    follows = follows and all(hasattr(policy, name) for name in others)
    return policy if follows else None  # type: ignore[return-value]  # checked just above


@cache
def _members(protocol: type) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return a protocol's methods and its other members."""
    bases = [base for base in protocol.__mro__ if getattr(base, "_is_protocol", False)]
    names = sorted({name for base in bases for name in (*vars(base), *vars(base).get("__annotations__", ()))})
    public = [name for name in names if not name.startswith("_")]
    methods = tuple(name for name in public if callable(getattr(protocol, name, None)))
    return methods, tuple(name for name in public if name not in methods)
