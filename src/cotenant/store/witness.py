"""Decides whether a store is the one that a witness knows, has regressed, or was replaced.

Theory of operation. A store has an identity: a random ID, and a generation that only an operator raises. It also has a
revision, and a progress key that every transaction of the mesh writes, so that the revision of this key shows up to
where the mesh's own writes are present. A witness (a service in memory and on disk, an agent on disk) remembers the
highest values that it has seen. A store of the same generation with lower values has lost acknowledged writes.
Revisions alone would miss a snapshot restored with `--bump-revision`, which raises them; it does not raise the progress
key.

Numbers are not enough either if a regressed store has been written to since by processes that remember nothing: it may
have overtaken the witness. So every process that opens the store begins an era there, and each write compares the era
that its writer knows. A witness remembers a revision together with its era; a store that says that the next era began
at that revision or before has a different history.

An operator who decides to continue with an older state writes a higher generation, which every witness accepts; for
another store, the identity also names the IDs that it supersedes.

A witness outside the control plane, an agent, shows a mark: ID, generation and revision, signed with a key that is
stored in the identity. A regressed store still holds that key, so it can distinguish its own marks from forged ones: an
agent cannot stop a mesh with an invented revision.
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
SUPERSEDED_MAX = 64  # IDs in an identity; the oldest are dropped first
KEY_BYTES = 32


class Mismatch(StrEnum):
    """How a store differs from the one that a witness knows."""

    REGRESSED = "STORE_REGRESSED"
    REPLACED = "STORE_REPLACED"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A store's mismatch, with the witness and the numbers."""

    mismatch: Mismatch
    text: str


@dataclass(frozen=True, slots=True)
class Identity:
    """A store's identity: `generation` rises when an operator accepts an older state or another store."""

    id: str
    generation: int
    key: str  # hexadecimal; signs marks, and never leaves the control plane
    supersedes: tuple[str, ...] = ()

    @classmethod
    def new(cls, now_seconds: float) -> Identity:
        """Return a new identity for a store that has none."""
        return cls(secrets.token_hex(16), max(1, int(now_seconds)), secrets.token_hex(KEY_BYTES))

    @classmethod
    def decode(cls, value: bytes) -> Identity | None:
        """Decode an identity; return None if it is damaged."""
        try:
            read = json.loads(value)
            key = str(read["key"])
            bytes.fromhex(key)
            found = cls(str(read["id"]), int(read["generation"]), key, tuple(map(str, read.get("supersedes", ()))))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
            return None
        return found if found.id and 0 < found.generation <= REVISION_MAX else None

    def encode(self) -> bytes:
        """Encode the identity."""
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
class RememberedStore:
    """What a witness remembers of a store. `progress` is the revision of the last write of the progress key."""

    id: str
    generation: int
    revision: int = 0
    progress: int = 0
    era: str = ""
    era_revision: int = 0  # of a write of the mesh, in this era or before it

    @classmethod
    def decode(cls, read: object) -> RememberedStore | None:
        """Decode parsed JSON; return None if it is damaged."""
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
    eras: tuple[tuple[str, int], ...] = ()  # the latest, each with the revision of the last write before it


