"""Each store adapter against a model: both give the same answers, and watches match the model's history."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from tests.contract.stores import EtcdHome, Home, MemoryHome, Model, SqliteHome, drain
from tests.support.properties import examples

from cotenant.store.port import Changes, Compare, Delete, Listing, Operation, Put, Relisted, Store

KEYS = ["a", "b", "b/1", "b/2", "bé", "c\0"]
PREFIXES = ["", "b", "b/"]
END = "b/~"  # under every prefix


@pytest.fixture(params=["memory", "sqlite", "etcd"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Home:
    if request.param == "memory":
        return MemoryHome()
    if request.param == "sqlite":
        return SqliteHome(tmp_path)
    return EtcdHome(request.getfixturevalue("shared_etcd"))


@dataclass(frozen=True)
class Transact:
    """Operations, if each key is now as long unchanged as said: 0 for just so, else how far the claim is off."""

    claims: tuple[tuple[str, int], ...]
    operations: tuple[Operation, ...]


@dataclass(frozen=True)
class Compact:
    """Compact this share of the history."""

    share: float


@dataclass(frozen=True)
class Watch:
    """Watch a prefix from this share of all history on."""

    prefix: str
    share: float


@dataclass(frozen=True)
class Reopen:
    """Close the store and open it again; watches resume."""


Step = Transact | Compact | Watch | Reopen

operations = st.one_of(
    st.builds(Put, st.sampled_from(KEYS), st.binary(max_size=4)), st.builds(Delete, st.sampled_from(KEYS))
)
claims = st.tuples(st.sampled_from(KEYS), st.sampled_from([0, 0, 0, 0, -1, 1]))
transactions = st.builds(
    Transact,
    st.lists(claims, max_size=2).map(tuple),
    st.lists(operations, max_size=4, unique_by=lambda operation: operation.key).map(tuple),
)
shares = st.floats(0, 1)
steps = st.one_of(
    transactions,
    transactions,
    transactions,
    st.builds(Watch, st.sampled_from(PREFIXES), shares),
    st.builds(Compact, shares),
    st.just(Reopen()),
)


@dataclass
class Viewer:
    """A watcher across reopened stores that records what it sees."""

    prefix: str
    after_revision: int
    seen: list[Changes | Relisted] = field(default_factory=list)
    watching: asyncio.Task[None] | None = None

    @property
    def position(self) -> int:
        return self.seen[-1].revision if self.seen else self.after_revision

    def begin(self, store: Store) -> None:
        self.watching = asyncio.create_task(self._watch(store))

    async def _watch(self, store: Store) -> None:
        async for update in store.watch(self.prefix, after_revision=self.position):
            self.seen.append(update)

    async def end(self) -> None:
        """Wait until the closed store ends the watch."""
        assert self.watching
        await asyncio.wait_for(self.watching, 10)


@dataclass
class Trial:
    """A store and its model, driven through the same steps."""

    home: Home
    store: Store
    at: str
    model: Model
    first_revision: int
    viewers: list[Viewer] = field(default_factory=list)

    async def take(self, step: Step) -> None:
        match step:
            case Transact():
                await self.transact(step)
            case Compact(share):
                revision = self.revision_at(share)
                await self.store.compact(revision)
                self.model.compacted = max(self.model.compacted, revision)
            case Watch(prefix, share):
                viewer = Viewer(self.at + prefix, self.revision_at(share))
                viewer.begin(self.store)
                self.viewers.append(viewer)
            case Reopen():
                await self.reopen()
        assert await self.store.list(self.at) == Listing(self.model.listed(self.at, self.model.revision), self.revision)

    @property
    def revision(self) -> int:
        return self.model.revision

    def revision_at(self, share: float) -> int:
        return self.first_revision + round(share * (self.revision - self.first_revision))

    async def transact(self, step: Transact) -> None:
        state = self.model.states[self.revision]
        compares = [
            Compare(self.at + key, (state[self.at + key].mod_revision if self.at + key in state else 0) + off)
            for key, off in step.claims
        ]
        operations = [moved(operation, self.at) for operation in step.operations]
        outcome = await self.store.transact(compares, operations)
        event(type(outcome).__name__)
        assert outcome == self.model.transact(compares, operations)

    async def reopen(self) -> None:
        store = await self.home.reopen(self.store)
        if store is self.store:
            return
        self.store = store
        for viewer in self.viewers:
            await viewer.end()
            viewer.begin(store)

    async def finish(self) -> None:
        """Write a final change, wait until all watchers have seen it, and check what each saw."""
        await self.transact(Transact((), (Put(END, b""),)))
        for viewer in self.viewers:
            async with asyncio.timeout(60):
                while viewer.position < self.revision:
                    await self.store.get(self.at)  # gives the viewers time, in every adapter
        await self.store.close()
        for viewer in self.viewers:
            await viewer.end()
            self.check(viewer.prefix, viewer.after_revision, viewer.seen)

    def check(self, prefix: str, after_revision: int, seen: Sequence[Changes | Relisted]) -> None:
        """Compare what was seen with the model: nothing lost, duplicated or out of order."""
        position = after_revision
        for index, update in enumerate(seen):
            if isinstance(update, Relisted):
                event("Relisted")
                assert position < self.model.compacted, "relisted, though nothing was forgotten"
                assert update.entries == self.model.listed(prefix, update.revision)
            else:
                assert [update] == self.model.changes(prefix, position, update.revision), f"update {index} of {seen}"
            position = update.revision
        assert self.model.changes(prefix, position, self.revision) == [], "the end was not seen"


def moved(operation: Operation, at: str) -> Operation:
    if isinstance(operation, Put):
        return Put(at + operation.key, operation.value)
    return Delete(at + operation.key)


@given(story=st.lists(steps, max_size=25))
@settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # each example opens a store of its own in `home`
)
async def test_a_store_does_what_the_model_does(home: Home, story: list[Step]) -> None:
    store, at = await home.open(), f"/{uuid4()}/"
    first_revision = (await store.list(at)).revision
    trial = Trial(home, store, at, Model(first_revision), first_revision)
    try:
        for step in story:
            await trial.take(step)
        await trial.finish()
    finally:
        await trial.store.close()


@given(story=st.lists(transactions, min_size=1, max_size=25), compacted=shares, after=shares)
@settings(
    max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)  # as above
async def test_a_watch_relists_exactly_when_its_revision_is_compacted(
    home: Home, story: list[Transact], compacted: float, after: float
) -> None:
    store, at = await home.open(), f"/{uuid4()}/"
    first_revision = (await store.list(at)).revision
    trial = Trial(home, store, at, Model(first_revision), first_revision)
    try:
        for step in [*story, Transact((), (Put(END, b""),))]:
            await trial.take(step)
        await trial.take(Compact(compacted))
        after_revision = trial.revision_at(after)
        is_forgotten = after_revision < trial.model.compacted
        if not is_forgotten and after_revision == trial.revision:
            return  # nothing to see
        seen = await drain(store.watch(at, after_revision=after_revision), to_revision=trial.revision)
        assert [isinstance(update, Relisted) for update in seen] == [is_forgotten, *[False] * (len(seen) - 1)]
        trial.check(at, after_revision, seen)
    finally:
        await store.close()
