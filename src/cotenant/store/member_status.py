"""The status of the members of a replicated store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """A member's reported status; `problem` says why it cannot serve, "" if it can."""

    endpoint: str
    leads: bool = False
    problem: str = ""
    version: str = ""
    size_bytes: int = 0


@runtime_checkable
class HasMembers(Protocol):
    """A store of several members."""

    async def member_statuses(self) -> Sequence[MemberStatus]:
        """Return the status of each member, by endpoint; an unavailable member has a problem, and is no error."""
