"""The jobs of a cycle about which placement is asked, page by page, with few of each equivalence class.

Theory of operation. Jobs of one class need the same, so where the first of them finds no room, the others find none. A
page therefore goes through the jobs in their order and ends each class with the first job that does not fit into what
is free, by counting: its refusal will answer for the others. Counting may be wrong, and a job may be refused for a
reason of its own. Then the next job of its class, which is not on the page, comes before the jobs behind it. So the
page says where that is, placement decides nothing from there on, and what it left undecided is on the next page: the
decisions are those of a page with all jobs.

Classes are sent whole whose jobs are known to get different answers. All are where running jobs may be stopped, or
where gangs reserve resources: there also a job that finds no room matters to those behind it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np

from cotenant.core.model.job_table import Flags, Ints
from cotenant.core.model.lifecycle import Phase
from cotenant.core.model.resources import Resources
from cotenant.rpc.slices import Slices
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.transitions import EquivalenceKey, Record
from cotenant.services.queue.scheduling.ranking import Ranking

PAGE_BYTES_MAX = 2 * 2**20  # of the specs of a page; placement accepts messages of 4 MiB
MOVED = -1  # the place of migrated jobs, which come before all others


class Entry(NamedTuple):
    """A candidate, and its place among the starts."""

    place: int
    record: Record


class Page(NamedTuple):
    """Candidates in order; `next_places` has the place of the next job of their class, for the last ones of a class."""

    entries: list[Entry]
    next_places: dict[str, int]

    def indexes(self, before: int) -> dict[str, int]:
        """Return by job before which candidate the next job of its class comes, if `before` others precede the page."""
        places = [entry.place for entry in self.entries]
        found = {job_id: bisect_right(places, place) for job_id, place in self.next_places.items()}
        return {job_id: before + index for job_id, index in found.items() if index < len(places)}


class CandidatePages:
    """The jobs that should start and about which placement was not asked yet; migrated jobs come first."""

    def __init__(self, state: State, ranking: Ranking, ending: Container[str]) -> None:
        self._state, self._starts, self._keys, self._codes = state, ranking.starts, ranking.keys, ranking.codes
        self._migrated = dict(state.migrating)  # first, for their reservations are short
        self._first = [Entry(MOVED, record) for job_id, record in self._migrated.items() if job_id not in ending]
        self._ending = ending
        self._left: Flags = np.ones(len(ranking.starts), dtype=np.bool_)
        self._whole = np.zeros(int(ranking.codes.max(initial=-1)) + 1, dtype=np.bool_)  # by code

    def send_whole(self, keys: Iterable[EquivalenceKey]) -> None:
        """Put all jobs of some classes on the pages: their answers differ."""
        for key in keys:
            if 0 <= key.code < len(self._keys) and self._keys[key.code] is key:
                self._whole[key.code : key.code + 1] = True

    async def page(
        self,
        size: int,
        most: int,
        refused: Collection[EquivalenceKey],
        asks: Callable[[Entry], bool],
        *,
        whole: bool,
    ) -> Page:
        """Return the next page, with about `size` jobs that may start and at most `most` in all.

        The jobs of `refused` classes are left out, and those about which it `asks` not. `whole`: all jobs of all
        classes are sent.
        """
        entries, next_places = [entry for entry in self._first[:most] if asks(entry)], dict[str, int]()
        self._first = self._first[most:]
        places, following = self._line_up(refused, whole=whole)
        free = self._free()
        room_bytes, slices = PAGE_BYTES_MAX, Slices()
        while places and len(entries) < most and size > 0 and room_bytes >= 0:
            place = heappop(places)
            await slices.step()
            record, after = self._record(place), int(following[place])
            if record is None or not asks(Entry(place, record)):
                self._left[place] = False
                if after >= 0:
                    heappush(places, after)
                continue
            entries.append(Entry(place, record))
            room_bytes -= record.job.spec.ByteSize()
            needs = record.requested_spec.resources(auto=1)
            if whole or self._whole[self._codes[place]] or _fits(needs, free):
                free, size = free - needs, size - 1
                if after >= 0:
                    heappush(places, after)
            elif after >= 0:
                next_places[record.id] = after
        return _of_waiting(entries, next_places)

    def answered(self, page: Page, job_ids: Container[str], refused: Container[EquivalenceKey]) -> None:
        """Note which jobs of a page placement answered; the others are on the next page."""
        cut = min(page.indexes(0).values(), default=len(page.entries))
        for index, (place, record) in enumerate(page.entries):
            if place != MOVED and (index < cut or record.id in job_ids):
                self._left[place] = False
            if record.id in page.next_places and record.equivalence_key not in refused:
                self._whole[self._codes[place]] = True

    def _record(self, place: int) -> Record | None:
        """Return the job at a place among the starts, unless it came first or ends."""
        job_id = self._starts[place]
        if job_id in self._migrated or job_id in self._ending:
            return None
        return self._state.records.get(job_id)

    def _line_up(self, refused: Collection[EquivalenceKey], *, whole: bool) -> tuple[list[int], Ints]:
        """Return a heap of places, the first of each class or all of it, and by place the next one of its class."""
        if refused:
            known = np.zeros(len(self._whole), dtype=np.bool_)
            known[: len(self._keys)] = [key is not None and key in refused for key in self._keys][: len(known)]
            self._left &= ~known[self._codes]
        left = np.flatnonzero(self._left)
        following = np.full(len(self._left), -1, dtype=np.int64)
        if whole:
            return left.tolist(), following
        codes = self._codes[left]
        order = np.argsort(codes, kind="stable")
        places, codes = left[order], codes[order]
        follows = (codes[1:] == codes[:-1]) & ~self._whole[codes[1:]]
        following[places[:-1][follows]] = places[1:][follows]
        heads: list[int] = places[np.concatenate([np.ones(min(1, len(places)), dtype=np.bool_), ~follows])].tolist()
        heapify(heads)
        return heads, following

    def _free(self) -> Resources:
        """Return what no running job holds, by counting."""
        return self._state.capacity - self._state.table.held()


def _fits(needs: Resources, free: Resources) -> bool:
    return all(need <= have or not need for need, have in zip(needs, free, strict=True))


def _of_waiting(entries: Sequence[Entry], next_places: dict[str, int]) -> Page:
    """Return a page without the jobs that have changed meanwhile, and without what would depend on them."""
    gone = [entry.record.id for entry in entries if entry.record.phase is not Phase.QUEUED]
    cut = min((next_places.pop(job_id) for job_id in gone if job_id in next_places), default=None)
    return Page(
        [one for one in entries if one.record.phase is Phase.QUEUED and (cut is None or one.place < cut)], next_places
    )
