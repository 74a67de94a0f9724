"""Properties of witnesses: no false alarm after crashes; always an alarm if an acknowledged write is lost."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from cotenant.store import witness_file
from cotenant.store.identity_check import Witnesses
from cotenant.store.witness import (
    Identity,
    Mark,
    Mismatch,
    RememberedStore,
    Seen,
    compare_store,
    is_signed,
    learn,
    newest,
    sign,
)


@dataclass
class Model:
    """A store with its past, and witnesses that check it and save what they saw at their own times."""

    states: list[Seen] = field(default_factory=lambda: [Seen(Identity("a", 1, "00"), 1, 0)])
    memories: dict[int, RememberedStore | None] = field(default_factory=dict)  # of running processes
    kept: dict[int, RememberedStore | None] = field(default_factory=dict)  # on their disks

    @property
    def now(self) -> Seen:
        return self.states[-1]

    def write(self, *, tracked: bool) -> None:
        """Commit a write of the mesh or the end of a lease."""
        revision = self.now.revision + 1
        self.states.append(replace(self.now, revision=revision, progress=revision if tracked else self.now.progress))

    def open(self) -> None:
        """Open the store in another process, which records that before any other write."""
        revision = self.now.revision + 1
        eras = (*self.now.eras, (f"era{next(ERAS)}", self.now.progress))
        self.states.append(replace(self.now, revision=revision, progress=revision, eras=eras[-ERAS_MAX:]))

    def look(self, who: int) -> None:
        assert compare_store(self.memories.get(who), self.now) is None
        self.memories[who] = learn(self.memories.get(who), self.now)

    def keep(self, who: int) -> None:
        self.kept[who] = newest(self.kept.get(who), self.memories.get(who))

    def crash(self, who: int) -> None:
        self.memories[who] = self.kept.get(who)

    def accept(self) -> None:
        assert self.now.identity
        revision = self.now.revision + 1_000
        self.states.append(Seen(self.now.identity.accepted(0.0), revision, revision, ((f"era{next(ERAS)}", 0),)))


ERAS = count()
ERAS_MAX = 5
STEPS = st.lists(
    st.tuples(st.sampled_from(["open", "write", "expire", "look", "keep", "crash", "accept"]), st.integers(0, 3)),
    max_size=60,
)


def played(steps: list[tuple[str, int]]) -> Model:
    model = Model()
    for what, who in steps:
        match what:
            case "write" | "expire":
                model.write(tracked=what == "write")
            case "open":
                model.open()
            case "look":
                model.look(who)
            case "keep":
                model.keep(who)
            case "crash":
                model.crash(who)
            case "accept":
                model.accept()
    return model


@given(steps=STEPS)
def test_no_history_of_writes_crashes_and_acceptances_raises_a_false_alarm(steps: list[tuple[str, int]]) -> None:
    model = played(steps)  # each check asserts it
    for who in range(4):
        model.look(who)


@given(steps=STEPS, back=st.integers(1, 20), bump=st.sampled_from([0, 1_000_000]))
def test_every_loss_of_seen_writes_raises_an_alarm(steps: list[tuple[str, int]], back: int, bump: int) -> None:
    model = played(steps)
    old = model.states[max(0, len(model.states) - 1 - back)]
    restored = replace(old, revision=old.revision + bump)
    for memory in model.memories.values():
        if memory is None or old.identity is None:
            continue
        lost = memory.generation > old.identity.generation or (
            memory.generation == old.identity.generation
            and (memory.progress > old.progress or (memory.revision > old.revision and not bump))
        )
        verdict = compare_store(memory, restored)
        assert (verdict is not None) == lost
        assert verdict is None or verdict.mismatch is Mismatch.REGRESSED


@given(steps=STEPS, back=st.integers(1, 20), idle=st.integers(0, 20), writes=st.integers(1, 40))
def test_a_store_that_overtook_its_witnesses_by_writes_of_others_raises_an_alarm(
    steps: list[tuple[str, int]], back: int, idle: int, writes: int
) -> None:
    model = played([("open", 0), *steps])
    old = model.states[max(1, len(model.states) - 1 - back)]
    branch = Model([old])
    for _ in range(idle):
        branch.write(tracked=False)  # leases end before anybody opens it
    branch.open()  # by a process that remembers nothing
    for _ in range(writes):
        branch.write(tracked=True)
    for memory in model.memories.values():
        if memory and old.identity and memory.generation == old.identity.generation:
            verdict = compare_store(memory, branch.now)
            assert verdict or memory.progress <= old.progress  # no write of the mesh is lost
            assert verdict is None or memory.revision > old.revision


@given(steps=STEPS)
def test_an_accepted_store_is_trusted_by_all_its_witnesses(steps: list[tuple[str, int]]) -> None:
    model = played(steps)
    oldest = model.states[0]
    highest = max([0, *(one.revision for one in model.memories.values() if one)])
    generation = max([1, *(one.generation for one in model.memories.values() if one)])
    assert oldest.identity
    accepted = Seen(oldest.identity.accepted(0.0, generation=generation), highest + 1_000_000, highest + 1_000_000)
    for memory in model.memories.values():
        assert compare_store(memory, accepted) is None


@given(revision=st.integers(1, 1 << 62), claimed=st.integers(1, 1 << 62), signature=st.binary(max_size=16))
def test_an_agent_cannot_forge_a_mark(revision: int, claimed: int, signature: bytes) -> None:
    store = Identity.new(1.0)
    shown = sign(store, revision)
    assert is_signed(store, shown)
    assert not is_signed(store, Mark(RememberedStore(store.id, store.generation, claimed), signature))
    if claimed != revision:
        assert not is_signed(store, Mark(RememberedStore(store.id, store.generation, claimed), shown.signature))


def test_one_node_of_another_store_stops_nothing_and_two_do_only_if_no_node_knows_this_one() -> None:
    alone = Witnesses()
    assert alone.record_unknown_store("n1", "other") == ""
    assert alone.record_unknown_store("n1", "other") == ""
    assert "n1, n2" in alone.record_unknown_store("n2", "other")
    known = Witnesses(marks={"n3": RememberedStore("this", 1, 5)})
    assert known.record_unknown_store("n1", "other") == known.record_unknown_store("n2", "other") == ""


def test_a_file_keeps_the_most_that_any_process_of_a_service_knew(tmp_path: Path) -> None:
    path = witness_file.path_of(tmp_path, "queue")
    assert witness_file.read(path) is None
    witness_file.write(path, RememberedStore("a", 1, 9, 8))
    witness_file.write(path, RememberedStore("a", 1, 7, 7))  # another process, which lags behind
    assert witness_file.read(path) == RememberedStore("a", 1, 9, 8)
    witness_file.write(path, RememberedStore("a", 2, 3, 3))
    assert witness_file.memories_of(tmp_path) == {"queue": RememberedStore("a", 2, 3, 3)}
    path.write_text('{"id": "a", "generation":')
    assert witness_file.read(path) is None  # a damaged file remembers nothing


@given(
    id=st.text(max_size=5), generation=st.integers(-1, 1 << 63), key=st.text(max_size=4), text=st.binary(max_size=30)
)
def test_a_damaged_identity_is_none(id: str, generation: int, key: str, text: bytes) -> None:
    for value in (Identity(id, generation, key).encode(), text):
        found = Identity.decode(value)
        assert found is None or (found.id and found.generation > 0)
