"""What the agent has seen of terms, epochs and the store, so that it never obeys an older one, even after a restart."""

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
from cotenant.store.witness import Identity, Mark, Memory, Seen, Verdict, judge

log = structlog.get_logger()

JOBS_MAX = 10_000
BYTES_MAX = 4 << 20  # appended before the journal is rewritten
REVISION_MAX = 1 << 62


class Fence:
    """The largest term, and the largest epoch of each of the last jobs.

    Kept as a journal of JSON lines that is rewritten at each start. What was raised counts at once; it is on the
    disk when `flush` has returned.
    """

    def __init__(self, path: Path, node_id: str = "") -> None:
        self._path, self._node_id = path, node_id
        self._pending: list[str] = []
        self._writing = asyncio.Lock()
        self._bytes = 0  # appended since it was rewritten
        self.term = 0
        self.store: Mark | None = None  # the newest that was shown
        self._epochs: dict[str, int] = {}
        self._load()

    def _load(self) -> None:
        for line in self._path.read_text(errors="replace").splitlines() if self._path.exists() else ():
            try:
                entry = json.loads(line)
                term, epoch = int(entry.get("term", 0)), int(entry.get("epoch", 0))
                if max(term, epoch) > REVISION_MAX:
                    continue  # no store is ever there, and the node would obey nobody again
                self.term = max(self.term, term)
                if mark := _mark_of(entry.get("store")):
                    self.store = mark  # the last line is the newest
                if "job" in entry:
                    self._raise(str(entry["job"]), epoch)
            except (ValueError, AttributeError, TypeError, OverflowError, RecursionError):
                continue  # a line that a crash cut short, or a disk damaged
        try:
            self._rewrite()
        except OSError as error:  # a full disk; the journal as it is says the same
            log.warning("fence_not_rewritten", error=str(error))

    def _rewrite(self) -> None:
        """Leave out what is outdated."""
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
        """The largest epoch seen for a job; 0 where none was."""
        return self._epochs.get(job_id, 0)

    @property
    def remedy(self) -> str:
        """What to do where every leader's term is older than one that was seen: stores are erased, fences are not."""
        return (
            "a placement that was cut off gives way to the one that leads; where the store went back in time or is "
            "another one, `cotenant store status` says so and `cotenant store accept-regression` has every node accept "
            "it; to give up this node's memory alone, end its jobs, stop the agent, "
            f"remove {self._path}, and start the agent"
        )

    def raise_term(self, term: int) -> bool:
        """Take a term; False where a larger one was seen."""
        if term > self.term:
            self.term = term
            self._pending.append(_term_line(term))
        if term == self.term:
            record(Welcomed(self._node_id, term))
        return term == self.term

    def judge_store(self, shown: Mark, supersedes: tuple[str, ...]) -> Verdict | None:
        """Return what is wrong with the store behind a placement; None where it is what was seen, or newer."""
        if self.store is None:
            return None
        told = shown.memory
        identity = Identity(told.id, told.generation, "", supersedes)
        return judge(self.store.memory, Seen(identity, told.revision), f"node {self._node_id}")

    def remember_store(self, shown: Mark) -> None:
        """Record a newer mark of the store, or the mark of another store that was accepted."""
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
        """Take a job's epoch; False where a larger one was seen."""
        if epoch > self.epoch_of(job_id):
            self._raise(job_id, epoch)
            self._pending.append(_epoch_line(job_id, epoch))
        record(Told(self._node_id, job_id, epoch))
        return epoch == self.epoch_of(job_id)

    def _raise(self, job_id: str, epoch: int) -> None:
        epoch = max(epoch, self._epochs.pop(job_id, 0))
        self._epochs[job_id] = epoch  # at the end: the first is the one that was raised longest ago
        while len(self._epochs) > JOBS_MAX:
            del self._epochs[next(iter(self._epochs))]

    async def flush(self) -> None:
        """Put what was raised on the disk; callers at the same time share one write. Raises `OSError`."""
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
            file.writelines(["\n", *lines])  # apart from a line that a crash may have cut short
            file.flush()
            os.fdatasync(file.fileno())


def remembered(path: Path) -> Memory | None:
    """Return what a node's journal says of the store, with the highest term and epoch that it has; changes nothing."""
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
    memory = Memory.decode(read)
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
