"""Job ids on the command line: numbers, `ARRAY_7`, `ARRAY_[1,3-5]`, or Cotenant's own ids."""

from __future__ import annotations

from collections.abc import Iterator

from cotenant.cli.slurm.outcome import SlurmError
from cotenant.core.model.job_number import DIGITS, ID_DIGITS, SEPARATOR, id_of, number_of
from cotenant.v1.job_pb2 import Job

INVALID = "Invalid job id specified"


def read_id(text: str) -> str:
    """Return the job id that a text means.

    >>> read_id("1387917"), read_id("32988737685313719_7"), read_id("32988737685313719000007"), read_id("0x9k2m3n4p5q")
    ('00000001abcd', '0x9k2m3n4p5q_7', '0x9k2m3n4p5q_7', '0x9k2m3n4p5q')

    Raises:
        SlurmError: the text means no job.
    """
    head, separator, index = text.strip().partition(SEPARATOR)
    own = len(head) == ID_DIGITS and set(head) <= set(DIGITS) and not head.isdecimal()
    try:
        found = head if own else id_of(int(head)) if head.isdecimal() else ""
        whole = f"{found}{separator}{int(index) if separator else ''}"
        number_of(whole)
    except ValueError:
        raise SlurmError(f"{INVALID}: {text}") from None
    return whole


def read_ids(text: str) -> Iterator[str]:
    """Yield the job ids of a list such as `123,124_[0-2],125_7`.

    >>> list(read_ids("1387917,32988737685313719_[1,3-4%2]"))
    ['00000001abcd', '0x9k2m3n4p5q_1', '0x9k2m3n4p5q_3', '0x9k2m3n4p5q_4']

    Raises:
        SlurmError: one of them means no job.
    """
    depth, begun = 0, ""
    for char in f"{text},":
        depth += (char == "[") - (char == "]")
        if char != "," or depth:
            begun += char
            continue
        if begun.strip():
            yield from _expanded(begun.strip())
        begun = ""
    if begun:
        raise SlurmError(f"{INVALID}: {text}")


def _expanded(text: str) -> Iterator[str]:
    head, bracket, indices = text.partition("_[")
    if not bracket:
        yield read_id(text.partition(".")[0])  # a step of a job stands for the job
        return
    from cotenant.core.model.job_array import read_array  # few lists have brackets

    try:
        found = read_array(indices.removesuffix("]")).indices
    except ValueError:
        raise SlurmError(f"{INVALID}: {text}") from None
    for index in found:
        yield read_id(f"{head}_{index}")


def shown_id(job: Job) -> str:
    """Return the id of a job as Slurm shows it: a number, or `ARRAY_7`."""
    head, separator, index = job.id.partition(SEPARATOR)
    return f"{number_of(head)}{separator}{index}"
