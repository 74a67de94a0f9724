"""Checks whether a store is the one that was written, from what processes and agents remember of it.

The store is checked when it is opened and once a second: its identity, its revision and its progress key (see
`witness`). Between two checks every response and every write of etcd is checked too (see `watermark`). What agents
remember is added when they connect. Once a mismatch is found it stays until the right data is back or an operator
accepts the present data.

A process that knows that the store has regressed leaves a note in it for processes that remember nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from cotenant import telemetry
from cotenant.store import witness_file
from cotenant.store.eras import ERAS, begun, eras_of, name_of
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
from cotenant.store.revision_offset import BASE, FILLING, OWN, OffsetStore, base_of
from cotenant.store.sqlite import SqliteStore
from cotenant.store.watermark import Watermark
from cotenant.store.witness import (
    Identity,
    Mark,
    Mismatch,
    RememberedStore,
    Seen,
    Verdict,
    compare_store,
    is_signed,
    learn,
    newest,
    sign,
)
from cotenant.telemetry.plain_structlog import structlog

if TYPE_CHECKING:
    from cotenant.store.etcd import EtcdStore

log = structlog.get_logger()

IDENTITY = f"{OWN}identity"  # JSON, see `witness.Identity`
PROGRESS = f"{OWN}progress"  # written by every transaction of the mesh
STOPPED = f"{OWN}stopped"  # why writing has stopped: the note of a process that remembers
LOOK_SECONDS = 1.0
UNKNOWN_STORES_MIN = 2  # nodes that must know the same other store before they are believed
NODES_MAX = 10_000
TEXT_LENGTH_MAX = 500
REMEDY = StoreDistrusted.remedy

DISTRUSTED = telemetry.gauge("cotenant.store.distrusted", "{store}", "1 while the store is not trusted, else 0.")


@dataclass(frozen=True, slots=True)
class Look:
    """What a store holds about itself. `verdict` is the mismatch that it records itself."""

    seen: Seen
    own: Seen  # the same, in the store's own revisions
    verdict: Verdict | None
    filling: bool
    era: bytes = b""  # the value and the revision of the key of eras
    era_written: int = 0


@dataclass(slots=True)
class Witnesses:
    """What agents remember, by node: marks of this store, and IDs of other stores."""

    marks: dict[str, RememberedStore] = field(default_factory=dict)
    unknown_stores: dict[str, str] = field(default_factory=dict)  # store id by node

    def record_unknown_store(self, node: str, store_id: str) -> str:
        """Record that a node knows another store; return why that is to be believed, or "".

        A single node is not believed, nor are several once one has shown a mark of this store.
        """
        if len(self.unknown_stores) < NODES_MAX:
            self.unknown_stores[node] = store_id
        same = sorted(one for one, known in self.unknown_stores.items() if known == store_id)
        if len(same) < UNKNOWN_STORES_MIN or self.marks:
            return ""
        return f"nodes {', '.join(same[:5])} know the store as {store_id[:8]}"


class Trust:
    """What is known of one store. `memory` is the file in which it is saved, if any.

    `on_return` is called when a distrusted store is trusted again, or was accepted in between: everything that was read
    before may be wrong. `on_look` is called with the duration of each check of an etcd; other stores are in memory.
    """

    def __init__(
        self,
        shifted: OffsetStore,
        memory: Path | None,
        on_return: Callable[[], None],
        on_look: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self.verdict: Verdict | None = None
        self.identity: Identity | None = None
        self.remembered: RememberedStore | None = None
        self.witnesses = Witnesses()
        self._shifted, self._raw, self._path, self._on_return = shifted, shifted.inner, memory, on_return
        self._on_look = on_look
        self._kept: RememberedStore | None = None
        self._unkept = False  # writing it failed; logged once
        self._began = False  # whether this process has begun its era
        self._opening = asyncio.Lock()
        self._judging = asyncio.Lock()  # else an older check could overrule a newer one
        self._looking: asyncio.Task[None] | None = None
        self._mark = Watermark(PROGRESS, era_key=ERAS)
        self._etcd = _etcd_of(self._raw)
        if self._etcd:
            self._etcd.watermark = self._mark
            self._mark.on_new_era = self._check_era

    @property
    def revision(self) -> int:
        """The highest revision that was seen; 0 before the first."""
        seen = self._raw.revision if isinstance(self._raw, LocalStore) else self._mark.revision
        return max(self.remembered.revision if self.remembered else 0, self._offset(seen))

    def mark(self) -> Mark | None:
        """Return what an agent should remember of the store; None if it is unknown or distrusted."""
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
            kind = StoreRegressed if verdict.mismatch is Mismatch.REGRESSED else StoreReplaced
            raise kind(verdict.text)

    async def add_witness(self, node: str, mark: Mark) -> Verdict | None:
        """Record what an agent knows of the store; return why it must get no orders, or None.

        Raises:
            StoreUnavailable: the store does not answer.
        """
        await self.open()
        identity, told = self.identity, mark.memory
        if identity is None:
            return self.verdict
        if told.id == identity.id:
            if not is_signed(identity, mark):
                log.warning("store_mark_refused", node=node, revision=told.revision)
                return self.verdict  # it proves nothing
            if len(self.witnesses.marks) < NODES_MAX:
                self.witnesses.marks[node] = told
            async with self._judging:
                if verdict := compare_store(told, (await look_at(self._raw)).seen, f"node {node}"):
                    self.remembered = newest(self.remembered, told)
                    await self.distrust(verdict)
            return self.verdict
        if told.id in identity.supersedes:
            return self.verdict
        verdict = Verdict(Mismatch.REPLACED, f"the store is {identity.id[:8]}; node {node} knows it as {told.id[:8]}")
        log.warning("store_unknown_to_node", node=node, store=told.id)
        if text := self.witnesses.record_unknown_store(node, told.id):
            await self.distrust(Verdict(Mismatch.REPLACED, f"the store is {identity.id[:8]}; {text}"))
        return verdict

    async def open(self) -> None:
        """Check the store before its first use.

        Raises:
            StoreUnavailable: the store does not answer.
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
                await self.check_after_error(error)
            self._looking = asyncio.get_running_loop().create_task(self._check_periodically(), name="store-witness")

    async def _check_periodically(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self.look()
            except StoreUnavailable as error:
                log.info("store_check_failed", error=str(error))
            except Exception:  # try again at the next check
                log.exception("store_check_failed")

    async def look(self) -> Look | None:
        """Compare the store with what is remembered, and remember its state; return it if it is trusted.

        Raises:
            StoreUnavailable: the store does not answer.
        """
        async with self._judging:
            return await self._look()

    async def _look(self) -> Look | None:
        while True:
            before = self._known()
            begin = time.monotonic()
            look = await look_at(self._raw)
            if self._etcd:
                self._on_look(time.monotonic() - begin)
            if look.filling:
                return None  # users of the store get an error
            if verdict := look.verdict or compare_store(before, look.seen):
                self.remembered = before
                await self.distrust(verdict)
                return None
            if look.seen.identity:
                self._trust_store(look.seen.identity, look)
                await self.keep()
                return look
            await self._name()

    async def _check_era(self, began: int) -> None:
        """Check a store in which another process has begun an era, before anything is written there.

        Raises:
            StoreRegressed, StoreReplaced: it is not the one that was written.
            StoreUnavailable: it does not answer, or is being restored.
        """
        async with self._judging:
            if self._mark.armed and self._mark.era_written >= began:
                return  # already checked for another transaction
            if await self._look() is None:
                self.check()
                raise StoreUnavailable("the store is being restored")

    def _known(self) -> RememberedStore | None:
        """Return what is remembered, including what was seen since the last check."""
        if self.remembered is None:
            return None
        value, proven = self._mark.proven
        era, at = (name_of(value), self._offset(proven)) if proven else ("", 0)
        if isinstance(self._raw, LocalStore):  # after this process has begun its era, no other can begin one
            era, at = (self.remembered.era, self._offset(self._raw.revision)) if self._began else ("", 0)
        known = self.remembered
        return replace(
            known,
            revision=max(self.revision, at),
            progress=max(known.progress, self._offset(self._mark.progress)),
            era=era if at > known.era_revision else known.era,
            era_revision=max(at, known.era_revision),
        )

    async def _begin_era(self) -> None:
        """Check the store, and record in it that this process has opened it, before any other write.

        Raises:
            StoreUnavailable: the store does not answer.
            StoreRegressed: it regressed in between.
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
                self._began = True
                if known := self.remembered:
                    revision = result.revision + look.seen.revision - look.own.revision
                    self.remembered = replace(known, era=name, era_revision=revision)
                log.info("store_opened", era=name, revision=result.revision)
                return

    async def _name(self) -> None:
        """Create the identity of a store without one; of several processes that do so at once, one succeeds."""
        identity = Identity.new(time.time())
        await self._put([Compare(IDENTITY, 0)], Put(IDENTITY, identity.encode()))

    async def _put(self, compares: list[Compare], put: Put) -> None:
        """Write a key about the store itself, even if the store is distrusted."""
        if self._etcd:
            await self._etcd.transact(compares, [put], checked=False)
        else:
            await self._raw.transact(compares, [put])

    def _trust_store(self, identity: Identity, look: Look) -> None:
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

    async def check_after_error(self, error: StoreDistrusted) -> None:
        """Check what is wrong with a store that has rejected a write, or whose response was too old."""
        turn = self._mark.turn
        with suppress(StoreUnavailable):
            await self.look()
        async with self._judging:
            if self._mark.turn == turn:  # else the error is from before the last check
                await self.distrust(Verdict(Mismatch(error.reason), str(error)))

    async def distrust(self, verdict: Verdict) -> None:
        """Distrust the store for this reason, unless it is already distrusted."""
        if self.verdict:
            return
        self.verdict = verdict
        self._mark.disarm()
        DISTRUSTED.set(1)
        log.error("store_rejected", reason=verdict.mismatch.value, why=verdict.text, remedy=REMEDY)
        await self.keep()
        if verdict.mismatch is Mismatch.REGRESSED and self._etcd:
            with suppress(StoreUnavailable, ValueError):
                await self._write_note(verdict)

    async def _write_note(self, verdict: Verdict) -> None:
        """Leave a note for processes that remember nothing; never in the right data, which may be back by now."""
        look = await look_at(self._raw)
        if compare_store(self._known(), look.seen) is None:
            return
        text = verdict.text.replace("this process", "another process")[:TEXT_LENGTH_MAX]
        unchanged = [Compare(PROGRESS, look.own.progress), Compare(ERAS, look.era_written)]
        await self._put([Compare(STOPPED, 0), *unchanged], Put(STOPPED, text.encode()))

    async def keep(self) -> None:
        """Save what is remembered, if it has changed."""
        memory = self.remembered
        if self._path is None or memory is None or memory == self._kept:
            return
        try:
            await asyncio.to_thread(witness_file.write, self._path, memory)
            self._kept, self._unkept = memory, False
        except OSError as error:
            if not self._unkept:
                log.warning("store_witness_write_failed", path=str(self._path), error=str(error))
            self._unkept = True

    def _offset(self, revision: int) -> int:
        return revision + (self._shifted.base or 0) if revision else 0

    async def close(self) -> None:
        """Stop checking, and save what is known."""
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


def generation_of(store: Store) -> str:
    """Return what distinguishes this generation of a store from all others; "" for a store without an identity."""
    while not isinstance(trust := getattr(store, "trust", None), Trust):
        if (inner := getattr(store, "inner", None)) is None:
            return ""
        store = inner
    identity = trust.identity
    return f"{identity.id[:8]}-{identity.generation:x}" if identity else ""


def look_of(listing: Listing) -> Look:
    """Return what a raw store holds about itself."""
    entries = {entry.key: entry for entry in listing.entries}
    base = base_of(entries.get(BASE)) or 0
    named, progress, stopped = entries.get(IDENTITY), entries.get(PROGRESS), entries.get(STOPPED)
    identity = Identity.decode(named.value) if named else None
    verdict = None
    if named and identity is None:
        verdict = Verdict(Mismatch.REPLACED, f"{IDENTITY} of the store is damaged")
    elif stopped:
        verdict = Verdict(Mismatch.REGRESSED, stopped.value.decode(errors="replace")[:TEXT_LENGTH_MAX])
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


def _etcd_of(raw: Store) -> EtcdStore | None:
    """Return a raw store if it is an etcd, whose client is imported only by those who use one."""
    if isinstance(raw, SqliteStore):
        return None
    from cotenant.store.etcd import EtcdStore

    return raw if isinstance(raw, EtcdStore) else None


async def look_at(raw: Store) -> Look:
    """Check a raw store once, and change nothing.

    Raises:
        StoreUnavailable: the store does not answer.
    """
    etcd = _etcd_of(raw)
    listing = await (etcd.list(OWN, checked=False) if etcd else raw.list(OWN))
    look = look_of(listing)
    if isinstance(raw, SqliteStore) and raw.regression:
        return replace(look, verdict=Verdict(Mismatch.REGRESSED, raw.regression))
    return look
