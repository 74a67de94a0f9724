"""The resources of the cluster: one table, and one vector type with arithmetic.

Theory of operation. GPUs and cores are held by name: each has an id, and what a job asks for is a count of them. Every
other resource is an amount of bytes. A record that has resources (a request, a node's shape, what an attempt holds)
derives from `Amounts`, so it has a field for each of them, and so have the messages that carry it. Whatever adds them
up, compares or prints them goes over the table. A new resource is a row of `KINDS`, a field of `Amounts` and of
`Resources`, and the fields of the messages: what is scheduled, refused, shown and recorded follows.

A cycle makes thousands of vectors, so the arithmetic is written out by component, which takes half as long as a
loop. A vector of another length does not unpack there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from cotenant.core.model.quantities import gib, gpus, plural

WHOLE_GPU_MILLI = 1000
AMOUNT_MIN, AMOUNT_MAX = 4 * 2**20, 2**50  # of a replica that asks for any, and of a node


@dataclass(frozen=True, slots=True)
class ResourceKind:
    """A row of the table.

    Attributes:
        name: of its field in records and messages, also behind a prefix such as `total_`.
        noun: for its shares: "75% of the memory".
        describe: returns what is needed, in words: "2 GiB of memory".
        write: returns a number of it without the noun: "2 GiB".
        key: in job files, and its flag; for amounts, whose rows in the table of job fields follow from this one.
        help: of the flag.
        other_names: in other schedulers, for suggestions.
        optional: left out of texts, recordings and views of jobs where there is none of it.
    """

    name: str
    noun: str
    describe: Callable[[int], str]
    write: Callable[[int], str]
    key: str = ""
    help: str = ""
    other_names: tuple[str, ...] = ()
    optional: bool = True


def _cores(count: int) -> str:
    return plural(count, "core")


def _bytes_of(noun: str) -> Callable[[int], str]:
    return lambda count: f"{gib(count)} of {noun}"


KINDS: tuple[ResourceKind, ...] = (
    ResourceKind("gpu_milli", "GPUs", gpus, lambda milli: f"{milli / WHOLE_GPU_MILLI:g}", optional=False),
    ResourceKind("cores", "cores", _cores, str, optional=False),
    ResourceKind(
        "memory_bytes",
        "memory",
        _bytes_of("memory"),
        gib,
        key="memory",
        help="Memory per replica, such as 4GiB.",
        other_names=("mem",),
        optional=False,
    ),
    ResourceKind(
        "scratch_bytes",
        "scratch",
        _bytes_of("scratch"),
        gib,
        key="scratch",
        help="Local scratch space per replica, such as 100GiB.",
        other_names=("tmp", "disk"),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Amounts:
    """What a record has of each resource that is an amount of bytes."""

    memory_bytes: int = 0
    scratch_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownAmounts:
    """The same, where they may be unknown."""

    memory_bytes: int | None = None
    scratch_bytes: int | None = None


class Resources(NamedTuple):
    """A number of each resource, in the order of `KINDS`: GPUs in thousandths, cores, and amounts of bytes.

    >>> Resources(8000, 24, 2**30) - Resources(1000, 3) * 2
    Resources(gpu_milli=6000, cores=18, memory_bytes=1073741824, scratch_bytes=0)
    >>> Resources(1000, 3).fits(Resources(8000, 2)), Resources(1000, 3).lacking(Resources(8000, 2))
    (False, ['cores'])
    """

    gpu_milli: int = 0
    cores: int = 0
    memory_bytes: int = 0
    scratch_bytes: int = 0

    @classmethod
    def of(cls, record: object, prefix: str = "") -> Resources:
        """Return the resources of a record or message that has a field for each; their names may have a prefix."""
        return tuple.__new__(cls, [getattr(record, prefix + name) for name in NAMES] if prefix else numbers_of(record))

    def __add__(self, other: Resources) -> Resources:  # type: ignore[override]  # a vector, not a sequence
        """Return the sum."""
        milli, cores, memory, scratch = self
        more_milli, more_cores, more_memory, more_scratch = other
        return tuple.__new__(
            Resources, (milli + more_milli, cores + more_cores, memory + more_memory, scratch + more_scratch)
        )

    def __sub__(self, other: Resources) -> Resources:
        """Return the difference; parts of it may be negative."""
        milli, cores, memory, scratch = self
        less_milli, less_cores, less_memory, less_scratch = other
        return tuple.__new__(
            Resources, (milli - less_milli, cores - less_cores, memory - less_memory, scratch - less_scratch)
        )

    def __mul__(self, count: int) -> Resources:  # type: ignore[override]  # a vector, not a sequence
        """Return this many times as much."""
        return times(self, count)

    def fits(self, free: Resources) -> bool:
        """Return whether no more of any resource is needed than is free."""
        milli, cores, memory, scratch = self
        have_milli, have_cores, have_memory, have_scratch = free
        return milli <= have_milli and cores <= have_cores and memory <= have_memory and scratch <= have_scratch

    def lacking(self, free: Resources) -> list[str]:
        """Return the names of the resources of which more is needed than is free."""
        return [name for name, one, there in zip(NAMES, self, free, strict=True) if one > there]


NOTHING = Resources()
NAMES = tuple(kind.name for kind in KINDS)
AMOUNT_KINDS = KINDS[2:]
AMOUNTS = NAMES[2:]
OPTIONAL = frozenset(kind.name for kind in KINDS if kind.optional)
UNITS = (WHOLE_GPU_MILLI, *(1 for _ in NAMES[1:]))  # of `Resources` in one count

# A record's number of each resource, without the arithmetic of `Resources`, which takes twice as long to make.
numbers_of: Callable[[object], tuple[int, ...]] = attrgetter(*NAMES)
# A record's whole GPUs, cores and amounts: what a ledger counts on a node, in the order of `KINDS`.
counts_of: Callable[[object], tuple[int, ...]] = attrgetter("gpus", *NAMES[1:])


def times(record: object, count: int) -> Resources:
    """Return this many times the resources of a record or vector.

    >>> times(Resources(1000, 3, 2**20), 2)
    Resources(gpu_milli=2000, cores=6, memory_bytes=2097152, scratch_bytes=0)
    """
    milli, cores, memory, scratch = numbers_of(record)
    return tuple.__new__(Resources, (milli * count, cores * count, memory * count, scratch * count))


def added(vectors: Iterable[Sequence[int]]) -> Resources:
    """Return the sum of vectors.

    >>> added([(1000, 2, 0, 0), (500, 1, 7, 0)])
    Resources(gpu_milli=1500, cores=3, memory_bytes=7, scratch_bytes=0)
    """
    sums = [sum(column) for column in zip(*vectors, strict=True)]
    return Resources(*sums)


def with_prefix(prefix: str, resources: Resources) -> dict[str, int]:
    """Return resources by their names behind a prefix, as messages have them: `total_cores`."""
    return {prefix + name: amount for name, amount in zip(NAMES, resources, strict=True)}


def amounts_of(record: object) -> dict[str, Any]:
    """Return the amounts of a record or message, as arguments for another.

    >>> amounts_of(Resources(1000, 3, 2**20))
    {'memory_bytes': 1048576, 'scratch_bytes': 0}
    """
    return {name: getattr(record, name) for name in AMOUNTS}


def amounts_times(record: Amounts, count: int) -> dict[str, Any]:
    """Return the amounts of a record this many times, as arguments for another."""
    return {"memory_bytes": record.memory_bytes * count, "scratch_bytes": record.scratch_bytes * count}


def present(record: object) -> list[tuple[ResourceKind, int]]:
    """Return the amounts of a record that are written: those that are not optional, and those above zero."""
    amounts = ((kind, getattr(record, kind.name)) for kind in AMOUNT_KINDS)
    return [(kind, amount) for kind, amount in amounts if amount or not kind.optional]


def as_map(fields: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return a record's fields as they are written: amounts follow the cores, optional ones only above zero.

    >>> as_map([("memory_bytes", 7), ("gpus", 1), ("cores", 3), ("rack", "r1")])
    {'gpus': 1, 'cores': 3, 'memory_bytes': 7, 'rack': 'r1'}
    """
    others = dict(fields)
    amounts = {name: others.pop(name) for name in AMOUNTS if name in others}
    if not amounts:
        return others
    written: dict[str, Any] = {}
    for name, value in others.items():
        written[name] = value
        if name == "cores":
            written |= {name: amount for name, amount in amounts.items() if amount or name not in OPTIONAL}
    return written


def in_words(amounts: Resources) -> str:
    """Describe amounts of all resources.

    >>> in_words(Resources(2000, 12, 2**30))
    '2 GPUs, 12 cores and 1 GiB of memory'
    """
    words = [kind.describe(one) for kind, one in zip(KINDS, amounts, strict=True) if one or not kind.optional]
    return in_list(words)


def in_list(words: Sequence[str]) -> str:
    """Join two or more words."""
    return " and ".join([", ".join(words[:-1]), words[-1]])
