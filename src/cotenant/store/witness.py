"""Decides whether a store is the one that a witness knows, or went back in time, or is another one.

Theory of operation. A store carries an identity: a random id, and a generation that only an operator raises. It also
has a revision, and a progress key that every write of the mesh puts in the same transaction, so that the revision at
which this key was changed says up to where the mesh's own writes are there. A witness (a service in memory and on disk,
an agent on disk) remembers the highest of all that it has seen. A store of the same generation that is below it has
lost what was acknowledged. Revisions alone would miss a snapshot restored with `--bump-revision`, for these are raised
there; the progress key is not.

Nor are numbers enough where a store that went back has been written to since, by processes that remember nothing: it
may have overtaken the witness. So every process that opens the store begins an era there, and each write compares the
era that its writer knows. A witness remembers a revision together with the era of it; a store that says that the next
era began at that revision or before has another history.

An operator who decides to go on with an older state writes a higher generation, which every witness accepts, and one of
another store names the ids that it supersedes.

A witness that the services cannot see into, an agent, shows a mark: id, generation and revision, signed with a key that
is kept in the identity. A store that went back in time still holds that key, so it can tell its own marks from forged
ones: an agent cannot stop a mesh by a revision that it made up.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from enum import StrEnum

REVISION_MAX = 1 << 62
SUPERSEDED_MAX = 64  # ids kept in an identity; the oldest go first
KEY_BYTES = 32


class Wrong(StrEnum):
    """How a store is not the one that a witness knows."""

    REGRESSED = "STORE_REGRESSED"
    REPLACED = "STORE_REPLACED"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is wrong with a store, and who knows it."""

    wrong: Wrong
    text: str


