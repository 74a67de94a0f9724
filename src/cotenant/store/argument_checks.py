"""Argument checks that every adapter makes before it does anything, so that all adapters reject the same."""

from __future__ import annotations

from collections.abc import Sequence

from cotenant.store.port import VALUE_BYTES_MAX, Compare, Operation, Put


def check_key(key: str) -> None:
    """Reject a key that some adapter could not store.

    >>> check_key("")
    Traceback (most recent call last):
    ValueError: a key must not be empty
    """
    if not key:
        raise ValueError("a key must not be empty")
    if not key.isascii():
        key.encode()  # a lone surrogate has no UTF-8 form; UnicodeEncodeError is a ValueError


def check_transaction(compares: Sequence[Compare], operations: Sequence[Operation]) -> None:
    """Reject a key written twice, an invalid key, and a value that is too large."""
    for compare in compares:
        check_key(compare.key)
    seen: set[str] = set()
    for operation in operations:
        check_key(operation.key)
        if operation.key in seen:
            raise ValueError(f"key {operation.key!r} is written twice in one transaction")
        seen.add(operation.key)
        if isinstance(operation, Put):
            check_value(operation.key, operation.value)


def check_value(key: str, value: bytes) -> None:
    """Reject a value that is not immutable bytes, or is too large."""
    if not isinstance(value, bytes):
        raise TypeError(f"the value of {key!r} is {type(value).__name__}, not bytes")
    if len(value) > VALUE_BYTES_MAX:
        raise ValueError(f"the value of {key!r} has {len(value)} bytes; the limit is {VALUE_BYTES_MAX}")


def check_ttl(ttl_seconds: float) -> None:
    """Reject a lease without a positive time to live."""
    if not ttl_seconds > 0:
        raise ValueError(f"a lease needs a time to live above 0 s, not {ttl_seconds}")
