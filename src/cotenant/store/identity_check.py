"""Whether a store is the one that was written: what is remembered of it, and what is known to be wrong with it.

The store is looked at when it is opened and once a second: its identity, its revision and its progress key (see
`witness`). Between two looks every answer and every write of etcd is checked too (see `watermark`). What agents know is
taken in where they show it. Once something is wrong it stays so until the right data is back or an operator accepts
what is there.

A process that knows that the store went back in time leaves a note in it for those that remember nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import structlog

from cotenant import telemetry
from cotenant.store import witness_file
from cotenant.store.eras import ERAS, begun, eras_of, name_of
from cotenant.store.etcd import EtcdStore
from cotenant.store.local_store import LocalStore
from cotenant.store.port import (
    Committed,
    Compare,
    Listing,
    Put,
    Store,
    StoreDistrusted,
    StoreRegressed,
    StoreReplaced,
    StoreUnavailable,
)
from cotenant.store.revision_offset import BASE, FILLING, OWN, ShiftedStore, base_of
from cotenant.store.sqlite import SqliteStore
from cotenant.store.watermark import Watermark
from cotenant.store.witness import Identity, Mark, Memory, Seen, Verdict, Wrong, is_signed, judge, learn, newest, sign

log = structlog.get_logger()

IDENTITY = f"{OWN}identity"  # JSON, see `witness.Identity`
PROGRESS = f"{OWN}progress"  # put by every write of the mesh
STOPPED = f"{OWN}stopped"  # why nothing is written any more: the note of a process that remembers
LOOK_SECONDS = 1.0
STRANGERS_MIN = 2  # nodes that have to know the same other store before they are believed
NODES_MAX = 10_000
TEXT_LENGTH_MAX = 500
REMEDY = StoreDistrusted.remedy

DISTRUSTED = telemetry.gauge("cotenant.store.distrusted", "{store}", "1 while the store is not trusted, else 0.")


@dataclass(frozen=True, slots=True)
class Look:
    """What a store holds about itself. `verdict` is what it knows to be wrong with itself."""

    seen: Seen
    own: Seen  # the same in the store's own revisions
    verdict: Verdict | None
    filling: bool
    era: bytes = b""  # what the key of eras holds, and the revision at which it was written
    era_written: int = 0


@dataclass(slots=True)
class Witnesses:
    """What agents have shown, by node: marks of this store, and ids of others."""

    marks: dict[str, Memory] = field(default_factory=dict)
    strangers: dict[str, str] = field(default_factory=dict)  # store id by node

    def stranger(self, node: str, store_id: str) -> str:
        """Take in that a node knows another store; return why that is to be believed, or "".

        A node alone is not believed, nor are several once one has shown a mark of this store.
        """
        if len(self.strangers) < NODES_MAX:
            self.strangers[node] = store_id
        same = sorted(one for one, known in self.strangers.items() if known == store_id)
        if len(same) < STRANGERS_MIN or self.marks:
            return ""
        return f"nodes {', '.join(same[:5])} know the store as {store_id[:8]}"


class Trust:
    """What is known of one store. `memory` is the file in which it is kept, if any.

    `on_return` is called when a store that was not believed is believed again, or was accepted meanwhile: whatever was
    read before may be wrong. `on_look` is called with how long each look at an etcd took; others are read from memory.
    """

    def __init__(
        self,
        shifted: ShiftedStore,
        memory: Path | None,
        on_return: Callable[[], None],
        on_look: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self.verdict: Verdict | None = None
        self.identity: Identity | None = None
        self.remembered: Memory | None = None
        self.witnesses = Witnesses()
        self._shifted, self._raw, self._path, self._on_return = shifted, shifted.inner, memory, on_return
        self._on_look = on_look
        self._kept: Memory | None = None
        self._unkept = False  # since it could not be written; told once
        self._opening = asyncio.Lock()
        self._judging = asyncio.Lock()  # else an older look could overrule a newer one
        self._looking: asyncio.Task[None] | None = None
        self._mark = Watermark(PROGRESS, era_key=ERAS)
        if isinstance(self._raw, EtcdStore):
            self._raw.watermark = self._mark
            self._mark.on_new_era = self._judge_era

    @property
    def revision(self) -> int:
        """The highest revision that was seen, or 0 before anything was."""
        seen = self._raw.revision if isinstance(self._raw, LocalStore) else self._mark.revision
        return max(self.remembered.revision if self.remembered else 0, self._shift(seen))

    def mark(self) -> Mark | None:
        """Return what an agent is to remember of the store; None where that is not known or not believed."""
        known = self._known()
        if self.identity is None or self.verdict or known is None:
            return None
        return sign(self.identity, known.revision, known.era, known.era_revision)

    def check(self) -> None:
        """Raise unless the store is the one that was written.

        Raises:
            StoreRegressed, StoreReplaced: it is not.
        """
        if verdict := self.verdict:
            kind = StoreRegressed if verdict.wrong is Wrong.REGRESSED else StoreReplaced
            raise kind(verdict.text)

    async def testify(self, node: str, mark: Mark) -> Verdict | None:
        """Take in what an agent knows of the store; return why it must not be told anything, or None.

        Raises:
            StoreUnavailable: the store cannot be asked.
        """
        await self.open()
        identity, told = self.identity, mark.memory
        if identity is None:
            return self.verdict
        if told.id == identity.id:
            if not is_signed(identity, mark):
                log.warning("store_mark_refused", node=node, revision=told.revision)
                return self.verdict  # nothing is known by it
            if len(self.witnesses.marks) < NODES_MAX:
                self.witnesses.marks[node] = told
            async with self._judging:
                if verdict := judge(told, (await look_at(self._raw)).seen, f"node {node}"):
                    self.remembered = newest(self.remembered, told)
                    await self.distrust(verdict)
            return self.verdict
        if told.id in identity.supersedes:
            return self.verdict
        verdict = Verdict(Wrong.REPLACED, f"the store is {identity.id[:8]}; node {node} knows it as {told.id[:8]}")
        log.warning("store_unknown_to_node", node=node, store=told.id)
        if text := self.witnesses.stranger(node, told.id):
            await self.distrust(Verdict(Wrong.REPLACED, f"the store is {identity.id[:8]}; {text}"))
        return verdict

    async def open(self) -> None:
        """Look at the store before it is used for the first time.

        Raises:
            StoreUnavailable: it does not answer.
        """
        if self._looking:
            return
        async with self._opening:
            if self._looking:
                return
            if self._path and self.remembered is None:
                self.remembered = self._kept = await asyncio.to_thread(witness_file.read, self._path)
            try:
                await self._begin_era()
            except StoreDistrusted as error:
                await self.doubt(error)
            self._looking = asyncio.get_running_loop().create_task(self._look_on(), name="store-witness")

    async def _look_on(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self.look()
            except StoreUnavailable as error:
                log.info("store_look_failed", error=str(error))
            except Exception:  # the next look may do better
                log.exception("store_look_failed")

    async def look(self) -> Look | None:
        """Judge the store by what is remembered, and remember what it is; return it where it is believed.

        Raises:
            StoreUnavailable: it does not answer.
        """
        async with self._judging:
            return await self._look()

    async def _look(self) -> Look | None:
        while True:
            before = self._known()
            begin = time.monotonic()
            look = await look_at(self._raw)
            if isinstance(self._raw, EtcdStore):
                self._on_look(time.monotonic() - begin)
            if look.filling:
                return None  # whoever uses the store is told so
            if verdict := look.verdict or judge(before, look.seen):
                self.remembered = before
                await self.distrust(verdict)
                return None
            if look.seen.identity:
                self._believe(look.seen.identity, look)
                await self.keep()
                return look
            await self._name()

    async def _judge_era(self, began: int) -> None:
        """Judge a store in which another process has begun an era, before anything is written there.

        Raises:
            StoreRegressed, StoreReplaced: it is not the one that was written.
            StoreUnavailable: it does not answer, or is being filled.
        """
        async with self._judging:
            if self._mark.armed and self._mark.era_written >= began:
                return  # judged for another transaction
            if await self._look() is None:
                self.check()
                raise StoreUnavailable("the store is being filled")

    def _known(self) -> Memory | None:
        """Return what is remembered, with what was seen since the last look."""
        if self.remembered is None:
            return None
        value, proven = self._mark.proven
        era, at = (name_of(value), self._shift(proven)) if proven else ("", 0)
        if isinstance(self._raw, LocalStore):  # nobody else can have begun one
            era, at = self.remembered.era, self._shift(self._raw.revision)
        known = self.remembered
        return replace(
            known,
            revision=max(self.revision, at),
            progress=max(known.progress, self._shift(self._mark.progress)),
            era=era if at > known.era_revision else known.era,
            era_revision=max(at, known.era_revision),
        )

    async def _begin_era(self) -> None:
        """Judge the store, and have it say that this process has opened it, before it writes anything else.

        Raises:
            StoreUnavailable: the store does not answer.
            StoreRegressed: it went back in time meanwhile.
        """
        while look := await self.look():
            if isinstance(self._raw, LocalStore):
                before = self._raw.revision + look.seen.revision - look.own.revision  # every write counts
            else:
                before = look.seen.progress
            name, value = begun(look.seen.eras, before)
            compares = [Compare(ERAS, look.era_written), Compare(PROGRESS, look.own.progress)]
            result = await self._raw.transact(compares, [Put(ERAS, value)])
            if isinstance(result, Committed):
                self._mark.begun(value, result.revision)
                if known := self.remembered:
                    revision = result.revision + look.seen.revision - look.own.revision
                    self.remembered = replace(known, era=name, era_revision=revision)
                log.info("store_opened", era=name, revision=result.revision)
                return

    async def _name(self) -> None:
        """Give a store that has no identity one; of several processes that do so at once, one succeeds."""
        identity = Identity.new(time.time())
        await self._put([Compare(IDENTITY, 0)], Put(IDENTITY, identity.encode()))

    async def _put(self, compares: list[Compare], put: Put) -> None:
        """Write a key about the store itself, whether the store is trusted or not."""
        if isinstance(self._raw, EtcdStore):
            await self._raw.transact(compares, [put], checked=False)
        else:
            await self._raw.transact(compares, [put])

    def _believe(self, identity: Identity, look: Look) -> None:
        known, again = self.remembered, self.verdict is not None
        again = again or (known is not None and (known.id, known.generation) != (identity.id, identity.generation))
        self.identity, self.remembered = identity, learn(known, look.seen)
        learnt = (look.own.revision, look.own.progress, look.era, look.era_written)
        if again or not self._mark.armed:
            self._mark.set(*learnt)
        else:
            self._mark.advance(*learnt)
        self.verdict = None
        DISTRUSTED.set(0)
        if again and self._looking:
            log.warning("store_trusted_again", revision=look.seen.revision, generation=identity.generation)
            self.witnesses = Witnesses()
            self._shifted.reload()
            self._on_return()

    async def doubt(self, error: StoreDistrusted) -> None:
        """Find out what is wrong with a store that has refused a write, or whose answer was too old."""
        turn = self._mark.turn
        with suppress(StoreUnavailable):
            await self.look()
        async with self._judging:
            if self._mark.turn == turn:  # else what the error says is of a time before the last judgement
                await self.distrust(Verdict(Wrong(error.reason), str(error)))

    async def distrust(self, verdict: Verdict) -> None:
        """Believe the store no more, for this reason unless there was one before."""
        if self.verdict:
            return
        self.verdict = verdict
        self._mark.disarm()
        DISTRUSTED.set(1)
        log.error("store_distrusted", reason=verdict.wrong.value, why=verdict.text, remedy=REMEDY)
        await self.keep()
        if verdict.wrong is Wrong.REGRESSED and isinstance(self._raw, EtcdStore):
            with suppress(StoreUnavailable, ValueError):
                await self._leave_note(verdict)

    async def _leave_note(self, verdict: Verdict) -> None:
        """Tell processes that remember nothing; never in the right data, which may be back by now."""
        look = await look_at(self._raw)
        if judge(self._known(), look.seen) is None:
            return
        text = verdict.text.replace("this process", "another process")[:TEXT_LENGTH_MAX]
        unchanged = [Compare(PROGRESS, look.own.progress), Compare(ERAS, look.era_written)]
        await self._put([Compare(STOPPED, 0), *unchanged], Put(STOPPED, text.encode()))

    async def keep(self) -> None:
        """Put what is remembered on the disk, where that has changed."""
        memory = self.remembered
        if self._path is None or memory is None or memory == self._kept:
            return
        try:
            await asyncio.to_thread(witness_file.write, self._path, memory)
            self._kept, self._unkept = memory, False
        except OSError as error:
            if not self._unkept:
                log.warning("store_witness_not_written", path=str(self._path), error=str(error))
            self._unkept = True

    def _shift(self, revision: int) -> int:
        return revision + (self._shifted.base or 0) if revision else 0

    async def close(self) -> None:
        """Look no more, and keep what is known."""
        if self._looking is None:
            return
        self._looking.cancel()
        await asyncio.gather(self._looking, return_exceptions=True)
        if isinstance(self._raw, LocalStore):
            with suppress(StoreUnavailable):
                await self.look()
        if self.verdict is None:
            self.remembered = self._known()
        await self.keep()


def look_of(listing: Listing) -> Look:
    """Read what a raw store holds about itself."""
    entries = {entry.key: entry for entry in listing.entries}
    base = base_of(entries.get(BASE)) or 0
    named, progress, stopped = entries.get(IDENTITY), entries.get(PROGRESS), entries.get(STOPPED)
    identity = Identity.decode(named.value) if named else None
    verdict = None
    if named and identity is None:
        verdict = Verdict(Wrong.REPLACED, f"{IDENTITY} of the store is damaged")
    elif stopped:
        verdict = Verdict(Wrong.REGRESSED, stopped.value.decode(errors="replace")[:TEXT_LENGTH_MAX])
    put = progress.mod_revision if progress else 0
    eras = entries.get(ERAS)
    return Look(
        Seen(identity, listing.revision + base, put + base if put else 0, eras_of(eras)),
        Seen(identity, listing.revision, put, eras_of(eras)),
        verdict,
        FILLING in entries,
        eras.value if eras else b"",
        eras.mod_revision if eras else 0,
    )


async def look_at(raw: Store) -> Look:
    """Look at a raw store once, and change nothing.

    Raises:
        StoreUnavailable: it does not answer.
    """
    listing = await (raw.list(OWN, checked=False) if isinstance(raw, EtcdStore) else raw.list(OWN))
    look = look_of(listing)
    if isinstance(raw, SqliteStore) and raw.regression:
        return replace(look, verdict=Verdict(Wrong.REGRESSED, raw.regression))
    return look
