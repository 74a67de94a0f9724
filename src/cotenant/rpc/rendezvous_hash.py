"""Assigns names to replicas by rendezvous hashing (Thaler and Ravishankar, 1998 [P]).

Each name orders the replicas by a hash of both, and belongs to the first available one. When a replica goes away, only
its own names move, each to the next replica in its order, so they spread over all remaining replicas.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def ranked(name: str, addresses: Sequence[str]) -> list[str]:
    """Return replicas in a name's order of preference; the order of the argument does not matter.

    >>> ranked("gpu-7", ["a:1", "b:1", "c:1"]) == ranked("gpu-7", ["c:1", "a:1", "b:1"])
    True
    """
    return sorted(addresses, key=lambda address: (_score(name, address), address))


def _score(name: str, address: str) -> bytes:
    return hashlib.blake2b(f"{name}\0{address}".encode(), digest_size=8).digest()
