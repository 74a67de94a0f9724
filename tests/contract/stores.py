"""The stores that one suite holds to the port's promises, and a model so simple that it is plainly right."""

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
from cotenant.store.revision_offset import BASE, ShiftedStore
from cotenant.store.sqlite import SqliteStore

WAIT_SECONDS_MAX = 20.0  # for what must come; a test that gets there fails


class Home(ABC):
    """Where one kind of store keeps its state, so that a test can open it again."""

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
    """A process's memory: it cannot be opened again, so the same store goes on."""

    async def open(self) -> Store:
        return MemoryStore()

    async def reopen(self, store: Store) -> Store:
        return store


class SqliteHome(Home):
    """A directory in which each store has a file of its own."""

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
    """A process's memory that goes on from another store's revisions."""

    async def open(self) -> Store:
        inner = MemoryStore()
        await put(inner, BASE, b"1000000")
        return ShiftedStore(inner)

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
    """Take the next few updates of a watch."""
    async with asyncio.timeout(WAIT_SECONDS_MAX):
        return [await anext(updates) for _ in range(count)]


async def changed_next(updates: AsyncIterator[Changes | Relisted]) -> dict[str, bytes | None]:
    """Take one update, which must be a change, and say what it changed."""
    (update,) = await take(updates, 1)
    assert isinstance(update, Changes)
    assert {change.mod_revision for change in update.changes} == {update.revision}
    return {change.key: change.value for change in update.changes}


async def drain(updates: AsyncIterator[Changes | Relisted], *, to_revision: int) -> list[Changes | Relisted]:
    """Take updates up to and including one at a revision."""
    taken: list[Changes | Relisted] = []
    async with asyncio.timeout(WAIT_SECONDS_MAX):
        while not taken or taken[-1].revision < to_revision:
            taken.append(await anext(updates))
    return taken


async def put(store: Store, key: str, value: bytes = b"", *, lease_id: int = 0) -> int:
    """Write one key, whatever it was, and return the revision."""
    outcome = await store.transact([], [Put(key, value, lease_id)])
    assert isinstance(outcome, Committed)
    return outcome.revision


@dataclass
class Model:
    """A store that keeps every state it was ever in: slow, and easy to believe."""

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
        """Say what was under a prefix at a revision."""
        return tuple(entry for key, entry in sorted(self.states[revision].items()) if key.startswith(prefix))

    def changes(self, prefix: str, after_revision: int, to_revision: int) -> list[Changes]:
        """Say what changed under a prefix between two revisions."""
        return [
            Changes(each.revision, under)
            for each in self.log
            if after_revision < each.revision <= to_revision
            and (under := tuple(change for change in each.changes if change.key.startswith(prefix)))
        ]
