"""Quantities in words, as refusals and errors write them."""

from __future__ import annotations


def plural(count: float, noun: str) -> str:
    """Format a count with its noun: `1 GPU`, `0.5 GPUs`, `3 servers`.

    >>> plural(1, "GPU"), plural(2.5, "GPU")
    ('1 GPU', '2.5 GPUs')
    """
    return f"{count:g} {noun}" if count == 1 else f"{count:g} {noun}s"


def gpus(milli: int) -> str:
    """Format GPUs given in thousandths.

    >>> gpus(8000), gpus(500)
    ('8 GPUs', '0.5 GPUs')
    """
    return plural(milli / 1000, "GPU")


def gib(count: int) -> str:
    """Format bytes.

    >>> gib(3 * 2**29), gib(2**40)
    ('1.5 GiB', '1024 GiB')
    """
    amount = count / 2**30
    return f"{amount:.3g} GiB" if amount < 999.5 else f"{amount:.0f} GiB"  # where `.3g` writes an exponent
