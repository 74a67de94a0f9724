"""What the agent has seen of terms and epochs, so that it never obeys an older one, not even after a restart."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import structlog

from cotenant import fail_points
from cotenant.history.events import Told, Welcomed
from cotenant.history.recording import record

log = structlog.get_logger()

JOBS_MAX = 10_000
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
        self.term = 0
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
        fresh = self._path.with_name(self._path.name + ".new")
        lines = [_term_line(self.term), *(_epoch_line(job, epoch) for job, epoch in self._epochs.items())]
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
            "a placement that was cut off gives way to the one that leads; but if placement's store was erased or "
            "restored from a backup, its terms begin anew, and this node obeys it again only once it forgets: end its "
            f"jobs, stop the agent, remove {self._path}, and start the agent"
        )

    def raise_term(self, term: int) -> bool:
        """Take a term; False where a larger one was seen."""
        if term > self.term:
            self.term = term
            self._pending.append(_term_line(term))
        if term == self.term:
            record(Welcomed(self._node_id, term))
        return term == self.term

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
                    await asyncio.to_thread(self._append, lines)
                except OSError:
                    self._pending = lines + self._pending
                    raise
                await fail_points.reach("agent.fenced")

    def _append(self, lines: list[str]) -> None:
        with self._path.open("a") as file:
            file.writelines(["\n", *lines])  # apart from a line that a crash may have cut short
            file.flush()
            os.fdatasync(file.fileno())


def _term_line(term: int) -> str:
    return json.dumps({"term": term}) + "\n"


def _epoch_line(job_id: str, epoch: int) -> str:
    return json.dumps({"job": job_id, "epoch": epoch}) + "\n"
