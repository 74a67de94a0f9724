"""What every adapter refuses before it does anything, so that all of them refuse the same."""

from __future__ import annotations

from collections.abc import Sequence

from cotenant.store.port import VALUE_BYTES_MAX, Compare, Operation, Put


def check_key(key: str) -> None:
    """Refuse a key that some adapter could not keep.

    >>> check_key("")
    Traceback (most recent call last):
    ValueError: a key must not be empty
    """
    if not key:
        raise ValueError("a key must not be empty")
    if not key.isascii():
        key.encode()  # a lone surrogate has no UTF-8 form; UnicodeEncodeError is a ValueError


def check_transaction(compares: Sequence[Compare], operations: Sequence[Operation]) -> None:
    """Refuse a key written twice, a key that cannot be kept, and a value that is too large."""
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
    """Refuse what is not immutable bytes, or too many of them."""
    if not isinstance(value, bytes):
        raise TypeError(f"the value of {key!r} is {type(value).__name__}, not bytes")
    if len(value) > VALUE_BYTES_MAX:
        raise ValueError(f"the value of {key!r} has {len(value)} bytes; at most {VALUE_BYTES_MAX} fit")


def check_ttl(ttl_seconds: float) -> None:
    """Refuse a lease that would be over before it began."""
    if not ttl_seconds > 0:
        raise ValueError(f"a lease needs a time to live above 0 s, not {ttl_seconds}")
