"""Validates figures and texts in persisted records, with the limits of observations.

A record that a disk or a third party changed may hold anything, even values that no float, message or terminal can
hold. It is rejected when it is read, so that nothing fails later.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from cotenant.core.model.job import WHOLE_GPU_MILLI
from cotenant.core.model.validation import CORES_MAX, GPU_MILLI_MAX, REPLICAS_MAX

RATE_MIN_PER_SECOND, RATE_MAX_PER_SECOND = 1e-9, 1e9
SECONDS_MAX = 100 * 365 * 86_400.0
UNIX_SECONDS_MAX = 253_402_300_799.0  # the year 9999: what google.protobuf.Timestamp can hold
NODES_MAX = 100_000
GPUS_MAX = GPU_MILLI_MAX * REPLICAS_MAX // WHOLE_GPU_MILLI
STEPS_MAX = 10**15
TEXT_LENGTH_MAX = 1024
LOSS_MAX = 1e30  # squares stay finite


def whole(value: object, least: int, most: int) -> int:
    """Return an integer within bounds.

    >>> whole("7", 0, 9)
    7

    Raises:
        ValueError, TypeError, OverflowError: the value is not one.
    """
    number = int(value)  # type: ignore[call-overload]  # raises if it is not a number
    if not least <= number <= most:
        raise ValueError(f"{number:.3g} is not from {least} to {most}")
    return int(number)


def cores(value: object, least: int = 0) -> int:
    """Return a count of cores, checked as by `whole`."""
    return whole(value, least, CORES_MAX)


def nodes(value: object) -> int:
    """Return a count of nodes, checked as by `whole`."""
    return whole(value, 1, NODES_MAX)


def gpu_milli(value: object) -> int:
    """Return the GPUs of a whole job in thousandths, checked as by `whole`."""
    return whole(value, 0, GPU_MILLI_MAX * REPLICAS_MAX)


def replicas(value: object, least: int = 1) -> int:
    """Return a count of replicas, checked as by `whole`."""
    return whole(value, least, REPLICAS_MAX)


def between(value: object, least: float, most: float) -> float:
    """Return a number within bounds.

    Raises:
        ValueError, TypeError, OverflowError: the value is not one.
    """
    number = float(value)  # type: ignore[arg-type]  # likewise
    if not (math.isfinite(number) and least <= number <= most):
        raise ValueError(f"{number:g} is not from {least:g} to {most:g}")
    return number


def rate(value: object) -> float:
    """Return a rate per second, checked as by `between`."""
    return between(value, RATE_MIN_PER_SECOND, RATE_MAX_PER_SECOND)


def text(value: object) -> str:
    """Return a text that can be sent.

    Raises:
        ValueError: the text is too long, or has no UTF-8 form.
    """
    decoded = str(value)
    if len(decoded) > TEXT_LENGTH_MAX:
        raise ValueError(f"a text has {len(decoded)} characters; at most {TEXT_LENGTH_MAX} are kept")
    decoded.encode()  # UnicodeEncodeError is a ValueError
    return decoded


def kind(parts: Iterable[object]) -> tuple[str, str, str, str]:
    """Return user, label, GPUs in thousandths and replicas of a job class.

    Raises:
        ValueError, TypeError: they are invalid.
    """
    user, label, milli, count = parts
    return text(user), text(label), str(gpu_milli(milli)), str(replicas(count))