def compare_store(memory: RememberedStore | None, seen: Seen, witness: str = "this process") -> Verdict | None:
    """Return the mismatch of a store with what a witness remembers; None if there is none.

    >>> mine = RememberedStore("a", 1, revision=10, progress=9)
    >>> compare_store(mine, Seen(Identity("a", 1, ""), 10, 9)), compare_store(None, Seen(None, 1))
    (None, None)
    >>> compare_store(mine, Seen(Identity("a", 1, ""), 7, 7)).text
    'the store is at revision 7; this process has seen revision 10'
    >>> compare_store(mine, Seen(Identity("a", 1, ""), 5000, 7)).text
    'the last write in the store has revision 7; this process knows of one with revision 9'
    >>> compare_store(mine, Seen(Identity("b", 1, ""), 12)).mismatch.name
    'REPLACED'
    """
    if memory is None:
        return None
    own = seen.identity
    if own is None:
        return Verdict(Mismatch.REPLACED, f"the store has no identity; {witness} knows it as {memory.id[:8]}")
    if own.id != memory.id:
        if memory.id in own.supersedes:
            return None
        return Verdict(Mismatch.REPLACED, f"the store is {own.id[:8]}; {witness} knows it as {memory.id[:8]}")
    if own.generation > memory.generation:
        return None
    if own.generation < memory.generation:
        text = f"the store is of generation {own.generation}; {witness} has seen generation {memory.generation}"
        return Verdict(Mismatch.REGRESSED, text)
    if seen.revision < memory.revision:
        text = f"the store is at revision {seen.revision}; {witness} has seen revision {memory.revision}"
        return Verdict(Mismatch.REGRESSED, text)
    if seen.progress < memory.progress:
        text = f"the last write in the store has revision {seen.progress}; {witness} knows of one with "
        return Verdict(Mismatch.REGRESSED, f"{text}revision {memory.progress}")
    if (branched := _branched_at(memory, seen)) is not None:
        text = f"the store was opened again after revision {branched}, without the write of revision "
        return Verdict(Mismatch.REGRESSED, f"{text}{memory.era_revision}, which {witness} has seen")
    return None


def _branched_at(memory: RememberedStore, seen: Seen) -> int | None:
    """Return from which revision a store's history differs from the remembered one; None if it does not.

    >>> seen = Seen(None, 20, 20, (("x", 3), ("y", 8)))
    >>> at = lambda era, revision: _branched_at(RememberedStore("a", 1, era=era, era_revision=revision), seen)
    >>> at("x", 8), at("x", 9), at("z", 9)
    (None, 8, 3)
    """
    if not memory.era or not seen.eras:
        return None
    names = [name for name, _ in seen.eras]
    if memory.era not in names:
        oldest = seen.eras[0][1]
        return oldest if memory.era_revision > oldest else None  # else its era may have been dropped from the list
    following = seen.eras[names.index(memory.era) + 1 :]
    return following[0][1] if following and following[0][1] < memory.era_revision else None


def learn(memory: RememberedStore | None, seen: Seen) -> RememberedStore | None:
    """Return what a witness remembers after it has seen a matching store."""
    own = seen.identity
    if own is None:
        return memory
    era, era_revision = (seen.eras[-1][0], seen.progress) if seen.eras else ("", 0)
    found = RememberedStore(own.id, own.generation, seen.revision, seen.progress, era, era_revision)
    if memory is None or (memory.id, memory.generation) != (own.id, own.generation):
        return found
    return newest(memory, found)


def newest(first: RememberedStore | None, second: RememberedStore | None) -> RememberedStore | None:
    """Return the newer of two memories; for different stores, the one with the higher generation."""
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
    """What an agent stores and shows: the remembered store, signed with the store's key."""

    memory: RememberedStore
    signature: bytes = b""


def sign(identity: Identity, revision: int, era: str = "", era_revision: int = 0) -> Mark:
    """Return the mark of a store at a revision, and at a revision that is known to be in an era."""
    memory = RememberedStore(identity.id, identity.generation, revision, 0, era, era_revision)
    return Mark(memory, _signature(identity, memory))


def is_signed(identity: Identity, mark: Mark) -> bool:
    """Return whether a mark was signed with the store's key.

    >>> store = Identity("a", 1, "00ff")
    >>> forged = Mark(RememberedStore("a", 1, 1 << 60), sign(store, 7).signature)
    >>> is_signed(store, sign(store, 7)), is_signed(store, forged)
    (True, False)
    """
    return mark.memory.id == identity.id and hmac.compare_digest(_signature(identity, mark.memory), mark.signature)


def _signature(identity: Identity, memory: RememberedStore) -> bytes:
    text = f"{memory.id}\n{memory.generation}\n{memory.revision}\n{memory.era}\n{memory.era_revision}"
    return hmac.new(bytes.fromhex(identity.key), text.encode(), hashlib.sha256).digest()[:16]