@dataclass(frozen=True, slots=True)
class Identity:
    """A store's own name: `generation` rises when an operator accepts an older state or another store."""

    id: str
    generation: int
    key: str  # hexadecimal; signs marks, and never leaves the control plane
    supersedes: tuple[str, ...] = ()

    @classmethod
    def new(cls, now_seconds: float) -> Identity:
        """Make the identity of a store that has none."""
        return cls(secrets.token_hex(16), max(1, int(now_seconds)), secrets.token_hex(KEY_BYTES))

    @classmethod
    def decode(cls, value: bytes) -> Identity | None:
        """Read an identity from its record; None where it is damaged."""
        try:
            read = json.loads(value)
            key = str(read["key"])
            bytes.fromhex(key)
            found = cls(str(read["id"]), int(read["generation"]), key, tuple(map(str, read.get("supersedes", ()))))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
            return None
        return found if found.id and 0 < found.generation <= REVISION_MAX else None

    def encode(self) -> bytes:
        """Return the identity as its record has it."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    def accepted(self, now_seconds: float, others: Iterable[str] = (), generation: int = 0) -> Identity:
        """Return the identity of the next generation, which witnesses of this store and of `others` accept.

        >>> first = Identity("a", 5, "00")
        >>> first.accepted(3.0, ["b"]).generation, first.accepted(9.0).generation, first.accepted(3.0, ["b"]).supersedes
        (6, 9, ('b',))
        """
        ids = dict.fromkeys([*self.supersedes, *(one for one in others if one and one != self.id)])
        return replace(
            self,
            generation=max(self.generation + 1, generation + 1, int(now_seconds)),
            supersedes=tuple(ids)[-SUPERSEDED_MAX:],
        )


@dataclass(frozen=True, slots=True)
class Memory:
    """What a witness remembers of a store. `progress` is the revision at which the progress key was last written."""

    id: str
    generation: int
    revision: int = 0
    progress: int = 0
    era: str = ""
    era_revision: int = 0  # of a write of the mesh, in this era or before

    @classmethod
    def decode(cls, read: object) -> Memory | None:
        """Read a memory from parsed JSON; None where it is damaged."""
        if not isinstance(read, dict):
            return None
        try:
            generation, revision, progress, era_revision = (
                int(read.get(name, 0)) for name in ("generation", "revision", "progress", "era_revision")
            )
            found = cls(str(read["id"]), generation, revision, progress, str(read.get("era", "")), era_revision)
        except (ValueError, KeyError, TypeError, OverflowError):
            return None
        numbers = (generation, revision, progress, era_revision)
        return found if found.id and all(0 <= number <= REVISION_MAX for number in numbers) else None


@dataclass(frozen=True, slots=True)
class Seen:
    """A store as it was read at one revision."""

    identity: Identity | None
    revision: int
    progress: int = 0
    eras: tuple[tuple[str, int], ...] = ()  # the last ones, each with the revision of the last write before it


def judge(memory: Memory | None, seen: Seen, witness: str = "this process") -> Verdict | None:
    """Return what is wrong with a store by what a witness remembers; None where nothing is.

    >>> mine = Memory("a", 1, revision=10, progress=9)
    >>> judge(mine, Seen(Identity("a", 1, ""), 10, 9)), judge(None, Seen(None, 1))
    (None, None)
    >>> judge(mine, Seen(Identity("a", 1, ""), 7, 7)).text
    'the store is at revision 7; this process has seen revision 10'
    >>> judge(mine, Seen(Identity("a", 1, ""), 5000, 7)).text
    'the last write that the store holds is of revision 7; this process knows of one of revision 9'
    >>> judge(mine, Seen(Identity("b", 1, ""), 12)).wrong.name
    'REPLACED'
    """
    if memory is None:
        return None
    own = seen.identity
    if own is None:
        return Verdict(Wrong.REPLACED, f"the store has no identity; {witness} knows it as {memory.id[:8]}")
    if own.id != memory.id:
        if memory.id in own.supersedes:
            return None
        return Verdict(Wrong.REPLACED, f"the store is {own.id[:8]}; {witness} knows it as {memory.id[:8]}")
    if own.generation > memory.generation:
        return None
    if own.generation < memory.generation:
        text = f"the store is of generation {own.generation}; {witness} has seen generation {memory.generation}"
        return Verdict(Wrong.REGRESSED, text)
    if seen.revision < memory.revision:
        text = f"the store is at revision {seen.revision}; {witness} has seen revision {memory.revision}"
        return Verdict(Wrong.REGRESSED, text)
    if seen.progress < memory.progress:
        text = f"the last write that the store holds is of revision {seen.progress}; {witness} knows of one of "
        return Verdict(Wrong.REGRESSED, f"{text}revision {memory.progress}")
    if (branched := _branched_at(memory, seen)) is not None:
        text = f"the store was opened again after revision {branched}, without the write of revision "
        return Verdict(Wrong.REGRESSED, f"{text}{memory.era_revision}, which {witness} has seen")
    return None


def _branched_at(memory: Memory, seen: Seen) -> int | None:
    """Return from where on a store has another history than the one that was seen; None where it has not.

    >>> seen = Seen(None, 20, 20, (("x", 3), ("y", 8)))
    >>> [_branched_at(Memory("a", 1, era=era, era_revision=at), seen) for era, at in (("x", 8), ("x", 9), ("z", 9))]
    [None, 8, 3]
    """
    if not memory.era or not seen.eras:
        return None
    names = [name for name, _ in seen.eras]
    if memory.era not in names:
        oldest = seen.eras[0][1]
        return oldest if memory.era_revision > oldest else None  # else it may be one that is kept no longer
    following = seen.eras[names.index(memory.era) + 1 :]
    return following[0][1] if following and following[0][1] < memory.era_revision else None


def learn(memory: Memory | None, seen: Seen) -> Memory | None:
    """Return what a witness remembers after it has seen a store with which nothing is wrong."""
    own = seen.identity
    if own is None:
        return memory
    era, era_revision = (seen.eras[-1][0], seen.progress) if seen.eras else ("", 0)
    found = Memory(own.id, own.generation, seen.revision, seen.progress, era, era_revision)
    if memory is None or (memory.id, memory.generation) != (own.id, own.generation):
        return found
    return newest(memory, found)


def newest(first: Memory | None, second: Memory | None) -> Memory | None:
    """Return the memory that knows more; of two stores, the one of the higher generation."""
    if first is None or second is None:
        return first or second
    if (first.id, first.generation) != (second.id, second.generation):
        return max(first, second, key=lambda one: (one.generation, one.revision))
    later = max(first, second, key=lambda one: one.era_revision)
    return replace(
        later,
        revision=max(first.revision, second.revision),
        progress=max(first.progress, second.progress),
    )


@dataclass(frozen=True, slots=True)
class Mark:
    """What an agent keeps and shows: a memory, signed by the store's key."""

    memory: Memory
    signature: bytes = b""


def sign(identity: Identity, revision: int, era: str = "", era_revision: int = 0) -> Mark:
    """Return the mark of a store at a revision, and at one that is known to be of an era."""
    memory = Memory(identity.id, identity.generation, revision, 0, era, era_revision)
    return Mark(memory, _signature(identity, memory))


def is_signed(identity: Identity, mark: Mark) -> bool:
    """Return whether a mark was signed with the store's key.

    >>> store = Identity("a", 1, "00ff")
    >>> is_signed(store, sign(store, 7)), is_signed(store, Mark(Memory("a", 1, 1 << 60), sign(store, 7).signature))
    (True, False)
    """
    return mark.memory.id == identity.id and hmac.compare_digest(_signature(identity, mark.memory), mark.signature)


def _signature(identity: Identity, memory: Memory) -> bytes:
    text = f"{memory.id}\n{memory.generation}\n{memory.revision}\n{memory.era}\n{memory.era_revision}"
    return hmac.new(bytes.fromhex(identity.key), text.encode(), hashlib.sha256).digest()[:16]
