"""Numbers of jobs, for schedulers' clients that know only numeric job ids: a reversible conversion of job ids.

A job id is 12 digits in base 32, so its value is a number below 2**60, and no two ids have the same one. A task of an
array, `ARRAY_7`, has the number of its array followed by its index in six decimal digits. Such a number is at least
2**60 for every array that was created after the first 20 minutes of 2026, the epoch of job ids; so no task has the
number of a job either, and the number says which it is.
"""

from __future__ import annotations

DIGITS = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's base 32: no i, l, o, u
ID_DIGITS = 12
INDEX_DIGITS = 6  # as many as `job_array.INDEX_MAX` has
SEPARATOR = "_"
_BITS = 5
_JOBS = 1 << (_BITS * ID_DIGITS)
_TASKS = 1_000_000  # as many as INDEX_DIGITS write


def number_of(job_id: str) -> int:
    """Return the number of a job, an array or a task of an array.

    >>> number_of("00000001abcd"), number_of("0x9k2m3n4p5q_7")
    (1387917, 32988737685313719000007)

    Raises:
        ValueError: the text is not a job id.
    """
    head, separator, index = job_id.partition(SEPARATOR)
    number = 0
    for digit in head:
        number = (number << _BITS) + DIGITS.index(digit)
    if len(head) != ID_DIGITS or (separator and not (index.isdecimal() and int(index) < _TASKS)):
        raise ValueError(f"not a job id: {job_id!r}")
    if not separator:
        return number
    if number * _TASKS < _JOBS:
        raise ValueError(f"the clock was wrong when {job_id!r} was created: its tasks have no numbers")
    return number * _TASKS + int(index)


def id_of(number: int) -> str:
    """Return the id of the job, array or task with a number; the reverse of `number_of`.

    >>> id_of(1387917), id_of(32988737685313719000007)
    ('00000001abcd', '0x9k2m3n4p5q_7')

    Raises:
        ValueError: no job has this number.
    """
    whole, index = (number, None) if number < _JOBS else divmod(number, _TASKS)
    if not 0 <= whole < _JOBS:
        raise ValueError(f"no job has the number {number}")
    head = encode(whole, ID_DIGITS)
    return head if index is None else f"{head}{SEPARATOR}{index}"


def encode(number: int, length: int) -> str:
    """Encode a number in base 32.

    >>> encode(33, 3)
    '011'
    """
    return "".join(DIGITS[(number >> (_BITS * place)) & 31] for place in reversed(range(length)))
