"""Which of several replicas keeps what belongs to a name (rendezvous hashing: Thaler and Ravishankar, 1998 [P]).

Each name orders the replicas by a hash of both. It goes to the first that is there: when one goes, only its own names
move, each to the next in its order, and they are spread over all that are left.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def ranked(name: str, addresses: Sequence[str]) -> list[str]:
    """Order replicas by how much a name prefers them; the order in which they are given does not matter.

    >>> ranked("gpu-7", ["a:1", "b:1", "c:1"]) == ranked("gpu-7", ["c:1", "a:1", "b:1"])
    True
    """
    return sorted(addresses, key=lambda address: (_score(name, address), address))


def _score(name: str, address: str) -> bytes:
    return hashlib.blake2b(f"{name}\0{address}".encode(), digest_size=8).digest()
