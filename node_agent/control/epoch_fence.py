"""Fencing: remembers the highest term, epochs and store mark seen, so that the agent never obeys an older one."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import structlog

from cotenant import fail_points
from cotenant.history.events import Told, Welcomed
from cotenant.history.recording import record
from cotenant.store.witness import Identity, Mark, RememberedStore, Seen, Verdict, compare_store

log = structlog.get_logger()

JOBS_MAX = 10_000
BYTES_MAX = 4 << 20  # appended between rewrites of the journal
REVISION_MAX = 1 << 62


class EpochFence:
    """The highest term, the highest epoch of each of the last `JOBS_MAX` jobs, and the newest mark of the store.

    They are kept in a journal of JSON lines that is rewritten at each start. A raised value counts at once and is on
    disk when `flush` has returned.
    """

    def __init__(self, path: Path, node_id: str = "") -> None:
        self._path, self._node_id = path, node_id
        self._pending: list[str] = []
        self._writing = asyncio.Lock()
        self._bytes = 0  # appended since the last rewrite
        self.term = 0
        self.store: Mark | None = None  # the newest mark seen
        self._epochs: dict[str, int] = {}
        self._load()

    def _load(self) -> None:
        for line in self._path.read_text(errors="replace").splitlines() if self._path.exists() else ():
            try:
                entry = json.loads(line)
                term, epoch = int(entry.get("term", 0)), int(entry.get("epoch", 0))
                if max(term, epoch) > REVISION_MAX:
                    continue  # no store reaches it, and the node would refuse every order
                self.term = max(self.term, term)
                if mark := _mark_of(entry.get("store")):
                    self.store = mark  # the last line is the newest
                if "job" in entry:
                    self._raise(str(entry["job"]), epoch)
            except (ValueError, AttributeError, TypeError, OverflowError, RecursionError):
                continue  # a torn or damaged line
        try:
            self._rewrite()
        except OSError as error:  # a full disk; the old journal has the same content
            log.warning("fence_rewrite_failed", error=str(error))

    def _rewrite(self) -> None:
        """Compact the journal."""
        self._replace(self._lines())

    def _lines(self) -> list[str]:
        known = [_store_line(self.store)] if self.store else []
        return [_term_line(self.term), *known, *(_epoch_line(job, epoch) for job, epoch in self._epochs.items())]

    def _replace(self, lines: list[str]) -> None:
        fresh = self._path.with_name(self._path.name + ".new")
        with fresh.open("w") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        fresh.rename(self._path)

    def epoch_of(self, job_id: str) -> int:
        """Return the highest epoch seen for a job, or 0."""
        return self._epochs.get(job_id, 0)

    @property
    def remedy(self) -> str:
        """What to do if every leader's term is older than one seen: a store may be erased, a fence is not."""
        return (
            "a placement that was cut off steps down for the leader; if the store went back in time or was replaced, "
            "`cotenant store status` shows it and `cotenant store accept-regression` makes every node accept it; to "
            "reset this node alone, end its jobs, stop the agent, "
            f"remove {self._path}, and start the agent"
        )

    def raise_term(self, term: int) -> bool:
        """Record a term; return False if a higher one was seen."""
        if term > self.term:
            self.term = term
            self._pending.append(_term_line(term))
        if term == self.term:
            record(Welcomed(self._node_id, term))
        return term == self.term

    def check_store(self, shown: Mark, supersedes: tuple[str, ...]) -> Verdict | None:
        """Return why the store behind placement is not acceptable; None if it is the known store and not older."""
        if self.store is None:
            return None
        memory = shown.memory
        identity = Identity(memory.id, memory.generation, "", supersedes)
        return compare_store(self.store.memory, Seen(identity, memory.revision), f"node {self._node_id}")

    def record_store(self, shown: Mark) -> None:
        """Record a newer mark of the store, or the mark of a new store that was accepted."""
        known = self.store
        if known == shown or (
            known
            and (known.memory.id, known.memory.generation) == (shown.memory.id, shown.memory.generation)
            and known.memory.revision > shown.memory.revision
        ):
            return
        self.store = shown
        self._pending = [line for line in self._pending if not line.startswith(STORE_PREFIX)]
        self._pending.append(_store_line(shown))

    def raise_epoch(self, job_id: str, epoch: int) -> bool:
        """Record a job's epoch; return False if a higher one was seen."""
        if epoch > self.epoch_of(job_id):
            self._raise(job_id, epoch)
            self._pending.append(_epoch_line(job_id, epoch))
        record(Told(self._node_id, job_id, epoch))
        return epoch == self.epoch_of(job_id)

    def _raise(self, job_id: str, epoch: int) -> None:
        epoch = max(epoch, self._epochs.pop(job_id, 0))
        self._epochs[job_id] = epoch  # in order of the last raise
        while len(self._epochs) > JOBS_MAX:
            del self._epochs[next(iter(self._epochs))]

    async def flush(self) -> None:
        """Write raised values to disk; concurrent callers share one write. Raises `OSError`."""
        async with self._writing:
            lines, self._pending = self._pending, []
            if lines:
                try:
                    if self._bytes > BYTES_MAX:
                        await asyncio.to_thread(self._replace, self._lines())
                        self._bytes = 0
                    else:
                        await asyncio.to_thread(self._append, lines)
                    self._bytes += sum(map(len, lines))
                except OSError:
                    self._pending = lines + self._pending
                    raise
                await fail_points.reach("agent.fenced")

    def _append(self, lines: list[str]) -> None:
        with self._path.open("a") as file:
            file.writelines(["\n", *lines])  # separate from a torn line
            file.flush()
            os.fdatasync(file.fileno())


def read_store_memory(path: Path) -> RememberedStore | None:
    """Return what a node's journal says of the store, with the highest term and epoch in it; read-only."""
    mark, highest = None, 0
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
            numbers = [int(entry.get("term", 0)), int(entry.get("epoch", 0))]
            mark = _mark_of(entry.get("store")) or mark
        except (ValueError, AttributeError, TypeError, OverflowError, RecursionError):
            continue
        highest = max(highest, *(number for number in numbers if number <= REVISION_MAX), 0)
    if mark is None:
        return None
    return replace(mark.memory, revision=max(mark.memory.revision, highest))


STORE_PREFIX = '{"store"'


def _store_line(mark: Mark) -> str:
    return json.dumps({"store": asdict(mark.memory) | {"signature": mark.signature.hex()}}) + "\n"


def _mark_of(read: object) -> Mark | None:
    memory = RememberedStore.decode(read)
    if memory is None or not isinstance(read, dict):
        return None
    try:
        return Mark(memory, bytes.fromhex(str(read.get("signature", ""))))
    except ValueError:
        return None


def _term_line(term: int) -> str:
    return json.dumps({"term": term}) + "\n"


def _epoch_line(job_id: str, epoch: int) -> str:
    return json.dumps({"job": job_id, "epoch": epoch}) + "\n"
