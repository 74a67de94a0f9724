"""Store adapters under the contract suite, and a model that is simple enough to be obviously correct."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from tests.support.etcd_server import EtcdServer

from cotenant.store.etcd import EtcdStore
from cotenant.store.memory import MemoryStore
from cotenant.store.port import (
    Change,
    Changes,
    Committed,
    Compare,
    Conflict,
    Entry,
    Operation,
    Put,
    Relisted,
    Store,
)
from cotenant.store.revision_offset import BASE, OffsetStore
from cotenant.store.sqlite import SqliteStore

WAIT_SECONDS_MAX = 20.0  # for what must come; a test that gets there fails


class Home(ABC):
    """The state of one kind of store, which a test can open again."""

    @abstractmethod
    async def open(self) -> Store:
        """Open a store; where the state is shared with other tests, they keep to other prefixes."""

    @abstractmethod
    async def reopen(self, store: Store) -> Store:
        """Close a store and open it again over the same state."""

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Store]:
        """Open a store for the length of a block."""
        store = await self.open()
        try:
            yield store
        finally:
            await store.close()


class MemoryHome(Home):
    """A memory store: reopening returns the same store."""

    async def open(self) -> Store:
        return MemoryStore()

    async def reopen(self, store: Store) -> Store:
        return store


class SqliteHome(Home):
    """A directory with one file per store."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._numbers = count()
        self._paths: dict[int, Path] = {}

    async def open(self) -> Store:
        return self._open(self._directory / f"{next(self._numbers)}.db")

    async def reopen(self, store: Store) -> Store:
        await store.close()
        return self._open(self._paths.pop(id(store)))

    def _open(self, path: Path) -> Store:
        store = SqliteStore(path)
        self._paths[id(store)] = path
        return store


class ShiftedHome(Home):
    """A memory store that continues from another store's revisions."""

    async def open(self) -> Store:
        inner = MemoryStore()
        await put(inner, BASE, b"1000000")
        return OffsetStore(inner)

    async def reopen(self, store: Store) -> Store:
        return store


class EtcdHome(Home):
    """An etcd that outlives its clients."""

    def __init__(self, server: EtcdServer) -> None:
        self._server = server

    async def open(self) -> Store:
        return EtcdStore([self._server.endpoint], timeout_seconds=WAIT_SECONDS_MAX)

    async def reopen(self, store: Store) -> Store:
        await store.close()
        return await self.open()


async def take(updates: AsyncIterator[Changes | Relisted], count: int) -> list[Changes | Relisted]:
    """Return the next few updates of a watch."""
    async with asyncio.timeout(WAIT_SECONDS_MAX):
        return [await anext(updates) for _ in range(count)]


async def changed_next(updates: AsyncIterator[Changes | Relisted]) -> dict[str, bytes | None]:
    """Return the changes of the next update, which must not be a relist."""
    (update,) = await take(updates, 1)
    assert isinstance(update, Changes)
    assert {change.mod_revision for change in update.changes} == {update.revision}
    return {change.key: change.value for change in update.changes}


async def drain(updates: AsyncIterator[Changes | Relisted], *, to_revision: int) -> list[Changes | Relisted]:
    """Return the updates up to and including one at a revision."""
    taken: list[Changes | Relisted] = []
    async with asyncio.timeout(WAIT_SECONDS_MAX):
        while not taken or taken[-1].revision < to_revision:
            taken.append(await anext(updates))
    return taken


async def put(store: Store, key: str, value: bytes = b"", *, lease_id: int = 0) -> int:
    """Put one key unconditionally and return the revision."""
    outcome = await store.transact([], [Put(key, value, lease_id)])
    assert isinstance(outcome, Committed)
    return outcome.revision


@dataclass
class Model:
    """A store that keeps all its past states: slow, but simple."""

    revision: int
    compacted: int = 0
    log: list[Changes] = field(default_factory=list)
    states: dict[int, dict[str, Entry]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.states[self.revision] = {}

    def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Committed | Conflict:
        state = dict(self.states[self.revision])
        for compare in compares:
            entry = state.get(compare.key)
            if compare.mod_revision != (entry.mod_revision if entry else 0):
                return Conflict(self.revision)
        revision, changes = self.revision + 1, []
        for operation in operations:
            before = state.pop(operation.key, None)
            if isinstance(operation, Put):
                created = before.create_revision if before else revision
                state[operation.key] = Entry(operation.key, operation.value, created, revision)
                changes.append(Change(operation.key, operation.value, revision))
            elif before:
                changes.append(Change(operation.key, None, revision))
        if changes:
            self.revision = revision
            self.log.append(Changes(revision, tuple(changes)))
            self.states[revision] = state
        return Committed(self.revision)

    def listed(self, prefix: str, revision: int) -> tuple[Entry, ...]:
        """Return the entries under a prefix at a revision."""
        return tuple(entry for key, entry in sorted(self.states[revision].items()) if key.startswith(prefix))

    def changes(self, prefix: str, after_revision: int, to_revision: int) -> list[Changes]:
        """Return the changes under a prefix between two revisions."""
        return [
            Changes(each.revision, under)
            for each in self.log
            if after_revision < each.revision <= to_revision
            and (under := tuple(change for change in each.changes if change.key.startswith(prefix)))
        ]
