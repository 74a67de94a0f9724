"""The complete revision: up to which every change of a job in the store is also applied in memory.

Theory of operation. A watch resumes from a store revision, so it may be told a revision only if no change up to it can
still appear in memory: else a watch that resumes there would miss that change. Commits are not applied in the order of
their revisions: of two transactions in flight, the later may be applied first, those of one group share a revision,
and the outcome of some is unknown until it is read back.

So every write is registered while it is open: from before it is sent until its outcome is applied and the watchers are
notified. The store's revision only rises. A write that begins while the newest known commit has revision L is committed
above L, if at all. So everything up to L is applied or open before it, and the complete revision is the L of the oldest
open write; without open writes, it is the newest known commit. It never falls. A write with an unknown outcome stays
open until that is settled. It need not be exact: a lower revision only makes a resumed watch repeat something.

A new leader begins with the revision of the listing that it has read: earlier leaders are fenced, so nothing of theirs
is in flight. A revision belongs to one generation of one store: after a restore, the same number means something else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from cotenant.codec.errors import Problem, failed_precondition
from cotenant.core.model.validation import Violation

UNKNOWN, COMPACTED = "REVISION_UNKNOWN", "REVISION_COMPACTED"
FIELD = "after_revision"
_TEXT = re.compile(r"([0-9a-z-]{0,40})\.([0-9]{1,19})", re.ASCII)
_ANEW = "begin a watch without a revision"


class Write:
    """A write to the store that is open: its outcome is not applied yet."""

    __slots__ = ("before", "revision", "unsettled")

    def __init__(self, before: int) -> None:
        self.before = before  # the newest known commit when it began
        self.revision = 0  # of its commit
        self.unsettled = 0  # outcomes that have to be read back; it stays open until then

    def committed(self, revision: int) -> None:
        """Record the commit."""
        self.revision = max(self.revision, revision)


class CompleteRevision:
    """Tracks the open writes of a leader.

    >>> revisions = CompleteRevision()
    >>> revisions.start("a", 5)
    >>> with revisions.write() as first:
    ...     with revisions.write() as second:
    ...         second.committed(7)
    ...     (revisions.value, revisions.newest)
    (5, 7)
    >>> revisions.value
    7
    """

    def __init__(self) -> None:
        self.generation = ""
        self.newest = 0  # the newest known commit
        self._open: dict[Write, None] = {}  # in the order in which they began, and so by `before`

    def start(self, generation: str, revision: int) -> None:
        """Begin with a listing of all jobs at a revision."""
        self.generation, self.newest = generation, revision

    @property
    def value(self) -> int:
        """The complete revision."""
        return next((write.before for write in self._open), self.newest)

    @property
    def text(self) -> str:
        """The complete revision as watches are told it."""
        return f"{self.generation}.{self.value}"

    @contextmanager
    def write(self) -> Iterator[Write]:
        """Keep a write open within the block, and beyond it if its outcome is unknown by then."""
        write = Write(self.newest)
        self._open[write] = None
        try:
            yield write
        finally:
            if not write.unsettled:
                self._close(write)

    def settle(self, write: Write) -> None:
        """Record that one of a write's unknown outcomes is applied; the last one closes it."""
        write.unsettled -= 1
        if not write.unsettled:
            self._close(write)

    def _close(self, write: Write) -> None:
        self.newest = max(self.newest, write.revision)
        self._open.pop(write, None)

    def parse(self, text: str, floor: int) -> int:
        """Return the revision in a text; removals up to `floor` are no longer known.

        Raises:
            Problem: INVALID_ARGUMENT it is no revision; FAILED_PRECONDITION it is not one of this store; OUT_OF_RANGE
                it is too old.
        """
        found = _TEXT.fullmatch(text)
        if found is None:
            wrong = f"is not a revision that a watch was told; {_ANEW}"
            raise Problem(
                grpc.StatusCode.INVALID_ARGUMENT, UNKNOWN, f"{FIELD}: {wrong}", violations=[Violation(FIELD, wrong)]
            )
        generation, revision = found[1], int(found[2])
        if generation != self.generation:
            raise failed_precondition(UNKNOWN, f"{FIELD}: is of another store, or from before a restore; {_ANEW}")
        if revision > self.newest:
            raise failed_precondition(UNKNOWN, f"{FIELD}: {revision} is newer than this store ({self.newest}); {_ANEW}")
        if revision <= floor:
            raise Problem(
                grpc.StatusCode.OUT_OF_RANGE,
                COMPACTED,
                f"{FIELD}: jobs that were removed up to revision {floor} are no longer known, {revision} is not newer; "
                f"{_ANEW}",
            )
        return revision
