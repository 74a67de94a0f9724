"""What becomes of the members of a store that has several: which of them can do their part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Standing:
    """A member as it told of itself; `problem` says why it cannot do its part, "" where it can."""

    endpoint: str
    leads: bool = False
    problem: str = ""
    version: str = ""
    size_bytes: int = 0


@runtime_checkable
class HasMembers(Protocol):
    """A store of several members."""

    async def standing(self) -> Sequence[Standing]:
        """Ask each member how it is, by its endpoint; one that is away is told of, and is no error."""
