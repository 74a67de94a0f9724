"""The complete revision: never above a commit that is not applied, and rising until it is the newest."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.codec.errors import Problem
from cotenant.services.queue.jobs.complete_revision import CompleteRevision, Write
from cotenant.services.queue.jobs.grouped_store import GroupedStore
from cotenant.services.queue.jobs.job_store import JobStore
from cotenant.services.queue.jobs.queue_state import State
from cotenant.store.open import open_raw, open_store
from cotenant.store.regression_acceptance import accept

STEPS = st.lists(st.tuples(st.sampled_from(["begin", "commit", "lose", "close", "settle"]), st.integers(0, 9)))


class Store:
    """Writes in flight, by what became of them."""

    def __init__(self) -> None:
        self.revisions, self.revision = CompleteRevision(), 5
        self.revisions.start("a", self.revision)
        self.open: list[tuple[Write, ExitStack]] = []  # begun
        self.done: list[tuple[Write, ExitStack, int]] = []  # committed, and not applied
        self.lost: list[tuple[Write, int]] = []  # with an unknown outcome: the revision, 0 if it was not committed

    def step(self, what: str, which: int) -> None:
        if what == "begin":
            stack = ExitStack()
            self.open.append((stack.enter_context(self.revisions.write()), stack))
        elif what == "commit" and self.open:
            write, stack = self.open.pop(which % len(self.open))
            self.revision += which % 2  # else: in one group with the commit before, which began before it
            self.revision = max(self.revision, write.before + 1)
            self.done.append((write, stack, self.revision))
        elif what == "lose" and self.open:
            write, stack = self.open.pop(which % len(self.open))
            self.revision += 1
            write.unsettled += 1
            self.lost.append((write, self.revision if which % 2 else 0))
            stack.close()
        elif what == "close" and self.done:
            write, stack, revision = self.done.pop(which % len(self.done))
            write.committed(revision)
            stack.close()
        elif what == "settle" and self.lost:
            self.revisions.settle(self.lost.pop(which % len(self.lost))[0])


@given(STEPS)
def test_no_unapplied_commit_is_below_it_and_it_never_falls(steps: list[tuple[str, int]]) -> None:
    store, before = Store(), 0
    for what, which in steps:
        store.step(what, which)
        unapplied = [revision for *_, revision in store.done] + [revision for _, revision in store.lost if revision]
        assert before <= store.revisions.value <= store.revision
        assert all(store.revisions.value < revision for revision in unapplied)
        before = store.revisions.value
    for write, stack in store.open:
        assert store.revisions.value <= write.before
        stack.close()
    for write, _ in store.lost:
        store.revisions.settle(write)
    for write, stack, revision in store.done:
        write.committed(revision)
        stack.close()
    assert store.revisions.value == store.revisions.newest >= before


async def test_a_revision_names_the_generation_of_its_store(tmp_path: Path) -> None:
    url, told = f"sqlite:{tmp_path / 'state.db'}", []
    for accepts in (False, False, True):
        if accepts:
            raw = await open_raw(url)
            await accept(raw, ())
            await raw.close()
        store = await open_store(url)
        queue = JobStore(GroupedStore(store), State())
        await queue.load()
        told.append(queue.revisions.text.partition(".")[0])
        await store.close()
    first, again, accepted = told
    assert first == again != accepted
    assert "" not in told


@pytest.mark.parametrize(
    ("text", "code", "reason"),
    [
        ("", "INVALID_ARGUMENT", "REVISION_UNKNOWN"),
        ("7", "INVALID_ARGUMENT", "REVISION_UNKNOWN"),
        ("a.-7", "INVALID_ARGUMENT", "REVISION_UNKNOWN"),
        ("a.٧", "INVALID_ARGUMENT", "REVISION_UNKNOWN"),
        ("a." + "9" * 20, "INVALID_ARGUMENT", "REVISION_UNKNOWN"),
        ("b.7", "FAILED_PRECONDITION", "REVISION_UNKNOWN"),
        ("a.9", "FAILED_PRECONDITION", "REVISION_UNKNOWN"),
        ("a.5", "OUT_OF_RANGE", "REVISION_COMPACTED"),
    ],
)
def test_other_revisions_are_refused(text: str, code: str, reason: str) -> None:
    revisions = CompleteRevision()
    revisions.start("a", 8)
    assert revisions.parse("a.6", floor=5) == 6
    assert revisions.parse(revisions.text, floor=5) == 8
    with pytest.raises(Problem) as refused:
        revisions.parse(text, floor=5)
    assert (refused.value.code, refused.value.reason) == (getattr(grpc.StatusCode, code), reason)
    assert "begin a watch without a revision" in refused.value.message
