"""Numbers, amounts of memory, and GPUs as Slurm's options give them."""

from __future__ import annotations

import re
from typing import NamedTuple

_SIZE = r"(?ai)(\d{1,12})([KMGT]?)B?"
_FACTORS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "": 1 << 20}
_COUNT = r"(?a)\d{1,9}"
_GPUS = r"(?a)(?:([A-Za-z][\w.-]*)[:=])?(\d{1,9})|([A-Za-z][\w.-]*)"
GPU = "gpu"


class Gpus(NamedTuple):
    """A number of GPUs, and their type; "" for any."""

    number: int
    gpu_type: str = ""


def read_count(text: str) -> int:
    """Return a number above zero.

    Raises:
        ValueError: the text is none.
    """
    if not re.fullmatch(_COUNT, text) or not int(text):
        raise ValueError(text)
    return int(text)


def read_bytes(text: str) -> int:
    """Return an amount of memory, in megabytes unless it has a unit.

    >>> read_bytes("1"), read_bytes("2G"), read_bytes("512kB"), read_bytes("0")
    (1048576, 2147483648, 524288, 0)

    Raises:
        ValueError: the text is none.
    """
    match = re.fullmatch(_SIZE, text)
    if not match:
        raise ValueError(text)
    return int(match[1]) * _FACTORS[match[2].upper()]


def write_megabytes(size: int) -> str:
    """Return an amount of memory as Slurm shows it.

    >>> write_megabytes(2 << 30), write_megabytes(3 << 19)
    ('2G', '1.50M')
    """
    for unit in ("T", "G", "M"):
        if size >= _FACTORS[unit]:
            count = size / _FACTORS[unit]
            return f"{count:.0f}{unit}" if count == int(count) else f"{count:.2f}{unit}"
    return f"{size >> 10}K" if size else "0"


def read_gpus(text: str) -> Gpus:
    """Return a number of GPUs: `2`, `a100:2` or `a100`.

    >>> read_gpus("2"), read_gpus("a100:2")
    (Gpus(number=2, gpu_type=''), Gpus(number=2, gpu_type='a100'))

    Raises:
        ValueError: the text is none, or names several types.
    """
    match = re.fullmatch(_GPUS, text)
    if not match:
        raise ValueError(text)
    return Gpus(1, match[3]) if match[3] else Gpus(int(match[2]), match[1] or "")


def read_gres(text: str) -> tuple[Gpus, list[str]]:
    """Return the GPUs among generic resources, and the others.

    >>> read_gres("gpu:a100:2,tmpfs:10G"), read_gres("gpu")
    ((Gpus(number=2, gpu_type='a100'), ['tmpfs:10G']), (Gpus(number=1, gpu_type=''), []))

    Raises:
        ValueError: GPUs are not given as `gpu[:type][:count]`, or twice.
    """
    gpus, others = Gpus(0), list[str]()
    for part in filter(None, text.removeprefix("none").split(",")):
        name, _, rest = part.removeprefix("gres:").removeprefix("gres/").partition(":")
        if name.lower() != GPU:
            others.append(part)
        elif gpus.number:
            raise ValueError(text)
        else:
            gpus = read_gpus(rest) if rest else Gpus(1)
    return gpus, others
