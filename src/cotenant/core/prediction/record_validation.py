"""What a figure or a text in a kept record may be: no more than whoever observes may say.

A record that a disk or a stranger changed has anything in it, also what no float, no message and no terminal holds. It
is refused when it is read, so that nobody who is asked afterwards fails.
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
LOSS_MAX = 1e30  # squares of such are still numbers


def whole(value: object, least: int, most: int) -> int:
    """Read a whole number within bounds.

    >>> whole("7", 0, 9)
    7

    Raises:
        ValueError, TypeError, OverflowError: it is none.
    """
    number = int(value)  # type: ignore[call-overload]  # of what is no number it says so
    if not least <= number <= most:
        raise ValueError(f"{number:.3g} is not from {least} to {most}")
    return int(number)


def cores(value: object, least: int = 0) -> int:
    """Read a count of cores, as `whole` does."""
    return whole(value, least, CORES_MAX)


def nodes(value: object) -> int:
    """Read a count of nodes, as `whole` does."""
    return whole(value, 1, NODES_MAX)


def gpu_milli(value: object) -> int:
    """Read the GPUs of a whole job in thousandths, as `whole` does."""
    return whole(value, 0, GPU_MILLI_MAX * REPLICAS_MAX)


def replicas(value: object, least: int = 1) -> int:
    """Read a count of replicas, as `whole` does."""
    return whole(value, least, REPLICAS_MAX)


def between(value: object, least: float, most: float) -> float:
    """Read a number within bounds.

    Raises:
        ValueError, TypeError, OverflowError: it is none.
    """
    number = float(value)  # type: ignore[arg-type]  # likewise
    if not (math.isfinite(number) and least <= number <= most):
        raise ValueError(f"{number:g} is not from {least:g} to {most:g}")
    return number


def rate(value: object) -> float:
    """Read a rate per second, as `between` does."""
    return between(value, RATE_MIN_PER_SECOND, RATE_MAX_PER_SECOND)


def text(value: object) -> str:
    """Read a text that can be sent.

    Raises:
        ValueError: it is too long, or has no UTF-8 form.
    """
    told = str(value)
    if len(told) > TEXT_LENGTH_MAX:
        raise ValueError(f"a text has {len(told)} characters; at most {TEXT_LENGTH_MAX} are kept")
    told.encode()  # UnicodeEncodeError is a ValueError
    return told


def kind(parts: Iterable[object]) -> tuple[str, str, str, str]:
    """Read user, label, GPUs in thousandths and replicas of a kind of job.

    Raises:
        ValueError, TypeError: they are none.
    """
    user, label, milli, count = parts
    return text(user), text(label), str(gpu_milli(milli)), str(replicas(count))
